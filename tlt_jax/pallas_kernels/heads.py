"""Attention heads split over the mesh axis `model`: a kernel runs on each shard's own."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.pallas_kernels import varying


def over_heads(
  f: Callable[..., jax.Array],
  num_kv_heads: int,
  args: Sequence[jax.Array],
  head_axes: Sequence[int | None],
  result_axis: int,
) -> jax.Array:
  """Calls `f` on each shard of the heads, where a mesh with `model` is around.

  XLA cannot partition a kernel: left to itself it gathers all heads on every device, and
  for a TPU it refuses even where `model` is of size 1. Heads that the shards do not divide
  are whole on each of them.

  Args:
    f: (*args) -> an array; may be called with 1/shards of the heads
    num_kv_heads: K
    args: of f
    head_axes: for each argument the axis that counts heads, or None
    result_axis: that of the result
  """
  mesh = axes.mesh_of_compiler()
  if mesh is None:
    return varying.like(f(*args), *args)
  splits = num_kv_heads % mesh.shape[axes.MODEL] == 0

  def spec(axis: int | None) -> PartitionSpec:
    if axis is None or not splits:
      return PartitionSpec()
    return PartitionSpec(*(None,) * axis, axes.MODEL)

  run = jax.shard_map(
    f,
    in_specs=tuple(map(spec, head_axes)),
    out_specs=spec(result_axis),
    axis_names={axes.MODEL},
    check_vma=False,  # not all kernels have types that say what varies
  )
  return varying.like(run(*args), *args)
