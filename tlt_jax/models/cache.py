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
  """An empty cache for `batch` rows of at most `length` tokens."""
  rows = (batch, config.num_kv_heads)
  zeros = lambda *shape: jnp.zeros((*rows, *shape), config.dtype)
  H = config.head_dim
  return tuple(
    LayerCache(zeros(H, length), zeros(length, H)) for _ in range(config.num_layers)
  )


def write(layer: LayerCache, k, v, positions) -> LayerCache:
  """Stores keys f[B K H T] and values f[B K T H] at slots i32[B T].

  Slots beyond the cache are dropped.
  """
  one_k = lambda row, x, at: row.at[:, at].set(x.astype(row.dtype), mode="drop")
  one_v = lambda row, x, at: row.at[at].set(x.astype(row.dtype), mode="drop")
  # Batched over rows and heads, so that sharded heads are written where they are.
  put = lambda one: jax.vmap(jax.vmap(one, (0, 0, None)))
  return LayerCache(
    put(one_k)(layer.k, k, positions), put(one_v)(layer.v, v, positions)
  )


def move(layer: LayerCache, source, slots) -> LayerCache:
  """Copies slots i32[B T] to other slots i32[B T] of the same row."""
  take_k = lambda row, at: row[:, at]
  take_v = lambda row, at: row[at]
  take = lambda one: jax.vmap(jax.vmap(one, (0, None)))
  return write(layer, take(take_k)(layer.k, source), take(take_v)(layer.v, source), slots)


def visible(positions: jax.Array, length: int) -> jax.Array:
  """Mask over a cache: a token at position p sees slots 0..p; bool[B T S].

  Worked row, S=6, two tokens at positions 3 and 4:  111100
                                                     111110
  """
  return jnp.arange(length)[None, None] <= positions[:, :, None]
