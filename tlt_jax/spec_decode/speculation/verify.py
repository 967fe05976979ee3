"""Which drafted tokens are accepted: those that plain decoding would have drawn.

The target draws its own token at every node of the draft tree, with that position's
noise, whatever was drafted. From the root, the walk follows the child that holds the
token drawn at its parent, until there is none: the tokens drawn on the way are the
output, and equal plain decoding's. (Daliri, Musco & Suresh 2024,
https://arxiv.org/abs/2408.07978, draw by Gumbel noise that drafter and target share.)

Worked row, a tree and the tokens that the target draws after each node, path 0 1 4 and
output b c d, of which d is the bonus:

    node    0  1  2  3  4        0
    token   a  b  x  y  c       / \\
    parent  .  0  0  1  1      1   2
    drawn   b  c  .  .  d     / \\
                             3   4

Departures from the paper:
- Trees, where it analyses chains: the nodes of one depth share the noise of their
  position.
- The shared noise is a hash of (seed, request, position, token), see `noise`. Plain
  decoding uses the same and draws the same tokens.
- A drafter need not use it: noise makes more guesses accepted, and changes no token.
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.spec_decode.speculation import tree as tree_lib


@flax.struct.dataclass
class Output:
  """The tokens that one pass of the target yields: `count[b]` in row b, at most A."""

  tokens: jax.Array  # i32[B A]
  logp: jax.Array  # f32[B A]
  logp_filtered: jax.Array  # f32[B A]
  features: jax.Array  # f[B A E]  of the token before each
  count: jax.Array  # i32[B]


def walk_chain(
  tree: tree_lib.Tree, drawn: jax.Array, path_length: int
) -> tuple[jax.Array, jax.Array]:
  """`walk` of a chain, in one comparison; the path continues beyond the accepted nodes."""
  chex.assert_equal_shape([drawn, tree.tokens])
  agrees = (tree.tokens[:, 1:] == drawn[:, :-1]) & tree.valid[:, 1:]
  following = jnp.arange(agrees.shape[1])
  accepted = jnp.min(
    jnp.where(agrees, agrees.shape[1], following), 1, initial=len(following)
  )
  path = jnp.minimum(jnp.arange(path_length), drawn.shape[1] - 1)
  return jnp.broadcast_to(path, (drawn.shape[0], path_length)), accepted


def walk(
  tree: tree_lib.Tree, drawn: jax.Array, path_length: int
) -> tuple[jax.Array, jax.Array]:
  """The accepted path of a tree, given the target's token after each node, i32[B J].

  Returns nodes from the root on, i32[B A] (padded by the last), and the number of drafted
  nodes among them, i32[B]. The walk ends at the deepest node that agrees with what was
  drawn, as all its ancestors do: found in three reductions, where steps from node to node
  would be kernels one after the other.
  """
  chex.assert_equal_shape([drawn, tree.tokens])
  before = jnp.take_along_axis(drawn, tree.parent, 1)
  agrees = (tree.tokens == before) & tree.valid & (tree.depth > 0)
  agrees |= jnp.arange(drawn.shape[1]) == 0
  ancestors = tree_lib.ancestors(tree.parent)
  reached = jnp.all(agrees[:, None] | ~ancestors, -1)
  last = jnp.argmax(jnp.where(reached, tree.depth, -1), 1)[:, None]
  above = jnp.take_along_axis(ancestors, last[..., None], 1)  # bool[B 1 J]
  at = above & (tree.depth[:, None] == jnp.arange(path_length)[:, None])  # bool[B A J]
  path = jnp.where(jnp.any(at, -1), jnp.argmax(at, -1), last)
  accepted = jnp.take_along_axis(tree.depth, last, 1)[:, 0]
  return path.astype(jnp.int32), accepted


def cut(
  tokens: jax.Array, count: jax.Array, stop_tokens: jax.Array, remaining: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Ends `count` of tokens i32[B A] at the first stop token and at `remaining`.

  Returns the count, i32[B], and whether the last token is a stop token.
  """
  B, A = tokens.shape
  chex.assert_shape([count, remaining], (B,))
  chex.assert_shape(stop_tokens, (B, None))
  is_stop = jnp.any(tokens[:, :, None] == stop_tokens[:, None], -1)
  first = jnp.min(jnp.where(is_stop, jnp.arange(A), A), 1)
  kept = jnp.minimum(jnp.minimum(count, first + 1), remaining)
  return kept, (first < kept)
