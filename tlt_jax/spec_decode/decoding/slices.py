"""Running a function once per slice, and arrays that may differ between slices.

Every device program of a rollout is manual over `data`: a slice works on its own rows,
and one that is done leaves its loop at once, whatever the others do.
Tensor parallelism inside a slice is left to the compiler.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import functools
import time

import jax
from jax import flatten_util
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from tlt_jax import axes
from tlt_jax import processes

# How an argument or a result is stored: split by rows over the slices, or whole on each.
ROWS, WHOLE = PartitionSpec(axes.DATA), PartitionSpec()

_SMALL_BYTES = 4 << 20  # of an array that is reduced together with others


def per_slice(
  mesh: Mesh, f: Callable, in_specs, out_specs, kernels: str | None = None
) -> Callable:
  """Maps `f` over the slices; specs are pytree prefixes of `ROWS` and `WHOLE`.

  What is `WHOLE` in `out_specs` must be equal on every slice.
  """
  return jax.shard_map(
    f,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={axes.DATA},
    # Pallas's interpreter does not say which of its arrays differ between slices; a sum
    # over one slice is left out, see `total`.
    check_vma=kernels != "interpret" and mesh.shape[axes.DATA] > 1,
  )


def place(mesh: Mesh, x: np.ndarray) -> jax.Array:
  """Puts [slices, b, ...] of the host on the devices as [slices * b, ...]."""
  flat = x.reshape(-1, *x.shape[2:])
  return processes.place(flat, axes.sharding(mesh, axes.DATA))


def abstract(mesh: Mesh, rows: int, dtype, *shape: int) -> jax.ShapeDtypeStruct:
  B = rows * mesh.shape[axes.DATA]
  over = axes.sharding(mesh, axes.DATA)
  return jax.ShapeDtypeStruct((B, *shape), dtype, sharding=over)


def zeros(abstract):
  """Makes arrays of these shapes and shardings, one by one; arrays stay as they are."""

  def make(x):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jnp.zeros(x.shape, x.dtype, device=x.sharding)
    return x

  return jax.tree.map(make, abstract)


def shardings(abstract):
  return jax.tree.map(lambda x: x.sharding, abstract)


def varying(x: jax.Array) -> jax.Array:
  return jax.lax.pcast(x, axes.DATA, to="varying")


def total(x: jax.Array) -> jax.Array:
  """The sum of all slices' `x`.

  One slice's is `x` itself: XLA's partitioner refuses sums over a manual axis of size 1
  of what is split over another axis (`IsManualSubgroup`, spmd_partitioner.cc).
  """
  return x if jax.lax.axis_size(axes.DATA) == 1 else jax.lax.psum(x, axes.DATA)


def combined(reduce: Callable[[jax.Array], jax.Array], tree):
  """Reduces every leaf over the slices, small ones of a dtype together as one vector.

  `reduce` is elementwise over slices, as `total` is.

  A collective of several processes on CPUs takes some 4 ms, however little it moves, and
  their compiler does not combine them. Where a slice has several devices each leaf goes
  alone: a vector of them would undo how they are split within the slice.
  """
  leaves, structure = jax.tree.flatten(tree)
  split = jax.sharding.get_abstract_mesh().shape[axes.MODEL] > 1
  together = collections.defaultdict(list)  # dtype -> places of small leaves
  for i, x in enumerate(leaves):
    if split or x.nbytes > _SMALL_BYTES:
      leaves[i] = reduce(x)
    else:
      together[x.dtype].append(i)
  for places in together.values():
    vector, restore = flatten_util.ravel_pytree([leaves[i] for i in places])
    for i, x in zip(places, restore(reduce(vector)), strict=True):
      leaves[i] = x
  return jax.tree.unflatten(structure, leaves)


def ready_s(x: jax.Array, began: float) -> np.ndarray:
  """Seconds since `began` until each slice's rows of `x` were there: f64[slices].

  Only this process's slices; those of others are 0. A slice of several devices is ready
  when one of them is: they work in step.
  """
  found = np.zeros(x.shape[0])
  mine = [shard for shard in x.addressable_shards if shard.replica_id == 0]

  def wait(shard) -> float:
    shard.data.block_until_ready()
    return time.perf_counter() - began

  for shard, seconds in zip(mine, _waiting(len(mine)).map(wait, mine), strict=True):
    found[shard.index[0]] = seconds
  return found


@functools.cache
def _waiting(count: int) -> futures.ThreadPoolExecutor:
  return futures.ThreadPoolExecutor(max(count, 1), thread_name_prefix="slice")
