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

import dataclasses
import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class Tree:
  """A draft tree of J nodes for each row."""

  tokens: jax.Array  # i32[B J]
  parent: jax.Array  # i32[B J]  a smaller index; node 0's is 0
  depth: jax.Array  # i32[B J]
  valid: jax.Array  # bool[B J]  what is not valid is never accepted


def chain(tokens: jax.Array, depth: jax.Array) -> Tree:
  """Makes a tree of nodes in a row.

  Args:
    tokens: i32[B J]
    depth: i32[] or i32[B]; deeper nodes are not valid
  """
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


@dataclasses.dataclass(frozen=True)
class Shape:
  """A tree whose nodes are known before anything is drafted; node 0 is the root."""

  parent: tuple[int, ...]  # [J]
  rank: tuple[int, ...]  # [J]  among its siblings
  depth: tuple[int, ...]  # [J]  never falling

  @property
  def levels(self) -> list[np.ndarray]:
    """The nodes that have children: an array in order for each depth."""
    inner = np.array(sorted(set(self.parent)))
    depth = np.array(self.depth)[inner]
    return [inner[depth == d] for d in np.unique(depth)]

  @property
  def ancestors(self) -> np.ndarray:
    """Which node i descends from which node j, or is it: bool[J J]."""
    found = np.eye(len(self.parent), dtype=bool)
    for node, parent in enumerate(self.parent):
      found[node] |= found[parent]
    return found

  @property
  def width(self) -> int:
    """W, the most children of a node."""
    return max(self.rank) + 1


# How often the first, second, ... child of a node is the one that stands: a guess, for
# the choice of a tree's shape. It bears on acceptance, not on what is drawn.
_STANDS = (0.75, 0.1, 0.04, 0.02, 0.01)


@functools.cache
def fixed(depth: int, width: int, size: int) -> Shape:
  """The tree of up to `size` nodes that holds most of what will be accepted.

  A child's chance of being accepted is its parent's times a factor of its rank alone;
  the nodes of the highest chances form a tree (Sequoia, Chen et al. 2024,
  https://arxiv.org/abs/2402.12374).

  Departures from the paper: the factors are guessed, not measured; and the best nodes are
  picked one by one, where the paper has a dynamic program (for the same tree, as no
  chance is above that of the parent or of an elder sibling).

  Args:
    depth: most nodes below the root on a path
    width: W, most children of a node
    size: J, most nodes, the root included
  """
  chance = [*_STANDS, *(_STANDS[-1] * 0.5**i for i in range(1, width))][:width]
  nodes = [(1.0, 0, ())]  # chance, order of making, ranks on the way
  grown, made = [nodes[0]], 1
  for _ in range(depth):
    children = []
    for parent_chance, _, path in grown:
      for rank, factor in enumerate(chance):
        children.append((parent_chance * factor, made, (*path, rank)))
        made += 1
    # No more than `size` of a level can be among the best of all.
    grown = sorted(children, key=lambda n: (-n[0], n[1]))[:size]
    nodes += grown
  best = sorted(nodes, key=lambda n: (-n[0], n[1]))[:size]
  paths = sorted((path for *_, path in best), key=lambda path: (len(path), path))
  number = {path: i for i, path in enumerate(paths)}
  return Shape(
    parent=tuple(number[path[:-1]] for path in paths),
    rank=tuple(path[-1] if path else 0 for path in paths),
    depth=tuple(map(len, paths)),
  )
