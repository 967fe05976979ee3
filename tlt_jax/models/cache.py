"""The KV cache: one pair of arrays per layer, written in place.

Token t of a row lives in slot t. A row is cut back by forgetting its length:
what lies beyond is masked, and overwritten when the row grows again.

Here each row lies in one piece, of the batch's length. `paged_cache` has the same in
pages.
"""

from collections.abc import Iterable

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.models import paged_cache
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import heads


@flax.struct.dataclass
class LayerCache:
  """Keys (already rotated) and values of one layer."""

  k: jax.Array  # f[B K S H]
  v: jax.Array  # f[B K S H]
  # What reads and writes it, see `pallas_kernels.implementations`.
  kernels: str | None = flax.struct.field(pytree_node=False)

  @property
  def length(self) -> int:
    """S, the slots of a row."""
    return self.v.shape[2]

  @property
  def pages(self) -> None:
    """None: it does not lie in pages."""
    return None

  def write(self, k: jax.Array, v: jax.Array, start: jax.Array) -> "LayerCache":
    """Stores keys and values in consecutive slots, in place under jit.

    Args:
      k, v: f[B K T H]
      start: i32[B]  the slot of a row's first; slots outside of the cache are dropped
    """
    put = lambda old, new: cache_write.cache_write(old, new, start, impl=self.kernels)
    return self.replace(k=put(self.k, k), v=put(self.v, v))

  def move(self, source: jax.Array, start: jax.Array) -> "LayerCache":
    """Copies slots `source` i32[B T] to start, start+1, ... i32[B] of the same row."""
    return self.write(_read(self.k, source), _read(self.v, source), start)


Layer = LayerCache | paged_cache.PagedLayer
KVCache = tuple[LayerCache, ...] | paged_cache.PagedCache  # either gives its layers


def with_layers(kv: KVCache, layers: Iterable[Layer]) -> KVCache:
  """A cache with these layers in place of its own."""
  return kv.with_layers(layers) if isinstance(kv, paged_cache.PagedCache) else tuple(layers)


def of_live(kv: KVCache, live: jax.Array) -> KVCache:
  """A cache in which only rows bool[B] still write to pages, which others may share."""
  return kv.of_live(live) if isinstance(kv, paged_cache.PagedCache) else kv


def slots_for(tokens: int, kernels: str | None) -> int:
  """The slots of a row with room for so many tokens: kernels want a multiple of 32."""
  on_cpu = kernels is None and jax.default_backend() == "cpu"
  return tokens if on_cpu else -(-tokens // 32) * 32


def init(
  config: config_lib.ModelConfig, batch: int, length: int, kernels: str | None = None
) -> tuple[LayerCache, ...]:
  """Makes an empty cache for `batch` rows of at most `length` tokens.

  Args:
    config: of the model
    batch: B
    length: S, of `slots_for`
    kernels: that will read and write it; None: those of this machine
  """
  shape = batch, config.num_kv_heads, length, config.head_dim
  zeros = lambda: jnp.zeros(shape, config.dtype)
  return tuple(LayerCache(zeros(), zeros(), kernels) for _ in range(config.num_layers))


def _read(cache: jax.Array, slots: jax.Array) -> jax.Array:
  """The slots i32[B T] of each row of f[B K S H]: f[B K T H]."""

  def of_shard(cache, slots):
    B, K, S, H = cache.shape
    first = (jnp.arange(B)[:, None] * K + jnp.arange(K)) * S  # i32[B K]
    # From a matrix: to pick slots of each row and head, XLA lays out the whole cache anew
    # on a TPU.
    return cache.reshape(-1, H)[first[..., None] + slots[:, None]]

  K = cache.shape[1]
  return heads.over_heads(of_shard, K, (cache, slots), (1, None), result_axis=1)
