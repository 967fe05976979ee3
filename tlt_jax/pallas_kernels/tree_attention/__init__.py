import functools

import chex
import jax

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_SMALLEST_PAGE = 64  # slots: the kernels' smallest block


def check_page(slots: int) -> None:
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
  pages: jax.Array,
  *,
  impl: str | None = None,
) -> jax.Array:
  """Grouped-query attention of tree nodes to their row's cache.

  Query head n uses kv head n // G. Products are summed in float32. The nodes' own keys and
  values are in the cache already. Only as many slots are read as the longest row has
  ("ref"), or each row (the kernels); slots beyond may be NaN.

  Slot s of row b is slot s % L of page `pages[b, s // L]` (PagedAttention,
  https://arxiv.org/abs/2309.06180).

  A row gets the same bits in any batch and with a table of any length. With another number
  of nodes the last bits may differ: matrix units add up in another order. On TPUs they may
  also differ with pages of fewer than 512 slots. Heads that are sharded over the mesh axis
  `model` stay sharded.

  Takes f[B J N H] and pools f[P K L H]; a node that sees nothing gets zeros.

  Raises:
    ValueError: the implementation does not exist, or does not support heads or pages of
      this size
  """
  B, J, N, H = q.shape
  P, K, L = v.shape[:3]
  chex.assert_shape((k, v), (P, K, L, H))
  chex.assert_shape(pages, (B, None))
  chex.assert_is_divisible(N, K)
  chex.assert_shape(seen.start, (B,))
  chex.assert_shape(seen.bits, (B, J, -(-seen.size // 32)))
  # The kernels have no windows.
  impl = implementations.choose(impl) if seen.first is None else "ref"
  kernel = implementations.load(__name__, impl).tree_attention
  if impl == "ref":
    return kernel(q, k, v, seen, pages)
  check_page(L)
  if impl == "interpret":
    kernel = functools.partial(kernel, interpret=True)

  def run(q, k, v, start, bits, pages):
    return kernel(q, k, v, seen_lib.Seen(start, bits, seen.size), pages)

  args = q, k, v, seen.start, seen.bits, pages
  head_axes = 2, 1, 1, None, None, None
  return heads.over_heads(run, K, args, head_axes, result_axis=2)
