"""The shape of draft trees."""

import jax.numpy as jnp
import numpy as np

from tlt_jax.spec_decode.speculation import tree


def test_a_node_descends_from_those_on_its_path():
  parent = jnp.array([[0, 0, 0, 1, 1, 3]])
  expected = ["100000", "110000", "101000", "110100", "110010", "110101"]
  np.testing.assert_array_equal(
    tree.ancestors(parent)[0], [[c == "1" for c in row] for row in expected]
  )
