"""The KV cache: where keys and values are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import paged_cache
from tlt_jax.spec_decode.decoding import slots as slots_lib

B, K, S, H = 3, tiny.CONFIG.num_kv_heads, 32, tiny.CONFIG.head_dim
KERNELS = (None, "ref", "interpret")


def filled(kernels):
  """A layer in which slot s holds s + 100 * row."""
  layer = cache_lib.init(tiny.CONFIG, B, S, kernels)[0]
  number = np.arange(S) + 100.0 * np.arange(B)[:, None]
  v = np.broadcast_to(number[:, None, :, None], (B, K, S, H)).astype(np.float32)
  return layer.replace(k=jnp.asarray(-v), v=jnp.asarray(v)), number


def check(layer, number):
  """Both arrays hold these numbers, the keys with another sign."""
  want = np.broadcast_to(number[:, None, :, None], (B, K, S, H))
  np.testing.assert_array_equal(layer.v, want)
  np.testing.assert_array_equal(layer.k, -want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_writes_consecutive_slots_and_drops_what_is_outside(kernels):
  layer, number = filled(kernels)
  assert layer.length == S
  start = jnp.array([4, -1, S - 2])
  v = jnp.full((B, K, 3, H), 7.0)
  number[0, 4:7] = number[1, :2] = number[2, S - 2 :] = 7
  check(jax.jit(cache_lib.LayerCache.write)(layer, -v, v, start), number)


@pytest.mark.parametrize("kernels", KERNELS)
def test_moves_a_path_to_consecutive_slots(kernels):
  layer, number = filled(kernels)
  start, path = jnp.array([4, 0, 20]), jnp.array([[0, 2, 5], [0, 1, 1], [0, 3, 9]])
  moved = jax.jit(cache_lib.LayerCache.move)(layer, start[:, None] + path, start)
  for row, first, nodes in zip(number, start, path, strict=True):
    row[first + np.arange(3)] = row[first + np.asarray(nodes)]
  check(moved, number)


def in_pages(layer, page, kernels):
  """A layer in pages, in random order; and how to put it together."""
  n = B * S // page
  order = np.random.default_rng(0).permutation(n).reshape(B, -1).astype(np.int32)
  made = paged_cache.init(tiny.CONFIG, B, S, pages=n, page=page, kernels=kernels)[0]
  split = lambda x: x.reshape(B, K, -1, page, H).swapaxes(1, 2)
  fill = lambda pool, x: pool.at[order].set(split(x))
  pool = jax.tree.map(fill, made.pool, paged_cache.Pool(layer.k, layer.v))

  def whole(layer):
    join = lambda x: np.asarray(x)[order].swapaxes(1, 2).reshape(B, K, S, H)
    assert not np.asarray(layer.k)[-1].any()  # nobody's page
    return cache_lib.LayerCache(join(layer.k), join(layer.v), kernels)

  return made.replace(pool=pool, pages=jnp.asarray(order)), whole


@pytest.mark.parametrize("page, kernels", [(8, "ref"), (32, "interpret")])
def test_pages_hold_what_a_row_in_one_piece_holds(page, kernels):
  """Slots are written and moved across the ends of pages; what is outside is dropped."""
  layer, number = filled("ref")
  paged, whole = in_pages(layer, page, kernels)
  assert paged.length == S
  start, v = jnp.array([4, -1, S - 2]), jnp.full((B, K, 9, H), 7.0)
  number[0, 4:13] = number[1, :8] = number[2, S - 2 :] = 7
  paged = jax.jit(paged_cache.PagedLayer.write)(paged, -v, v, start)
  check(whole(paged), number)
  start, path = jnp.array([4, 0, 14]), jnp.array([[0, 2, 5], [0, 1, 9], [0, 3, 9]])
  paged = jax.jit(paged_cache.PagedLayer.move)(paged, start[:, None] + path, start)
  for row, first, nodes in zip(number, start, path, strict=True):
    row[first + np.arange(3)] = row[first + np.asarray(nodes)]
  check(whole(paged), number)


def test_rows_without_pages_write_nowhere():
  """Where the table names the last page, nothing comes to be."""
  made = paged_cache.init(tiny.CONFIG, B, S, pages=4, page=8, kernels="ref")[0]
  one = jnp.ones((B, K, 3, H))
  written = jax.jit(paged_cache.PagedLayer.write)(made, one, one, jnp.zeros(B, jnp.int32))
  assert not np.asarray(written.k).any() and not np.asarray(written.v).any()


def test_kernels_get_whole_tiles():
  """Rows for named kernels have a multiple of 32 slots, on whichever machine."""
  assert [cache_lib.slots_for(n, "triton") for n in (1, 32, 33)] == [32, 32, 64]
  assert cache_lib.slots_for(33, None) == 33  # on a CPU


def test_free_slots_read_nothing():
  """Wherever the request that has left stood, beyond the cache too."""
  names = ("pending", "stop_tokens", "sampling", "features")
  slots = slots_lib.Slots(
    position=np.array([3, 900]),
    remaining=np.array([1, 0]),
    kv=(),
    **dict.fromkeys(names),
  )
  np.testing.assert_array_equal(slots.start, [3, 0])
