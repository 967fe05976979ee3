"""The shape of draft trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.spec_decode.speculation import tree


@pytest.mark.parametrize(
  ("depth", "width", "size"), [(1, 3, 4), (3, 2, 7), (3, 4, 16), (8, 4, 48), (4, 1, 5)]
)
def test_a_fixed_tree_is_one(depth, width, size):
  """Whole levels come in order, and no node without its parent and elder siblings."""
  shape = tree.fixed(depth, width, size)
  assert len(shape.parent) == size
  assert max(shape.depth) <= depth and shape.width <= width
  nodes = list(zip(shape.parent, shape.rank, shape.depth, strict=True))
  assert list(shape.depth) == sorted(shape.depth)
  for node, (parent, rank, level) in enumerate(nodes[1:], 1):
    assert parent < node and level == shape.depth[parent] + 1
    siblings = [r for p, r, d in nodes[1:] if p == parent]
    assert sorted(siblings) == list(range(len(siblings))) and rank in siblings


def test_a_fixed_tree_has_all_there_is_if_that_is_less():
  shape = tree.fixed(2, 2, 100)
  assert shape.parent == (0, 0, 0, 1, 1, 2, 2)
  assert shape.rank == (0, 0, 1, 0, 1, 0, 1)
  assert [list(level) for level in shape.levels] == [[0], [1, 2]]


def test_a_small_tree_goes_deep_first():
  """The likeliest child of a likely node is worth more than a second choice."""
  assert tree.fixed(8, 4, 5).parent == (0, 0, 1, 2, 3)


def test_ancestors_are_those_of_the_device():
  shape = tree.fixed(4, 3, 20)
  device = tree.ancestors(jnp.array([shape.parent]))[0]
  np.testing.assert_array_equal(shape.ancestors, device)
