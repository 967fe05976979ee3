"""What all files of drafters share: checks, and the tables of a vocabulary.

Token i of a drafter with a vocabulary of its own is token i + d2t[i] of the target; t2d
marks these among all of the target's. That is how published EAGLE-3 files store it.
"""

import pathlib
from typing import Any

import numpy as np

from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter
from tlt_jax.models import hf_folder


def check(name: str, tensor: Any, shape: tuple | None, dtypes: tuple) -> None:
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


def check_target(
  path: pathlib.Path,
  config: drafter.DrafterConfig,
  target_config: config_lib.ModelConfig,
) -> None:
  """Raises CheckpointError if the drafter is for a target of another shape."""
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


def vocab_tables(config: drafter.DrafterConfig) -> dict[str, np.ndarray]:
  """The tables of a drafter's vocabulary: d2t i64[U] and t2d bool[V]; none of none."""
  if not config.vocab:
    return {}
  vocab = np.array(config.vocab, np.int64)
  t2d = np.zeros(config.layer.vocab_size, bool)
  t2d[vocab] = True
  return {"d2t": vocab - np.arange(len(vocab)), "t2d": t2d}


def take_vocab(
  stored: dict, size: int, target_size: int, needs_t2d: bool = True
) -> tuple[int, ...]:
  """Takes a drafter's own vocabulary out of its tables.

  Args:
    stored: lazy tensors by name; loses the tables
    size: U, tokens of the drafter
    target_size: V, tokens of the target
    needs_t2d: whether t2d must be there: it says nothing that d2t does not
  Raises:
    ValueError: the tables are damaged, or contradict each other
  """
  d2t, t2d = stored.pop("d2t", None), stored.pop("t2d", None)
  check("d2t", d2t, (size,), ("I64",))
  ids = np.arange(size) + d2t[:]
  for id in ids[(ids < 0) | (ids >= target_size)][:1]:
    raise ValueError(f"d2t names token {id}; the target has tokens 0 to {target_size - 1}")
  if t2d is None and not needs_t2d:
    vocab = np.unique(ids)
  else:
    check("t2d", t2d, (target_size,), ("BOOL",))
    vocab = np.flatnonzero(t2d[:])
  if not np.array_equal(vocab, ids):
    raise ValueError("d2t and t2d name different tokens, or in another order")
  return tuple(vocab.tolist())
