"""The KV cache: one pair of arrays per layer, written in place.

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

  k: jax.Array  # f[B K S H]
  v: jax.Array  # f[B K S H]


KVCache = tuple[LayerCache, ...]  # one entry per layer


def init(config: config_lib.ModelConfig, batch: int, length: int) -> KVCache:
  """An empty cache for `batch` rows of at most `length` tokens."""
  shape = (batch, config.num_kv_heads, length, config.head_dim)
  zeros = lambda: jnp.zeros(shape, config.dtype)
  return tuple(LayerCache(zeros(), zeros()) for _ in range(config.num_layers))


def write(layer: LayerCache, k, v, positions) -> LayerCache:
  """Stores f[B K T H] at slots i32[B T]; slots beyond the cache are dropped."""
  one = lambda row, x, at: row.at[at].set(x.astype(row.dtype), mode="drop")
  # Batched over rows and heads, so that sharded heads are written where they are.
  put = jax.vmap(jax.vmap(one, (0, 0, None)))
  return LayerCache(put(layer.k, k, positions), put(layer.v, v, positions))


def visible(positions: jax.Array, length: int) -> jax.Array:
  """Mask over a cache: a token at position p sees slots 0..p; bool[B T S].

  Worked row, S=6, two tokens at positions 3 and 4:  111100
                                                     111110
  """
  return jnp.arange(length)[None, None] <= positions[:, :, None]
