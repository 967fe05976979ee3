import functools

import chex
import jax

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels.cache_write import ref


def cache_write(
  cache: jax.Array,
  new: jax.Array,
  start: jax.Array,
  pages: jax.Array,
  *,
  impl: str | None = None,
) -> jax.Array:
  """Writes f[B K J H] to consecutive slots of a cache f[P K L H], from `start` i32[B] on.

  Under jit the write is in place if nothing else uses the old cache: on TPUs only together
  with the Pallas kernel of `tree_attention`, on CPUs and GPUs by XLA. Heads that are
  sharded over the mesh axis `model` stay sharded.

  Writes to the last page of the pool, the sink page, are dropped. Rows that write to the
  same page must write the same values.

  Writes outside of a row's table are dropped. "triton" is "ref", which is in place on GPUs.
  """
  _, K, _, H = cache.shape
  B = len(start)
  chex.assert_shape(new, (B, K, None, H))
  chex.assert_shape(start, (B,))
  chex.assert_shape(pages, (B, None))
  impl = implementations.choose(impl)
  write = ref.cache_write
  if impl in ("pallas", "interpret"):
    kernel = implementations.load(__name__, impl).cache_write
    write = functools.partial(kernel, interpret=impl == "interpret")
  args = cache, new, start, pages
  return heads.over_heads(write, K, args, (1, 1, None, None), result_axis=1)
