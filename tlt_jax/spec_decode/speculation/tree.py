"""Draft trees: the input of one verification pass of the target.

Node 0 is the request's pending token, every other node a guess at the token after its
parent. Parents come first. In a chain node j's parent is j-1.

    node    0  1  2  3  4        0
    parent  .  0  0  1  1       / \\
    depth   0  1  1  2  2      1   2
                              / \\
                             3   4
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Tree:
  tokens: jax.Array  # i32[B J]
  parent: jax.Array  # i32[B J]  a smaller index; node 0's is 0
  depth: jax.Array  # i32[B J]
  valid: jax.Array  # bool[B J]  others are never accepted


def chain(tokens: jax.Array, depth: jax.Array) -> Tree:
  """A chain of tokens i32[B J]; nodes deeper than `depth` i32[] or i32[B] are not valid."""
  index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  valid = index <= jnp.broadcast_to(depth, tokens.shape[:1])[:, None]
  return Tree(tokens, jnp.maximum(index - 1, 0), index, valid)


def ancestors(parent: jax.Array) -> jax.Array:
  """Which node i descends from which node j, or is it: parent i32[B J] -> bool[B J J].

  Worked rows, of the tree above:  10000
                                   11000
                                   10100
                                   11010
                                   11001
  """
  chex.assert_rank(parent, 2)
  J = parent.shape[1]
  reach = jnp.eye(J, dtype=bool) | jax.nn.one_hot(parent, J, dtype=bool)
  for _ in range(max(J - 1, 1).bit_length()):  # each round doubles the distance
    reach = jnp.einsum("bij,bjk->bik", reach, reach)
  return reach
