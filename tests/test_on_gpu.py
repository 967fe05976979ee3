"""Kernels compiled on the hardware that they are for, alone and in whole rollouts.

`pytest --gpu` or `--tpu` runs these, as `make gpu` and `make tpu` do; without such a
device all are skipped. `test_tree_attention` and `test_verify_sample` have more for GPUs.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import pools
from tests import sorting
from tests import test_tree_attention
from tests import test_verify_sample
from tests import tiny
from tlt_jax import axes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target
from tlt_jax.pallas_kernels import find_cut
from tlt_jax.pallas_kernels import verify_sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

GPU = pytest.param("triton", marks=pytest.mark.gpu)
TPU = pytest.param("pallas", marks=pytest.mark.tpu)
# A TPU's tiles want heads of 128; and no tile divides this vocabulary.
CONFIG = dataclasses.replace(tiny.CONFIG, head_dim=128, vocab_size=1021)
STRATEGIES = ("off", "ngram_3", "3_1_4", "3_2_6")
# Logits of magnitude 8 have steps of 2^-5 in bfloat16, and two sides are apart by a few.
BFLOAT16_TOLERANCE = 0.25


@pytest.mark.parametrize("shape", range(len(test_tree_attention.SHAPES)))
@pytest.mark.parametrize("impl", [TPU])
def test_attention_equals_float64(impl, shape):
  """At odd sizes, with NaN behind every row."""
  c, want = test_tree_attention._boundaries(shape, "bfloat16")
  out = c.poisoned()(impl=impl)
  np.testing.assert_allclose(out, want, rtol=0, atol=2e-2)


@pytest.mark.parametrize(("V", "rows"), test_verify_sample.SIZES)
@pytest.mark.parametrize("impl", [TPU])
def test_sampling_draws_the_argmax_under_noise(impl, V, rows):
  args = test_verify_sample.some_rows(V, rows)
  run = jax.jit(functools.partial(verify_sample.verify_sample, impl=impl))
  test_verify_sample.assert_exact(jax.device_get(run(*args)), *args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_new", [1, 5, 33, 48])
@pytest.mark.parametrize("impl", [GPU, TPU])
def test_writes_equal_those_of_numpy(impl, num_new, dtype):
  """Bit for bit, also where slots lie outside of the cache."""
  args, want = pools.case(num_new, dtype)
  out = np.asarray(pools.write(*args, impl=impl))
  np.testing.assert_array_equal(out.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("V", [300, 49_152])
@pytest.mark.parametrize("impl", [GPU, TPU])
def test_cuts_keep_what_sorting_keeps(impl, V):
  """By the search of accelerators, four bits at a time."""
  del impl  # there is one implementation; the backend chooses how it searches
  logits = sorting.some_logits(V, 2.0, rows=len(sorting.FEW))
  cut = jax.jit(find_cut.find_cut)(logits, *sorting.columns(sorting.FEW))
  sorting.assert_kept(cut, logits, sorting.FEW)


@functools.cache
def model(dtype):
  """A model, its parameters, a drafter and its parameters."""
  config = dataclasses.replace(CONFIG, dtype=dtype)
  params = jax.jit(lambda key: target.init_params(config, key))(jax.random.key(0))
  params["head"] = params["head"] * 20.0  # neither flat nor certain
  drafter = drafter_lib.of_target(config, "eagle2")
  init = jax.jit(lambda key: drafter_lib.init_params(drafter, key))
  return config, params, drafter, init(jax.random.key(5))


def requests():
  return tiny.requests(4, 2, max_tokens=np.arange(8) * 5 + 4, temperature=0.8)


@functools.cache
def responses(kernels, dtype, strategy, page=64):
  """A rollout of requests of unequal lengths, through two buckets."""
  config, params, *drafter = model(dtype)
  drafter = spot_lib.Frozen(*drafter)
  parsed = strategy_lib.parse(strategy)
  selector = parsed and selector_lib.always(parsed)
  if not strategy_lib.uses_drafter(parsed):
    drafter = None
  engine = rollout.make(
    config,
    axes.make_mesh(1, jax.devices()[:1]),
    rollout.Options(
      **dict(max_length=96, max_prompt=12, slots=8, buckets=(4,), chunk=8),
      kernels=kernels,
      page_tokens=page,
    ),
    drafter,
    selector,
  )
  return engine(params, requests())


@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("impl", [GPU, TPU])
def test_a_rollout_draws_the_tokens_of_one_without_kernels(impl, strategy, page):
  """In float32, but for near-ties; with pages of several sizes."""
  config, params, _, _ = model("float32")
  want = responses("ref", "float32", "off")
  got = responses(impl, "float32", strategy, page)
  found = compare.compare(config, params, requests(), want, got)
  assert found.total_tokens > 50
  assert found.differing_tokens == 0, found.where
  if not found.near_ties:
    np.testing.assert_allclose(got.logp, want.logp, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("impl", [GPU, TPU])
def test_in_bfloat16_only_near_ties_are_drawn_otherwise(impl, strategy, capsys):
  """And how many: the share of tokens that agree up to the first that does not."""
  config, params, _, _ = model("bfloat16")
  want, got = responses("ref", "bfloat16", "off"), responses(impl, "bfloat16", strategy)
  found = compare.compare(
    config, params, requests(), want, got, tolerance=BFLOAT16_TOLERANCE
  )
  agreed = found.total_tokens - found.near_ties - found.differing_tokens
  with capsys.disabled():
    print(
      f"\nbfloat16, {impl}, {strategy}: {agreed} tokens of {want.length.sum()} agree, "
      f"{found.near_ties} of {len(want.length)} responses part at a near-tie"
    )
  assert found.differing_tokens == 0, found.where
