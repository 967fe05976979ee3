"""A drafter as a folder: `config.json` and `model.safetensors`.

Arrays carry their place in the parameter tree as name. The embedding is the target's
and not in it, nor is the head, unless the drafter has its own; a folder says which
shape of target it is for. `kind` in `config.json` is the name of the kind's module, as
`drafters.find` takes it.

A vocabulary of the drafter's own is stored as in published EAGLE-3 files: its size in
`config.json` (`draft_vocab_size`, else null), its tokens beside the weights. Token i of
the drafter is token i + d2t[i] of the target; t2d marks these among all of the target's.
"""

import dataclasses
import json
import pathlib

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import hf_folder

_TENSORS = "model.safetensors"


def save(path: str | pathlib.Path, config: drafter.DrafterConfig, params: dict) -> None:
  """Writes the folder, whole or not at all; see `hf_folder.replacing`."""
  flat = traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")
  flat = {name: np.asarray(x) for name, x in flat.items()}
  raw = dataclasses.asdict(config)
  vocab = np.array(raw.pop("vocab"), np.int64)
  raw["draft_vocab_size"] = len(vocab) or None
  if config.vocab:
    t2d = np.zeros(config.layer.vocab_size, bool)
    t2d[vocab] = True
    flat |= {"d2t": vocab - np.arange(len(vocab)), "t2d": t2d}
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
  config, draft_vocab_size = _load_config(path)
  _check_target(path, config, target_config)
  try:
    stored = safetensors.numpy.load_file(path / _TENSORS)
  except (OSError, safetensors.SafetensorError) as e:
    raise hf_folder.CheckpointError(f"{path}: model.safetensors cannot be read: {e}") from e
  if draft_vocab_size is not None:
    try:
      vocab = _take_vocab(stored, draft_vocab_size, config.layer.vocab_size)
      config = dataclasses.replace(config, vocab=vocab)
    except ValueError as e:
      raise hf_folder.CheckpointError(f"{path}: {e}") from e
  abstract = drafter.abstract_params(config)
  _check_shapes(path, abstract, stored)
  params = traverse_util.unflatten_dict(
    {name: jnp.asarray(x) for name, x in stored.items()}, sep="/"
  )
  if mesh is not None:
    params = jax.device_put(params, axes.shardings(mesh, rules, abstract))
  return config, params


def _check_target(
  path: pathlib.Path,
  config: drafter.DrafterConfig,
  target_config: config_lib.ModelConfig,
) -> None:
  """Raises if the drafter is for a target of another shape."""
  for name in ("vocab_size", "width"):
    have, want = getattr(config.layer, name), getattr(target_config, name)
    if have != want:
      raise hf_folder.CheckpointError(
        f"{path}: this drafter is for a target of {name} {have}, not {want}; train one "
        "with experiments.train_drafter"
      )
  if config.taps and max(config.taps) >= target_config.num_layers:
    raise hf_folder.CheckpointError(
      f"{path}: this drafter reads layer {max(config.taps)} of the target, which has "
      f"{target_config.num_layers} layers"
    )


def _check_shapes(path: pathlib.Path, abstract: dict, stored: dict) -> None:
  """Raises unless the file holds exactly the arrays of the drafter."""
  flat = traverse_util.flatten_dict(nn.meta.unbox(abstract), sep="/")
  shapes = {name: tuple(x.shape) for name, x in flat.items()}
  found = {name: tuple(x.shape) for name, x in stored.items()}
  if shapes != found:
    wrong = sorted(n for n in shapes | found if shapes.get(n) != found.get(n))[0]
    raise hf_folder.CheckpointError(
      f"{path}: {wrong} has shape {found.get(wrong)}, config.json says "
      f"{shapes.get(wrong)}"
    )


def _take_vocab(stored: dict, size: int, target_size: int) -> tuple[int, ...]:
  """Takes a drafter's own vocabulary out of its tables; ValueError if damaged."""
  d2t, t2d = stored.pop("d2t", None), stored.pop("t2d", None)
  for name, table, shape in (("d2t", d2t, (size,)), ("t2d", t2d, (target_size,))):
    have = None if table is None else table.shape
    if have != shape:
      raise ValueError(f"{name} has shape {have}, config.json says {shape}")
  ids = np.arange(len(d2t)) + d2t
  for id in ids[(ids < 0) | (ids >= target_size)][:1]:
    raise ValueError(f"d2t names token {id}; the target has tokens 0 to {target_size - 1}")
  vocab = np.flatnonzero(t2d)
  if not np.array_equal(vocab, ids):
    raise ValueError("d2t and t2d name different tokens, or in another order")
  return tuple(vocab.tolist())


def _load_config(path: pathlib.Path) -> tuple[drafter.DrafterConfig, int | None]:
  """Reads the drafter without its vocabulary, and the size of that."""
  try:
    raw = json.loads((path / hf_folder.CONFIG).read_text())
    layer = dict(raw.pop("layer"))
    if layer.get("rope_scaling") is not None:
      layer["rope_scaling"] = config_lib.RopeScaling(**layer["rope_scaling"])
    raw["taps"] = tuple(raw["taps"])
    size = raw.pop("draft_vocab_size", None)
    layer = config_lib.ModelConfig(**layer)
    return drafter.DrafterConfig(layer=layer, vocab=(), **raw), size
  except OSError as e:
    raise hf_folder.CheckpointError(f"{path}: no drafter there: {e}") from e
  except (ValueError, KeyError, TypeError) as e:
    raise hf_folder.CheckpointError(f"{path}: config.json is not a drafter's: {e}") from e
