"""Drafting by a drafter with weights: its state, and chains.

Drafter and target add the same noise to their logits, which couples their draws: a guess
is the top candidate of (draft logits / T + the noise of its position).

A drafter with a `vocab` drafts only its U tokens: logits, noise and candidates are of
these, and candidates are mapped to the target's ids at the end.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import few_rows_drafter
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib


@flax.struct.dataclass
class DraftState:
  """The drafter's side of the slots: its KV, and the pairs that are not in it yet.

  A drafter of blocks reads the features alone.

  Pair t is the feature of token t with token t+1, and has slot t of its row. For a row at
  position p the pairs before p - count are in the pool; the last `count` are here.
  """

  pools: tuple[
    cache_lib.Pool, ...
  ]  # of each layer, with the row's pages of the target's KV
  features: jax.Array  # f[B A E]  the target's
  tokens: jax.Array  # i32[B A]
  count: jax.Array  # i32[B]


class Draft:
  def __init__(
    self,
    config: drafter_lib.DrafterConfig,
    layout: features_lib.Layout,
    target_params,
    params,
    rotations: layers.Rotation,
    kernels: str | None = None,
  ):
    self._config, self._kernels = config, kernels
    self._module = drafter_lib.Drafter(config)
    self._layout = layout
    # Cast here, not in each step of a loop that follows: XLA would leave it there.
    self._params = jax.tree.map(lambda x: x.astype(config.layer.dtype), params)
    self._target = target_params
    self._head = self._apply(drafter_lib.Drafter.output_head, target_params)
    # i32[U], the target's ids of the drafter's tokens; None: all, in order.
    self.ids = jnp.asarray(config.target_ids) if config.vocab else None
    self._rotations = rotations
    self._few_rows = few_rows_drafter.make_weights(
      config, self._params, target_params, self._head, self._rotations
    )

  def _apply(self, method, *args):
    return self._module.apply({"params": self._params}, *args, method=method)

  def fits(self, cache: cache_lib.LayerCache, rows: int) -> bool:
    """Whether a step of so many pairs is one of `few_rows_drafter`."""
    return few_rows_drafter.fits(self._config, cache, rows)

  def extend(
    self,
    features: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    last: jax.Array,
    cache: cache_lib.LayerCache,
  ) -> tuple[jax.Array, cache_lib.LayerCache]:
    """The pairs of few rows; see `few_rows_drafter.extend`."""
    read = self._layout.split(features).drafter_input
    args = read, tokens, start, last, cache
    return few_rows_drafter.extend(self._config, self._few_rows, *args)

  def features(self, features: jax.Array) -> jax.Array:
    read = self._layout.split(features).drafter_input
    return self._apply(drafter_lib.Drafter.features, read)

  def fill(
    self,
    pools: tuple[cache_lib.Pool, ...],
    features: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    pages: jax.Array,
  ) -> tuple[cache_lib.Pool, ...]:
    """Writes pairs [B T] from slots `start` i32[B] on; their features are f[B T E]."""
    at = start[:, None] + jnp.arange(tokens.shape[1])
    k, v = self.keys_values(self.features(features), tokens, at)
    return (cache_lib.LayerCache(*pools, pages, self._kernels).write(k, v, start).pool,)

  def keys_values(
    self, h: jax.Array, tokens: jax.Array, positions: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    by = self._rotations.at(positions)
    return self._apply(drafter_lib.Drafter.keys_values, self._target, h, tokens, by)

  def step(
    self,
    h: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    nodes: few_rows.Nodes,
    seen: seen_lib.Seen,
    cache: cache_lib.LayerCache,
    start: jax.Array,
  ) -> tuple[jax.Array, cache_lib.LayerCache]:
    """Runs pairs, and writes them from slot `start` on; what they see, in two forms."""
    if self.fits(cache, tokens.size):
      args = h, tokens, positions, nodes, cache, start
      return few_rows_drafter.step(self._config, self._few_rows, *args)
    by = self._rotations.at(positions)
    return self._apply(
      drafter_lib.Drafter.__call__, self._target, h, tokens, by, seen, cache, start
    )

  def over_cache(
    self,
    h: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    seen: seen_lib.Seen,
    cache: cache_lib.LayerCache,
  ) -> jax.Array:
    by = self._rotations.at(positions)
    return self._apply(
      drafter_lib.Drafter.over_cache, self._target, h, tokens, by, seen, cache
    )

  def logits(self, h: jax.Array) -> jax.Array:
    rows = h.size // h.shape[-1]
    if few_rows_drafter.head_fits(self._config, self._kernels, rows, self._head):
      return few_rows_drafter.logits(self._config, self._few_rows, h)
    return self._apply(drafter_lib.Drafter.logits, self._head, h)

  def tokens(self, places: jax.Array) -> jax.Array:
    """The target's ids of indices into the U tokens."""
    return places if self.ids is None else self.ids[places]


def extend(
  draft: Draft, state: DraftState, slots: slots_lib.Slots
) -> tuple[jax.Array, cache_lib.LayerCache]:
  """Computes the pairs that the pool lacks; returns f[B D] at the last, and the cache."""
  pending, position = slots.pending, slots.position
  cache = cache_lib.LayerCache(*state.pools, slots.kv.pages, slots.kernels)
  last, start = jnp.maximum(state.count - 1, 0), position - state.count
  if draft.fits(cache, state.tokens.size):
    is_last = jnp.arange(state.tokens.shape[1]) == last[:, None]
    tokens = jnp.where(is_last, pending[:, None], state.tokens)
    start = jnp.maximum(start, 0)  # of free slots
    h, cache = draft.extend(state.features, tokens, start, last, cache)
    return h[:, 0], cache
  h = draft.features(state.features)
  pair = start[:, None] + jnp.arange(state.tokens.shape[1])
  k, v = draft.keys_values(h, state.tokens, jnp.maximum(pair, 0))
  # All A of them: those beyond `count` are overwritten before they are attended to.
  cache = cache.write(k, v, start)
  h = jnp.take_along_axis(h, last[:, None, None], 1)
  at = jnp.maximum(position - 1, 0)
  seen = seen_lib.causal(at, 1)
  return draft.over_cache(h, pending[:, None], at[:, None], seen, cache)[:, 0], cache


def draft_chain(
  draft: Draft, state: DraftState, slots: slots_lib.Slots, depth: jax.Array, size: int
) -> tuple[tree_lib.Tree, cache_lib.LayerCache]:
  """Guesses `depth` i32[] <= size - 1 tokens in a row: a tree of J = `size` nodes."""
  h, cache = extend(draft, state, slots)

  def guess(h, d, tokens):
    position = slots.position + d + 1
    runners = sampling_lib.contest(draft.logits(h), slots.sampling, position, draft.ids)
    token = draft.tokens(sampling_lib.argmax(runners))
    put = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], d + 1, 1)
    return token, put

  def step(d, carry):
    h, cache, token, tokens = carry
    pair = slots.position - 1 + d
    nodes, seen = few_rows.chain(pair, 1), seen_lib.causal(pair, 1)
    args = h[:, None], token[:, None], pair[:, None], nodes, seen, cache, pair
    h, cache = draft.step(*args)
    return h[:, 0], cache, *guess(h[:, 0], d, tokens)

  tokens = jnp.zeros((h.shape[0], size), jnp.int32).at[:, 0].set(slots.pending)
  start = (h, cache, *guess(h, 0, tokens))
  _, cache, _, tokens = jax.lax.fori_loop(1, depth, step, start)
  return tree_lib.chain(tokens, depth), cache
