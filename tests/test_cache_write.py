"""Writing to a KV cache: each implementation against numpy, bit for bit."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests import mutants
from tests import pools
from tests import tpu_kernels
from tlt_jax.pallas_kernels.cache_write import pallas


@pytest.mark.parametrize(
  "J, dtype", [*((J, "float32") for J in (1, 5, 33, 48)), (48, "bfloat16")]
)
@pytest.mark.parametrize("impl", ["ref", "interpret"])
def test_writes_the_slots_and_no_other(impl, J, dtype):
  """To the pages of each row, wherever they are; to no other page, and not to the sink."""
  args, want = pools.case(J, dtype)
  out = np.asarray(pools.write(*args, impl=impl))
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
  (pool, new, start, pages), _ = pools.case(5)
  new = np.nan_to_num(new).astype(jnp.bfloat16)
  for impl in ("ref", "interpret"):
    out = pools.write(pool, new, start, pages, impl=impl)
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
  right = [is_right(FAULTS.get(fault), pools.case(J), tmp_path) for J in (33, 48)]
  assert all(right) == (fault is None)


@pytest.mark.parametrize("kind", tpu_kernels.KINDS)
def test_lowers_for_tpus(kind):
  """In place: the kernel's result is its input."""
  start, pages = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8,), (8, 16)))
  for J in (1, 16, 48):
    pool = jax.ShapeDtypeStruct((129, 4, 64, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((8, 4, J, 128), jnp.bfloat16)
    args = pool, new, start, pages
    text = tpu_kernels.lowered(pallas.cache_write, kind, *args)
    assert "tpu_custom_call" in text and "output_operand_alias" in text
