"""Drafting trees by a drafter with weights.

The children of a node are the top candidates of (draft logits / T + the noise of their
position). A node's score is the drafter's estimate of the log-probability that the target
draws it: as the noise is known, the only uncertainty is the drafter's error, and the
perturbed candidates are weighted by a softmax.

Departures from EAGLE-2 (https://arxiv.org/abs/2406.16858): the children of a node are
the top tokens under the target's own noise, not the likeliest ones, and scores follow.
The tree's depth is read at run time.
"""

from collections.abc import Callable
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib


@flax.struct.dataclass
class Nodes:
  """Candidates for a tree, n per row, in any order.

  Worked row, two children per node: the root's children are made first, then those of
  the best two of every level. `parent` is the number of a node, not its place.

      number  0   1   2   3   4   5
      parent  -1  -1  0   0   1   1
      depth   1   1   2   2   2   2
  """

  score: jax.Array  # f32[B n]  -inf: none
  token: jax.Array  # i32[B n]
  number: jax.Array  # i32[B n]  in order of their making
  parent: jax.Array  # i32[B n]  its number; -1: the root
  depth: jax.Array  # i32[B n]


def _best(nodes: Nodes, count: int) -> tuple[Nodes, jax.Array]:
  """Picks the `count` of highest score, with their index; ties go to earlier ones.

  A child's score is at most its parent's, so the best include their ancestors.
  """
  _, index = jax.lax.top_k(nodes.score, count)
  return jax.tree.map(lambda x: jnp.take_along_axis(x, index, 1), nodes), index


def draft_tree(
  draft: draft_lib.Draft,
  state: draft_lib.DraftState,
  slots: slots_lib.Slots,
  depth: jax.Array,
  *,
  width: int,
  size: int,
  scratch: int,
) -> tuple[tree_lib.Tree, cache_lib.LayerCache]:
  """Grows a tree level by level, and keeps the best `size` - 1 nodes.

  At each level the `width` best nodes get `width` children each (EAGLE-2, section 4.1,
  with this module's scores). The cache needs `width` slots per level but the last behind
  the longest position, of which a row can use `scratch`; `depth` is read at run time.
  """
  h, cache = draft_lib.extend(draft, state, slots)
  B, W = h.shape[0], width
  every = sampling_lib.repeat(slots.sampling, W)

  candidates = functools.partial(_top_children, draft, W)
  first = first_level(*candidates(h, slots.sampling, slots.position + 1))
  beams_h = jnp.repeat(h[:, None], W, 1)
  # The scratch slots of each beam's ancestors, level by level, then its own.
  levels = max(scratch // W, 1)
  path = jnp.broadcast_to(slots.position[:, None, None], (B, W, levels))

  def expand(d, beams, of_beams, cache):
    beams_h, path = of_beams
    start = slots.position + (d - 1) * W  # the slot of the level's first pair
    own = (start[:, None] + jnp.arange(W))[..., None]
    path = jnp.where(jnp.arange(levels) < d - 1, path, own)
    nodes = _beams(slots.position, d - 1, path)
    at = slots.position[:, None] + jnp.arange(scratch)
    mask = jnp.any(path[..., None] == at[:, None, None], 2)
    seen = seen_lib.of_mask(slots.position, mask)
    pair = jnp.broadcast_to((slots.position - 1 + d)[:, None], (B, W))
    out, cache = draft.step(beams_h, beams.token, pair, nodes, seen, cache, start)
    following = jnp.repeat(slots.position + d + 1, W)
    score, token = candidates(out.reshape(B * W, -1), every, following)
    return score.reshape(B, W, W), token.reshape(B, W, W), (out, path), cache

  kept, cache = grow(expand, first, (beams_h, path), cache, depth, size)
  return assemble(kept, slots.pending), cache


def grow(
  expand: Callable, first: Nodes, of_beams: Any, rest: Any, depth: jax.Array, size: int
) -> tuple[Nodes, Any]:
  """Grows trees level by level, to `depth` i32[]; keeps the best `size` - 1 nodes.

  Args:
    expand: (d, beams, of_beams, rest) -> the children of a level's W beams, their scores
      f32[B W W] and tokens i32[B W W]; what the best children inherit of their parents, in
      place of `of_beams`; and `rest`
    first: the first level, of W nodes
    of_beams: arrays [B W ...], which follow their beams
    rest: others
  Returns:
    The nodes, and the last `rest`.
  """
  B, W = first.token.shape
  join = functools.partial(jax.tree.map, lambda a, b: jnp.concatenate([a, b], 1))
  kept, _ = _best(join(first, _no_nodes(B, size - 1)), size - 1)

  def level(d, carry):
    beams, of_beams, rest, kept = carry
    score, token, of_beams, rest = expand(d, beams, of_beams, rest)
    children = _children(beams, score, token, d)
    kept, _ = _best(join(kept, children), size - 1)
    beams, index = _best(children, W)
    parent = (index // W)[..., None]
    inherited = jax.tree.map(lambda x: jnp.take_along_axis(x, parent, 1), of_beams)
    return beams, inherited, rest, kept

  *_, rest, kept = jax.lax.fori_loop(1, depth, level, (first, of_beams, rest, kept))
  return kept, rest


def _beams(start: jax.Array, depth: jax.Array, path: jax.Array) -> few_rows.Nodes:
  """A level's nodes, each with a path of its own: slots i32[B W A]."""
  B, W, _ = path.shape
  owner = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
  depth = jnp.full((B, W), depth, jnp.int32)
  return few_rows.Nodes(start, depth, owner, path, jnp.full(B, W, jnp.int32))


def _top_children(draft, width: int, h, sampling, position):
  runners = sampling_lib.contest(draft.logits(h), sampling, position, draft.ids)
  score, place = sampling_lib.likeliest(runners, width)
  return score, draft.tokens(place)


def first_level(score: jax.Array, token: jax.Array) -> Nodes:
  zero = jnp.zeros_like(token)
  return Nodes(
    score=score,
    token=token,
    number=zero + jnp.arange(token.shape[1], dtype=jnp.int32),
    parent=zero - 1,
    depth=zero + 1,
  )


def _no_nodes(B: int, count: int) -> Nodes:
  names = ("token", "number", "parent", "depth")
  largest = jnp.iinfo(jnp.int32).max
  return Nodes(
    score=jnp.full((B, count), -jnp.inf),
    **{name: jnp.full((B, count), largest, jnp.int32) for name in names},
  )


def _children(beams: Nodes, score: jax.Array, token: jax.Array, depth) -> Nodes:
  """Children of a level's W nodes, given each node's scores and tokens [B W W]."""
  B, W, _ = score.shape
  number = W + (depth - 1) * W * W + jnp.arange(W * W, dtype=jnp.int32)
  return Nodes(
    score=(beams.score[..., None] + score).reshape(B, -1),
    token=token.reshape(B, -1),
    number=jnp.broadcast_to(number, (B, W * W)),
    parent=jnp.repeat(beams.number, W, 1),
    depth=jnp.full((B, W * W), depth + 1, jnp.int32),
  )


def assemble(nodes: Nodes, pending) -> tree_lib.Tree:
  """The tree of the chosen nodes, in order of number: parents come first."""
  order = jnp.argsort(jnp.where(nodes.score > -jnp.inf, nodes.number, 2**30), 1)
  nodes = jax.tree.map(lambda x: jnp.take_along_axis(x, order, 1), nodes)
  is_parent = nodes.parent[:, :, None] == nodes.number[:, None]
  parent = jnp.where(jnp.any(is_parent, -1), jnp.argmax(is_parent, -1) + 1, 0)
  valid = nodes.score > -jnp.inf

  def with_root(x):
    return jnp.pad(jnp.where(valid, x, 0).astype(jnp.int32), ((0, 0), (1, 0)))

  return tree_lib.Tree(
    tokens=with_root(nodes.token).at[:, 0].set(pending),
    parent=with_root(parent),
    depth=with_root(nodes.depth),
    valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
  )
