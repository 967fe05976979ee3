"""The KV cache: where keys and values are written, in either layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax.models import cache as cache_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib

B, K, S, H = 3, tiny.CONFIG.num_kv_heads, 32, tiny.CONFIG.head_dim
LAYOUTS = {None: "transposed", "ref": "plain", "interpret": "plain"}
plain = lambda layer: layer.k if layer.keys == "plain" else layer.k.swapaxes(2, 3)


def filled(kernels):
  """A layer in which slot s holds s + 100 * row."""
  layer = cache_lib.init(tiny.CONFIG, B, S, kernels)[0]
  number = np.arange(S) + 100.0 * np.arange(B)[:, None]
  v = np.broadcast_to(number[:, None, :, None], (B, K, S, H)).astype(np.float32)
  k = -v if layer.keys == "plain" else -v.swapaxes(2, 3)
  return layer.replace(k=jnp.asarray(k), v=jnp.asarray(v)), number


def check(layer, number):
  """Both arrays hold these numbers, the keys with another sign."""
  want = np.broadcast_to(number[:, None, :, None], (B, K, S, H))
  np.testing.assert_array_equal(layer.v, want)
  np.testing.assert_array_equal(plain(layer), -want)


@pytest.mark.parametrize("kernels", LAYOUTS)
def test_writes_consecutive_slots_and_drops_what_is_outside(kernels):
  layer, number = filled(kernels)
  assert layer.keys == LAYOUTS[kernels] and layer.length == S
  start = jnp.array([4, -1, S - 2])
  v = jnp.full((B, K, 3, H), 7.0)
  k = -v if layer.keys == "plain" else -v.swapaxes(2, 3)
  number[0, 4:7] = number[1, :2] = number[2, S - 2 :] = 7
  check(jax.jit(cache_lib.write)(layer, k, v, start), number)


@pytest.mark.parametrize("kernels", LAYOUTS)
def test_moves_a_path_to_consecutive_slots(kernels):
  layer, number = filled(kernels)
  start, path = jnp.array([4, 0, 20]), jnp.array([[0, 2, 5], [0, 1, 1], [0, 3, 9]])
  moved = jax.jit(cache_lib.move)(layer, start[:, None] + path, start)
  for row, first, nodes in zip(number, start, path, strict=True):
    row[first + np.arange(3)] = row[first + np.asarray(nodes)]
  check(moved, number)


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
