"""A drafter as a folder: `config.json` and `model.safetensors`.

Arrays carry their place in the parameter tree as name. The embedding is the target's
and not in it, nor is the head, unless the drafter has its own; a folder says which
shape of target it is for. `kind` in `config.json` is the name of the kind's module, as
`drafters.find` takes it.

The vocabulary of a drafter of any kind is stored as in published EAGLE-3 files: its size in
`config.json` (`draft_vocab_size`, else null), its tokens beside the weights. Token i of
the drafter is token i + d2t[i] of the target; t2d marks these among all of the target's.
"""

import contextlib
import dataclasses
import pathlib
import typing
from typing import Any

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tlt_jax import axes
from tlt_jax import json_objects
from tlt_jax import processes
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
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
  with contextlib.ExitStack() as stack:
    stored = hf_folder.open_tensors(path, stack).lazy
    try:
      if draft_vocab_size is not None:
        vocab = _take_vocab(stored, draft_vocab_size, config.layer.vocab_size)
        config = dataclasses.replace(config, vocab=vocab)
      abstract = drafter.abstract_params(config)
      _check_tensors(abstract, stored)
    except ValueError as e:
      raise hf_folder.CheckpointError(f"{path / _TENSORS}: {e}") from e
    params = {name: jnp.asarray(tensor[:]) for name, tensor in stored.items()}
  params = traverse_util.unflatten_dict(params, sep="/")
  if mesh is not None:
    params = jax.tree.map(processes.place, params, axes.shardings(mesh, rules, abstract))
  return config, params


def _check_target(
  path: pathlib.Path,
  config: drafter.DrafterConfig,
  target_config: config_lib.ModelConfig,
) -> None:
  """Raises if the drafter is for a target of another shape."""
  for name in ("vocab_size", "width", "tie_embeddings"):
    have, want = getattr(config.layer, name), getattr(target_config, name)
    if have != want:
      raise hf_folder.CheckpointError(
        f"{path}: this drafter is for a target of {name} {have}, not {want}; train one "
        "with experiments.train_drafter"
      )
  if config.taps and max(config.taps) >= target_config.num_layers:
    raise hf_folder.CheckpointError(
      f"{path}: this drafter reads layer {max(config.taps)} of the target (taps), which "
      f"has {target_config.num_layers} layers"
    )


def _check_tensors(abstract: dict, stored: dict) -> None:
  """Raises ValueError unless the file holds exactly the arrays of the drafter."""
  flat = traverse_util.flatten_dict(nn.meta.unbox(abstract), sep="/")
  for name in sorted(flat.keys() | stored.keys()):
    shape = tuple(flat[name].shape) if name in flat else None
    _check_tensor(name, stored.get(name), shape, hf_folder.FLOATS)


def _check_tensor(name: str, tensor: Any, shape: tuple | None, dtypes: tuple) -> None:
  """Raises ValueError unless a stored tensor is there and as it should be.

  Args:
    name: of the tensor
    tensor: lazy; None: it is missing
    shape: that it should have; None: it should not be there
    dtypes: of safetensors, that it may have
  """
  found = None if tensor is None else tuple(tensor.get_shape())
  if found != shape:
    raise ValueError(f"{name:.100} has shape {found!s:.100}, config.json says {shape}")
  if tensor.get_dtype() not in dtypes:
    raise ValueError(
      f"{name} is stored as {tensor.get_dtype()}, not as {' or '.join(dtypes)}"
    )


def _take_vocab(stored: dict, size: int, target_size: int) -> tuple[int, ...]:
  """Takes a drafter's own vocabulary out of its tables; ValueError if damaged."""
  d2t, t2d = stored.pop("d2t", None), stored.pop("t2d", None)
  _check_tensor("d2t", d2t, (size,), ("I64",))
  _check_tensor("t2d", t2d, (target_size,), ("BOOL",))
  d2t, t2d = d2t[:], t2d[:]
  ids = np.arange(len(d2t)) + d2t
  for id in ids[(ids < 0) | (ids >= target_size)][:1]:
    raise ValueError(f"d2t names token {id}; the target has tokens 0 to {target_size - 1}")
  vocab = np.flatnonzero(t2d)
  if not np.array_equal(vocab, ids):
    raise ValueError("d2t and t2d name different tokens, or in another order")
  return tuple(vocab.tolist())


def load_shape(path: str | pathlib.Path) -> drafter.DrafterConfig:
  """The drafter of a folder without its weights; of a vocabulary, the size is right.

  Raises:
    CheckpointError: `path` is no folder of `save`
  """
  config, size = _load_config(pathlib.Path(path))
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
  types = typing.get_type_hints(cls, include_extras=True)
  for name, value in raw.items():
    if name not in fields or name in made:
      raise ValueError(f"key {name!r:.60} is unknown")
    if not ranges.holds(types[name], value):
      raise ValueError(f"{name}={value!r:.60} is not {ranges.words(types[name])}")
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
