"""Drafting: what the drafter guesses, as a chain or as a tree.

Drafter and target add the same noise to their logits, so that their draws are
coupled: a child is a top candidate of (draft logits / T + the noise of its
position). Where verification is by rejection, children are drawn with noise of the
drafter's own, and a tree's shape is fixed beforehand.

In a tree that grows, a node's score is the log-probability that the target draws it,
as far as the drafter can tell: with noise known, what is uncertain is the drafter's own
error, and the perturbed candidates are weighed by a softmax.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib


@flax.struct.dataclass
class DraftState:
  """The drafter's side of the slots: its cache, and the pairs that it lacks.

  Pair t is the feature of token t with token t+1, and lives in slot t. Of a row at
  position p the cache holds the pairs before p - count; the last `count` are here.
  """

  cache: cache_lib.LayerCache  # f[B K S H]
  features: jax.Array  # f[B R E]  the target's
  tokens: jax.Array  # i32[B R]
  count: jax.Array  # i32[B]


class Draft:
  """A drafter with its parameters, as the functions below need it."""

  def __init__(
    self, config: drafter_lib.DrafterConfig, target_params, params, longest: int
  ):
    """`longest` is a bound of all positions; best made outside of a loop."""
    self._module = drafter_lib.Drafter(config)
    self._target, self._params = target_params, params
    self._rotations = layers.rotation(config.layer, jnp.arange(longest))

  def _apply(self, method, *args):
    return self._module.apply({"params": self._params}, *args, method=method)

  def features(self, x):
    """f[... E or more] -> f[... D]; what is kept for training only comes last."""
    x = x[..., : self._module.config.feature_width]
    return self._apply(drafter_lib.Drafter.features, x)

  def keys_values(self, h, tokens, positions):
    args = (self._target, h, tokens, self._rotations.at(positions))
    return self._apply(drafter_lib.Drafter.keys_values, *args)

  def step(self, h, tokens, positions, mask, cache, slots):
    by = self._rotations.at(positions)
    args = (self._target, h, tokens, by, mask, cache, slots)
    return self._apply(drafter_lib.Drafter.__call__, *args)

  def over_cache(self, h, tokens, positions, mask, cache):
    args = (self._target, h, tokens, self._rotations.at(positions), mask, cache)
    return self._apply(drafter_lib.Drafter.over_cache, *args)

  def logits(self, h):
    """f[... D] -> f32[... V]; -inf at tokens that the drafter does not predict."""
    logits = self._apply(drafter_lib.Drafter.logits, self._target, h)
    config = self._module.config
    if not config.vocab:
      return logits
    return jnp.take(logits, config.draft_ids, -1, mode="fill", fill_value=-jnp.inf)


def extend(draft: Draft, state: DraftState, pending, position):
  """Takes in the pairs that the cache lacks.

  Args:
    pending, position: i32[B]  each row's last known token, and its index
  Returns:
    h f[B D], the drafter's output at the last pair, and the cache
  """
  R, S = state.tokens.shape[1], state.cache.length
  h = draft.features(state.features)
  pair = (position - state.count)[:, None] + jnp.arange(R)
  k, v = draft.keys_values(h, state.tokens, jnp.maximum(pair, 0))
  known = (jnp.arange(R) < state.count[:, None]) & (pair >= 0)
  cache = cache_lib.write(state.cache, k, v, jnp.where(known, pair, S))
  last = jnp.maximum(state.count - 1, 0)
  h = jnp.take_along_axis(h, last[:, None, None], 1)
  at = jnp.maximum(position - 1, 0)[:, None]
  seen = cache_lib.visible(at, S)
  return draft.over_cache(h, pending[:, None], at, seen, cache)[:, 0], cache


def likeliest(logits, sampling: sampling_lib.Sampling, position) -> jax.Array:
  """`sampling.contest` without noise: the likeliest tokens win, at any temperature."""
  return sampling_lib.scale(logits, sampling)


def draft_chain(
  draft: Draft, state: DraftState, slots, depth, size: int, candidates, kept: bool = False
):
  """Guesses `depth` <= size - 1 tokens in a row.

  Args:
    slots: pending i32[B], position i32[B] and sampling of each row
    depth: i32[]  read at run time
    size: J, nodes of the tree
    candidates: (logits f32[B V], sampling, position i32[B]) -> i32[B W], the children
      of a node; the first is guessed
    kept: whether the logits are needed later
  Returns:
    the tree; the drafter's cache; and f32[B J V], the drafter's logits after each
    node that has a child, or None
  """
  h, cache = extend(draft, state, slots.pending, slots.position)
  put = jax.lax.dynamic_update_slice_in_dim

  def guess(h, d, tokens, every):
    """The token after node d, and the arrays with what belongs there."""
    logits = draft.logits(h)
    token = candidates(logits, slots.sampling, slots.position + d + 1)[:, 0]
    if kept:
      every = put(every, logits[:, None], d, 1)
    return token, put(tokens, token[:, None], d + 1, 1), every

  def step(d, carry):
    h, cache, (token, *drafted) = carry
    pair = (slots.position - 1 + d)[:, None]
    seen = cache_lib.visible(pair, cache.length)
    h, cache = draft.step(h[:, None], token[:, None], pair, seen, cache, pair)
    return h[:, 0], cache, guess(h[:, 0], d, *drafted)

  B, V = jax.eval_shape(draft.logits, h).shape
  tokens = jnp.zeros((B, size), jnp.int32).at[:, 0].set(slots.pending)
  every = jnp.zeros((B, size, V)) if kept else None
  start = (h, cache, guess(h, 0, tokens, every))
  _, cache, (_, tokens, every) = jax.lax.fori_loop(1, depth, step, start)
  return tree_lib.chain(tokens, depth), cache, every


@flax.struct.dataclass
class Nodes:
  """Candidates for the tree, in any order."""

  score: jax.Array  # f32[B n]  -inf: none
  token: jax.Array  # i32[B n]
  number: jax.Array  # i32[B n]  in order of their making
  parent: jax.Array  # i32[B n]  its number; -1: the root
  depth: jax.Array  # i32[B n]


def _best(nodes: Nodes, count: int) -> tuple[Nodes, jax.Array]:
  """The `count` of highest score, earlier ones first among equals; and their index.

  As a child's score is never above its parent's, the best are closed under it.
  """
  _, index = jax.lax.top_k(nodes.score, count)
  return jax.tree.map(lambda x: jnp.take_along_axis(x, index, 1), nodes), index


def draft_tree(
  draft: Draft,
  state: DraftState,
  slots,
  depth,
  width: int,
  size: int,
  scratch: int,
  contest,
):
  """Grows a tree level by level, and keeps the best `size` - 1 nodes.

  At each level the `width` best nodes get `width` children each (EAGLE-2, section
  4.1, with the scores of the head of this file).

  Args:
    depth: i32[]  levels, read at run time; the cache must have `width` slots for
      each level but the last beyond the longest position
    scratch: slots behind each row's last pair that may be used, >= width * (depth-1)
    contest: (logits f32[B V], sampling, position i32[B]) -> f32[B V], whose top are
      the children of a node
  Returns:
    the tree, and the drafter's cache
  """
  h, cache = extend(draft, state, slots.pending, slots.position)
  B, W = h.shape[0], width
  every = sampling_lib.repeat(slots.sampling, W)

  def candidates(h, sampling, position):
    """Scores f32[b W] and tokens i32[b W] of the top children of each row."""
    runners = contest(draft.logits(h), sampling, position)
    score = jax.nn.log_softmax(runners, -1)
    return jax.lax.top_k(score, W)

  score, token = candidates(h, slots.sampling, slots.position + 1)
  token = token.astype(jnp.int32)
  zero = jnp.zeros_like(token)
  first = Nodes(
    score=score,
    token=token,
    number=zero + jnp.arange(W, dtype=jnp.int32),
    parent=zero - 1,
    depth=zero + 1,
  )
  none = Nodes(
    score=jnp.full((B, size - 1), -jnp.inf),
    **{
      name: jnp.full((B, size - 1), jnp.iinfo(jnp.int32).max, jnp.int32)
      for name in ("token", "number", "parent", "depth")
    },
  )
  join = functools.partial(jax.tree.map, lambda a, b: jnp.concatenate([a, b], 1))
  kept, _ = _best(join(first, none), size - 1)
  beams_h = jnp.repeat(h[:, None], W, 1)
  # What each beam sees of the scratch slots: its ancestors there, and itself.
  seen = jnp.broadcast_to(zero[..., None] > 0, (B, W, scratch))

  def grow(d, carry):
    beams, beams_h, seen, cache, kept = carry
    slot = (d - 1) * W + jnp.arange(W)
    seen = seen | (jnp.arange(scratch) == slot[:, None])
    mask = tree_lib.attention_mask(seen, slots.position, cache.length)
    pair = jnp.broadcast_to((slots.position - 1 + d)[:, None], (B, W))
    at = slots.position[:, None] + slot
    out, cache = draft.step(beams_h, beams.token, pair, mask, cache, at)
    score, token = candidates(
      out.reshape(B * W, -1), every, jnp.repeat(slots.position + d + 1, W)
    )
    children = Nodes(
      score=(beams.score[..., None] + score.reshape(B, W, W)).reshape(B, -1),
      token=token.reshape(B, -1).astype(jnp.int32),
      number=jnp.broadcast_to(
        W + (d - 1) * W * W + jnp.arange(W * W, dtype=jnp.int32), (B, W * W)
      ),
      parent=jnp.repeat(beams.number, W, 1),
      depth=jnp.full((B, W * W), d + 1, jnp.int32),
    )
    kept, _ = _best(join(kept, children), size - 1)
    beams, index = _best(children, W)
    of = lambda x: jnp.take_along_axis(x, (index // W)[..., None], 1)
    return beams, of(out), of(seen), cache, kept

  start = (first, beams_h, seen, cache, kept)
  *_, cache, kept = jax.lax.fori_loop(1, depth, grow, start)
  return _assemble(kept, slots.pending), cache


def draft_fixed(
  draft: Draft, state: DraftState, slots, shape: tree_lib.Shape, scratch: int, candidates
):
  """Draws the tokens of a tree whose shape is given, J nodes.

  Args:
    scratch: slots behind each row's last pair that may be used, >= J - 1
    candidates: as for `draft_chain`, in their order
  Returns:
    the tree; the drafter's cache; and f32[B J V], its logits after each node that has
    a child
  """
  h, cache = extend(draft, state, slots.pending, slots.position)
  B, J = h.shape[0], len(shape.parent)
  parent, rank, depth = map(np.array, (shape.parent, shape.rank, shape.depth))
  below = np.pad(shape.ancestors[:, 1:], ((0, 0), (0, scratch - J + 1)))
  hidden = jnp.zeros((B, J, h.shape[-1]), h.dtype).at[:, 0].set(h)
  tokens = jnp.zeros((B, J), jnp.int32).at[:, 0].set(slots.pending)
  every = jnp.zeros((B, J, jax.eval_shape(draft.logits, h).shape[-1]))
  for level in shape.levels:
    n, d = len(level), int(depth[level[0]])
    if d > 0:
      seen = jnp.broadcast_to(below[level], (B, n, scratch))
      pair = jnp.broadcast_to((slots.position - 1 + d)[:, None], (B, n))
      at = slots.position[:, None] + (level - 1)
      mask = tree_lib.attention_mask(seen, slots.position, cache.length)
      above = hidden[:, parent[level]]
      out, cache = draft.step(above, tokens[:, level], pair, mask, cache, at)
      hidden = hidden.at[:, level].set(out)
    logits = draft.logits(hidden[:, level])
    drawn = candidates(
      logits.reshape(B * n, -1),
      sampling_lib.repeat(slots.sampling, n),
      jnp.repeat(slots.position + 1 + d, n),
    ).reshape(B, n, -1)
    children = np.flatnonzero(np.isin(parent, level) & (depth == d + 1))
    of = np.searchsorted(level, parent[children])
    tokens = tokens.at[:, children].set(drawn[:, of, rank[children]])
    every = every.at[:, level].set(logits)
  whole = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B, J))
  tree = tree_lib.Tree(tokens, whole(parent), whole(depth), jnp.ones((B, J), bool))
  return tree, cache, every


def _assemble(nodes: Nodes, pending) -> tree_lib.Tree:
  """The tree of chosen nodes: in order of making, so that parents come first."""
  order = jnp.argsort(jnp.where(nodes.score > -jnp.inf, nodes.number, 2**30), 1)
  nodes = jax.tree.map(lambda x: jnp.take_along_axis(x, order, 1), nodes)
  is_parent = nodes.parent[:, :, None] == nodes.number[:, None]
  parent = jnp.where(jnp.any(is_parent, -1), jnp.argmax(is_parent, -1) + 1, 0)
  valid = nodes.score > -jnp.inf
  root = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
  tokens = root(jnp.where(valid, nodes.token, 0), 0).at[:, 0].set(pending)
  return tree_lib.Tree(
    tokens=tokens,
    parent=root(jnp.where(valid, parent, 0).astype(jnp.int32), 0),
    depth=root(jnp.where(valid, nodes.depth, 0), 0),
    valid=root(valid, True),
  )
