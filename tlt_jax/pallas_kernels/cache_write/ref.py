"""The reference of cache_write in plain jax.numpy."""

import jax
import jax.numpy as jnp


def cache_write(
  cache: jax.Array, new: jax.Array, start: jax.Array, pages: jax.Array
) -> jax.Array:
  """Scatters into a matrix: with more axes, XLA would copy the pool to another layout."""
  P, K, L, H = cache.shape
  slots = start[:, None] + jnp.arange(new.shape[2])
  page = jnp.take_along_axis(pages, slots // L, 1, mode="clip")
  exists = (slots >= 0) & (slots < pages.shape[1] * L) & (page < P - 1)
  at = (page[:, None] * K + jnp.arange(K)[:, None]) * L + (slots % L)[:, None]
  at = jnp.where(exists[:, None], at, P * K * L)
  matrix = cache.reshape(-1, H).at[at].set(new.astype(cache.dtype), mode="drop")
  return matrix.reshape(cache.shape)
