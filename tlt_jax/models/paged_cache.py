"""The KV cache in pages: a pool per layer, and a table that says where rows have theirs.

A row takes as many pages as it has tokens, wherever they are free, instead of a row of
the batch's length; rows may share pages that none of them writes to (PagedAttention, Kwon
et al. 2023, https://arxiv.org/abs/2309.06180). `PagedLayer` does what `cache.LayerCache`
does. Slot s of a row is slot s % L of page s // L of its row of the table. The last page
of a pool is nobody's: it stands in the table where a row has no page. What is written
there is dropped, what is read from there means nothing.
"""

from collections.abc import Iterable, Iterator

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import heads


@flax.struct.dataclass
class Pool:
  """Keys (already rotated) and values of one layer; of P pages the last is nobody's."""

  k: jax.Array  # f[P K L H]
  v: jax.Array  # f[P K L H]


@flax.struct.dataclass
class PagedLayer:
  """Keys and values of one layer, as rows have them."""

  pool: Pool
  pages: jax.Array  # i32[B M]  of each row, in their order
  # What reads and writes it, see `pallas_kernels.implementations`.
  kernels: str | None = flax.struct.field(pytree_node=False)

  @property
  def k(self) -> jax.Array:
    """Keys, f[P K L H]."""
    return self.pool.k

  @property
  def v(self) -> jax.Array:
    """Values, f[P K L H]."""
    return self.pool.v

  @property
  def length(self) -> int:
    """S, the slots of a row."""
    return self.pages.shape[1] * self.v.shape[2]

  def write(self, k: jax.Array, v: jax.Array, start: jax.Array) -> "PagedLayer":
    """Stores keys and values f[B K T H] in consecutive slots; see `LayerCache.write`."""
    put = lambda pool, new: cache_write.cache_write(
      pool, new, start, self.pages, impl=self.kernels
    )
    return self.replace(pool=Pool(put(self.k, k), put(self.v, v)))

  def move(self, source: jax.Array, start: jax.Array) -> "PagedLayer":
    """Copies slots `source` i32[B T] to start, start+1, ... i32[B] of the same row."""
    return self.write(self._read(self.k, source), self._read(self.v, source), start)

  def _read(self, pool: jax.Array, slots: jax.Array) -> jax.Array:
    """The slots i32[B T] of each row: f[B K T H]."""

    def of_shard(pool, pages, slots):
      _, K, L, H = pool.shape
      page = jnp.take_along_axis(pages, slots // L, 1, mode="clip")
      at = (page[:, None] * K + jnp.arange(K)[:, None]) * L + (slots % L)[:, None]
      return pool.reshape(-1, H)[at]  # from a matrix, see `cache`

    args = pool, self.pages, slots
    return heads.over_heads(of_shard, pool.shape[1], args, (1, None, None), result_axis=1)


@flax.struct.dataclass
class PagedCache:
  """The layers of a cache, which have one table."""

  pools: tuple[Pool, ...]  # one per layer
  pages: jax.Array  # i32[B M]
  kernels: str | None = flax.struct.field(pytree_node=False)

  def __getitem__(self, layer: int) -> PagedLayer:
    """The layer of that number."""
    return PagedLayer(self.pools[layer], self.pages, self.kernels)

  def __iter__(self) -> Iterator[PagedLayer]:
    return (self[i] for i in range(len(self.pools)))

  def __len__(self) -> int:
    return len(self.pools)

  def with_layers(self, layers: Iterable[PagedLayer]) -> "PagedCache":
    """With the pools of these layers."""
    return self.replace(pools=tuple(layer.pool for layer in layers))

  def of_live(self, live: jax.Array) -> "PagedCache":
    """With pages for these rows bool[B] only: what others write is dropped."""
    nobodys = self[0].v.shape[0] - 1
    return self.replace(pages=jnp.where(live[:, None], self.pages, nobodys))


def init(
  config: config_lib.ModelConfig,
  batch: int,
  length: int,
  *,
  pages: int,
  page: int,
  kernels: str | None = None,
) -> PagedCache:
  """Makes an empty cache in which no row has a page.

  Args:
    config: of the model
    batch: B
    length: tokens of a row for which the table has entries
    pages: that rows can have; P is one more
    page: L, slots of a page
    kernels: that will read and write it; None: those of this machine
  """
  shape = pages + 1, config.num_kv_heads, page, config.head_dim
  zeros = lambda: jnp.zeros(shape, config.dtype)
  pools = tuple(Pool(zeros(), zeros()) for _ in range(config.num_layers))
  nobodys = jnp.full((batch, -(-length // page)), pages, jnp.int32)
  return PagedCache(pools, nobodys, kernels)
