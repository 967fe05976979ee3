"""The KV cache: a pool of pages per layer, and page tables.

A row takes free pages as it grows, and rows may share pages that none of them writes to
(PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180). Token t of a row is
in slot t % L of page `pages[b, t // L]`. The last page of a pool is the sink page, to
which unused entries of the table point: writes to it are dropped, reads are undefined. A
row is truncated by reducing its length: slots beyond are masked, and overwritten later.

Layers with a sliding window may have another table, `near`, in which entries that are far
apart are the same page: a row's pages are then a ring, as many as its window needs. Older
entries do not name any more what their slots held, but such slots are outside of the window
and masked by their position: what reads and writes a cache does not know of the ring.
"""

from collections.abc import Iterable, Iterator

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import heads

# Slots of a page: a longer one wastes more at the end of rows; kernels take 64, 128, ...
PAGE = 128


@flax.struct.dataclass
class Pool:
  """Rotated keys, and values, of one layer; the last of P pages is the sink page."""

  k: jax.Array  # f[P K L H]
  v: jax.Array  # f[P K L H]


@flax.struct.dataclass
class LayerCache:
  pool: Pool
  pages: jax.Array  # i32[B M]  of each row, in order
  # See `pallas_kernels.implementations`.
  kernels: str | None = flax.struct.field(pytree_node=False, default=None)

  @property
  def k(self) -> jax.Array:
    return self.pool.k

  @property
  def v(self) -> jax.Array:
    return self.pool.v

  def write(self, k: jax.Array, v: jax.Array, start: jax.Array) -> "LayerCache":
    """Writes f[B K T H] to consecutive slots from `start` i32[B] on, in place under jit.

    Writes to slots without a page are dropped.
    """

    def put(pool, new):
      return cache_write.cache_write(pool, new, start, self.pages, impl=self.kernels)

    return self.replace(pool=Pool(put(self.k, k), put(self.v, v)))

  def move(self, source: jax.Array, start: jax.Array) -> "LayerCache":
    """Copies slots `source` i32[B T] to start, start+1, ... i32[B] of the same row."""
    return self.write(self._read(self.k, source), self._read(self.v, source), start)

  def _read(self, pool: jax.Array, slots: jax.Array) -> jax.Array:
    def of_shard(pool, pages, slots):
      _, K, L, H = pool.shape
      page = jnp.take_along_axis(pages, slots // L, 1, mode="clip")
      at = (page[:, None] * K + jnp.arange(K)[:, None]) * L + (slots % L)[:, None]
      # Gathered from a matrix: gathering slots of each head makes XLA copy the whole pool
      # to another layout on a TPU.
      return pool.reshape(-1, H)[at]

    args = pool, self.pages, slots
    return heads.over_heads(of_shard, pool.shape[1], args, (1, None, None), result_axis=1)


@flax.struct.dataclass
class KVCache:
  pools: tuple[Pool, ...]  # one per layer
  pages: jax.Array  # i32[B M]
  kernels: str | None = flax.struct.field(pytree_node=False, default=None)
  near: jax.Array | None = None  # i32[B M]  of `windowed` layers; None: all have `pages`
  windowed: tuple[bool, ...] = flax.struct.field(pytree_node=False, default=())

  def __getitem__(self, layer: int) -> LayerCache:
    table = self.near if self._has_near[layer] else self.pages
    return LayerCache(self.pools[layer], table, self.kernels)

  def __iter__(self) -> Iterator[LayerCache]:
    return (self[i] for i in range(len(self.pools)))

  def __len__(self) -> int:
    return len(self.pools)

  @property
  def length(self) -> int:
    return self.pages.shape[1] * self.pools[0].v.shape[2]

  @property
  def _has_near(self) -> tuple[bool, ...]:
    return (False,) * len(self.pools) if self.near is None else self.windowed

  def with_layers(self, layers: Iterable[LayerCache]) -> "KVCache":
    return self.replace(pools=tuple(layer.pool for layer in layers))

  def of_live(self, live: jax.Array, sink: int | None = None) -> "KVCache":
    """Points rows that are not live, bool[B], at the sink page: they cannot write.

    Args:
      sink: of `pages`, if all layers are windowed and something else is in these pages
    """
    sinks = {False: sink}
    for is_near, pool in zip(self._has_near, self.pools, strict=True):
      sinks[is_near] = pool.v.shape[0] - 1

    def at_sink(table, sink):
      return table if sink is None else jnp.where(live[:, None], table, sink)

    near = None if self.near is None else at_sink(self.near, sinks[True])
    return self.replace(pages=at_sink(self.pages, sinks[False]), near=near)


def init_pool(config: config_lib.ModelConfig, pages: int, page: int) -> Pool:
  """An empty pool of one layer: `pages` of `page` slots, and the sink page."""
  shape = pages + 1, config.num_kv_heads, page, config.head_dim
  return Pool(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def init(
  config: config_lib.ModelConfig,
  batch: int,
  length: int,
  *,
  page: int = PAGE,
  kernels: str | None = None,
) -> KVCache:
  """An empty cache of `batch` rows of at most `length` tokens, each with all its pages."""
  most = -(-length // page)
  pools = (init_pool(config, batch * most, page) for _ in range(config.num_layers))
  pages = jnp.arange(batch * most, dtype=jnp.int32).reshape(batch, most)
  return KVCache(tuple(pools), pages, kernels, windowed=config.windowed)
