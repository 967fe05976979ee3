"""A matrix product for few rows on CPUs.

XLA hands a CPU's products to a library that packs the right operand in every call. Here
that is the few rows; the large matrix is read as it lies.
"""

import jax
import jax.numpy as jnp


def times_transposed(
  x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
  """Computes `x @ w.T` as `(w @ x.T).T`, which XLA may not turn back: f[... R O].

  Args:
    x: f[... R I]  few rows
    w: f[... O I]  an array of its own, not what a transposition has made
    dtype: in which products are added up, of the result; None: that of x
  """
  barrier = jax.lax.optimization_barrier
  turned = barrier(x.swapaxes(-1, -2))
  return barrier(jnp.matmul(w, turned, preferred_element_type=dtype)).swapaxes(-1, -2)
