"""cache_write in plain jax.numpy: what every other implementation must equal."""

import jax
import jax.numpy as jnp


def cache_write(
  cache: jax.Array, new: jax.Array, start: jax.Array, pages: jax.Array | None = None
) -> jax.Array:
  """Does what the package's function says."""
  if pages is not None:
    return _to_pages(cache, new, start[:, None] + jnp.arange(new.shape[2]), pages)
  # Batched over rows and heads, so that sharded heads are written where they are.
  write = lambda row, x, at: row.at[at].set(x.astype(row.dtype), mode="drop")
  slots = start[:, None] + jnp.arange(new.shape[2])
  slots = jnp.where(slots < 0, cache.shape[2], slots)  # else they count from the end
  if len(slots) > 1:
    return jax.vmap(jax.vmap(write, (0, 0, None)))(cache, new, slots)
  # The same slots once per head. With a single index, as one head alone still has, XLA
  # updates a slice instead, and its CPU backend copies the whole cache in every step.
  slots = jnp.broadcast_to(slots[:, None], (*cache.shape[:2], slots.shape[1]))
  return jax.vmap(jax.vmap(write))(cache, new, slots)


def _to_pages(pool, new, slots, pages):
  """Writes f[B K J H] to the slots i32[B J] of rows that have pages i32[B M] of a pool.

  Into a matrix: of slots within pages and heads, XLA would make a pool laid out anew.
  """
  P, K, L, H = pool.shape
  page = jnp.take_along_axis(pages, slots // L, 1, mode="clip")
  exists = (slots >= 0) & (slots < pages.shape[1] * L) & (page < P - 1)
  at = (page[:, None] * K + jnp.arange(K)[:, None]) * L + (slots % L)[:, None]
  at = jnp.where(exists[:, None], at, P * K * L)
  matrix = pool.reshape(-1, H).at[at].set(new.astype(pool.dtype), mode="drop")
  return matrix.reshape(pool.shape)
