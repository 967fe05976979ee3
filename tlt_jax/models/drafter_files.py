"""A drafter as a folder: `config.json` and `model.safetensors`.

`load` takes the published layouts of `eagle_files` as well. What `save` writes is this
project's own, for drafters of any kind: arrays carry their place in the parameter tree as
name. The embedding is the target's and not in it, nor is the head, unless the drafter has
its own; a folder says which shape of target it is for. `kind` in `config.json` is the
name of the kind's module, as `drafters.find` takes it.

The vocabulary of a drafter of any kind is stored as in published EAGLE-3 files: its size in
`config.json` (`draft_vocab_size`, else null), its tokens beside the weights
(`drafter_tensors`).
"""

import contextlib
import dataclasses
import pathlib
from typing import Any

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import safetensors.numpy

from tlt_jax import axes
from tlt_jax import json_objects
from tlt_jax import processes
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import drafter_tensors
from tlt_jax.models import eagle_files
from tlt_jax.models import hf_folder
from tlt_jax.models import json_fields

_TENSORS = "model.safetensors"


def save(path: str | pathlib.Path, config: drafter.DrafterConfig, params: dict) -> None:
  """Writes the folder, whole or not at all; see `hf_folder.replacing`."""
  flat = traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")
  flat = {name: processes.fetch(x) for name, x in flat.items()}
  if not processes.is_first():
    return
  raw = dataclasses.asdict(config)
  raw["draft_vocab_size"] = len(raw.pop("vocab")) or None
  flat |= drafter_tensors.vocab_tables(config)
  with hf_folder.replacing(pathlib.Path(path)) as folder:
    safetensors.numpy.save_file(flat, folder / _TENSORS)
    hf_folder.write_json(folder / hf_folder.CONFIG, raw)


def load(
  path: str | pathlib.Path,
  target_config: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh | None = None,
  rules: axes.Rules = axes.ROLLOUT,
) -> tuple[drafter.DrafterConfig, dict]:
  """Reads a folder.

  Args:
    path: the folder
    target_config: of the target it is to draft for
    mesh, rules: where to; one device without a mesh
  Returns:
    DrafterConfig and parameters
  Raises:
    hf_folder.CheckpointError: the folder is missing, damaged, or for another target
  """
  path = pathlib.Path(path)
  if eagle_files.is_published(path):
    config, params = eagle_files.load(path, target_config)
  else:
    config, params = _load_own(path, target_config)
  if mesh is not None:
    abstract = drafter.abstract_params(config)
    params = jax.tree.map(processes.place, params, axes.shardings(mesh, rules, abstract))
  return config, params


def _load_own(path: pathlib.Path, target_config: config_lib.ModelConfig):
  """Reads a folder of `save`: DrafterConfig and parameters."""
  config, draft_vocab_size = _load_config(path)
  drafter_tensors.check_target(path, config, target_config)
  with contextlib.ExitStack() as stack:
    stored = hf_folder.open_tensors(path, stack).lazy
    try:
      if draft_vocab_size is not None:
        vocab = drafter_tensors.take_vocab(
          stored, draft_vocab_size, config.layer.vocab_size
        )
        config = dataclasses.replace(config, vocab=vocab)
      _check_tensors(drafter.abstract_params(config), stored)
    except ValueError as e:
      raise hf_folder.CheckpointError(f"{path / _TENSORS}: {e}") from e
    params = {name: jnp.asarray(tensor[:]) for name, tensor in stored.items()}
  return config, traverse_util.unflatten_dict(params, sep="/")


def _check_tensors(abstract: dict, stored: dict) -> None:
  """Raises ValueError unless the file holds exactly the arrays of the drafter."""
  flat = traverse_util.flatten_dict(nn.meta.unbox(abstract), sep="/")
  for name in sorted(flat.keys() | stored.keys()):
    shape = tuple(flat[name].shape) if name in flat else None
    drafter_tensors.check(name, stored.get(name), shape, hf_folder.FLOATS)


def load_shape(
  path: str | pathlib.Path, target_config: config_lib.ModelConfig
) -> drafter.DrafterConfig:
  """The drafter of a folder without its weights; of a vocabulary, the size is right.

  Raises:
    CheckpointError: `path` is no folder of a drafter
  """
  path = pathlib.Path(path)
  if eagle_files.is_published(path):
    return eagle_files.load_shape(path, target_config)
  config, size = _load_config(path)
  return dataclasses.replace(config, vocab=tuple(range(size or 0)))


def _load_config(path: pathlib.Path) -> tuple[drafter.DrafterConfig, int | None]:
  """Reads the drafter without its vocabulary, and the size of that."""
  file = path / hf_folder.CONFIG
  try:
    raw = json_objects.parse(file.read_bytes())
    size = raw.pop("draft_vocab_size", None)
    if size is not None:
      json_fields.check("draft_vocab_size", size, int)
    layer = dict(json_fields.check("layer", raw.pop("layer", None), dict))
    scaling = layer.pop("rope_scaling", None)
    if scaling is not None:
      json_fields.check("rope_scaling", scaling, dict)
      scaling = _make(config_lib.RopeScaling, scaling)
    layer = _make(config_lib.ModelConfig, layer, rope_scaling=scaling)
    _check_layer(layer)
    taps = json_fields.check("taps", raw.pop("taps", None), list)
    if not all(type(tap) is int and tap >= 0 for tap in taps):
      raise ValueError(f"taps={taps!r:.60} are not layers of the target, from 0")
    config = _make(drafter.DrafterConfig, raw, layer=layer, taps=tuple(taps), vocab=())
    return config, size
  except OSError as e:
    raise hf_folder.CheckpointError(f"{path}: no drafter there: {e}") from e
  except ValueError as e:
    raise hf_folder.CheckpointError(f"{file} is not a drafter's: {e!s:.300}") from e


def _make(cls: type, raw: dict, **made: Any) -> Any:
  """An instance of a dataclass with the fields in `raw`, each of its type, and `made`."""
  fields = {field.name: field for field in dataclasses.fields(cls)}
  for name in raw:
    if name not in fields or name in made:
      raise ValueError(f"key {name!r:.60} is unknown")
  ranges.check(cls, raw)
  for name, field in fields.items():
    if field.default is dataclasses.MISSING and name not in raw | made:
      raise ValueError(f"{name!r} is missing")
  return cls(**raw, **made)


def _check_layer(layer: config_lib.ModelConfig) -> None:
  """Raises if it is not a single layer that computes in a type we know."""
  if layer.num_layers != 1:
    raise ValueError(f"num_layers={layer.num_layers}, but a drafter has 1")
  if layer.dtype not in config_lib.DTYPES:
    raise ValueError(f"dtype={layer.dtype:.60} is none of {', '.join(config_lib.DTYPES)}")
