"""Benchmarks and checks as a user runs them, to their last line, at the smallest sizes."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import run_record
from benchmarks import run_summary
from benchmarks import scenarios
from experiments import interleave
from experiments import sides
from tests import commands
from tlt_jax import metrics
from tlt_jax.spec_decode.speculation import levels

home, chat = commands.home, commands.chat
run, error = commands.run, commands.error
tiny_run, found = commands.tiny_run, commands.found


@pytest.mark.slow
def test_rollouts_are_measured(home, chat):
  """Tables of speculation by live batch, and of steps."""
  result = found(
    home,
    "benchmarks.rollout",
    *chat,
    "--drafter=eagle2",
    "--only=speculation,steps",
    "--strategies=2_1_3",
    "--live=1",
    "--tokens=8",
    "--lengths=64",
    "--repeats=1",
    f"--workdir={home / 'bench_rollout'}",
  )
  assert result["differing_tokens"] == result["near_ties"] == 0
  (cell,) = result["by_live_batch"].values()
  assert cell["strategy"] == "2_1_3" and cell["mean_acceptance_length"] >= 1
  assert set(result["steps"]["1"]["step_ms"]) == {"off", "2_1_3"}


@pytest.mark.slow
def test_whole_steps_are_compared_side_by_side(home):
  """Responses follow a trace; a drafter trains."""
  result = found(
    home,
    "benchmarks.step",
    *tiny_run(home, *commands.DRAFTING.items()),
    "--sides=plain,ngram_3,tlt",
    *("--steps=2", "--warm_up=1", "--lengths=log-normal"),
    f"--workdir={home / 'bench_step'}",
  )
  assert result["identical"] and result["near_ties"] == 0 and result["steps"] == 2
  assert result["sides"]["plain"]["speedup_step"] == 1
  assert result["shown"] == "tlt" and result["harvested_share"] >= 0


def test_side_by_side_needs_a_drafter_or_sides_without_one(home):
  message = error(run(home, "benchmarks.step", *tiny_run(home)))
  assert "nothing drafts on side 'frozen'" in message


def whole_run(home, workdir) -> list[str]:
  """Arguments of a run of two tiny steps, each with a checkpoint."""
  settings = {"checkpoint.every": 1, "steps": 2, "optimizer.total": 30}
  return [
    *tiny_run(home, *commands.DRAFTING.items(), *settings.items()),
    *("--scenario=elsewhere", "--seeds=0", "--sides=plain,tlt", "--probe_every=1"),
    *("--probe_prompts=1", "--probe_strategy=2_1_3", f"--workdir={workdir}"),
  ]


@pytest.mark.slow
def test_a_whole_run_that_is_killed_ends_like_one_that_is_not(home, tmp_path):
  """It has each step once; done again, nothing is done."""
  args = {name: whole_run(home, tmp_path / name) for name in ("straight", "killed")}
  with commands.start(home, "benchmarks.run", *args["killed"]) as process:
    for line in process.stdout:
      if line.startswith("seed 0, step 1/2"):
        process.kill()
    process.stderr.read()
  losses = {}
  for name, of_run in args.items():
    s = found(home, "benchmarks.run", *of_run)
    assert s["steps"] == 2 and list(s["sides"]) == ["plain", "tlt"]
    assert s["updates_equal"] and s["differing_tokens"] == s["near_ties"] == 0
    folder = tmp_path / name / "elsewhere"
    lines = metrics.read(folder / "seed_0" / "metrics.jsonl")
    assert [r["step"] for r in lines] == [0, 1, 2]
    for r in lines[:2]:
      parts = sum(r[f"tlt/{key}"] for key in run_record.PARTS.values())
      assert parts == pytest.approx(r["tlt/rollout_s"])
      assert r["plain/passes"] == r["plain/tokens"] == r["tlt/tokens"]
    assert [step for step, _ in s["sides"]["tlt"]["probes"]] == [0, 1, 2]
    assert json.loads((folder / "summary.json").read_text()) == s
    assert (folder / "summary.png").stat().st_size > 20_000
    losses[name] = [r.get("policy/loss") for r in lines]
  assert losses["killed"] == losses["straight"]
  assert found(home, "benchmarks.run", *of_run) == s


@pytest.mark.slow
def test_a_whole_run_of_two_processes(home, tmp_path):
  """Each has a slice; all that it writes comes from the first one."""
  args = ["--processes=2", "--", "benchmarks.run", *whole_run(home, tmp_path)]
  s = found(home, "launch", *args)
  assert s["steps"] == 2 and s["updates_equal"] and s["differing_tokens"] == 0


# Seconds of a rollout by side; other parts of a step take 2 s.
ROLLOUT = {"plain": 8.0, "frozen": 4.0, "tlt": 3.0}
PROBES = {"frozen": [3.0, 2.5], "tlt": [1.0, 4.0]}  # tokens per pass at steps 0 and 2


def records(seed: int) -> list[dict]:
  """Two steps, and the record behind the last; seed 1 takes twice as long."""
  made = [{"step": step, "reward/mean": 0.5 * step} for step in range(2)] + [{"step": 2}]
  zero = (*run_record.PARTS.values(), "updates", "near_ties", "differing_tokens")
  for r in made[:2]:
    for side, seconds in ROLLOUT.items():
      trained = side == "tlt"
      r |= {f"{side}/{key}": 0.0 for key in (*zero, "logp_apart")}
      r |= {
        f"{side}/rollout_s": seconds * (1 + seed),
        f"{side}/training_s": 1.0 * trained,
        f"{side}/step_s": seconds * (1 + seed) + trained + 2,
        f"{side}/tokens": 100,
        f"{side}/passes": 100 if side == "plain" else 40,
        f"{side}/idle_s": 2.0,
        f"{side}/harvested_s": 1.5 * trained,
      }
  made[0]["updates_equal"] = 1.0
  for side, (first, last) in PROBES.items():
    made[0][f"{side}/probe"], made[2][f"{side}/probe"] = first, last
  return made


def test_what_whole_runs_come_to():
  """Two seeds of two steps: ratios over all four, curves as means over seeds."""
  runs = {seed: records(seed) for seed in (0, 1)}
  s = run_summary.summarize("drift", list(ROLLOUT), runs)
  tlt = s["sides"]["tlt"]
  assert s["steps"] == 4 and s["reward"] == [(0, 0.0), (1, 0.5)]
  assert tlt["over"]["frozen"]["rollout"]["interval"] == pytest.approx([4 / 3, 4 / 3])
  assert tlt["over"]["plain"]["step"]["mean"] == pytest.approx((10 / 6 * 18 / 9) ** 0.5)
  assert tlt["over"]["plain"]["total"]["mean"] == pytest.approx((10 + 18) / (6 + 9))
  assert tlt["tokens_per_pass"] == 2.5 and tlt["harvested_s"] == 6
  assert tlt["learning"][0] == [(0.0, 0.0, 1.0), (3.0, 2.0, 4.0)]
  assert tlt["above_frozen_from"] == 2 and tlt["probes"] == [(0, 1.0), (2, 4.0)]


def test_the_interval_of_a_ratio_of_sums():
  """By hand: Student's t over two turns."""
  found = interleave.ratio_of_totals([3, 5], [2, 2])
  half = 12.706 * np.std([3 - 4, 5 - 4], ddof=1) / 2**0.5 / 4
  assert found["mean"] == 2
  assert found["interval"] == pytest.approx([2 * np.exp(-half), 2 * np.exp(half)], rel=1e-4)


def test_every_turn_begins_with_another_side_and_the_warm_up_is_left_out():
  called = []
  calls = {name: lambda turn, name=name: called.append((turn, name)) for name in "abc"}
  measured = list(interleave.turns(calls, repeats=2, warm_up=2))
  assert len(measured) == 2
  assert [name for turn, name in called if turn == 1] == ["b", "c", "a"]
  assert sorted(called) == [(turn, name) for turn in range(4) for name in "abc"]


@pytest.mark.parametrize("file", ["tail.py:8", "smollm2.py"])
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_a_scenario_sets_keys_of_any_config(name, file):
  """But none that the command line has set."""
  config = commands.read_run(file)
  config = dataclasses.replace(config, drafter="mine")
  own = scenarios.apply(name, config, {"drafter"})
  assert own.drafter == "mine" and own.steps >= 100
  assert "ngram_3" in own.strategies or name != "cold"
  with pytest.raises(ValueError, match="give --config.drafter=DIR"):
    scenarios.apply("elsewhere", config, {})


@pytest.mark.parametrize(
  "side, strategies, drafts, trains",
  [
    ("plain", "", False, False),
    ("tlt", "up to 4 live: off or 3_1_4 or 8_1_9; up to 16 live: off or 3_1_4", True, True),
    ("ngram", "up to 4 live: {0}; up to 16 live: {0}", False, False),
    ("3_1_4", "up to 16 live: 3_1_4", True, False),
  ],
)
def test_a_side_is_the_run_with_other_settings(side, strategies, drafts, trains):
  config = commands.read_run("tail.py")
  own = sides.settings(side, config)
  expected = strategies.format("off or ngram_3 or ngram_5")
  assert levels.parse(own.strategies) == levels.parse(expected)
  assert bool(own.drafter) == drafts
  assert (drafts and own.spot.train) == trains


def test_speculation_is_checked_token_by_token(home, chat):
  """On a file of prompts, which are asked again when there are no more."""
  sizes = ["--strategies=2_1_3", "--tokens=100", "--batch=4"]
  result = found(home, "check_lossless", *chat, "--drafter=eagle2", *sizes)
  assert set(result["strategies"]) == {"2_1_3"}
  assert result["total_tokens"] >= 100
  assert result["differing_tokens"] == 0
  without = run(home, "check_lossless", *tiny_run(home))
  assert "give --drafter" in error(without)
