"""Consecutive slots of each row of a KV cache, written in place."""

import functools

import chex
import jax

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels.cache_write import pallas
from tlt_jax.pallas_kernels.cache_write import ref


def cache_write(
  cache: jax.Array, new: jax.Array, start: jax.Array, *, impl: str | None = None
) -> jax.Array:
  """Writes new keys, or values, to consecutive slots of a cache with plain keys.

  Under jit, where nothing else uses the old cache, it is written in place: on TPUs only
  together with the Pallas kernel of `tree_attention`, on CPUs and GPUs by XLA. Heads that
  are split over the mesh axis `model` stay where they are.

  Args:
    cache: f[B K S H]
    new: f[B K J H]
    start: i32[B]  the slot of a row's first; slots outside of the cache are dropped
    impl: see `implementations`; "triton" is "ref", which is in place on GPUs; None: see
      `implementations.choose`
  Returns:
    the cache f[B K S H] with the new in it

  Raises:
    ValueError: there is no such implementation, or it cannot write to caches of S slots
  """
  B, K, _, H = cache.shape
  chex.assert_shape(new, (B, K, None, H))
  chex.assert_shape(start, (B,))
  impl = implementations.choose(impl)
  if impl in ("ref", "triton"):
    return ref.cache_write(cache, new, start)
  kernel = functools.partial(pallas.cache_write, interpret=impl == "interpret")
  return heads.over_heads(kernel, K, (cache, new, start), (1, 1, None), result_axis=1)
