"""Attention within packed rows for training, without T x T intermediates."""

import chex
import flax.struct
import jax

from tlt_jax.pallas_kernels.packed_attention import blockwise


@flax.struct.dataclass
class Segments:
  """Segments of packed rows, contiguous: a token attends to its segment, up to itself."""

  ids: jax.Array  # i32[B T]  one number per segment of a row; 0 is padding
  # Tokens that each attends to, itself included; None: all before it.
  window: int | None = flax.struct.field(pytree_node=False, default=None)


def packed_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> jax.Array:
  """Causal grouped-query attention of f[B T N H] to f[B K T H] within segments.

  Query head n uses kv head n // G. Products are summed in float32, and memory grows with T,
  not with its square, in the gradient as well.
  """
  B, T, N, H = q.shape
  K = k.shape[1]
  chex.assert_shape([k, v], (B, K, T, H))
  chex.assert_is_divisible(N, K)
  chex.assert_shape(segments.ids, (B, T))
  return blockwise.packed_attention(q, k, v, segments.ids, segments.window)
