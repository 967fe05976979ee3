"""Rollouts with kernels draw what rollouts without any draw, token for token."""

import functools

import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

SIZES = dict(max_length=48, max_prompt=12, slots=4, chunk=8, prompt_rows=4, prefill_rows=4)
CHAIN, TREE = map(strategy_lib.parse, ("3_1_4", "3_2_6"))


class Chosen(selector_lib.Selector):
  """Lets the test say what runs: its strategies share an engine's other programs."""

  strategies = (CHAIN, TREE)

  def __init__(self):
    self.chosen = None

  def choose(self, live, step_s):
    return self.chosen

  def arms(self, live):
    return None, CHAIN, TREE


@functools.cache
def engine(kernels, data=1, model=1, buckets=()):
  options = rollout.Options(**SIZES, buckets=buckets, kernels=kernels)
  drafter = tiny.frozen("eagle2")
  return rollout.make(tiny.CONFIG, tiny.mesh(data, model), options, drafter, Chosen())


@functools.cache
def requests():
  """Every filter is in some row, and some rows are greedy."""
  return tiny.requests(
    *(2, 3),
    max_tokens=np.array([10, 4, 12, 7, 9, 30]),
    temperature=np.array([1.0, 1.0, 0.7, 0.0, 0.6, 1.0]),
    top_k=np.array([0, 0, 9, 0, 0, 5]),
    top_p=np.array([1.0, 0.8, 0.9, 1.0, 1.0, 1.0]),
    min_p=np.array([0.0, 0.0, 0.05, 0.0, 0.1, 0.0]),
  )


def run(strategy, kernels, data=1, model=1, **options):
  made = engine(kernels, data, model, **options)
  made.selector.chosen = strategy
  params = tiny.on(tiny.mesh(data, model))
  return made(params, requests())


reference = functools.cache(lambda: run(None, kernels=None))


def assert_same(samples):
  want = reference()
  found = compare.compare(tiny.CONFIG, tiny.params(), requests(), want, samples)
  assert found.total_tokens > 50
  assert found.differing_tokens == found.near_ties == 0, found.where
  np.testing.assert_allclose(samples.logp, want.logp, atol=1e-5)
  np.testing.assert_allclose(samples.logp_filtered, want.logp_filtered, atol=1e-5)


@pytest.mark.parametrize(
  ("strategy", "data", "model"),
  [
    (TREE, 2, 2),
    *(tiny.slow(strategy, 2, 2) for strategy in (None, CHAIN)),
    *(tiny.slow(strategy, 2, 1) for strategy in (None, CHAIN, TREE)),
  ],
  ids=str,
)
def test_kernels_draw_the_same(strategy, data, model):
  """Interpreted as on a TPU: attention, writes to the caches, sampling."""
  assert_same(run(strategy, "interpret", data, model))


@pytest.mark.parametrize("strategy", [None, tiny.slow(CHAIN), tiny.slow(TREE)], ids=str)
def test_the_reference_draws_the_same(strategy):
  """By the reference that is named, through another number of slots, too."""
  assert_same(run(strategy, "ref", buckets=(2,)))
