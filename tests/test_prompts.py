"""Admissions: a request gets a copy of its prompt's last page, and no other is touched."""

import jax
import numpy as np

from tests import tiny
from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import slices

SLICES, PAGES, SINK = 2, 4, 3


def test_pages_are_copied_on_each_slice_up_to_the_sink():
  mesh, rng = tiny.mesh(SLICES), np.random.default_rng(0)
  shapes = {"k": (2, 8, 4), "v": (2, 8, 4), "features": (8, 6)}
  before = {
    name: rng.normal(size=(SLICES, PAGES, *shape)).astype(np.float32)
    for name, shape in shapes.items()
  }
  k, v, features = (slices.place(mesh, x) for x in before.values())
  source = np.array([[0, 1, 1], [2, 0, 1]], np.int32)
  goal = np.array([[2, 0, SINK], [1, SINK, SINK]], np.int32)
  over = axes.sharding(mesh, axes.DATA)
  pools, features = pages_lib.make_copy(mesh, over, over, (False,))(
    (cache_lib.Pool(k, v),), features, slices.place(mesh, source), slices.place(mesh, goal)
  )
  after = {"k": pools[0].k, "v": pools[0].v, "features": features}
  for name, x in before.items():
    expected = x.copy()
    expected[0, 2], expected[0, 0], expected[1, 1] = x[0, 0], x[0, 1], x[1, 2]
    found = jax.device_get(after[name]).reshape(x.shape)
    np.testing.assert_array_equal(found, expected)
