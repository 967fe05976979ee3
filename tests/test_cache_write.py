"""Writing to a KV cache: each implementation against numpy, bit for bit."""


import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests import mutants
from tests import tpu_kernels
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels.cache_write import pallas

write = jax.jit(cache_write.cache_write, static_argnames="impl")


def case(J, dtype="float32", S=96):
  """A cache, new values, starts at every boundary and beyond, and what should come out.

  Some of each holds NaN: nothing of it may reach another slot.
  """
  rng = np.random.default_rng(J)
  start = np.array([0, 1, 31, 32, 33, S - J, S - 1, S, S + 40, -1, -J, -33], np.int32)
  cache = rng.normal(size=(len(start), 2, S, 16)).astype(jnp.dtype(dtype))
  new = rng.normal(size=(len(start), 2, J, 16)).astype(jnp.dtype(dtype))
  cache[:, :, ::7] = np.nan
  new[:, :, J // 2] = np.nan
  want = cache.copy()
  for b in range(len(start)):
    for j in range(J):
      if 0 <= start[b] + j < S:
        want[b, :, start[b] + j] = new[b, :, j]
  return (cache, new, start), want


PAGE = 64


def paged(J, dtype="float32"):
  """`case` with its rows in pages in random order, among pages of other rows.

  Rows 1 and 4 lack some pages: what goes there is dropped.
  """
  (cache, new, start), want = case(J, dtype, S=3 * PAGE)
  (B, K, _, H), rng = cache.shape, np.random.default_rng(J)
  pages = rng.permutation(B * 3 + 5)[: B * 3].reshape(B, 3).astype(np.int32)
  sink = B * 3 + 5
  pool = rng.normal(size=(sink + 1, K, PAGE, H)).astype(cache.dtype)
  split = lambda x: x.reshape(B, K, 3, PAGE, H).swapaxes(1, 2)
  pool[pages] = split(cache)
  mine, there = pages.copy(), np.ones((B, 3), bool)
  there[1, 0] = there[4, 1:] = there[6] = False
  after = pool.copy()
  after[pages[there]] = split(want)[there]
  return (pool, new, start, np.where(there, mine, sink)), after


@pytest.mark.parametrize(
  "J, dtype", [*((J, "float32") for J in (1, 5, 33, 48)), (48, "bfloat16")]
)
@pytest.mark.parametrize("impl", ["ref", "interpret"])
def test_writes_the_slots_and_no_other(impl, J, dtype):
  """To the pages of each row, wherever they are; to no other page, and not to the sink."""
  args, want = paged(J, dtype)
  out = np.asarray(write(*args, impl=impl))
  np.testing.assert_array_equal(out.astype(np.float32), want.astype(np.float32))


FAULTS = {
  "a tile less": ("pl.cdiv(J - 1, TILE) + 1", "pl.cdiv(J, TILE)"),
  "not rolled": ("range(_BITS)", "range(_BITS - 1)"),
  "one too many": ("slot < start + num_new", "slot <= start + num_new"),
  "before the start": ("(slot >= start) &", "(slot >= 0) &"),
  "beyond the cache": ("(first < length)", "(first >= 0)"),
  "before the cache": ("(first >= 0) &", "(first < length) &"),
  "nothing where no tile exists": ("out_ref[...] = old_ref[...]", "pass"),
  "wrong page": ("div(tile, of_page)]", "div(tile, of_page + 1)]"),
  "wrong tile of a page": ("jax.lax.rem(tile, of_page)", "tile % 1"),
  "the sink is written": ("& ~is_sink", ""),
  "nothing for the sink": ("| is_sink", ""),
}


def test_what_is_narrower_is_widened():
  """New values of another dtype are stored in that of the cache."""
  (pool, new, start, pages), want = paged(5)
  new = np.nan_to_num(new).astype(jnp.bfloat16)
  for impl in ("ref", "interpret"):
    out = write(pool, new, start, pages, impl=impl)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[pages[0, 0], :, :5], new[0].astype(np.float32))


def is_right(fault, case, tmp_path) -> bool:
  """Whether the kernel with a fault writes what it should."""
  mutant = mutants.load(pallas.__file__, fault, tmp_path)
  args, want = case
  # As a TPU does it: what lies in fast memory is NaN until it is written.
  out = np.asarray(mutant.cache_write(*args, interpret=pltpu.InterpretParams()))
  return np.array_equal(out, want, equal_nan=True)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_of_the_kernel_are_found(fault, tmp_path):
  """By the test above; and no fault in the kernel as it is."""
  right = [is_right(FAULTS.get(fault), paged(J), tmp_path) for J in (33, 48)]
  assert all(right) == (fault is None)


def test_odd_pages_are_refused_with_a_remedy():
  """The kernel writes whole tiles."""
  pool, new = np.zeros((3, 2, 40, 16), np.float32), np.zeros((1, 2, 5, 16), np.float32)
  with pytest.raises(ValueError, match="multiple of 32 slots, not 40"):
    write(pool, new, np.zeros(1, np.int32), np.zeros((1, 2), np.int32), impl="interpret")


@pytest.mark.parametrize("kind", tpu_kernels.KINDS)
def test_lowers_for_tpus(kind):
  """In place: the kernel's result is its input."""
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  start, pages = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8,), (8, 16)))
  for J in (1, 16, 48):
    args = shape(129, 4, 64, 128), shape(8, 4, J, 128), start, pages
    text = tpu_kernels.lowered(pallas.cache_write, kind, *args)
    assert "tpu_custom_call" in text and "output_operand_alias" in text
