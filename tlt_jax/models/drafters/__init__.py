"""In what drafters differ: a file per kind, found by its name.

A kind is a module that holds `KIND`, a `Kind`. "eagle3" is `drafters/eagle3.py`; a name
with a dot is imported as it stands, so that a kind may live in any package. What they
share is `tlt_jax.models.drafter`; a new kind edits neither that nor any other file.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax

from tlt_jax import named


class Kind(NamedTuple):
  """The parts in which one kind of drafter differs from another.

  The functions run inside a `drafter.Drafter`, their first argument, like methods of it;
  a config is a `drafter.DrafterConfig`.

  inputs: (drafter, embedding f[B T D], h f[B T D]) -> what attention reads, f[B T *], and
    the residual stream, f[B T D]
  setup: (drafter) makes, as attributes, the modules and parameters of this kind alone
  feature: (drafter, f[B T E]) -> f[B T D], what stands for the target's features
  before_head: (drafter, h f[... D]) -> f[... D], what the head reads
  fc_width: (config) -> inputs of the projection `drafter.apply_fc`; None: it has none
  attention_width: (config) -> width of what attention reads; None: D
  customary_taps: (L) -> target layers, from 0, after which drafters of this kind
    usually read; None: this kind reads the state after the target's final norm
  own_head: whether a drafter that predicts a part of the target's tokens has a head of
    its own for them; else these columns of the target's head, frozen, are read
  predicts_features: whether its output is the target's next feature, so that training
    may compare the two
  """

  inputs: Callable[[nn.Module, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
  setup: Callable[[nn.Module], None] = lambda drafter: None
  feature: Callable[[nn.Module, jax.Array], jax.Array] = lambda drafter, x: x
  before_head: Callable[[nn.Module, jax.Array], jax.Array] = lambda drafter, h: h
  fc_width: Callable[..., int] | None = None
  attention_width: Callable[..., int] | None = None
  customary_taps: Callable[[int], tuple[int, ...]] | None = None
  own_head: bool = False
  predicts_features: bool = False


def find(name: str) -> Kind:
  """The kind of that name.

  Raises:
    ValueError: no such module, or one without a `KIND`
  """
  try:
    return named.module(name, __name__, "KIND").KIND
  except named.NameNotFound as e:
    raise ValueError(f"no drafter kind {name!r}: {e}") from e


def is_kind(name: str) -> bool:
  """Whether there is a kind of that name; else it may be a drafter's folder."""
  if not all(part.isidentifier() for part in name.split(".")):
    return False
  try:
    find(name)
  except ValueError:
    return False
  return True
