"""Consecutive slots of each row of a KV cache, written in place."""

import functools

import chex
import jax

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels.cache_write import pallas
from tlt_jax.pallas_kernels.cache_write import ref


def cache_write(
  cache: jax.Array,
  new: jax.Array,
  start: jax.Array,
  pages: jax.Array | None = None,
  *,
  impl: str | None = None,
) -> jax.Array:
  """Writes new keys, or values, to consecutive slots of a cache.

  Under jit, where nothing else uses the old cache, it is written in place: on TPUs only
  together with the Pallas kernel of `tree_attention`, on CPUs and GPUs by XLA. Heads that
  are split over the mesh axis `model` stay where they are.

  A cache may lie in pages of L slots, as for `tree_attention`. What goes to the last page
  of the pool, which is nobody's, is dropped. No other page may be written by two rows.

  Args:
    cache: f[B K S H]; f[P K L H] with pages
    new: f[B K J H]
    start: i32[B]  the slot of a row's first; slots outside of the cache are dropped
    pages: i32[B S/L], or None: each row has a cache of its own
    impl: see `implementations`; "triton" is "ref", which is in place on GPUs; None: see
      `implementations.choose`
  Returns:
    the cache with the new in it

  Raises:
    ValueError: there is no such implementation, or it cannot write to caches of S slots
  """
  rows, K, _, H = cache.shape
  B = len(start)
  chex.assert_shape(new, (B, K, None, H))
  chex.assert_shape(start, (B,))
  if pages is None:
    chex.assert_equal(B, rows)
  else:
    chex.assert_shape(pages, (B, None))
  impl = implementations.choose(impl)
  if impl in ("ref", "triton"):
    if pages is None:
      return ref.cache_write(cache, new, start)
    write = ref.cache_write
  else:
    write = functools.partial(pallas.cache_write, interpret=impl == "interpret")
  args = cache, new, start, *(() if pages is None else (pages,))
  head_axes = 1, 1, *(None,) * (len(args) - 2)
  return heads.over_heads(write, K, args, head_axes, result_axis=1)
