"""The KV cache: one pair of arrays per layer, written in place.

Keys lie as values do (*plain*) or *transposed*: the product with the queries then reads
them as they lie. On a CPU that takes half the time: there, XLA copies plain keys first.
Accelerators read both alike, and write plain keys faster, a row of memory per token. Where
kernels are named keys are plain, whichever machine compiles the program.

Token t of a row lives in slot t. A row is cut back by forgetting its length:
what lies beyond is masked, and overwritten when the row grows again.

Here each row lies in one piece, of the batch's length. `paged_cache` has the same in
pages.
"""

from collections.abc import Iterable
import functools

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.models import paged_cache
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels.cache_write import ref


@flax.struct.dataclass
class LayerCache:
  """Keys (already rotated) and values of one layer."""

  k: jax.Array  # f[B K S H], or f[B K H S] if transposed
  v: jax.Array  # f[B K S H]
  keys: str = flax.struct.field(pytree_node=False)  # "plain" or "transposed"
  # What reads and writes it, see `pallas_kernels.implementations`.
  kernels: str | None = flax.struct.field(pytree_node=False)

  @property
  def length(self) -> int:
    """S, the slots of a row."""
    return self.v.shape[2]

  @property
  def slot_axis(self) -> "LayerCache":
    """Which axis of each array counts the slots."""
    return self.replace(k=3 if self.keys == "transposed" else 2, v=2)

  @property
  def pages(self) -> None:
    """None: it does not lie in pages."""
    return None

  def write(self, k: jax.Array, v: jax.Array, start: jax.Array) -> "LayerCache":
    """Stores keys and values in consecutive slots, in place under jit.

    Args:
      k: f[B K T H], or f[B K H T] if its keys are transposed
      v: f[B K T H]
      start: i32[B]  the slot of a row's first; slots outside of the cache are dropped
    """
    put = functools.partial(cache_write.cache_write, impl=self.kernels)
    put_keys = _write_transposed if self.keys == "transposed" else put
    return self.replace(k=put_keys(self.k, k, start), v=put(self.v, v, start))

  def move(self, source: jax.Array, start: jax.Array) -> "LayerCache":
    """Copies slots `source` i32[B T] to start, start+1, ... i32[B] of the same row."""
    read_keys = _read_transposed if self.keys == "transposed" else _read
    return self.write(read_keys(self.k, source), _read(self.v, source), start)


Layer = LayerCache | paged_cache.PagedLayer
KVCache = tuple[LayerCache, ...] | paged_cache.PagedCache  # either gives its layers


def with_layers(kv: KVCache, layers: Iterable[Layer]) -> KVCache:
  """A cache with these layers in place of its own."""
  return kv.with_layers(layers) if isinstance(kv, paged_cache.PagedCache) else tuple(layers)


def of_live(kv: KVCache, live: jax.Array) -> KVCache:
  """A cache in which only rows bool[B] still write to pages, which others may share."""
  return kv.of_live(live) if isinstance(kv, paged_cache.PagedCache) else kv


def keys_for(kernels: str | None) -> str:
  """How keys lie for these kernels, None for those of this machine."""
  on_cpu = kernels is None and jax.default_backend() == "cpu"
  return "transposed" if on_cpu else "plain"


def slots_for(tokens: int, kernels: str | None) -> int:
  """The slots of a row with room for so many tokens: kernels want a multiple of 32."""
  return tokens if keys_for(kernels) == "transposed" else -(-tokens // 32) * 32


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
  B, K, H, S = batch, config.num_kv_heads, config.head_dim, length
  keys = keys_for(kernels)
  zeros = lambda *shape: jnp.zeros(shape, config.dtype)
  of_keys = (B, K, H, S) if keys == "transposed" else (B, K, S, H)
  return tuple(
    LayerCache(zeros(*of_keys), zeros(B, K, S, H), keys, kernels)
    for _ in range(config.num_layers)
  )


def _write_transposed(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Is `cache_write`, of keys f[B K H T] to f[B K H S]."""
  put = lambda row, x, at: row.at[:, at].set(x.astype(row.dtype), mode="drop")
  return ref.in_each_head(put, cache, new, start, axis=3)


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


def _read_transposed(cache: jax.Array, slots: jax.Array) -> jax.Array:
  """Is `_read`, of keys f[B K H S]: f[B K H T]."""
  of_head = lambda row, at: row[:, at]
  return jax.vmap(jax.vmap(of_head, (0, None)))(cache, slots)
