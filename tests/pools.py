"""Writes to a pool of pages, and what they leave there by numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.pallas_kernels import cache_write

PAGE, TABLE = 64, 3  # slots of a page, pages of a row
write = jax.jit(cache_write.cache_write, static_argnames="impl")


def case(J, dtype="float32"):
  """Arguments of a write that starts at every boundary and beyond, and the pool after it.

  The pages of rows are in random order among others; rows 1, 4 and 6 lack some, and what
  goes there is dropped. Some numbers are NaN: nothing of them may reach another slot.
  """
  rng, S = np.random.default_rng(J), PAGE * TABLE
  start = np.array([0, 1, 31, 32, 33, S - J, S - 1, S, S + 40, -1, -J, -33], np.int32)
  B, K, H = len(start), 2, 16
  new = rng.normal(size=(B, K, J, H)).astype(jnp.dtype(dtype))
  new[:, :, J // 2] = np.nan
  sink = B * TABLE + 5
  pages = rng.permutation(sink)[: B * TABLE].reshape(B, TABLE).astype(np.int32)
  pages[1, 0] = pages[4, 1:] = pages[6] = sink
  pool = rng.normal(size=(sink + 1, K, PAGE, H)).astype(jnp.dtype(dtype))
  pool[:, :, ::7] = np.nan
  after = pool.copy()
  for b in range(B):
    for j in range(J):
      slot = start[b] + j
      if 0 <= slot < S and pages[b, slot // PAGE] != sink:
        after[pages[b, slot // PAGE], :, slot % PAGE] = new[b, :, j]
  return (pool, new, start, pages), after
