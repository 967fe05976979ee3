"""The KV cache: where keys and values are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax.models import cache as cache_lib

B, K, S, H = 3, tiny.CONFIG.num_kv_heads, 64, tiny.CONFIG.head_dim
KERNELS = [(8, "ref"), (64, "ref"), (32, "interpret")]


def filled(page, kernels):
  """A layer in which slot s of a row is s + 100 * row, with pages in random order."""
  layer = cache_lib.init(tiny.CONFIG, B, S, page=page, kernels=kernels)[0]
  order = np.random.default_rng(0).permutation(B * S // page).reshape(B, -1)
  number = np.arange(S) + 100.0 * np.arange(B)[:, None]
  v = np.zeros(layer.v.shape, np.float32)
  v[order] = number.reshape(B, -1, 1, page, 1)
  pool = cache_lib.Pool(jnp.asarray(-v), jnp.asarray(v))
  return layer.replace(pool=pool, pages=jnp.asarray(order, jnp.int32)), number


def check(layer, number):
  """Both arrays hold these numbers, the keys with another sign, and the sink nothing."""
  of_rows = np.asarray(layer.v)[np.asarray(layer.pages)].swapaxes(1, 2)
  want = np.broadcast_to(number[:, None, :, None], (B, K, S, H))
  np.testing.assert_array_equal(of_rows.reshape(B, K, S, H), want)
  np.testing.assert_array_equal(layer.k, -np.asarray(layer.v))
  assert not np.asarray(layer.v)[-1].any()


@pytest.mark.parametrize(("page", "kernels"), KERNELS)
def test_writes_consecutive_slots_and_drops_what_is_outside(page, kernels):
  layer, number = filled(page, kernels)
  start, v = jnp.array([4, -1, S - 2]), jnp.full((B, K, 9, H), 7.0)
  number[0, 4:13] = number[1, :8] = number[2, S - 2 :] = 7
  check(jax.jit(cache_lib.LayerCache.write)(layer, -v, v, start), number)


@pytest.mark.parametrize(("page", "kernels"), KERNELS)
def test_moves_a_path_to_consecutive_slots(page, kernels):
  layer, number = filled(page, kernels)
  start, path = jnp.array([4, 0, 30]), jnp.array([[0, 2, 5], [0, 1, 9], [0, 3, 9]])
  moved = jax.jit(cache_lib.LayerCache.move)(layer, start[:, None] + path, start)
  for row, first, nodes in zip(number, start, path, strict=True):
    row[first + np.arange(3)] = row[first + np.asarray(nodes)]
  check(moved, number)


def test_rows_without_pages_write_nowhere():
  """Where the table names the sink."""
  cache = cache_lib.init(tiny.CONFIG, B, S, page=8, kernels="ref")
  layer = cache.of_live(jnp.zeros(B, bool))[0]
  one = jnp.ones((B, K, 3, H))
  written = jax.jit(cache_lib.LayerCache.write)(layer, one, one, jnp.zeros(B, jnp.int32))
  assert not np.asarray(written.k).any() and not np.asarray(written.v).any()
