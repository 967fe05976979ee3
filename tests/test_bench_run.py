"""Whole runs side by side: what made-up times come to, and a tiny run that is killed."""

import gc
import json
import weakref

import numpy as np
import pytest

from experiments import declarations
from experiments import keys
from experiments.bench import interleave
from experiments.bench import run_record
from experiments.bench import run_summary
from experiments.bench import scenarios
from experiments.bench import sides
from tests import commands
from tests import test_bench_step
from tlt_jax import metrics
from tlt_jax.spec_decode.speculation import levels

home, found = commands.home, commands.found
bench_run = commands.module("bench.run")

SIDES = ("plain", "frozen", "tlt")
ROLLOUT = {"plain": 8.0, "frozen": 4.0, "tlt": 3.0}  # seconds; other parts take 2 s
AFTER = {"tlt": 1.0}  # seconds of training after a rollout
PROBES = {"frozen": [3.0, 2.5], "tlt": [1.0, 4.0]}  # tokens per pass at steps 0 and 2


def records(seed: int) -> list[dict]:
  """Two steps, and the record behind the last; seed 1 takes twice as long."""
  made = [{"step": step, "reward/mean": 0.5 * step} for step in range(2)] + [{"step": 2}]
  for r in made[:2]:
    for side in SIDES:
      rollout_s = ROLLOUT[side] * (1 + seed)
      r |= {
        f"{side}/{key}": 0.0
        for key in (*run_record.PARTS.values(), "updates", "near_ties", "logp_apart")
      }
      r |= {
        f"{side}/rollout_s": rollout_s,
        f"{side}/training_s": AFTER.get(side, 0.0),
        f"{side}/step_s": rollout_s + AFTER.get(side, 0.0) + 2,
        f"{side}/tokens": 100,
        f"{side}/passes": 100 if side == "plain" else 40,
        f"{side}/idle_s": 2.0,
        f"{side}/harvested_s": 1.5 if side == "tlt" else 0.0,
        f"{side}/differing_tokens": 0,
      }
  made[0]["updates_equal"] = 1.0
  for side, (first, last) in PROBES.items():
    made[0][f"{side}/probe"], made[2][f"{side}/probe"] = first, last
  return made


def test_what_runs_come_to():
  """Two seeds of two steps: ratios over all four, curves as means over seeds."""
  runs = {seed: records(seed) for seed in (0, 1)}
  gains = {1: [{"step": 2, "frozen": 2.5, "tlt": 4.0, "limit": 5.0}]}
  s = run_summary.summarize("drift", SIDES, runs, gains)
  assert (s["steps"], s["seeds"], s["updates_equal"]) == (4, [0, 1], True)
  tlt = s["sides"]["tlt"]
  assert tlt["over"]["frozen"]["rollout"]["mean"] == pytest.approx(4 / 3)
  assert tlt["over"]["frozen"]["rollout"]["interval"] == pytest.approx([4 / 3, 4 / 3])
  assert tlt["over"]["plain"]["step"]["mean"] == pytest.approx((10 / 6 * 18 / 9) ** 0.5)
  assert tlt["over"]["plain"]["total"]["mean"] == pytest.approx((10 + 18) / (6 + 9))
  low, high = tlt["over"]["plain"]["total"]["interval"]
  assert low < 28 / 15 < high
  assert s["sides"]["frozen"]["over"]["tlt"]["total"]["mean"] == pytest.approx(15 / 16)
  assert tlt["tokens_per_pass"] == 2.5 and tlt["harvested_s"] == 6
  assert tlt["learning"][0] == [(0.0, 0.0, 1.0), (3.0, 2.0, 4.0)]
  assert tlt["above_frozen_from"] == 2 and tlt["probes"] == [(0, 1.0), (2, 4.0)]
  assert s["headroom"] == [gains[1][0] | {"seed": 1, "headroom": 1.0}]
  assert s["reward"] == [(0, 0.0), (1, 0.5)]


def test_a_drafter_that_falls_behind_again_is_not_above():
  frozen = [(0, 2.0), (5, 2.0), (10, 2.0)]
  above = lambda *values: run_summary.stays_above(
    [(step, x) for (step, _), x in zip(frozen, values, strict=True)], frozen
  )
  assert [above(1, 3, 3), above(3, 1, 3), above(3, 3, 3)] == [5, 10, 0]
  assert above(3, 3, 2) is None


def test_the_interval_of_a_ratio_of_sums():
  """Where the ratio is the same in every turn, there is no doubt; else Student's t."""
  same = interleave.ratio_of_totals([2, 4, 8], [1, 2, 4])
  assert same["mean"] == 2 and same["interval"] == pytest.approx([2, 2])
  found = interleave.ratio_of_totals([3, 5], [2, 2])
  half = 12.706 * np.std([3 - 4, 5 - 4], ddof=1) / 2**0.5 / 4
  assert found["mean"] == 2
  assert found["interval"] == pytest.approx([2 * np.exp(-half), 2 * np.exp(half)], rel=1e-4)


def test_the_seconds_of_a_rollout_by_what_its_slices_did():
  """One slice decodes for 4 s, the other for 2 s; it trains for 0.5 s and then waits."""
  s = test_bench_step.samples(4.0, passes=4, trained=2)
  assert run_record.seconds_by_part(s, rollout_s=4.5) == {
    "plain_s": 3.0,
    "speculation_s": 0.0,
    "idle_training_s": 0.25,
    "waiting_s": 0.75,
    "outside_s": 0.5,
  }


@pytest.mark.parametrize("file", ["tail.py:8", "smollm2.py", "countdown.py"])
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_a_scenario_sets_keys_of_any_config(name, file):
  """But none that the command line has set."""
  config = commands.read_run(file)
  given = {"drafter": "mine", "spot.rows": 7}
  own = scenarios.apply(name, config | {"drafter": "mine"}, given)
  assert own["drafter"] == "mine" and own["steps"] >= 100
  assert own["spot"]["rows"] == config["spot"]["rows"]
  assert own["optimizer"].get("total") in (None, own["steps"])
  assert levels.parse(own["strategies"])
  assert "ngram_3" in own["strategies"] or name != "cold"
  declarations.fill_in(keys.RUN, own, {})
  declarations.check(keys.RUN, own)
  rate = config["optimizer"]["learning_rate"]
  rate = min(3 * rate, 1e-4) if name == "drift" else rate
  assert own["optimizer"]["learning_rate"] == rate


def test_a_cold_run_has_n_grams_whatever_strategies_are_given():
  given = {"strategies": "up to 2 live: off or 2_1_3; up to 8 live: ngram_5"}
  config = commands.read_run("tail.py:8") | given
  own = scenarios.apply("cold", config, given)["strategies"]
  assert own == "up to 2 live: off or 2_1_3 or ngram_3; up to 8 live: ngram_5"


def test_the_learning_rate_falls_over_the_steps_that_are_asked_for():
  config = commands.read_run("tail.py:8")
  total = config["optimizer"]["total"]
  own = scenarios.apply("cold", config | {"steps": total + 7}, {"steps": total + 7})
  assert own["optimizer"]["total"] == total + 7


def test_scenarios_that_cannot_be():
  config = commands.read_run("tail.py:8")
  assert scenarios.apply("cold", config, {})["drafter"] == "eagle2"
  with pytest.raises(ValueError, match="give --config.drafter=DIR"):
    scenarios.apply("elsewhere", config, {})
  with pytest.raises(ValueError, match="did you mean 'cold'"):
    scenarios.apply("cool", config, {})


@pytest.mark.parametrize("texts", [["0", "x"], ["-1"], []])
def test_flags_that_list_numbers(texts):
  assert bench_run.numbers("seeds", ["0", "12"]) == [0, 12]
  with pytest.raises(ValueError, match="--seeds takes numbers such as 0,50"):
    bench_run.numbers("seeds", texts)


def test_the_programs_of_a_run_that_is_over_are_let_go():
  """They lie in cycles, and sides freeze all that is there once they are compiled."""

  class Pool:
    """What holds programs."""

  pool = Pool()
  pool.itself, kept = pool, weakref.ref(pool)
  gc.freeze()
  del pool
  gc.collect()
  assert kept() is not None
  sides.let_go()
  assert kept() is None


def tiny(home, workdir, headroom: str) -> list[str]:
  """Arguments of a run of two tiny steps, each with a checkpoint.

  Their programs are those of the tiny runs of other tests: the scenario changes nothing.
  """
  settings = {"checkpoint.every": 1, "steps": 2, "optimizer.total": 30}
  return [
    *commands.tiny_run(home, *commands.DRAFTING.items(), *settings.items()),
    *("--scenario=elsewhere", "--seeds=0", "--sides=plain,tlt"),
    *("--probe_every=1", f"--headroom={headroom}"),
    "--offline=experiments/configs/drafter.py:smoke",
    *("--offline.steps=1", "--offline.responses.prompts=2"),
    *("--offline.evaluation.prompts=1", "--offline.evaluation.strategies=('2_1_3',)"),
    f"--workdir={workdir}",
  ]


@pytest.mark.slow
def test_a_tiny_run(home, tmp_path):
  """All that it writes."""
  s = found(home, "bench.run", *tiny(home, tmp_path, headroom=""))
  assert (s["scenario"], s["steps"], list(s["sides"])) == ("elsewhere", 2, ["plain", "tlt"])
  assert s["updates_equal"] and s["differing_tokens"] == s["near_ties"] == 0
  assert s["logp_apart"] < 1e-4
  folder = tmp_path / "elsewhere"
  lines = metrics.read(folder / "seed_0" / "metrics.jsonl")
  assert [r["step"] for r in lines] == [0, 1, 2]
  for r in lines[:2]:
    parts = sum(r[f"tlt/{key}"] for key in run_record.PARTS.values())
    assert parts == pytest.approx(r["tlt/rollout_s"])
    assert r["plain/tokens"] == r["tlt/tokens"]
    assert r["plain/passes"] == r["plain/tokens"] and r["plain/training_s"] == 0
  assert sum(r["tlt/updates"] for r in lines[:2]) > 0
  assert [step for step, _ in s["sides"]["tlt"]["probes"]] == [0, 1, 2]
  assert (folder / "summary.png").stat().st_size > 20_000
  assert json.loads((folder / "summary.json").read_text()) == s


@pytest.mark.slow
def test_a_tiny_run_of_two_processes(home, tmp_path):
  """Each has a slice; all that it writes comes from the first one."""
  run = ["--processes=2", "--", "experiments.bench.run", *tiny(home, tmp_path, "")]
  s = found(home, "launch", *run)
  assert s["steps"] == 2 and s["updates_equal"] and s["differing_tokens"] == 0
  assert s["sides"]["tlt"]["updates"] > 0
  lines = metrics.read(tmp_path / "elsewhere" / "seed_0" / "metrics.jsonl")
  assert [r["step"] for r in lines] == [0, 1, 2]


@pytest.mark.slow
def test_a_run_that_is_killed_trains_the_same_policy(home, tmp_path):
  """It has each step once then; and a drafter that is trained to its limit.

  Done again, nothing is done.
  """
  args = {name: tiny(home, tmp_path / name, "2") for name in ("straight", "killed")}
  with commands.start(home, "bench.run", *args["killed"]) as process:
    for line in process.stdout:
      if line.startswith("seed 0, step 2/2"):
        process.kill()
    process.stderr.read()
  ended = {}
  for name, of_run in args.items():
    s = found(home, "bench.run", *of_run)
    (headroom,) = s["headroom"]
    assert headroom["step"] == 2 and headroom["limit"] >= 1
    folder = tmp_path / name / "elsewhere" / "seed_0"
    lines = metrics.read(folder / "metrics.jsonl")
    policy = (folder / "at_000002" / "policy" / "model.safetensors").read_bytes()
    ended[name] = [[r.get("policy/loss") for r in lines], policy]
  assert len(ended["killed"][0]) == 3 and ended["killed"] == ended["straight"]
  written = (folder / "metrics.jsonl").stat().st_mtime_ns
  assert found(home, "bench.run", *of_run) == s
  assert (folder / "metrics.jsonl").stat().st_mtime_ns == written
