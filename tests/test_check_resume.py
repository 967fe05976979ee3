"""The command that kills runs: what it compares, and that it runs."""

import json
import shutil

import pytest

from experiments import outcomes
from tests import commands
from tlt_jax import metrics

home = commands.home


@pytest.mark.slow
def test_a_killed_run_is_compared_with_a_whole_one(home, tmp_path):
  """And what is compared is all but memory, seconds and ratios of them."""
  args = commands.tiny_run(home, *commands.DRAFTING.items())
  more = ["--steps=2", "--kills=1", f"--workdir={tmp_path}"]
  found = commands.found(home, "check_resume", *args, *more)
  assert found["kills"] == 1
  assert found["differing"] == []
  assert len(found["updates"]) == found["runs"] + 1
  assert min(found["updates"]) > 0

  first = tmp_path / "first"
  whole = outcomes.of(first)
  assert outcomes.of(tmp_path / "killed_0") == whole
  for file, change, differs in (
    ("metrics", lambda r: r | {"step/seconds_s": 99.0, "memory/x": 1}, []),
    ("metrics", lambda r: r | {"rollout/realised_gain": 9.0}, []),
    ("metrics", lambda r: r | {"policy/loss": 99.0}, ["metrics"]),
    ("rollouts", lambda r: r | {"outcome": []}, ["responses"]),
    ("rollouts", lambda r: r | {"chunks": []}, ["trained"]),
  ):
    other = shutil.copytree(first, tmp_path / "other", dirs_exist_ok=True)
    records = [change(r) for r in metrics.read(first / f"{file}.jsonl")]
    (other / f"{file}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    ended = outcomes.of(other)
    assert [name for name in whole if ended[name] != whole[name]] == differs


@pytest.mark.slow
def test_a_process_of_a_job_is_told_to_stop(home, tmp_path):
  """The job says so in one line, and goes on as if nothing had been."""
  args = commands.tiny_run(home, *commands.DRAFTING.items())
  more = ["--steps=2", "--kills=1", "--processes=2", "--signal=SIGTERM"]
  found = commands.found(home, "check_resume", *args, *more, f"--workdir={tmp_path}")
  assert (found["kills"], found["differing"]) == (1, [])
  assert sum(found["lines"].values()) == 1
  assert found["longest_end_s"] > 0
