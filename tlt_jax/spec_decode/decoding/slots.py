"""The arrays of a rollout on the devices: slots, and what a chunk emits.

Slots are the rows of a batch; each has one running request. KV and features are in pages
(`pages`), which outlive the slots. A slot's last known token is *pending*: its KV is not
computed yet, so a prompt's prefill stops before its last token.
"""

from collections.abc import Callable
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices


@flax.struct.dataclass
class Slots:
  """The running requests; row b of every array of B rows belongs to slot b."""

  pending: jax.Array  # i32[B]  last known token
  # i32[B]  its index in the sequence, prompt included, and its slot of the cache; 0 in a
  # free slot, for which nothing is read then
  position: jax.Array
  remaining: jax.Array  # i32[B]  tokens that may still be drawn; 0 frees the slot
  stop_tokens: jax.Array  # i32[B stops]
  sampling: sampling_lib.Sampling
  kv: cache_lib.KVCache
  features: jax.Array | None  # f[P L E]  in the pages of the KV; None: not kept

  @property
  def length(self) -> int:
    """Tokens for which a row may have pages."""
    return self.kv.length

  @property
  def kernels(self) -> str | None:
    return self.kv.kernels

  def by_row(self, f: Callable[[jax.Array], jax.Array]) -> "Slots":
    """Applies `f` to the arrays of B rows."""
    return self.replace(
      pending=f(self.pending),
      position=f(self.position),
      remaining=f(self.remaining),
      stop_tokens=f(self.stop_tokens),
      sampling=jax.tree.map(f, self.sampling),
      kv=self.kv.replace(pages=f(self.kv.pages), near=jax.tree.map(f, self.kv.near)),
    )

  def with_free_slot(self) -> "Slots":
    """Two slots for one, of which the second is free."""
    slots = self.by_row(functools.partial(jnp.repeat, repeats=2, axis=0))
    live = jnp.arange(2) == 0
    slots = slots.replace(position=slots.position * live, remaining=slots.remaining * live)
    return slots.without_pages()

  def without_pages(self) -> "Slots":
    """Takes the pages of free slots away: they cannot write."""
    sink = None if self.features is None else self.features.shape[0] - 1
    return self.replace(kv=self.kv.of_live(self.remaining > 0, sink))

  def with_features(self, position: jax.Array, new: jax.Array) -> "Slots":
    """Keeps features f[B T E] of the tokens at i32[B T], if any are kept."""
    if self.features is None:
      return self
    kept = pages_lib.write(self.features, self.kv.pages, position, new)
    return self.replace(features=kept)


@flax.struct.dataclass
class Emitted:
  """The tokens that a chunk drew; row b holds `count[b]`, and anything behind them."""

  tokens: jax.Array  # i32[B T]
  logp: jax.Array  # f32[B T]
  logp_filtered: jax.Array  # f32[B T]
  count: jax.Array  # i32[B]
  remaining: jax.Array  # i32[B]  of the slots, after the chunk
  steps: jax.Array  # i32[slices]  iterations that each slice ran
  # i32[slices A]: [s, a] counts passes over a live row of slice s that drew more than a
  # tokens; None without speculation, where every pass draws one
  accepted: jax.Array | None = None

  def extend(
    self, tokens: jax.Array, logp: jax.Array, logp_filtered: jax.Array, count: jax.Array
  ) -> "Emitted":
    """Appends the first `count` i32[B] of [B A] to each row; the others are undefined.

    All numbers of a row are selected, in one kernel; XLA does not fuse updates of slices.
    """
    T, A = self.tokens.shape[1], tokens.shape[1]
    at = jnp.arange(T) - self.count[:, None]
    is_new = (at >= 0) & (at < A)
    at = jnp.clip(at, 0, A - 1)

    def put(x, new):
      return jnp.where(is_new, jnp.take_along_axis(new, at, 1), x)

    return self.replace(
      tokens=put(self.tokens, tokens),
      logp=put(self.logp, logp),
      logp_filtered=put(self.logp_filtered, logp_filtered),
      count=self.count + count,
    )

  def by_row(self, f: Callable[[jax.Array], jax.Array]) -> "Emitted":
    """Applies `f` to the arrays of B rows."""
    return self.replace(
      tokens=f(self.tokens),
      logp=f(self.logp),
      logp_filtered=f(self.logp_filtered),
      count=f(self.count),
      remaining=f(self.remaining),
    )


def pool_sharding(mesh: Mesh, config: config_lib.ModelConfig) -> NamedSharding:
  """Of keys and values: pages over `data`, kv heads over `model` where they divide."""
  return axes.sharding(mesh, axes.DATA, axes.model_if_divides(mesh, config.num_kv_heads))


def abstract_pool(
  mesh: Mesh, config: config_lib.ModelConfig, sizes: pages_lib.Sizes
) -> cache_lib.Pool:
  """Of a layer without a window."""
  pool = jax.eval_shape(lambda: cache_lib.init_pool(config, sizes.pages, sizes.page))
  over, count = pool_sharding(mesh, config), mesh.shape[axes.DATA]

  def of_all(x):
    return x.update(shape=(count * x.shape[0], *x.shape[1:]), sharding=over)

  return jax.tree.map(of_all, pool)


def abstract_kv(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  rows: int,
  sizes: pages_lib.Sizes,
  kernels: str | None = None,
) -> cache_lib.KVCache:
  pools = [abstract_pool(mesh, config, kind) for kind in sizes.kinds]
  of_layers = tuple(pools[is_near and len(pools) > 1] for is_near in config.windowed)
  table = slices.abstract(mesh, rows, jnp.int32, sizes.most)
  near = table if sizes.near else None
  return cache_lib.KVCache(of_layers, table, kernels, near, config.windowed)


def abstract_features(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  sizes: pages_lib.Sizes,
) -> jax.ShapeDtypeStruct | None:
  if layout is None:
    return None
  shape = sizes.page, layout.size
  return features_lib.abstract(mesh, sizes.pages + 1, config.dtype, *shape)


def abstract_slots(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  *,
  batch: int,
  stops: int,
  layout: features_lib.Layout | None,
  sizes: pages_lib.Sizes,
  kernels: str | None = None,
  filters: bool = True,
) -> Slots:
  i32, u32, f32 = (
    slices.abstract(mesh, batch, dtype) for dtype in (jnp.int32, jnp.uint32, jnp.float32)
  )
  sampling = sampling_lib.Sampling(
    seed=u32, request=u32, temperature=f32, top_k=i32, top_p=f32, min_p=f32
  )
  return Slots(
    pending=i32,
    position=i32,
    remaining=i32,
    stop_tokens=slices.abstract(mesh, batch, jnp.int32, stops),
    sampling=sampling if filters else sampling.without_filters(),
    kv=abstract_kv(mesh, config, batch, sizes, kernels),
    features=abstract_features(mesh, config, layout, sizes),
  )


def slots_shardings(
  mesh: Mesh,
  config: config_lib.ModelConfig,
  layout: features_lib.Layout | None,
  kernels: str | None = None,
  filters: bool = True,
) -> Slots:
  has_near = int(any(config.windowed))
  one = pages_lib.Sizes(pages=1, most=1, page=1, ring=has_near, near=has_near)
  return slices.shardings(
    abstract_slots(
      mesh,
      config,
      batch=1,
      stops=1,
      layout=layout,
      sizes=one,
      kernels=kernels,
      filters=filters,
    )
  )


def nothing_emitted(slots: Slots, tokens: int, most: int | None = None) -> Emitted:
  B = slots.pending.shape[0]

  def blank(dtype, *shape):
    return slices.varying(jnp.zeros(shape, dtype))

  return Emitted(
    tokens=blank(jnp.int32, B, tokens),
    logp=blank(jnp.float32, B, tokens),
    logp_filtered=blank(jnp.float32, B, tokens),
    count=blank(jnp.int32, B),
    remaining=slots.remaining,
    steps=blank(jnp.int32, 1),
    accepted=None if most is None else blank(jnp.int32, 1, most),
  )
