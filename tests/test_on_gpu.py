"""Kernels compiled on the hardware that they are for, in whole rollouts.

`pytest --gpu` and `pytest --tpu` run these, and `make gpu`; `test_tree_attention` and
`test_verify_sample` have more of the kind. Without such a device all are skipped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import test_find_cut
from tests import test_tree_attention
from tests import test_verify_sample
from tests import tiny
from tlt_jax import axes
from tlt_jax.models import target
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import verify_sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

GPU = pytest.param("triton", marks=pytest.mark.gpu)
TPU = pytest.param("pallas", marks=pytest.mark.tpu)
# Heads of 128, which a TPU's kernels want; a vocabulary that no tile divides.
CONFIG = dataclasses.replace(tiny.CONFIG, head_dim=128, vocab_size=1021)
STRATEGIES = (None, "ngram_3", "3_2_6")


@pytest.mark.parametrize("impl", [TPU])
@pytest.mark.parametrize("shape", range(len(test_tree_attention.SHAPES)))
def test_attention_equals_float64(shape, impl):
  """At odd sizes, with NaN behind each row; a GPU's has a test beside the others."""
  c, want = test_tree_attention._boundaries(shape, "bfloat16")
  out = c.poisoned()(keys="plain", impl=impl)
  np.testing.assert_allclose(out, want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("impl", [TPU])
@pytest.mark.parametrize(("V", "rows"), [(64, 11), (32_000, 5), (151_936, 48)])
def test_sampling_draws_the_same(V, rows, impl):
  args = test_verify_sample.some_rows(V, rows)
  run = jax.jit(functools.partial(verify_sample.verify_sample, impl=impl))
  test_verify_sample.assert_exact(jax.device_get(run(*args)), *args)


@pytest.mark.parametrize("impl", [GPU, TPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_equal_those_of_numpy(dtype, impl):
  """Across tiles, at both ends of the cache, of more than a tile."""
  rng = np.random.default_rng(0)
  start = np.array([0, 1, 31, 30, 60, 95], np.int32)
  for J in (1, 5, 33):
    cache = rng.normal(size=(6, 2, 96, 128)).astype(dtype)
    new = rng.normal(size=(6, 2, J, 128)).astype(dtype)
    want = cache.copy()
    for b, s in enumerate(start):
      want[b, :, s : s + J] = new[b, :, : max(0, 96 - s)]
    write = jax.jit(functools.partial(cache_write.cache_write, impl=impl))
    out = np.asarray(write(cache, new, start))
    np.testing.assert_array_equal(out.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("device", [pytest.param("gpu", marks=pytest.mark.gpu),
                                    pytest.param("tpu", marks=pytest.mark.tpu)])
def test_cuts_equal_those_of_a_sort(device):
  """Found by the code that runs on an accelerator, four bits at a time."""
  logits = test_find_cut.some_logits(5000, 2.0, rows=len(test_find_cut.FEW))
  filters = test_find_cut.columns(test_find_cut.FEW)
  cut = np.asarray(test_find_cut.find(logits, *filters))
  for row, setting in enumerate(test_find_cut.FEW):
    kept = test_find_cut.num_kept(logits[row], **setting)
    assert (logits[row] >= cut[row]).sum() == kept, setting


@functools.cache
def engine(kernels, dtype, strategy):
  options = rollout.Options(
    max_length=96, max_prompt=12, slots=8, chunk=8, buckets=((4, 96),), kernels=kernels
  )
  config = dataclasses.replace(CONFIG, dtype=dtype)
  mesh, drafter, selector = axes.make_mesh(1, jax.devices()[:1]), None, None
  if strategy is not None:
    parsed = strategy_lib.parse(strategy)
    selector = selector_lib.always(parsed)
    drafter = _drafter(dtype) if parsed.source == strategy_lib.MODEL else None
  return rollout.make(config, mesh, options, drafter, selector)


def _drafter(dtype):
  from tlt_jax.models import drafter

  return drafter.of_target(dataclasses.replace(CONFIG, dtype=dtype), "eagle2")
