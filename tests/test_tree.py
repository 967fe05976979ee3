"""The shape of draft trees."""

import jax.numpy as jnp
import numpy as np

from tlt_jax.spec_decode.speculation import tree
from tlt_jax.spec_decode.speculation import verify


def test_a_node_descends_from_those_on_its_path():
  parent = jnp.array([[0, 0, 0, 1, 1, 3]])
  expected = ["100000", "110000", "101000", "110100", "110010", "110101"]
  np.testing.assert_array_equal(
    tree.ancestors(parent)[0], [[c == "1" for c in row] for row in expected]
  )


def test_the_walk_follows_what_was_drawn():
  """To a bonus token, past nodes that are not valid, and not beyond a disagreement."""
  parent, depth = jnp.array([[0, 0, 0, 1, 1, 3]] * 4), jnp.array([[0, 1, 1, 2, 2, 3]] * 4)
  tokens = jnp.array([[7, 1, 2, 3, 4, 5]] * 4)
  valid = jnp.ones((4, 6), bool).at[2, 3].set(False)
  drawn = jnp.array(
    [
      [1, 3, 0, 5, 0, 9],  # 0 1 3 5
      [2, 3, 9, 5, 0, 9],  # 0 2; nodes 3 and 5 agree with parents that do not
      [1, 3, 0, 5, 0, 9],  # 0 1; node 3 is not valid
      [8, 3, 0, 5, 0, 9],  # 0
    ]
  )
  path, accepted = verify.walk(tree.Tree(tokens, parent, depth, valid), drawn, 4)
  np.testing.assert_array_equal(accepted, [3, 1, 1, 0])
  expected = [[0, 1, 3, 5], [0, 2, 2, 2], [0, 1, 1, 1], [0, 0, 0, 0]]
  np.testing.assert_array_equal(path, expected)
