"""Matrix products that are fast for the few rows of decoding, where XLA's own are slow.

On CPUs XLA calls a library that packs the right operand in every call. `times_transposed`
makes it pack the few rows instead of the large matrix.

On GPUs XLA turns a product of one row into a kernel that writes `x * w`, as large as the
matrix, and another that reads it and adds up. On TPUs the vector units compute it, in 3.4
times the cycles of the matrix unit, as the compiler counts them. `linear` pads it to
several rows, which on GPUs also gives the same bits as one of several rows.
"""

import math

import jax
import jax.numpy as jnp

_FEW = 64  # most rows for which CPUs are faster with swapped operands
# Float32 values of an AVX2 register: columns the library computes at once. Products of
# other widths, from 5 on, take longer than those of the next multiple.
_LANES = 8
_NARROW = 4  # most columns for which the library has a special case
_SEVERAL = 8  # rows that one row is padded to on GPUs and TPUs


def linear(
  x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
  """`x @ w.T` of f[... I] and f[O I], cast to the dtype of x: f[... O].

  Args:
    dtype: of accumulation and result; None: x's
  """
  w, rows = w.astype(x.dtype), math.prod(x.shape[:-1])

  def plain(x, w):
    contracted = ((x.ndim - 1,), (1,)), ((), ())
    return jax.lax.dot_general(x, w, contracted, preferred_element_type=dtype)

  def swapped(x, w):
    y = times_transposed(x.reshape(rows, -1), w, dtype)
    return y.reshape(*x.shape[:-1], -1)

  def padded_rows(x, w):
    padded = jnp.pad(x.reshape(1, -1), ((0, _SEVERAL - 1), (0, 0)))
    # The barrier keeps XLA from computing one row only.
    y = plain(jax.lax.optimization_barrier(padded), w)[:1]
    return y.reshape(*x.shape[:-1], -1)

  if rows > _FEW:
    return plain(x, w)
  several = padded_rows if rows == 1 else plain
  by_platform = dict(cpu=swapped, cuda=several, tpu=several, default=plain)
  return jax.lax.platform_dependent(x, w, **by_platform)


def times_transposed(
  x: jax.Array, w: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
  """Computes `x @ w.T` as `(w @ x.T).T`, which XLA may not turn back: f[... R O].

  For few rows x f[... R I], and w f[... O I] that is not the result of a transposition.
  """
  barrier = jax.lax.optimization_barrier
  rows = x.shape[-2]
  turned = x.swapaxes(-1, -2)
  if rows > _NARROW:
    turned = jnp.pad(turned, [(0, 0)] * (x.ndim - 1) + [(0, -rows % _LANES)])
  product = barrier(jnp.matmul(w, barrier(turned), preferred_element_type=dtype))
  return product[..., :rows].swapaxes(-1, -2)
