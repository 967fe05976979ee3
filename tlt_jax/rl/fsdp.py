"""Fully sharded data parallelism: arrays are sharded over slices and gathered for use.

This runs inside `shard_map` over `data`, where each slice computes its own rows: no
activation moves between slices, and a gradient is summed where its array was gathered
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, stage 3; Zhao et al. 2023,
https://arxiv.org/abs/2304.11277).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tlt_jax import axes

WHOLE = PartitionSpec()
MICRO_BATCHES = PartitionSpec(None, axes.DATA)  # [M rows ...]


def specs(shardings: Any) -> Any:
  return jax.tree.map(lambda s: _only(axes.DATA, s.spec), shardings)


def _only(axis: str, spec: PartitionSpec) -> PartitionSpec:
  return PartitionSpec(*(a if a == axis else None for a in spec))


def on_slices(
  mesh: jax.sharding.Mesh, f: Callable, in_specs: Any, out_specs: Any
) -> Callable:
  """Maps `f` over the slices; within one, XLA splits arrays over `model` as before."""
  return jax.shard_map(
    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axes.DATA}
  )


def gather(params: Any, shardings: Any, dtype: str) -> Any:
  """Gathers arrays over the slices; they stay split over `model`.

  Matrices are sent in `dtype`. Their gradients keep their own dtype and are
  reduce-scattered; those of arrays that are not split over slices are summed.
  """
  if isinstance(params, dict):
    return {name: gather(x, shardings[name], dtype) for name, x in params.items()}
  spec = shardings.spec
  if axes.DATA not in spec:
    # Here, not where it is used: its gradient is summed as it is, not rounded first.
    return jax.lax.pcast(params, axes.DATA, to="varying")
  of_model = _only(axes.MODEL, spec)
  dtype = dtype if params.ndim > 1 else str(params.dtype)
  return _gather(params, spec.index(axes.DATA), of_model, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, axis: int, of_model: PartitionSpec, dtype: str) -> jax.Array:
  all_gather = functools.partial(
    jax.lax.all_gather, axis_name=axes.DATA, axis=axis, tiled=True
  )
  return _on_shards(all_gather, of_model)(x.astype(dtype)).astype(x.dtype)


def _reduce_scatter(axis, of_model, dtype, residuals, gradient: jax.Array):
  del dtype, residuals
  reduce_scatter = functools.partial(
    jax.lax.psum_scatter, axis_name=axes.DATA, scatter_dimension=axis, tiled=True
  )
  return (_on_shards(reduce_scatter, of_model)(gradient),)


_gather.defvjp(lambda x, *static: (_gather(x, *static), None), _reduce_scatter)


def _on_shards(f: Callable, spec: PartitionSpec) -> Callable:
  """Maps `f` over `model`: XLA itself would gather these shards before they travel."""
  return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names={axes.MODEL})
