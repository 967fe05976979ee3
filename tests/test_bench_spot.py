"""What pairs of rollouts with training and without come to, from made-up ones."""

import types

import numpy as np
import pytest

from tests import commands
from tlt_jax.spec_decode.decoding import samples as samples_lib

spot = commands.module("bench.spot")


def samples(drawn: list[int], strategy: str = "3_1_4") -> samples_lib.Samples:
  """A rollout of chunks of a second and ten passes, which draw so many tokens."""
  chunks = [
    samples_lib.ChunkRecord(
      start_s=float(start),
      end_s=start + 1.0,
      batch=4,
      length=64,
      strategy=strategy,
      live=[1, 0],
      steps=[10, 0],
      trained=[0, 0],
      tokens=tokens,
      passes=10,
    )
    for start, tokens in enumerate(drawn)
  ]
  zeros = np.zeros((1, 1))
  return samples_lib.Samples(
    zeros, np.ones(1, int), zeros, zeros, zeros, chunks=chunks, training=[]
  )


def test_thirds_are_of_the_time_and_of_speculative_chunks():
  assert spot.thirds(samples([10, 20, 20, 30, 40, 40])) == [1.5, 2.5, 4.0]
  assert np.isnan(spot.thirds(samples([10, 10, 10], strategy="off"))).all()


def test_both_sides_draft_alike_by_the_drafter():
  levels = "up to 2 live: off or 3_1_4 or 5_1_6 or ngram_3; up to 8 live: off or ngram_3"
  assert spot.always(levels) == "up to 2 live: 5_1_6; up to 8 live: off"


def test_pairs_tell_whether_the_drafter_gets_better_within_a_rollout():
  """By what it draws more than the frozen one at the end, and at the beginning."""
  scored = lambda drawn: types.SimpleNamespace(samples=samples(drawn), rollout_s=6.0)
  pairs = [
    {"off": scored([20, 20, 20]), "train": scored([21, 20, 25])},
    {"off": scored([20, 20, 20]), "train": scored([23, 20, 27])},
  ]
  found = spot.summary(pairs, slices=2)
  assert found["first_third"]["gain"] == pytest.approx(0.2)
  assert found["last_third"]["gain"] == pytest.approx(0.6)
  assert found["last_over_first_third"]["gain"] == pytest.approx(0.4)
  assert found["last_over_first_third"]["gain_half_width"] == pytest.approx(0, abs=1e-9)


def test_the_last_exchange_is_told_apart_from_what_decoding_loses():
  """It comes after the last token: nobody decodes any more."""

  def scored(rollout_s, training_s=0.0):
    drawn = samples([20, 20, 20])
    drawn.training_s = training_s
    return types.SimpleNamespace(samples=drawn, rollout_s=rollout_s)

  pairs = [
    {"off": scored(10.0), "train": scored(10.3, training_s=0.2)},
    {"off": scored(20.0), "train": scored(20.6, training_s=0.4)},
  ]
  found = spot.summary(pairs, slices=2)
  assert found["busy_overhead"] == pytest.approx(0.03)
  assert found["busy_overhead_to_last_token"] == pytest.approx(0.01)
