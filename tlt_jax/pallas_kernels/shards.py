"""Operations on a vocabulary that is sharded over the mesh axis `model`.

Results of shards are gathered and combined in the order of the shards: the last bits of
an all-reduce would depend on a row's position in the batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.pallas_kernels import varying


def over_vocabulary(f: Callable, logits: jax.Array, *args: jax.Array) -> Any:
  """Calls `f` on each shard of the vocabulary, under a mesh with the axis `model`.

  XLA cannot partition kernels, so this is manual over `model` even if it has size 1. The
  vocabulary is replicated if the shards do not divide it.

  `f` takes (axis, logits f32[R V/shards], *args), and returns arrays equal on every shard;
  `axis` is None if the logits are replicated.
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
    check_vma=False,  # some kernels' results lack the varying axes in their types
  )
  results = run(logits, *args)
  return jax.tree.map(lambda x: varying.like(x, logits, *args), results)


def side_by_side(x: jax.Array, axis: str | None) -> jax.Array:
  """An all-gather in the order of the shards: [shards ...].

  It is a sum in which all summands but one are 0, so exact in any order.
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
  return x if axis is None else jax.lax.pmax(x, axis)
