"""What whole steps side by side come to, from made-up times; and what each side runs."""

import numpy as np
import pytest

from experiments.bench import sides
from tests import commands
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import levels

step = commands.module("bench.step")


def samples(seconds: float, passes: int, trained: int = 0) -> samples_lib.Samples:
  """A rollout of 12 tokens on two slices in one chunk; the second idles half of it."""
  chunk = samples_lib.ChunkRecord(
    start_s=0.0,
    end_s=seconds,
    batch=4,
    length=64,
    strategy="off",
    live=[1, 1],
    steps=[4, 2],
    trained=[0, trained],
    tokens=12,
    passes=passes,
  )
  return samples_lib.Samples(
    tokens=np.zeros((2, 8), np.int32),
    length=np.array([8, 4]),
    logp=np.zeros((2, 8)),
    logp_filtered=np.zeros((2, 8)),
    finish_reason=np.zeros(2, np.int32),
    features=None,
    timeline=[],
    chunks=[chunk],
    micro_batch_s=0.25,
  )


# Seconds of each rollout; the rest of a step takes 2 s everywhere.
ROLLOUTS = {
  "plain": [6.0, 6.0],
  "plain+rebalance": [4.0, 4.0],
  "tlt+rebalance": [2.0, 2.0],
  "frozen+rebalance": [1.6, 1.6],
}


def made_up(sides):
  seconds = {s: [{"rollout": t, "step": t + 2} for t in ROLLOUTS[s]] for s in sides}
  drawn = {
    side: [
      samples(t, passes=4, trained=2 if side.startswith("tlt") else 0)
      for t in ROLLOUTS[side]
    ]
    for side in sides
  }
  return step.summary(seconds, drawn)


def test_a_target_is_told_by_the_first_side_that_trains_its_drafter():
  """Whatever its suffix, against the fastest plain side and the frozen one like it."""
  found = made_up(ROLLOUTS)
  assert found["steps"] == 2
  assert (found["plain"], found["shown"]) == ("plain+rebalance", "tlt+rebalance")
  assert found["rollout_share_plain"] == pytest.approx(4 / 6)
  assert found["speedup_rollout"] == pytest.approx(2)
  assert found["speedup_step"] == pytest.approx(6 / 4)
  assert found["of_amdahl"] == pytest.approx(1)
  assert found["mean_acceptance_length"] == 3
  assert found["idle_s"] == pytest.approx(2 * 0.5 * 2.0)
  assert found["harvested_share"] == pytest.approx(2 * 2 * 0.25 / 2.0)
  assert found["busy_overhead"] == pytest.approx(2.0 / 1.6 - 1)
  assert found["sides"]["frozen+rebalance"]["harvested_share"] == 0
  assert found["sides"]["plain"]["speedup_rollout"] == pytest.approx(4 / 6)
  assert found["sides"]["plain"]["seconds_by_bucket"] == {"4x64": 6.0}


def test_without_a_side_that_trains_the_second_one_is_told():
  found = made_up(["plain", "frozen+rebalance"])
  assert found["shown"] == "frozen+rebalance"
  assert found["harvested_share"] == 0 and found["busy_overhead"] is None
  assert made_up(["plain"])["shown"] == "plain"


def test_without_its_frozen_twin_an_overhead_is_not_known():
  assert made_up(["plain", "tlt+rebalance"])["busy_overhead"] is None


@pytest.mark.parametrize(
  "side, strategies, drafts, trains",
  [
    ("plain", "", False, False),
    ("tlt", "up to 4 live: off or 3_1_4 or 8_1_9; up to 16 live: off or 3_1_4", True, True),
    ("ngram", "up to 4 live: {0}; up to 16 live: {0}", False, False),
    ("3_1_4", "up to 16 live: 3_1_4", True, False),
    ("ngram_3", "up to 16 live: ngram_3", False, False),
  ],
)
@pytest.mark.parametrize("suffix", ["", "+rebalance"])
def test_a_side_is_the_run_with_other_settings(side, strategies, drafts, trains, suffix):
  config = commands.read_run("tail.py")
  own = sides.settings(side + suffix, config)
  expected = strategies.format("off or ngram_3 or ngram_5")
  assert levels.parse(own["strategies"]) == levels.parse(expected)
  assert bool(own["drafter"]) == drafts
  assert (drafts and own["spot"]["train"]) == trains
  assert own["rollout"]["rebalance"] == bool(suffix)
  assert own["sampling"] == config["sampling"]


def test_a_suffix_that_does_not_exist_is_named():
  with pytest.raises(ValueError, match=r"no suffix \+balance; there are \+reb"):
    sides.check(["plain", "frozen+balance"], {"drafter": "eagle2"})


def test_a_side_that_could_not_draft_is_refused():
  levels = "up to 4 live: off or 3_1_4"
  with pytest.raises(ValueError, match="nothing drafts on side '5_1_6'"):
    sides.check(["plain", "ngram", "5_1_6"], {"drafter": "", "strategies": levels})
  with pytest.raises(ValueError, match="side 'ngram' has no strategies"):
    sides.check(["plain", "ngram"], {"drafter": "", "strategies": ""})
  sides.check(["plain", "ngram_3"], {"drafter": "", "strategies": levels})
