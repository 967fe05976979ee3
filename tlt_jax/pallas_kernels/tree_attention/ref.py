import functools

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_MASKED = -1e30  # finite: no NaN in a fully masked row

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def tree_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: seen_lib.Seen, pages: jax.Array
) -> jax.Array:
  """Online softmax (Milakov & Gimelshein 2018), a page of every row at a time.

  A page in which a row sees nothing does not change its bits.
  """
  B, J, N, H = q.shape
  (_, K, L, _), M = k.shape, pages.shape[1]
  q = (q * H**-0.5).reshape(B, J, K, -1, H).transpose(0, 2, 3, 1, 4)  # f[B K G J H]
  q, G = q.reshape(B, K, -1, H), N // K  # one matrix product per kv head

  def fold(i, carry):
    largest, total, out = carry
    page = jax.lax.dynamic_index_in_dim(pages, i, 1, keepdims=False)
    scores = _product("bkqh,bksh->bkqs", q, k[page])
    shown = jnp.tile(seen.mask(i * L, L), (1, G, 1))[:, None]
    scores = jnp.where(shown, scores, -jnp.inf)
    higher = jnp.maximum(largest, jnp.max(scores, -1, keepdims=True))
    weights, rescale = jnp.exp(scores - higher), jnp.exp(largest - higher)
    total = total * rescale + jnp.sum(weights, -1, keepdims=True)
    added = _product("bkqs,bksh->bkqh", weights.astype(v.dtype), v[page])
    return higher, total, out * rescale + added

  end = jnp.minimum(jnp.max(seen.start) + seen.size, M * L)
  first = 0 if seen.first is None else jnp.maximum(jnp.min(seen.first), 0) // L
  zero = jnp.zeros_like(q, jnp.float32)
  start = zero[..., :1] + _MASKED, zero[..., :1], zero
  _, total, out = jax.lax.fori_loop(first, -(-end // L), fold, start)
  out = (out / jnp.where(total > 0, total, 1)).astype(v.dtype)
  out = out.reshape(B, K, G, J, H).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, J, N, H)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """Grouped-query attention of f[B T N H] to f[B K S H], by a mask bool[B T S]."""
  B, T, N, H = q.shape
  K, G = k.shape[1], N // k.shape[1]
  q = (q * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)  # f[B K G T H]
  q = q.reshape(B, K, -1, H)  # one matrix product per kv head
  scores = _product("bkqh,bksh->bkqs", q, k)
  scores = jnp.where(jnp.tile(mask, (1, G, 1))[:, None], scores, _MASKED)
  # The division by the softmax's sum comes last, for H numbers per query instead of S. The
  # result does not depend on `largest`: it needs no gradient.
  largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
  weights = jnp.exp(scores - largest)
  out = _product("bkqs,bksh->bkqh", weights.astype(v.dtype), v)
  out = (out / jnp.sum(weights, -1, keepdims=True)).astype(v.dtype)
  out = out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, T, N, H)
