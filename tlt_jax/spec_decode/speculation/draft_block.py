"""Drafting by a drafter that guesses a block in one pass: chains and trees.

All candidates come from one pass, over as many places as so many nodes can be deep
(`drafter.Block.first`); a tree costs no other. As in `draft`, the target's noise is added
to the logits of each guess, so that a perfect marginal is a sure hit where the guesses
before it are right.

With a selector (`Block.rank`) the best candidates of a guess are scored again, given the
one before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models.drafters import block as block_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import draft_tree
from tlt_jax.spec_decode.speculation import tree as tree_lib

_SELECTED = 16  # candidates of a guess that the selector scores (DFlash 2's number)

Pools = tuple[cache_lib.Pool, ...]  # of each layer


class Candidates(NamedTuple):
  """The best C of each guess, in order, as the drafter scores them."""

  score: jax.Array  # f32[B G C]  log-softmax of the perturbed logits
  place: jax.Array  # i32[B G C]  among the drafter's tokens


class BlockDraft:
  def __init__(
    self,
    config: drafter_lib.DrafterConfig,
    layout: features_lib.Layout,
    target_params,
    params,
    rotations: layers.Rotation,
    kernels: str | None = None,
  ):
    self._config, self._layout, self._kernels = config, layout, kernels
    self._params = jax.tree.map(lambda x: x.astype(config.layer.dtype), params)
    self._target, self._rotations = target_params, rotations
    self._head = self._apply("output_head", target_params)
    self._ids = jnp.asarray(config.target_ids) if config.vocab else None

  def _apply(self, method: str, *args):
    module = drafter_lib.module(self._config)
    return module.apply({"params": self._params}, *args, method=method)

  def _guess(self, guesses: int, pending, h, caches, position):
    """The input of the head of the first guesses, f[B guesses D]; and the caches."""
    config, params = block_lib.first(self._config, self._params, guesses)
    by = self._rotations.at(position[:, None] + jnp.arange(config.block.size))
    args = self._target, pending, h, by, caches, position
    x, caches = drafter_lib.module(config).apply({"params": params}, *args)
    return x[:, :guesses], caches

  def fill(
    self,
    pools: Pools,
    features: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    pages: jax.Array,
  ) -> Pools:
    """Writes the context of features f[B T E], from slots `start` i32[B] on."""
    del tokens
    return self._write(pools, self._context(features), start, pages)

  def _context(self, features: jax.Array) -> jax.Array:
    return self._apply("features", self._layout.split(features).drafter_input)

  def _write(self, pools, h, start, pages):
    at = start[:, None] + jnp.arange(h.shape[1])
    by = self._rotations.at(jnp.maximum(at, 0))
    written = zip(pools, self._apply("keys_values", h, by), strict=True)
    return tuple(
      cache_lib.LayerCache(pool, pages, self._kernels).write(k, v, start).pool
      for pool, (k, v) in written
    )

  def candidates(
    self, state: draft_lib.DraftState, slots: slots_lib.Slots, count: int, guesses: int
  ) -> tuple[Candidates, Pools]:
    """The `count` best candidates of the first guesses; and the pools, with the context."""
    pages, position = slots.kv.pages, slots.position
    h = self._context(state.features)
    pools = self._write(state.pools, h, position - state.count, pages)
    caches = [cache_lib.LayerCache(pool, pages, self._kernels) for pool in pools]
    last = jnp.maximum(state.count - 1, 0)[:, None, None]
    h = jnp.take_along_axis(h, last, 1)[:, 0]
    x, caches = self._guess(guesses, slots.pending, h, caches, position)
    B, G, D = x.shape
    logits = self._apply("logits", self._head, x.reshape(B * G, D))
    at = (position[:, None] + 1 + jnp.arange(G)).reshape(-1)
    every = sampling_lib.repeat(slots.sampling, G)
    runners = sampling_lib.contest(logits, every, at, self._ids)
    if count == 1:
      place = sampling_lib.argmax(runners)[:, None]
      found = jnp.zeros(place.shape), place
    else:
      found = sampling_lib.likeliest(runners, count)
    found = Candidates(*(y.reshape(B, G, -1) for y in found))
    return found, tuple(cache.pool for cache in caches)

  def given(
    self, found: Candidates, before: jax.Array, temperature: jax.Array
  ) -> jax.Array:
    """Scores f32[B W C] of one guess's candidates [B 1 C] after tokens i32[B W]."""
    read, every = self._apply("selector", before)
    added = jnp.einsum("bwr,bcr->bwc", read, every[found.place[:, 0]])
    scaled = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    return jax.nn.log_softmax(found.score + added.astype(jnp.float32) / scaled, -1)

  def tokens(self, places: jax.Array) -> jax.Array:
    """The target's ids of indices into the drafter's tokens."""
    return places if self._ids is None else self._ids[places]

  @property
  def selects(self) -> bool:
    return self._config.block.rank > 0

  @property
  def known(self) -> int:
    return len(self._config.target_ids)


def chain(
  draft: BlockDraft,
  state: draft_lib.DraftState,
  slots: slots_lib.Slots,
  depth: jax.Array,
  size: int,
) -> tuple[tree_lib.Tree, Pools]:
  """Guesses `depth` i32[] <= size - 1 tokens in a row: a tree of J = `size` nodes."""
  count = min(_SELECTED, draft.known) if draft.selects else 1
  found, pools = draft.candidates(state, slots, count, size - 1)
  if draft.selects:
    guesses = _select(draft, found, slots)
  else:
    guesses = draft.tokens(found.place[..., 0])
  guesses = jnp.pad(guesses, ((0, 0), (0, size - 1 - guesses.shape[1])))
  tokens = jnp.concatenate([slots.pending[:, None], guesses], 1)
  return tree_lib.chain(tokens, depth), pools


def _select(draft: BlockDraft, found: Candidates, slots: slots_lib.Slots) -> jax.Array:
  before, guesses = slots.pending[:, None], []
  for g in range(found.score.shape[1]):
    of_guess = Candidates(*(x[:, g : g + 1] for x in found))
    score = draft.given(of_guess, before, slots.sampling.temperature)[:, 0]
    best = sampling_lib.argmax(score)[:, None]
    before = draft.tokens(jnp.take_along_axis(of_guess.place[:, 0], best, 1))
    guesses.append(before)
  return jnp.concatenate(guesses, 1)


def tree(
  draft: BlockDraft,
  state: draft_lib.DraftState,
  slots: slots_lib.Slots,
  depth: jax.Array,
  *,
  width: int,
  size: int,
) -> tuple[tree_lib.Tree, Pools]:
  """Grows a tree from one pass, as `draft_tree.grow` does.

  DDTree (https://arxiv.org/abs/2604.12989) takes the best of independent marginals, too,
  without noise.
  """
  count = min(max(_SELECTED, width), draft.known) if draft.selects else width
  found, pools = draft.candidates(state, slots, count, size - 1)

  def children(guess, before):
    """The `width` best of a guess after tokens i32[B W]: f32[B W width], i32[...]."""
    of_guess = Candidates(
      *(jax.lax.dynamic_slice_in_dim(x, guess, 1, axis=1) for x in found)
    )
    shape = *before.shape, width
    if not draft.selects:
      score, place = (jnp.broadcast_to(x, shape) for x in of_guess)
    else:
      scores = draft.given(of_guess, before, slots.sampling.temperature)
      score, best = jax.lax.top_k(scores, width)
      every = jnp.broadcast_to(of_guess.place, scores.shape)
      place = jnp.take_along_axis(every, best, -1)
    return score, draft.tokens(place)

  def expand(level, beams, of_beams, rest):
    return *children(level, beams.token), of_beams, rest

  score, token = children(0, slots.pending[:, None])
  first = draft_tree.first_level(score[:, 0], token[:, 0])
  kept, _ = draft_tree.grow(expand, first, (), (), depth, size)
  return draft_tree.assemble(kept, slots.pending), pools
