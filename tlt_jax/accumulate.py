"""Sums over micro-batches: gradients and metrics of as many as there are at run time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def sum_over(
  count: jax.Array, f: Callable[[jax.Array], Any], start: Any = None
) -> Any:
  """Adds up f(0), ..., f(count - 1) in a loop, so that one of them is held at a time.

  (optax's micro-batching divides one batch into parts of a number known when it is
  compiled; here the parts lie in buckets of several shapes, and their number is data.)

  Args:
    count: i32[], read at run time
    f: i32[] -> tree of arrays
    start: the tree to add to, such as the sum over another bucket; default: zeros
  """
  if start is None:
    shapes = jax.eval_shape(f, 0)
    start = jax.tree.map(_zeros, shapes)
  add = lambda i, total: jax.tree.map(jnp.add, total, f(i))
  return jax.lax.fori_loop(0, count, add, start)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros of a shape, varying over the mesh axes over which an array of it does."""
  zeros, kind = jnp.zeros(shape.shape, shape.dtype), shape.manual_axis_type
  over = tuple(sorted(kind.varying)) if kind is not None else ()
  return jax.lax.pcast(zeros, over, to="varying") if over else zeros
