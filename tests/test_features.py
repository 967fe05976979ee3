"""Kept features in pages: what is written for a token is read again."""

import jax.numpy as jnp
import numpy as np

from tlt_jax.spec_decode.decoding import pages as pages_lib

PAGES, PAGE, WIDTH = 5, 4, 3  # the last page is the sink


def test_what_is_written_is_read_and_what_has_no_page_is_dropped():
  """The second row has one page; what it writes behind that touches nobody's."""
  rng = np.random.default_rng(0)
  before = rng.normal(size=(PAGES, PAGE, WIDTH)).astype(jnp.bfloat16)
  table = np.array([[3, 0], [1, PAGES - 1]], np.int32)
  at = np.array([[2, 3, 4, 7, 8], [0, 3, 4, 5, 9]], np.int32)
  new = rng.normal(size=(*at.shape, WIDTH)).astype(jnp.bfloat16)
  after = pages_lib.write(jnp.array(before), table, at, new)
  found = np.asarray(pages_lib.read(after, table, at))
  np.testing.assert_array_equal(found[0, :4], new[0, :4])
  np.testing.assert_array_equal(found[1, :2], new[1, :2])
  expected = before.copy()
  expected[3, 2:], expected[0, 0], expected[0, 3] = new[0, :2], new[0, 2], new[0, 3]
  expected[1, 0], expected[1, 3] = new[1, :2]
  np.testing.assert_array_equal(np.asarray(after)[:-1], expected[:-1])
