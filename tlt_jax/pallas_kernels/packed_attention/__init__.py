"""Attention within packed rows for training, without T x T intermediates."""

import chex
import flax.struct
import jax

from tlt_jax.pallas_kernels.packed_attention import blockwise


@flax.struct.dataclass
class Segments:
  """Segments of packed rows: each token attends to its segment, up to itself.

  Segments are contiguous; their tokens are in order.
  """

  ids: jax.Array  # i32[B T]  one number per segment of a row; 0 is padding


def packed_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> jax.Array:
  """Attends within the segments of packed rows: causal, with grouped queries.

  Query head n uses kv head n // G. Scores are q * H^-0.5 times the keys; products are
  added up in float32, and the softmax is in float32. Memory grows with T, not with its
  square, in the gradient as well.

  Args:
    q: f[B T N H]
    k, v: f[B K T H]
  Returns:
    f[B T N H]
  """
  B, T, N, H = q.shape
  K = k.shape[1]
  chex.assert_shape([k, v], (B, K, T, H))
  chex.assert_is_divisible(N, K)
  chex.assert_shape(segments.ids, (B, T))
  return blockwise.packed_attention(q, k, v, segments.ids)
