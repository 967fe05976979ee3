from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.pallas_kernels import varying


def over_heads(
  f: Callable[..., Any],
  num_kv_heads: int,
  args: Sequence[jax.Array],
  head_axes: Sequence[int | None],
  result_axis: int | tuple[int, ...],
) -> Any:
  """Calls `f(*args)` on each shard of the heads, under a mesh with the axis `model`.

  XLA cannot partition a kernel: it gathers all heads on every device, and for TPUs fails
  even if `model` has size 1. Heads are replicated if the shards do not divide them.
  `head_axes` has for each argument the axis of heads, or None; `result_axis` that of the
  result, or of each of several.
  """
  mesh = axes.mesh_of_compiler()

  def marked(results):
    return jax.tree.map(lambda x: varying.like(x, *args), results)

  if mesh is None:
    return marked(f(*args))
  splits = num_kv_heads % mesh.shape[axes.MODEL] == 0

  def spec(axis: int | None) -> PartitionSpec:
    if axis is None or not splits:
      return PartitionSpec()
    return PartitionSpec(*(None,) * axis, axes.MODEL)

  run = jax.shard_map(
    f,
    in_specs=tuple(map(spec, head_axes)),
    out_specs=jax.tree.map(spec, result_axis),
    axis_names={axes.MODEL},
    check_vma=False,  # some kernels' results lack the varying axes in their types
  )
  return marked(run(*args))
