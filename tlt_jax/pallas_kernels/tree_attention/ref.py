"""tree_attention in plain jax.numpy: what every other implementation must equal."""

import functools

import jax
import jax.numpy as jnp

from tlt_jax import few_rows_matmul
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_MASKED = -1e30  # finite, so that a fully masked row stays free of NaN

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def tree_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen: seen_lib.Seen,
  pages: jax.Array | None = None,
) -> jax.Array:
  """Does what the package's function says; reads the whole cache, all of it finite."""
  if pages is not None:
    k, v = _rows(k, pages), _rows(v, pages)
  mask = seen.mask(v.shape[2])
  sees_any = jnp.any(mask, -1)[:, :, None, None]
  return jnp.where(sees_any, attend(q, k, v, mask, cached=True), 0)


def _rows(pool: jax.Array, pages: jax.Array) -> jax.Array:
  """The cache of each row, f[B K S H], from a pool f[P K L H] and i32[B S/L]."""
  (B, M), (_, K, L, H) = pages.shape, pool.shape
  return pool[pages].swapaxes(1, 2).reshape(B, K, M * L, H)


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, cached: bool = False
) -> jax.Array:
  """Grouped-query attention.

  Args:
    q: f[B T N H]
    k, v: f[B K S H]
    mask: bool[B T S]  True where a query may look
    cached: whether keys lie in a cache, and few queries look at them
  Returns:
    f[B T N H]
  """
  B, T, N, H = q.shape
  K, G = k.shape[1], N // k.shape[1]
  q = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)  # f[B K G T H]
  q = q.reshape(B, K, -1, H)  # one matrix product per kv head
  if cached:
    scores = few_rows_matmul.times_transposed(q, k, jnp.float32)
  else:
    scores = _product("bkqh,bksh->bkqs", q, k)
  scores = jnp.where(jnp.tile(mask, (1, G, 1))[:, None], scores, _MASKED)
  # A softmax whose sum divides at the end, H numbers of a query instead of S. What is
  # subtracted changes nothing but the range: it needs no gradient.
  largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
  weights = jnp.exp(scores - largest)
  out = _product("bkqs,bksh->bkqh", weights.astype(v.dtype), v)
  out = (out / jnp.sum(weights, -1, keepdims=True)).astype(v.dtype)
  out = out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, T, N, H)
