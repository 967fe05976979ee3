"""Fully sharded data parallelism: a slice has a part of each array, gathered for its use.

Inside of `shard_map` over `data`, where every slice has rows of its own: there, no
activation can travel between slices, and a gradient is summed where its array was
gathered. (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, stage 3; Zhao et al.
2023, https://arxiv.org/abs/2304.11277.)
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
  """How arrays of these shardings are split over the slices."""
  of_data = lambda axis: axis if axis == axes.DATA else None
  return jax.tree.map(lambda s: PartitionSpec(*map(of_data, s.spec)), shardings)


def on_slices(
  mesh: jax.sharding.Mesh, f: Callable, in_specs: Any, out_specs: Any
) -> Callable:
  """Maps `f` over the slices; within one, XLA splits arrays over `model` as before."""
  return jax.shard_map(
    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axes.DATA}
  )


def gather(params: Any, shardings: Any, dtype: str) -> Any:
  """Whole arrays from this slice's parts; split over `model` they stay.

  Matrices travel in `dtype`, their gradients in their own, and come back as the part of
  the sum over the slices (reduce-scatter). What is not split over them stays as it is, and
  its gradients are summed.

  Args:
    params: tree of this slice's parts
    shardings: of the parameters, for a tree that has these entries at least
    dtype: in which matrices are used
  """
  if isinstance(params, dict):
    return {name: gather(x, shardings[name], dtype) for name, x in params.items()}
  spec = shardings.spec
  if axes.DATA not in spec:
    # Here, not where it is used: its gradient is summed as it is, not rounded first.
    return jax.lax.pcast(params, axes.DATA, to="varying")
  of_model = PartitionSpec(*(axis if axis == axes.MODEL else None for axis in spec))
  dtype = dtype if params.ndim > 1 else str(params.dtype)
  return _gather(params, spec.index(axes.DATA), of_model, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, axis: int, of_model: PartitionSpec, dtype: str) -> jax.Array:
  """The whole array along an axis, rounded to `dtype` on its way."""
  whole = lambda x: jax.lax.all_gather(x, axes.DATA, axis=axis, tiled=True)
  return _on_shards(whole, of_model)(x.astype(dtype)).astype(x.dtype)


def _sum_and_split(axis, of_model, dtype, known, gradient: jax.Array):
  """A slice's part of the gradients of all slices, added up."""
  del dtype, known
  split = lambda x: jax.lax.psum_scatter(
    x, axes.DATA, scatter_dimension=axis, tiled=True
  )
  return (_on_shards(split, of_model)(gradient),)


_gather.defvjp(lambda x, *how: (_gather(x, *how), None), _sum_and_split)


def _on_shards(f: Callable, spec: PartitionSpec) -> Callable:
  """Maps `f` over `model`: XLA itself would gather these shards before they travel."""
  return jax.shard_map(f, in_specs=spec, out_specs=spec, axis_names={axes.MODEL})
