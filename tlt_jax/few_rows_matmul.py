"""Matrix products that are fast for the few rows of decoding, where XLA's own are slow.

On CPUs XLA hands products to a library that packs the right operand in every call.
`times_transposed` has it pack the few rows; the large matrix is read as it is.

On GPUs XLA turns a product of one row into a kernel that writes `x * w`, as large as the
matrix, and another that reads it and adds up. `linear` has it computed as one of several
rows, and so with the same bits.
"""

import math

import jax
import jax.numpy as jnp

_FEW = 64  # rows, up to which CPUs are faster with the operands changed over
# Of float32 that a vector register of AVX2 holds: columns the library computes at once.
# Products of other widths, from 5 on, take longer than those of the next multiple.
_LANES = 8
_NARROW = 4  # columns, up to which it has a way of its own
_SEVERAL = 8  # rows as which one row is computed on GPUs


def linear(
  x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
  """`x @ w.T`: f[... O].

  Args:
    x: f[... I]
    w: f[O I], cast to the dtype of x
    dtype: in which products are added up, of the result; None: that of x
  """
  w, rows = w.astype(x.dtype), math.prod(x.shape[:-1])

  def plain(x, w):
    contracted = ((x.ndim - 1,), (1,)), ((), ())
    return jax.lax.dot_general(x, w, contracted, preferred_element_type=dtype)

  def changed_over(x, w):
    y = times_transposed(x.reshape(rows, -1), w, dtype)
    return y.reshape(*x.shape[:-1], -1)

  def as_several(x, w):
    padded = jnp.pad(x.reshape(1, -1), ((0, _SEVERAL - 1), (0, 0)))
    # Else XLA sees that one row is wanted.
    y = plain(jax.lax.optimization_barrier(padded), w)[:1]
    return y.reshape(*x.shape[:-1], -1)

  if rows > _FEW:
    return plain(x, w)
  cuda = as_several if rows == 1 else plain
  return jax.lax.platform_dependent(x, w, cpu=changed_over, cuda=cuda, default=plain)


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
