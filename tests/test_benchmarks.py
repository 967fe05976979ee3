"""Benchmarks and checks as a user runs them, to their last line, at the smallest sizes."""

import json
import signal
import sys

import numpy as np
import pytest

from benchmarks import run_record
from experiments import interleave
from experiments import sides
from tests import commands
from tlt_jax import metrics
from tlt_jax.spec_decode.speculation import levels

home, chat = commands.home, commands.chat
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


@pytest.mark.slow
def test_an_rl_run_that_is_stopped_is_summed_up_and_goes_on(home, tmp_path):
  args = [*tiny_run(home, *commands.DRAFTING.items()), f"--workdir={tmp_path / 'run'}"]
  with commands.start(home, "benchmarks.rl_run", *args, "--config.steps=999") as process:
    for line in process.stderr:
      if "step 2/999" in line:
        process.send_signal(signal.SIGTERM)
        break
    stdout, _ = process.communicate()
  first = json.loads(stdout.splitlines()[-1])
  assert process.returncode and 2 <= first["steps"] < 999
  steps = first["steps"] + 2
  last = found(home, "benchmarks.rl_run", *args, f"--config.steps={steps}")
  assert last["steps"] == steps and len(last["first_tokens_s"]) == 2
  assert 0 < last["update_share"] < 1 and last["seconds"]["evaluations"] > 0


THEIRS = """
import json, sys
_, folder, dtype = sys.argv
print(json.dumps({"torch": "none"}), flush=True)
for line in sys.stdin:
  asked = json.loads(line)
  count = len(asked["prompts"]) * asked["tokens"]
  print(json.dumps({"seconds": count / 1000, "tokens": count}), flush=True)
"""


@pytest.mark.slow
def test_rollouts_beside_those_of_another_process(home, chat, tmp_path):
  """Which takes a millisecond per token here, and is asked as transformers is."""
  (tmp_path / "theirs.py").write_text(THEIRS)
  python = tmp_path / "python"
  python.write_text(
    f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path}/theirs.py "$@"\n'
  )
  python.chmod(0o755)
  few = ["--live=1,2", "--tokens=8", "--repeats=1", "--strategies=ngram_3"]
  result = found(home, "benchmarks.beside_transformers", *chat, f"--python={python}", *few)
  assert list(result["live"]) == ["1", "2"]
  for measured in result["live"].values():
    plain = measured["plain"]
    assert measured["transformers"]["tokens_per_s"] == pytest.approx(1000)
    assert plain["speedup"] == pytest.approx(plain["tokens_per_s"] / 1000)
    assert measured["ngram_3"]["mean_acceptance_length"] >= 1
  none = commands.run(home, "benchmarks.beside_transformers", *chat, "--python=false", *few)
  assert "names one with torch and transformers" in commands.error(none)


def whole_run(home, workdir) -> list[str]:
  """Arguments of a run of two tiny steps, each with a checkpoint."""
  settings = {"checkpoint.every": 1, "steps": 2, "optimizer.total": 30}
  return [
    *tiny_run(home, *commands.DRAFTING.items(), *settings.items()),
    *("--scenario=elsewhere", "--seeds=0", "--sides=plain,tlt,block", "--probe_every=1"),
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
    assert s["steps"] == 2 and list(s["sides"]) == ["plain", "tlt", "block"]
    assert s["updates_equal"] and s["differing_tokens"] == s["near_ties"] == 0
    folder = tmp_path / name / "elsewhere"
    lines = metrics.read(folder / "seed_0" / "metrics.jsonl")
    assert [r["step"] for r in lines] == [0, 1, 2]
    for r in lines[:2]:
      parts = sum(r[f"tlt/{key}"] for key in run_record.PARTS.values())
      assert parts == pytest.approx(r["tlt/rollout_s"])
      assert r["plain/passes"] == r["plain/tokens"] == r["tlt/tokens"]
    assert list(s["sides"]["block"]["over"]) == ["plain", "tlt"]
    for side in ("tlt", "block"):
      assert [step for step, _ in s["sides"][side]["probes"]] == [0, 1, 2]
    assert json.loads((folder / "summary.json").read_text()) == s
    assert (folder / "summary.png").stat().st_size > 20_000
    losses[name] = [r.get("policy/loss") for r in lines]
  assert losses["killed"] == losses["straight"]
  assert found(home, "benchmarks.run", *of_run) == s


def test_the_interval_of_a_ratio_of_sums():
  """By hand: Student's t over two turns."""
  found = interleave.ratio_of_totals([3, 5], [2, 2])
  half = 12.706 * np.std([3 - 4, 5 - 4], ddof=1) / 2**0.5 / 4
  assert found["mean"] == 2
  assert found["interval"] == pytest.approx([2 * np.exp(-half), 2 * np.exp(half)], rel=1e-4)


TAIL = "up to 4 live: off or 3_1_4 or 8_1_9; up to 16 live: off or 3_1_4"


@pytest.mark.parametrize(
  "side, strategies, drafts, trains",
  [
    ("plain", "", False, False),
    ("tlt", TAIL, True, True),
    ("block", TAIL, True, True),
    ("3_1_4", "up to 16 live: 3_1_4", True, False),
  ],
)
def test_a_side_is_the_run_with_other_settings(side, strategies, drafts, trains):
  config = commands.read_run("tail.py")
  own = sides.settings(side, config)
  assert levels.parse(own.strategies) == levels.parse(strategies)
  assert bool(own.drafter) == drafts
  assert (drafts and own.spot.train) == trains


def test_speculation_is_checked_token_by_token(home, chat):
  """On a file of prompts, which are asked again when there are no more."""
  sizes = ["--strategies=2_1_3", "--tokens=100", "--batch=4"]
  result = found(home, "check_lossless", *chat, "--drafter=eagle2", *sizes)
  assert set(result["strategies"]) == {"2_1_3"}
  assert result["total_tokens"] >= 100
  assert result["differing_tokens"] == 0
