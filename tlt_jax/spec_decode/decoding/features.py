"""Which hidden states of the target are kept per token, and how they lie in one row.

*Tapped* states are the outputs of chosen layers, *final* ones those after the final
norm. Drafters read one or the other; training a drafter that reads tapped states needs
the final ones too, from which the target's distributions follow.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tlt_jax.models import drafter as drafter_lib


class Kept(NamedTuple):
  """The parts of kept features."""

  drafter_input: jax.Array  # f[... *]  what the drafter reads
  final: jax.Array | None  # f[... D]  None: not kept


@dataclasses.dataclass(frozen=True)
class Layout:
  """The order in a row of E numbers: the tapped states one by one, then the final ones."""

  width: int  # D
  taps: tuple[int, ...] = ()  # layers; none: the final states alone
  final: bool = True  # whether the final states are kept; always without taps

  @property
  def size(self) -> int:
    """E, numbers kept per token."""
    return self.width * (len(self.taps) + (self.final or not self.taps))

  def join(self, tapped: jax.Array, final: jax.Array) -> jax.Array:
    """Features f[... E] of tapped states f[... len(taps)*D] and final ones f[... D]."""
    chex.assert_axis_dimension(final, -1, self.width)
    if not self.taps:
      return final
    chex.assert_axis_dimension(tapped, -1, self.width * len(self.taps))
    if not self.final:
      return tapped
    return jnp.concatenate([tapped, final.astype(tapped.dtype)], -1)

  def split(self, features: jax.Array) -> Kept:
    """The parts of features f[... E]."""
    chex.assert_axis_dimension(features, -1, self.size)
    if not self.taps:
      return Kept(features, features)
    tapped = len(self.taps) * self.width
    final = features[..., tapped:] if self.final else None
    return Kept(features[..., :tapped], final)


def of_drafter(drafter: drafter_lib.DrafterConfig, train: bool = False) -> Layout:
  """The layout that a drafter needs to draft, or, with `train`, to be trained as well."""
  return Layout(drafter.layer.width, drafter.taps, final=train or not drafter.taps)
