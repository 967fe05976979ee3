"""A vocabulary split over the mesh axis `model`: running on each shard, and adding up.

What the shards found is put side by side and combined in the order of the shards, on
each of them alike. A sum left to the collective would be taken in an order that depends
on where a row stands in the batch, and so would its last bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.pallas_kernels import varying


def over_vocabulary(f: Callable, logits: jax.Array, *args: jax.Array) -> Any:
  """Calls `f` on each shard of the vocabulary, where a mesh with `model` is around.

  The kernels cannot be partitioned by XLA; so it is manual over `model` even where that
  is of size 1. A vocabulary that the shards do not divide is whole on each of them.

  Args:
    f: (axis, logits f32[R V/shards], *args) -> arrays equal on every shard; `axis` is
      the name of the mesh axis that the logits are split over, None if they are whole
    logits: f32[R V]
    args: whole on every shard
  """
  mesh = axes.mesh_of_compiler()
  if mesh is None:
    return f(None, logits, *args)
  whole = PartitionSpec()
  splits = logits.shape[1] % mesh.shape[axes.MODEL] == 0
  spec = PartitionSpec(None, axes.MODEL) if splits else whole
  run = jax.shard_map(
    lambda *args: f(axes.MODEL if splits else None, *args),
    in_specs=(spec, *(whole for _ in args)),
    out_specs=whole,
    axis_names={axes.MODEL},
    check_vma=False,  # not all kernels have types that say what varies
  )
  results = run(logits, *args)
  return jax.tree.map(lambda x: varying.like(x, logits, *args), results)


def side_by_side(x: jax.Array, axis: str | None) -> jax.Array:
  """What each shard has, in their order: [shards ...], equal on every shard.

  A sum in which all summands but one are 0, so exact in any order.
  """
  if axis is None:
    return x[None]
  count = jax.lax.axis_size(axis)
  mine = jnp.arange(count) == jax.lax.axis_index(axis)
  mine = mine.reshape(count, *(1 for _ in x.shape))
  return jax.lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), axis)


def add(x: jax.Array, axis: str | None) -> jax.Array:
  """The sum over the shards, in their order."""
  first, *others = side_by_side(x, axis)
  for other in others:
    first = first + other
  return first


def largest(x: jax.Array, axis: str | None) -> jax.Array:
  """The maximum over the shards."""
  return x if axis is None else jax.lax.pmax(x, axis)
