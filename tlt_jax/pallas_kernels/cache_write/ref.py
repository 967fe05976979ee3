import jax
import jax.numpy as jnp


def cache_write(
  cache: jax.Array, new: jax.Array, start: jax.Array, pages: jax.Array
) -> jax.Array:
  """Scatters each slot of each head by itself.

  Of whole heads, and into a matrix where a device has a single head, XLA would copy the
  pool to another layout.
  """
  P, K, L, _ = cache.shape
  slots = start[:, None] + jnp.arange(new.shape[2])
  page = jnp.take_along_axis(pages, slots // L, 1, mode="clip")
  exists = (slots >= 0) & (slots < pages.shape[1] * L) & (page < P - 1)
  page = jnp.where(exists, page, P)
  at = page[:, None], jnp.arange(K)[:, None], (slots % L)[:, None]  # i32[B K J] each
  return cache.at[at].set(new.astype(cache.dtype), mode="drop")
