"""Kernels compiled on the hardware that they are for, alone and in whole rollouts.

`pytest --gpu` or `--tpu` runs these, as `make gpu` and `make tpu` do; without such a
device all are skipped. `test_tree_attention` and `test_verify_sample` have more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests import tiny
from tlt_jax import axes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import find_cut
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_new", [1, 5, 33, 48])
@pytest.mark.parametrize("impl", [GPU, TPU])
def test_writes_equal_those_of_numpy(impl, num_new, dtype):
  """Bit for bit, also where slots lie outside of the cache."""
  rng, L = np.random.default_rng(num_new), 64
  start = np.array([0, 1, 31, 32, 33, 2 * L - num_new, 2 * L - 1, 2 * L], np.int32)
  pages = rng.permutation(2 * len(start)).reshape(-1, 2).astype(np.int32)
  pool = rng.normal(size=(2 * len(start) + 1, 2, L, 128)).astype(jnp.dtype(dtype))
  new = rng.normal(size=(len(start), 2, num_new, 128)).astype(jnp.dtype(dtype))
  want = pool.copy()
  for b, first in enumerate(start):
    for j in range(min(num_new, 2 * L - first)):
      page, slot = divmod(first + j, L)
      want[pages[b, page], :, slot] = new[b, :, j]
  write = jax.jit(functools.partial(cache_write.cache_write, impl=impl))
  out = np.asarray(write(pool, new, start, pages))
  np.testing.assert_array_equal(out.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("V", [300, 49_152])
@pytest.mark.parametrize("impl", [GPU, TPU])
def test_cuts_keep_the_mass_that_sorting_keeps(impl, V):
  """By the search of accelerators, four bits at a time: top-k, and top-p."""
  del impl  # there is one implementation; the backend chooses how it searches
  logits = np.random.default_rng(7).normal(0, 2, (4, V)).astype(np.float32)
  top_k, top_p = np.array([50, 1, 0, 0], np.int32), np.array([1, 1, 0.5, 0.95], np.float32)
  ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
  cut = jax.jit(find_cut.find_cut)(logits, ones, top_k, top_p, zeros)
  kept = np.sum(logits >= np.asarray(cut)[:, None], -1)
  assert kept[:2].tolist() == [50, 1]
  for row in (2, 3):
    mass = np.cumsum(np.sort(special.softmax(logits[row].astype(np.float64)))[::-1])
    assert mass[kept[row] - 2] < top_p[row] + 1e-6
    assert mass[kept[row] - 1] > top_p[row] - 1e-6


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
