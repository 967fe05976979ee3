"""The KV cache: one pair of arrays per layer, written in place.

Keys are stored transposed: the product with the queries then reads them as they
lie. (On a CPU half the time of attention; there, XLA copies them otherwise.)

Token t of a row lives in slot t. A row is cut back by forgetting its length:
what lies beyond is masked, and overwritten when the row grows again.
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib


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
  layer: LayerCache, k: jax.Array, v: jax.Array, slots: jax.Array
) -> LayerCache:
  """Stores keys and values.

  Args:
    layer: updated in place under jit
    k: f[B K H T]
    v: f[B K T H]
    slots: i32[B T]  where to; those beyond the cache are dropped
  """
  B, T = slots.shape
  chex.assert_shape(k, (B, None, None, T))
  chex.assert_shape(v, (B, None, T, None))
  set_k = lambda row, x, at: row.at[:, at].set(x.astype(row.dtype), mode="drop")
  set_v = lambda row, x, at: row.at[at].set(x.astype(row.dtype), mode="drop")
  # Batched over rows and heads, so that sharded heads are written where they are.
  per_head = lambda write: jax.vmap(jax.vmap(write, (0, 0, None)))
  return LayerCache(per_head(set_k)(layer.k, k, slots), per_head(set_v)(layer.v, v, slots))


def move(layer: LayerCache, source: jax.Array, slots: jax.Array) -> LayerCache:
  """Copies slots `source` i32[B T] to other slots i32[B T] of the same row."""
  per_head = lambda read: jax.vmap(jax.vmap(read, (0, None)))
  k = per_head(lambda row, at: row[:, at])(layer.k, source)
  v = per_head(lambda row, at: row[at])(layer.v, source)
  return write(layer, k, v, slots)


def visible(positions: jax.Array, length: int) -> jax.Array:
  """The mask over a cache in which a token at position p sees slots 0..p: bool[B T S].

  Worked rows, S=6, two tokens at positions 3 and 4:  111100
                                                      111110

  Args:
    positions: i32[B T]
    length: S
  """
  chex.assert_rank(positions, 2)
  return jnp.arange(length)[None, None] <= positions[:, :, None]
