"""Attention of the nodes of draft trees, or of single tokens, to a KV cache."""

import functools

import chex
import jax

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels.tree_attention import pallas
from tlt_jax.pallas_kernels.tree_attention import ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_SMALLEST_PAGE = 64  # slots: what the kernels fold at once, at least


def check_page(slots: int) -> None:
  """Raises ValueError unless the kernels can read pages of so many slots."""
  if slots < _SMALLEST_PAGE or slots & (slots - 1):
    raise ValueError(
      f"pages must have {_SMALLEST_PAGE}, 128, 256, ... slots, not {slots}; only the "
      'implementation "ref" takes any'
    )


def tree_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen: seen_lib.Seen,
  pages: jax.Array | None = None,
  *,
  impl: str | None = None,
) -> jax.Array:
  """Attends to what each node sees of its row's cache: grouped-query attention.

  Query head n uses kv head n // G. Scores are q * H^-0.5 times the keys; products are
  added up in float32, and the softmax is in float32. The nodes' own keys and values are in
  the cache already. The kernels read no more of it than the rows' lengths need, and what
  lies beyond may hold anything, NaN too.

  A cache may lie in pages of L slots (PagedAttention, https://arxiv.org/abs/2309.06180):
  then k and v are a pool of P pages, rows may share some, and slot s of row b is slot s % L
  of page `pages[b, s // L]`.

  The kernels give a row the same bits in any batch and with a cache of any length. With
  another number of nodes the last bits may differ: matrix units add up in another order.
  On a TPU so they may with pages of fewer than 512 slots.
  Heads that are split over the mesh axis `model` stay where they are.

  Args:
    q: f[B J N H]
    k, v: f[B K S H]; f[P K L H] with pages
    seen: of J nodes; one that sees nothing gets zeros
    pages: i32[B S/L], or None: each row has a cache of its own. The kernels do not read
      pages beyond a row's length; "ref" does
    impl: "ref", "pallas", "interpret" or "triton"; None: see `implementations.choose`
  Returns:
    f[B J N H]

  Raises:
    ValueError: there is no such implementation, or it cannot have heads, or pages, of
      this size
  """
  B, J, N, H = q.shape
  rows, K, S = v.shape[:3]
  if pages is not None:
    if implementations.choose(impl) != "ref":
      check_page(S)
    chex.assert_shape(pages, (B, None))
  chex.assert_shape((k, v), (B if pages is None else rows, K, S, H))
  chex.assert_is_divisible(N, K)
  chex.assert_shape(seen.start, (B,))
  chex.assert_shape(seen.bits, (B, J, -(-seen.size // 32)))
  impl = implementations.choose(impl)
  if impl == "ref":
    return ref.tree_attention(q, k, v, seen, pages)
  if impl == "triton":
    from tlt_jax.pallas_kernels.tree_attention import triton  # not on every platform

    kernel = triton.tree_attention
  else:
    kernel = functools.partial(pallas.tree_attention, interpret=impl == "interpret")
  run = lambda q, k, v, start, bits, *pages: kernel(
    q, k, v, seen_lib.Seen(start, bits, seen.size), *pages
  )
  args = q, k, v, seen.start, seen.bits, *(() if pages is None else (pages,))
  head_axes = 2, 1, 1, *(None,) * (len(args) - 3)
  return heads.over_heads(run, K, args, head_axes, result_axis=2)
