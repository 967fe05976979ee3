"""Drafters as folders: config.json and model.safetensors.

`save` writes this project's own layout: config.json has the fields of `DrafterConfig`,
tensors are named by their path in the parameter tree. A vocabulary is stored as in
published EAGLE-3 files. `load` reads the layouts of `eagle_files` and `block_files`, too.
"""

import contextlib
import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from tlt_jax import axes
from tlt_jax import processes
from tlt_jax.models import block_files
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import eagle_files
from tlt_jax.models import hf


def save(path: str | pathlib.Path, config: drafter.DrafterConfig, params: dict) -> None:
  """Writes the folder, whole or not at all; see `hf.replacing`."""
  tensors = {name: processes.fetch(x) for name, x in hf.flatten(params).items()}
  if not processes.is_first():
    return
  raw = dataclasses.asdict(config)
  raw["draft_vocab_size"] = len(raw.pop("vocab")) or None
  del raw["layer"]["unused_rows"]  # the target's
  with hf.replacing(pathlib.Path(path)) as folder:
    hf.write_tensors(folder / hf.SINGLE, tensors | eagle_files.vocab_tables(config))
    hf.write_json(folder / hf.CONFIG, raw)


def load(
  path: str | pathlib.Path,
  target_config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh | None = None,
  rules: axes.Rules = axes.ROLLOUT,
) -> tuple[drafter.DrafterConfig, dict]:
  """Reads a folder; raises hf.CheckpointError if it is damaged or for another target."""
  path = pathlib.Path(path)
  with contextlib.ExitStack() as stack:
    config, stored, names = _open(path, target_config, stack)
    eagle_files.check_target(path, config, target_config)
    abstract = drafter.abstract_params(config)
    shapes = {name: x.shape for name, x in hf.flatten(abstract).items()}
    theirs = {names.get(name, name): shape for name, shape in shapes.items()}
    for name in sorted(stored.lazy.keys() | theirs.keys()):
      stored.check(name, theirs.get(name))
    params = hf.unflatten(
      {name: jnp.asarray(stored.lazy[names.get(name, name)][:]) for name in shapes}
    )
  if mesh is not None:
    params = jax.tree.map(processes.place, params, axes.shardings(mesh, rules, abstract))
  return config, params


def load_shape(
  path: str | pathlib.Path, target_config: config_lib.ModelConfig
) -> drafter.DrafterConfig:
  with contextlib.ExitStack() as stack:
    return _open(pathlib.Path(path), target_config, stack)[0]


def _open(
  path: pathlib.Path, target_config: config_lib.ModelConfig, stack: contextlib.ExitStack
) -> tuple[drafter.DrafterConfig, hf.Tensors, dict[str, str]]:
  """The drafter, its tensors, and path in our tree -> name where they differ."""
  file = path / hf.CONFIG
  raw = hf.read_json(file)
  stored = hf.open_tensors(path, stack)
  if "kind" not in raw:
    published = block_files if block_files.is_one(raw) else eagle_files
    return published.read(file, raw, stored, target_config)
  size = raw.pop("draft_vocab_size", None)
  try:
    config = config_lib.make(drafter.DrafterConfig, raw | {"vocab": ()})
    if "vocab" in raw or (size is not None and type(size) is not int):
      raise ValueError(f"draft_vocab_size={size!r:.60} is not an integer or null")
  except ValueError as e:
    raise hf.CheckpointError(f"{file} is not a drafter's: {e!s:.300}") from e
  vocab = eagle_files.take_vocab(stored, size, config.layer.vocab_size)
  layer = dataclasses.replace(config.layer, unused_rows=target_config.unused_rows)
  return dataclasses.replace(config, layer=layer, vocab=vocab), stored, {}
