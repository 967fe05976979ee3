"""The arrays of a rollout on the devices: slots, the prompt store, what a chunk emits.

The KV of slots has one of two layouts: each slot has a row in one piece, or pages of a
pool (`models.paged_cache`), which prompts have then too.

Slots are the rows of a batch; each holds one running request. A slot's last known token
is *pending*: its KV is not computed yet. A prompt's prefill therefore stops before its
last token, and every token that is drawn is drawn in the same loop.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import paged_cache
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices


@flax.struct.dataclass
class PromptStore:
  """The target's KV, and features, of some prompts; a row for each.

  Where KV lies in pages, so does that of prompts, in the pool of the slots: `kv` is that
  pool while prompts are computed, with a table of theirs, and otherwise ().
  """

  kv: cache_lib.KVCache
  features: jax.Array | None  # f[B S E], if they are kept


@flax.struct.dataclass
class Slots:
  """The running requests; row b of every array belongs to slot b."""

  pending: jax.Array  # i32[B]  last known token
  position: jax.Array  # i32[B]  its index in the sequence, prompt included
  remaining: jax.Array  # i32[B]  tokens that may still be drawn; 0 frees the slot
  stop_tokens: jax.Array  # i32[B stops]
  sampling: sampling_lib.Sampling
  kv: cache_lib.KVCache
  features: pages_lib.Features | None

  @property
  def length(self) -> int:
    """S, cache slots of a row."""
    return self.kv[0].length

  @property
  def kernels(self) -> str | None:
    """What attends, writes to the KV and draws; see `pallas_kernels.implementations`."""
    return self.kv[0].kernels

  @property
  def start(self) -> jax.Array:
    """i32[B]: the cache slot of each pending token; before it, all are filled.

    That of a free slot is 0, whatever its position: a step reads nothing for it.
    """
    return jnp.where(self.remaining > 0, self.position, 0)


@flax.struct.dataclass
class Emitted:
  """The tokens that a chunk drew; row b holds `count[b]` of them."""

  tokens: jax.Array  # i32[B T]
  logp: jax.Array  # f32[B T]
  logp_filtered: jax.Array  # f32[B T]
  count: jax.Array  # i32[B]
  remaining: jax.Array  # i32[B]  of the slots, after the chunk
  steps: jax.Array  # i32[slices]  iterations that each slice ran
  # i32[slices A], how often a live row drew more than a tokens in one pass of the
  # target; None without speculation, where every pass draws one
  accepted: jax.Array | None = None


def cache_sharding(mesh: Mesh, config: config_lib.ModelConfig) -> NamedSharding:
  """Of all keys and values: rows over `data`, kv heads over `model` where they divide.

  Pages are the rows of a pool.
  """
  heads = axes.model_if_divides(mesh, config.num_kv_heads)
  return axes.sharding(mesh, axes.DATA, heads)


def abstract_cache(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  rows: int,
  length: int,
  kernels: str | None = None,
) -> cache_lib.KVCache:
  """Shapes and shardings of a KV cache.

  Args:
    rows: per slice
    length, kernels: as for `cache.init`
  """
  B, over = rows * mesh.shape[axes.DATA], cache_sharding(mesh, config)
  shapes = jax.eval_shape(lambda: cache_lib.init(config, B, length, kernels))
  return jax.tree.map(lambda x: x.update(sharding=over), shapes)


def paged_shardings(
  mesh: Mesh, config: config_lib.ModelConfig, kernels: str | None
) -> paged_cache.PagedCache:
  """The shardings of a KV cache in pages."""
  over = cache_sharding(mesh, config)
  return paged_cache.PagedCache(over, axes.sharding(mesh, axes.DATA), kernels)


def abstract_paged_cache(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  rows: int,
  length: int,
  sizes: pages_lib.Sizes,
  kernels: str | None = None,
) -> paged_cache.PagedCache:
  """Shapes and shardings of a KV cache in pages.

  Args:
    rows: per slice
    length: tokens of a row for which the table has entries
    sizes: of the pages
    kernels: as for `cache.init`
  """
  num_slices, over = mesh.shape[axes.DATA], paged_shardings(mesh, config, kernels)
  page = dict(pages=sizes.pages, page=sizes.page)
  shapes = jax.eval_shape(
    lambda: paged_cache.init(config, rows, length, **page, kernels=kernels)
  )
  of_all = lambda x, over: x.update(
    shape=(num_slices * x.shape[0], *x.shape[1:]), sharding=over
  )
  return shapes.replace(
    pools=jax.tree.map(lambda x: of_all(x, over.pools), shapes.pools),
    pages=of_all(shapes.pages, over.pages),
  )


def abstract_store(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  rows: int,
  length: int,
  layout: features_lib.Layout | None,
  kernels: str | None = None,
  paged: bool = False,
) -> PromptStore:
  """Shapes and shardings of a store.

  Args:
    rows: prompts per slice
    length: S, room for the longest prompt
    layout: of the features that are kept; None: none are
    kernels: as for `cache.init`
    paged: whether its KV lies in pages, elsewhere
  """
  kept = None
  if layout:
    kept = features_lib.abstract(mesh, rows, config.dtype, length, layout.size)
  kv = () if paged else abstract_cache(mesh, config, rows, length, kernels)
  return PromptStore(kv, kept)


def abstract_slots(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  *,
  batch: int,
  length: int,
  stops: int,
  layout: features_lib.Layout | None,
  sizes: pages_lib.Sizes,
  kernels: str | None = None,
  kv_pages: pages_lib.Sizes | None = None,
) -> Slots:
  """Shapes and shardings of the slots of a bucket.

  Args:
    batch: slots per slice
    length: S, cache slots of each
    stops: stop tokens per request
    layout: of the features that are kept; None: none are
    sizes: of their pages
    kernels: as for `cache.init`
    kv_pages: of the KV; None: each slot has a row in one piece
  """
  if kv_pages:
    kv = abstract_paged_cache(mesh, config, batch, length, kv_pages, kernels)
  else:
    kv = abstract_cache(mesh, config, batch, length, kernels)
  i32, u32, f32 = (
    slices.abstract(mesh, batch, dtype) for dtype in (jnp.int32, jnp.uint32, jnp.float32)
  )
  features = None
  if layout:
    features = pages_lib.abstract(mesh, layout.size, config.dtype, batch, sizes)
  return Slots(
    pending=i32,
    position=i32,
    remaining=i32,
    stop_tokens=slices.abstract(mesh, batch, jnp.int32, stops),
    sampling=sampling_lib.Sampling(
      seed=u32, request=u32, temperature=f32, top_k=i32, top_p=f32, min_p=f32
    ),
    kv=kv,
    features=features,
  )


def slots_shardings(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  kernels: str | None = None,
  paged: bool = False,
) -> Slots:
  """The shardings of slots, which are the same in every bucket.

  Args:
    layout: of the features that are kept; None: none are
    kernels: of the slots' caches
    paged: whether KV lies in pages
  """
  kv = paged_shardings(mesh, config, kernels) if paged else cache_sharding(mesh, config)
  smallest = abstract_slots(
    mesh,
    config,
    batch=1,
    length=1,
    stops=1,
    layout=layout,
    sizes=pages_lib.Sizes(pages=1, most=1),
  )
  return slices.shardings(smallest).replace(kv=kv)


def nothing_emitted(slots: Slots, tokens: int, most: int | None = None) -> Emitted:
  """`Emitted` at a chunk's start, for one slice.

  Args:
    tokens: T, for which each slot has room
    most: A of `accepted`, for a chunk that speculates
  """
  B = slots.pending.shape[0]
  blank = lambda dtype, *shape: slices.varying(jnp.zeros(shape, dtype))
  return Emitted(
    tokens=blank(jnp.int32, B, tokens),
    logp=blank(jnp.float32, B, tokens),
    logp_filtered=blank(jnp.float32, B, tokens),
    count=blank(jnp.int32, B),
    remaining=slots.remaining,
    steps=blank(jnp.int32, 1),
    accepted=None if most is None else blank(jnp.int32, 1, most),
  )
