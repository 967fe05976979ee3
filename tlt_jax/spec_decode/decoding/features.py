"""Which hidden states of the target are kept per token, and how they are stored in one row.

*Tapped* states are the outputs of chosen layers, *final* ones those after the final
norm. Drafters read one or the other; training a drafter that reads tapped states needs
the final ones too, from which the target's distributions follow.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax import axes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import slices


class Kept(NamedTuple):
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
    """E, numbers per token."""
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
    chex.assert_axis_dimension(features, -1, self.size)
    if not self.taps:
      return Kept(features, features)
    tapped = len(self.taps) * self.width
    final = features[..., tapped:] if self.final else None
    return Kept(features[..., :tapped], final)


def of_drafter(drafter: drafter_lib.DrafterConfig, train: bool = False) -> Layout:
  """The layout that a drafter needs to draft, or, with `train`, to be trained as well."""
  return Layout(drafter.layer.width, drafter.taps, final=train or not drafter.taps)


def sharding(mesh: Mesh, ndim: int, size: int) -> NamedSharding:
  """Sharding of kept features: rows over `data`, `size` over `model` where it divides."""
  numbers = axes.model_if_divides(mesh, size)
  return axes.sharding(mesh, axes.DATA, *[None] * (ndim - 2), numbers)


def abstract(mesh: Mesh, rows: int, dtype, *shape: int) -> jax.ShapeDtypeStruct:
  """Describes kept features of `rows` rows a slice, f[slices*rows *shape]."""
  over = sharding(mesh, 1 + len(shape), shape[-1])
  return slices.abstract(mesh, rows, dtype, *shape).update(sharding=over)


def whole(features: jax.Array) -> jax.Array:
  """Gathers features that are read on every device of their slice, in a slice's program.

  The compiler could split products with them, which would round differently.
  """
  if axes.mesh_of_compiler() is None:
    return features
  return jax.lax.with_sharding_constraint(features, PartitionSpec())
