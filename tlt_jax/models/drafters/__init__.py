"""Kinds of drafters: a module with `KIND` each, found by its name.

"eagle3" is `drafters/eagle3.py`; a name with a dot is a module of any package. The common
part is `tlt_jax.models.drafter`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from tlt_jax import named


class Kind(NamedTuple):
  """The kind-specific parts of a `drafter.Drafter`, whose methods call the functions.

  Steps of few rows on GPUs call them, too; `drafter.apply_fc`, and what follows `inputs` in
  the layer, are kernels then.

  inputs: (drafter, embedding f[B T D], h f[B T D]) -> input of attention, f[B T *], and
    the residual stream, f[B T D]
  setup: (drafter) makes further modules and parameters, as attributes
  feature: (drafter, f[B T E]) -> f[B T D], from the target's features
  before_head: (drafter, h f[... D]) -> f[... D], input of the head
  fc_width: (config) -> inputs of the projection `drafter.apply_fc`; None: no projection
  attention_width: (config) -> width of attention's input; None: D
  customary_taps: (L) -> default target layers, from 0, after which it reads; None: it
    reads the state after the target's final norm
  own_head: whether a drafter with a `vocab` has its own head, not those columns of the
    target's
  predicts_features: whether its output is the target's next feature, so that training
    may compare the two
  new_block: (config of the target) -> the `drafter.Block` of a new drafter that guesses a
    block in one pass; None: it guesses token by token
  module: (config) -> the module of a drafter of blocks, in place of `drafter.Drafter`; of
    the other fields only `customary_taps` matters then
  """

  inputs: Callable[..., tuple[jax.Array, jax.Array]] | None = None
  setup: Callable[[nn.Module], None] = lambda drafter: None
  feature: Callable[[nn.Module, jax.Array], jax.Array] = lambda drafter, x: x
  before_head: Callable[[nn.Module, jax.Array], jax.Array] = lambda drafter, h: h
  fc_width: Callable[..., int] | None = None
  attention_width: Callable[..., int] | None = None
  customary_taps: Callable[[int], tuple[int, ...]] | None = None
  own_head: bool = False
  predicts_features: bool = False
  new_block: Callable[..., Any] | None = None
  module: Callable[..., nn.Module] | None = None


def find(name: str) -> Kind:
  """The kind of that name; raises ValueError if there is none."""
  try:
    return named.module(name, __name__, "KIND").KIND
  except named.NameNotFound as e:
    raise ValueError(f"no drafter kind {name!r}: {e}") from e


def is_kind(name: str) -> bool:
  if not all(part.isidentifier() for part in name.split(".")):
    return False
  try:
    find(name)
  except ValueError:
    return False
  return True
