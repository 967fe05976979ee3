"""A matrix product for few rows on CPUs.

XLA hands a CPU's products to a library that packs the right operand in every call. Here
that is the few rows; the large matrix is read as it lies.
"""

import jax
import jax.numpy as jnp

# Of float32 that a vector register of AVX2 holds: columns the library computes at once.
# Products of other widths, from 5 on, take longer than those of the next multiple.
_LANES = 8
_NARROW = 4  # columns, up to which it has a way of its own


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
  rows = x.shape[-2]
  turned = x.swapaxes(-1, -2)
  if rows > _NARROW:
    beside = [(0, 0)] * (x.ndim - 1) + [(0, -rows % _LANES)]
    turned = jnp.pad(turned, beside)
  product = barrier(jnp.matmul(w, barrier(turned), preferred_element_type=dtype))
  return product[..., :rows].swapaxes(-1, -2)
