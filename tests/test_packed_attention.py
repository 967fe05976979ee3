"""Attention of packed rows in blocks: equal to attention with a mask of all pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax import packing
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.pallas_kernels.tree_attention import ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

B, N, K, H = 2, 4, 2, 8


def rows(T: int, lengths: tuple[tuple[int, ...], ...]) -> np.ndarray:
  """Segment ids of rows that hold sequences of these lengths, i32[B T]."""
  ids = np.zeros((len(lengths), T), np.int32)
  for row, sizes in zip(ids, lengths, strict=True):
    filled = np.repeat(np.arange(len(sizes)) + 1, sizes)
    row[: len(filled)] = filled
  return ids


def dense(q, k, v, ids, window):
  """With every score at once."""
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  mask = packing.segment_mask(ids, positions)
  return ref.attend(q, k, v, mask & seen_lib.near(positions, window or ids.shape[1]))


def blockwise(q, k, v, ids, window):
  segments = packed_attention.Segments(ids, window)
  return packed_attention.packed_attention(q, k, v, segments)


@pytest.mark.parametrize(
  ("T", "lengths", "window"),
  [
    (7, ((7,), (2, 3)), None),  # one block, padding
    (7, ((7,), (2, 3)), 2),
    # Three blocks of 434 and one token to fill them up: a segment in each block, one over
    # all of them, one that starts in the last, and padding that fills a block.
    (1301, ((434, 434, 433), (1301,)), None),
    (1301, ((100, 1000, 201), (300,)), None),
    (1301, ((100, 1000, 201), (1301,)), 435),  # a window as large as a block and one token
    (1301, ((100, 1000, 201), (300,)), 3),
  ],
)
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_blocks_equal_all_pairs(T, lengths, window, dtype, atol):
  """The result, and the gradient of each argument, of every token that is no padding."""
  ids = jnp.asarray(rows(T, lengths))
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (B, T, N, H), (B, K, T, H), (B, K, T, H), (B, T, N, H)
  *args, weight = (
    jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)
  )
  weight *= (ids > 0)[..., None, None]

  @jax.jit
  def both(*args):
    def run(f):
      def loss(*args):
        return jnp.sum(f(*args, ids, window).astype(jnp.float32) * weight)

      found = f(*args, ids, window) * (ids > 0)[..., None, None]
      return found, jax.grad(loss, (0, 1, 2))(*args)

    return run(blockwise), run(dense)

  for x, y in zip(*map(jax.tree.leaves, both(*args)), strict=True):
    assert x.dtype == dtype
    scale = np.abs(np.asarray(y, np.float32)).max()
    np.testing.assert_allclose(
      np.asarray(x, np.float32), np.asarray(y, np.float32), atol=atol * scale
    )
