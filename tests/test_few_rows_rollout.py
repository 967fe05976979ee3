"""Rollouts in bfloat16 by the kernels for few rows, interpreted: equal to the last bit.

Not only tokens: their log-probabilities are the same float32 numbers, plain, in chains and
in trees, alone and among others.
"""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks import few_rows as bench
from benchmarks import shapes
from tests import tiny
from tests import triton_kernels
from tlt_jax import axes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

pytestmark = triton_kernels.requires_triton

HEADS = dict(num_heads=2, num_kv_heads=1)  # of a device
CONFIG = dataclasses.replace(bench.tiny(shapes.MODELS["qwen3-0.6b"]), num_layers=1, **HEADS)
OPTIONS = rollout.Options(
  max_length=80,
  max_prompt=8,
  slots=4,
  chunk=8,
  prompt_rows=4,
  prefill_rows=4,
  kernels="triton",
)
CHAIN, TREE = map(strategy_lib.parse, ("3_1_4", "2_2_6"))


@functools.cache
def drafter(target):
  config = drafter_lib.of_target(target)
  return spot_lib.Frozen(config, drafter_lib.init_params(config, jax.random.key(1)))


@functools.cache
def drawn(strategy, slots=4, devices=1, prompts=(5, 8), **changes):
  """Some rows filter, one is greedy."""
  rng = np.random.default_rng(0)
  made = requests_lib.make_requests(
    [rng.integers(0, CONFIG.vocab_size, length) for length in prompts],
    responses=2,
    seed=7,
    max_tokens=np.array([6, 9, 5, 8]),
    stop_tokens=[],
    temperature=np.array([1.0, 0.7, 0.0, 1.0]),
    top_p=np.array([1.0, 0.9, 1.0, 1.0]),
  )
  options = dataclasses.replace(OPTIONS, slots=slots, **changes)
  heads = {name: devices * count for name, count in HEADS.items()}
  config = dataclasses.replace(CONFIG, **heads)
  of = (drafter(config), selector_lib.always(strategy)) if strategy else (None, None)
  mesh = tiny.mesh(1, devices)
  layout = axes.shardings(mesh, axes.ROLLOUT, target.abstract_params(config))
  params = jax.device_put(bench.weights(config), layout)
  by_xla = mock.patch.object(decode, "forward", side_effect=AssertionError)
  with triton_kernels.interpreted(), by_xla:  # which no pass is
    run = rollout.make(config, mesh, options, *of)
    assert run.exact
    return run(params, made)


def assert_same_bits(a, b):
  for name in ("tokens", "logp", "logp_filtered"):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize(
  "strategy, slots, devices",
  [
    tiny.slow(CHAIN, 4, 1),
    (TREE, 4, 1),
    tiny.slow(None, 1, 1),
    tiny.slow(TREE, 1, 1),
    tiny.slow(TREE, 4, 2),
    tiny.slow(None, 1, 2),
  ],
  ids=str,
)
def test_every_bit_is_that_of_plain_decoding(strategy, slots, devices):
  """On a slice of one device, and of two."""
  plain, found = drawn(None, devices=devices), drawn(strategy, slots, devices)
  np.testing.assert_array_equal(plain.length, [6, 9, 5, 8])
  assert_same_bits(plain, found)


def test_prompts_have_the_same_bits_whatever_is_computed_with_them():
  """In passes of 32 tokens of each of four, the second of which overlaps the first; and in
  blocks of 16 of one."""
  long = dict(prompts=(37, 40), max_prompt=40)
  together = drawn(None, prefill_block=40, **long)
  assert_same_bits(together, drawn(None, prefill_block=16, prefill_rows=1, **long))
