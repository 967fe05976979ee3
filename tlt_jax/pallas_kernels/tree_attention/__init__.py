"""Attention of the nodes of draft trees, or of single tokens, to a KV cache."""

import functools

import chex
import jax

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels.tree_attention import pallas
from tlt_jax.pallas_kernels.tree_attention import ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

KEYS = ("plain", "transposed")


def tree_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen: seen_lib.Seen,
  *,
  keys: str = "plain",
  impl: str | None = None,
) -> jax.Array:
  """Attends to what each node sees of its row's cache: grouped-query attention.

  Query head n uses kv head n // G. Scores are q * H^-0.5 times the keys; products are
  added up in float32, and the softmax is in float32. The nodes' own keys and values are in
  the cache already. The kernels read no more of it than the rows' lengths need, and what
  lies beyond may hold anything, NaN too.

  The kernels give a row the same bits in any batch and with a cache of any length. With
  another number of nodes the last bits may differ: matrix units add up in another order.
  Heads that are split over the mesh axis `model` stay where they are.

  Args:
    q: f[B J N H]
    k: f[B K S H], or f[B K H S] with keys="transposed"
    v: f[B K S H]
    seen: of J nodes; one that sees nothing gets zeros
    keys: "plain", which accelerators read faster, or "transposed", for CPUs
    impl: "ref", "pallas", "interpret" or "triton"; None: see `implementations.choose`
  Returns:
    f[B J N H]

  Raises:
    ValueError: there are no such keys or no such implementation, or the implementation
      cannot have heads of this size
  """
  B, J, N, H = q.shape
  K, S = v.shape[1:3]
  if keys not in KEYS:
    raise ValueError(f"keys must be one of {', '.join(KEYS)}, not {keys!r}")
  chex.assert_shape(v, (B, K, S, H))
  chex.assert_shape(k, (B, K, H, S) if keys == "transposed" else (B, K, S, H))
  chex.assert_is_divisible(N, K)
  chex.assert_shape(seen.start, (B,))
  chex.assert_shape(seen.bits, (B, J, -(-seen.size // 32)))
  impl = implementations.choose(impl)
  if impl == "ref":
    return ref.tree_attention(q, k, v, seen, keys=keys)
  if impl == "triton":
    from tlt_jax.pallas_kernels.tree_attention import triton  # not on every platform

    kernel = triton.tree_attention
  else:
    kernel = functools.partial(pallas.tree_attention, interpret=impl == "interpret")
  run = lambda q, k, v, start, bits: kernel(
    q, k, v, seen_lib.Seen(start, bits, seen.size), keys=keys
  )
  args, head_axes = (q, k, v, seen.start, seen.bits), (2, 1, 1, None, None)
  return heads.over_heads(run, K, args, head_axes, result_axis=2)
