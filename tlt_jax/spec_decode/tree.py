"""Draft trees: what one verification pass of the target looks at.

Node 0 is the request's pending token, every other node a guess at the token after
its parent. Nodes are ordered so that parents come first. A chain is a tree in which
node j's parent is j-1.

    node    0  1  2  3  4        0
    parent  .  0  0  1  1       / \\
    depth   0  1  1  2  2      1   2
                              / \\
                             3   4
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Tree:
  """J nodes per row."""

  tokens: jax.Array  # i32[B J]
  parent: jax.Array  # i32[B J]  a smaller index; node 0's is 0
  depth: jax.Array  # i32[B J]
  valid: jax.Array  # bool[B J]  what is not valid is never accepted


def chain(tokens: jax.Array, depth: jax.Array) -> Tree:
  """Tokens i32[B J] in a row; those deeper than i32[] or i32[B] `depth` not valid."""
  index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  valid = index <= jnp.broadcast_to(depth, tokens.shape[:1])[:, None]
  return Tree(tokens, jnp.maximum(index - 1, 0), index, valid)


def ancestors(parent: jax.Array) -> jax.Array:
  """bool[B J J]: node i descends from node j, or is it."""
  J = parent.shape[1]
  reach = jnp.eye(J, dtype=bool) | jax.nn.one_hot(parent, J, dtype=bool)
  for _ in range(max(J - 1, 1).bit_length()):  # each round doubles the distance
    reach = jnp.einsum("bij,bjk->bik", reach, reach)
  return reach


def attention_mask(tree_mask: jax.Array, start: jax.Array, length: int) -> jax.Array:
  """What J nodes, in cache slots from `start` on, see of a cache: bool[B J S].

  Args:
    tree_mask: bool[B J M]  what they see of the M slots from `start` on
    start: i32[B]  they see every slot before it
    length: S; needs start + M <= S, what does not fit must not count
  """
  rows = tree_mask.shape[1]
  base = jnp.arange(length) < start[:, None, None]
  base = jnp.broadcast_to(base, (start.shape[0], rows, length))
  put = lambda row, tree, at: jax.lax.dynamic_update_slice(row, tree, (0, at))
  return jax.vmap(put)(base, tree_mask, start)
