"""Which drafted tokens stand, by rejection: the output is distributed as the target.

The alternative to `verify`, which couples drafter and target and so changes no token:
this keeps more of a chain (the most that is possible), but is lossless in distribution
only. Speculative sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192,
Algorithm 1), and for trees its recursive form (SpecInfer, Miao et al. 2023,
https://arxiv.org/abs/2305.09781; without replacement, by the Gumbel-top-k trick: Jeon et
al. 2024, https://arxiv.org/abs/2402.14160).

In order: the distributions p of the target and q of the drafter, the children that are
drawn from q, and the walk that keeps or rejects them.

A node's children are drawn one after the other from q, each without those before it:
distinct guesses are worth more than repeated ones, and one row of Gumbel noise draws
them all. They are tried in that order. A child x stands with probability
min(1, p(x) / q(x)); if it falls, what is left to draw is p <- max(p - q, 0),
normalised, and q loses x. Where no child stands, the next token, the bonus, is drawn
from the p that is left. A chain is the case of one child per node.

What decides how many children a node has may look at any token before them, never at
the children themselves or beyond them: a node that keeps the likelier of two drawn
tokens has not drawn it from q. Nor may they be put in another order.

All noise is a function of (seed, request, position), as is plain decoding's, and
independent of that. Each position is decided once, and nothing that is decided has
looked at the noise of a later one. So the nodes of one depth may share their noise,
and what is drafted again is drafted with the same noise.

Departures from the papers:
- Noise is a hash of where it is used, not the next number of a generator.
- A tree's shape is fixed before it is drawn (`tree.fixed`), with more children where they
  are likelier to stand; Jeon et al. have as many at each node, or a beam search.
- The target's filters act on q as well, so that no draft is a token that p excludes for
  sure; at temperature 0, where p is one token, q is that of temperature 1.
"""

import chex
import jax
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.speculation import tree as tree_lib

_CHILDREN, _STANDS, _BONUS = 1, 2, 3  # what noise is for


def draft_distribution(logits: jax.Array, sampling: sampling_lib.Sampling) -> jax.Array:
  """The distribution q of drafts, the target's filters included.

  At temperature 0 it is that of temperature 1, unfiltered: any guess may be tried.

  Args:
    logits: f32[B U]  the drafter's, of all tokens or some
    sampling: of each row
  Returns:
    f32[B U]
  """
  chex.assert_rank(logits, 2)
  scaled = sampling_lib.scale(logits, sampling)
  cut = sampling_lib.threshold(logits, sampling)
  kept = (logits >= cut[:, None]) | (sampling.temperature <= 0)[:, None]
  return jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), -1)


def target_distribution(logits: jax.Array, sampling: sampling_lib.Sampling) -> jax.Array:
  """The distribution p that plain decoding draws from.

  Args:
    logits: f32[B V]  the target's
    sampling: of each row
  Returns:
    f32[B V]
  """
  likeliest = jnp.arange(logits.shape[-1]) == sampling_lib.argmax(logits)[:, None]
  random = (sampling.temperature > 0)[:, None]
  p = draft_distribution(logits, sampling)
  return jnp.where(random, p, likeliest.astype(p.dtype))


def draw_candidates(
  q: jax.Array, sampling: sampling_lib.Sampling, position: jax.Array, width: int
) -> jax.Array:
  """Draws the children of a node, in the order in which they must be tried.

  From q without replacement: they are the top of log q under Gumbel noise. Where q has
  fewer tokens the rest are no candidates, which `verify` sees in q. At temperature 0
  they are the likeliest.

  Args:
    q: f32[B U]  from `draft_distribution`, of all tokens or some
    sampling: of each row
    position: i32[B]  of the token that is guessed
    width: W
  Returns:
    i32[B W], their places in q; the first of them are the same whatever W
  """
  chex.assert_rank(q, 2)
  chex.assert_shape(position, (q.shape[0],))
  g = _gumbel(sampling, position, _CHILDREN, jnp.arange(q.shape[-1]))
  runners = jnp.log(q) + jnp.where((sampling.temperature > 0)[:, None], g, 0.0)
  if width == 1:
    return sampling_lib.argmax(runners)[:, None]
  return jax.lax.top_k(runners, width)[1].astype(jnp.int32)


def verify(
  tree: tree_lib.Tree,
  p: jax.Array,
  q: jax.Array,
  sampling: sampling_lib.Sampling,
  position: jax.Array,
  path_length: int,
  width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gives tokens that are distributed as the target's own, whatever q is.

  At temperature 0 they are the target's argmax.

  Args:
    tree: the children of a node in the order in which they were drawn
    p: f32[B J V]  `target_distribution` after each node
    q: f32[B J V]  the distribution that the children of each node were drawn from
    sampling: of each row
    position: i32[B]  of the root's token
    path_length: A, most nodes of a path, the root included
    width: W, most children that are tried; 1 for a chain
  Returns:
    path i32[B A], nodes from the root on (beyond its end: the last one again); how
    many drafted nodes are on it, i32[B]; and the output i32[B A], their tokens and
    then the bonus, of which accepted + 1 count
  """
  chex.assert_equal_shape([p, q])
  chex.assert_shape(p, (*tree.tokens.shape, None))
  chex.assert_shape(position, tree.tokens.shape[:1])
  rows = jnp.arange(position.shape[0])
  tree = tree.replace(valid=tree.valid & (tree.depth < path_length))
  uniform = _uniform(sampling, position[:, None] + 1 + jnp.arange(path_length), width)

  def step(now, accepted):
    """The node after `now`, whether it is another, and what is left of p if not."""
    child, exists = _children(tree, now, width)
    tokens = jnp.take_along_axis(tree.tokens, child, 1)
    u = uniform[rows, accepted]
    stands, left = _try(tokens, exists, p[rows, now], q[rows, now], u)
    found = jnp.any(stands, 1)
    return jnp.where(found, jnp.sum(jnp.where(stands, child, 0), 1), now), found, left

  now = accepted = jnp.zeros_like(position)
  path = [now]
  for _ in range(path_length - 1):
    # A row that has stopped stays: the same uniforms reject the same children again.
    now, found, _ = step(now, accepted)
    accepted += found
    path.append(now)
  path = jnp.stack(path, 1)
  *_, left = step(now, accepted)
  bonus = _draw(left, sampling, position + accepted + 1)
  drafted = jnp.roll(jnp.take_along_axis(tree.tokens, path, 1), -1, 1)
  on_path = jnp.arange(path_length) < accepted[:, None]
  return path, accepted, jnp.where(on_path, drafted, bonus[:, None])


def _children(tree, now, width):
  """Finds the first `width` children i32[B W] of nodes `now` i32[B], and which exist."""
  is_child = (tree.parent == now[:, None]) & tree.valid & (tree.depth > 0)
  nth = jnp.cumsum(is_child, 1)[:, None] == 1 + jnp.arange(width)[:, None]  # [B W J]
  nth &= is_child[:, None]
  return jnp.argmax(nth, -1).astype(jnp.int32), jnp.any(nth, -1)


def _try(tokens, exists, p, q, u):
  """Tries children in order, until one stands.

  Args:
    tokens: i32[B W]  of the children
    exists: bool[B W]  which children there are
    p, q: f32[B V]
    u: f32[B W]  uniform on (0, 1)
  Returns:
    which stands, bool[B W], at most one; and what is left of p if none does
  """
  at = lambda x, token: jnp.take_along_axis(x, token[:, None], 1)[:, 0]
  stands = []
  done = jnp.zeros_like(exists[:, 0])
  for w in range(tokens.shape[1]):
    token = tokens[:, w]
    p_token, q_token = at(p, token), at(q, token)
    tried = exists[:, w] & (q_token > 0) & ~done  # of q = 0 it was not drawn
    stands.append(tried & _accepts(u[:, w], p_token, q_token))
    done |= stands[-1]
    fell = (tried & ~done)[:, None]
    p, q = jnp.where(fell, _residual(p, q), p), jnp.where(fell, _without(q, token), q)
  return jnp.stack(stands, 1), p


def _accepts(u, p, q):
  """True with probability min(1, p / q), u being uniform on (0, 1)."""
  return u * q < p


def _residual(p, q):
  """The distribution of a draw from p, given that the guess from q fell."""
  rest = jnp.maximum(p - q, 0.0)
  total = jnp.sum(rest, -1, keepdims=True)
  # No mass is left only if p = q, whose guesses fall by rounding alone.
  return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), p)


def _without(q, token):
  """The q of the next child, once `token` i32[B] is drawn; 0 if that was the last."""
  rest = jnp.where(jnp.arange(q.shape[-1]) == token[:, None], 0.0, q)
  total = jnp.sum(rest, -1, keepdims=True)
  return rest / jnp.where(total > 0, total, 1.0)


def _draw(p, sampling, position):
  """Draws the bonus i32[B], from p f32[B V]."""
  g = _gumbel(sampling, position, _BONUS, jnp.arange(p.shape[-1]))
  return sampling_lib.argmax(jnp.log(p) + g)


def _uniform(sampling, position, count):
  """Draws a number in (0, 1) per child: f32[B ... count] for positions i32[B ...]."""
  return -jnp.expm1(-jnp.exp(-_gumbel(sampling, position, _STANDS, jnp.arange(count))))


def _gumbel(sampling, position, purpose, ids):
  """Draws noise that is independent of plain decoding's and of other purposes'.

  Args:
    sampling: of each row
    position: i32[B ...]
    purpose: `_CHILDREN`, `_STANDS` or `_BONUS`
    ids: i32[n]
  Returns:
    f32[B ... n]
  """
  row = lambda x: x.reshape(x.shape + (1,) * (position.ndim - 1))
  key = noise.row_key(row(sampling.seed), row(sampling.request), position)
  return noise.gumbel(noise.row_key(key[..., 0], key[..., 1], purpose), ids)
