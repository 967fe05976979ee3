from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def sum_over(count: jax.Array, f: Callable[[jax.Array], Any], start: Any = None) -> Any:
  """Adds up f(0), ..., f(count - 1) in a loop, holding one of them at a time.

  (optax's micro-batching needs the number of parts at compile time.) `start` is the tree to
  add to; default: zeros.
  """
  if start is None:
    start = jax.tree.map(_zeros, jax.eval_shape(f, 0))

  def add(i, total):
    return jax.tree.map(jnp.add, total, f(i))

  return jax.lax.fori_loop(0, count, add, start)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
  zeros, kind = jnp.zeros(shape.shape, shape.dtype), shape.manual_axis_type
  over = tuple(sorted(kind.varying)) if kind is not None else ()
  return jax.lax.pcast(zeros, over, to="varying") if over else zeros
