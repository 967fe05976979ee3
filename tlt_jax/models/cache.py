"""The KV cache: one pair of arrays per layer, written in place.

Keys are stored transposed: the product with the queries then reads them as they
lie. (On a CPU half the time of attention; there, XLA copies them otherwise.)

Token t of a row lives in slot t. A row is cut back by forgetting its length:
what lies beyond is masked, and overwritten when the row grows again.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import cache_write


@flax.struct.dataclass
class LayerCache:
  """Keys (already rotated) and values of one layer."""

  k: jax.Array  # f[B K H S]
  v: jax.Array  # f[B K S H]

  @property
  def length(self) -> int:
    """S, the slots of a row."""
    return self.v.shape[2]


# Which axis of each array counts the slots.
SLOT_AXIS = LayerCache(k=3, v=2)


KVCache = tuple[LayerCache, ...]  # one entry per layer


def init(config: config_lib.ModelConfig, batch: int, length: int) -> KVCache:
  """Makes an empty cache for `batch` rows of at most `length` tokens."""
  B, K, H, S = batch, config.num_kv_heads, config.head_dim, length
  zeros = lambda *shape: jnp.zeros(shape, config.dtype)
  layers = range(config.num_layers)
  return tuple(LayerCache(zeros(B, K, H, S), zeros(B, K, S, H)) for _ in layers)


def write(
  layer: LayerCache, k: jax.Array, v: jax.Array, start: jax.Array
) -> LayerCache:
  """Stores keys and values in consecutive slots.

  Args:
    layer: updated in place under jit
    k: f[B K H T]
    v: f[B K T H]
    start: i32[B]  the slot of a row's first; slots outside of the cache are dropped
  """
  k = _write_transposed(layer.k, k, start)
  return LayerCache(k, cache_write.cache_write(layer.v, v, start))


def _write_transposed(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Is `cache_write`, of keys f[B K H T] to f[B K H S]."""
  slots = start[:, None] + jnp.arange(new.shape[3])
  slots = jnp.where(slots < 0, cache.shape[3], slots)  # else they count from the end
  put = lambda row, x, at: row.at[:, at].set(x.astype(row.dtype), mode="drop")
  # Batched over rows and heads, so that sharded heads are written where they are.
  return jax.vmap(jax.vmap(put, (0, 0, None)))(cache, new, slots)


def move(layer: LayerCache, source: jax.Array, start: jax.Array) -> LayerCache:
  """Copies slots `source` i32[B T] to start, start+1, ... i32[B] of the same row."""
  per_head = lambda read: jax.vmap(jax.vmap(read, (0, None)))
  k = per_head(lambda row, at: row[:, at])(layer.k, source)
  v = per_head(lambda row, at: row[at])(layer.v, source)
  return write(layer, k, v, start)
