"""Workdirs: who may go on in which, and that asking changes nothing."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments import config as config_lib
from experiments import trees
from experiments import workdirs
from tests import commands
from tlt_jax import checkpoint

CONFIG = commands.read_run("countdown.py:smoke", {"steps": 8, "drafter": "eagle2"})
STATE = {"policy": jnp.arange(3.0), "drafter": jnp.zeros(2)}


def config(changes: dict | None = None) -> config_lib.RunConfig:
  return trees.change(CONFIG, changes or {})


def made(folder: pathlib.Path, *steps: int) -> pathlib.Path:
  """The folder of a run that saved these steps."""
  run = workdirs.open(str(folder), config())
  run.begin(0)
  with run.checkpoints as checkpoints:
    for step in steps:
      checkpoints.save(step, STATE, {"step": step}, force=True)
  for name in ("metrics.jsonl", "rollouts.jsonl"):
    lines = [json.dumps({"step": step}) + "\n" for step in range(max(steps, default=3))]
    (folder / name).write_text("".join(lines))
  return folder


def contents(folder: pathlib.Path) -> dict:
  return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps(path: pathlib.Path) -> list[int]:
  return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_folder_is_one_jobs_until_that_ends(tmp_path):
  """Of another process it is refused with its name, of this one not."""
  folder = made(tmp_path / "run", 2)
  workdirs.open(str(folder), config())
  ask = (
    "from experiments import workdirs\n"
    f"workdirs.lock(workdirs.pathlib.Path({str(folder)!r}))\n"
    "print('mine', flush=True)\n"
  )

  def run():
    return subprocess.run(
    [sys.executable, "-c", ask], cwd=commands.ROOT, capture_output=True, text=True
  )

  refused = run().stderr.splitlines()[-1]
  assert f"in use by process {os.getpid()}" in refused
  workdirs._locked.pop(folder.resolve()).close()  # as when this process ends
  assert run().stdout == "mine\n"


def test_a_new_folder_is_not_made_before_the_run_begins(tmp_path):
  run = workdirs.open(str(tmp_path / "run"), config(), fork="")
  assert run.start is None and run.log is None and not (tmp_path / "run").exists()
  run.begin(0)
  read = json.loads((tmp_path / "run" / "config.json").read_text())
  assert trees.validate(config_lib.RunConfig, read) == config()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"policy": "b"}, "policy was"),
    ({"seed": 1, "drafter": ""}, "drafter was .* seed was"),
    ({"rollout.slots": 4}, "rollout.slots was"),
    ({"steps": 3}, "4 steps already"),
  ],
)
def test_other_settings_are_refused_and_change_nothing(tmp_path, changes, message):
  folder = made(tmp_path / "run", 2, 4)
  before = contents(tmp_path)
  with pytest.raises(workdirs.WorkdirError, match=message):
    workdirs.open(str(folder), config(changes), fork="")
  assert contents(tmp_path) == before


def test_a_run_may_be_longer_and_be_saved_and_evaluated_otherwise(tmp_path):
  folder = made(tmp_path / "run", 2, 4)
  changes = {"steps": 4, "evaluation.every": 0, "compare.every": 2}
  changes |= {"checkpoint.every": 1, "checkpoint.keep": 3}
  run = workdirs.open(str(folder), config(changes))
  assert run.start.latest() == 4 and run.log == folder / "rollouts.jsonl"


def test_what_was_not_saved_binds_nothing(tmp_path):
  """But its decisions are followed only where the settings are the same."""
  folder = made(tmp_path / "run")
  assert workdirs.open(str(folder), config()).log == folder / "rollouts.jsonl"
  run = workdirs.open(str(folder), config({"seed": 1}))
  assert run.start is None and run.log is None


def test_files_bind_the_keys_that_they_depend_on(tmp_path):
  folder = made(tmp_path / "run")
  (folder / "made.npz").write_text("")
  holds = {"made.npz": ("seed", "policy"), "none.npz": ("drafter",)}
  workdirs.open(str(folder), config({"drafter": "", "steps": 1}), holds=holds)
  with pytest.raises(workdirs.WorkdirError, match="seed was 0 and is 1 now"):
    workdirs.open(str(folder), config({"drafter": "", "seed": 1}), holds=holds)


def test_a_fork_starts_from_the_latest_checkpoint_and_writes_elsewhere(tmp_path):
  """Nothing is there before it begins, so that a slip can be corrected."""
  old, new = made(tmp_path / "old", 2, 4), tmp_path / "new"
  before = contents(old)
  for changes in ({"policy": "typo"}, {"policy": "b"}):
    run = workdirs.open(str(old), config(changes), fork=str(new))
    assert run.path == new and run.start.folder == old / "checkpoints"
    assert run.not_restored == () and not (new / "checkpoints").exists()
    run.begin(4)  # the first is killed before it has saved
  assert json.loads((new / "config.json").read_text())["policy"] == "b"
  origin = json.loads((new / "forked_from.json").read_text())
  assert origin == {"workdir": str(old), "step": 4}
  assert steps(new / "metrics.jsonl") == steps(new / "rollouts.jsonl") == [0, 1, 2, 3]
  assert contents(old) == before


def test_a_fork_resumes_in_its_own_folder(tmp_path):
  """By either command, before and after its first checkpoint."""
  old, new = made(tmp_path / "old", 2, 4), tmp_path / "new"
  other = config({"seed": 1})
  workdirs.open(str(old), other, fork=str(new)).begin(4)
  for workdir, fork in ((old, str(new)), (new, "")):
    run = workdirs.open(str(workdir), other, fork=fork)
    assert (run.path, run.start.folder) == (new, old / "checkpoints")
    assert run.log == new / "rollouts.jsonl"
  with run.checkpoints as checkpoints:
    checkpoints.save(5, STATE, {}, force=True)
  for workdir, fork in ((old, str(new)), (new, "")):
    run = workdirs.open(str(workdir), other, fork=fork)
    assert (run.path, run.start.latest()) == (new, 5)
    assert run.start.folder == new / "checkpoints" and run.forked_from is None
    with pytest.raises(workdirs.WorkdirError, match="seed was 1 and is 0 now"):
      workdirs.open(str(workdir), config(), fork=fork)


@pytest.mark.parametrize(
  ("changes", "anew"),
  [
    ({"seed": 1, "steps": 9}, ()),
    ({"drafter": "eagle3"}, ("drafter",)),
    ({"spot.train": False}, ("drafter",)),
    ({"sampling.max_tokens": 9}, ("drafter",)),
    ({"algorithm": {"name": "ppo"}}, ("critic",)),
  ],
)
def test_a_fork_makes_anew_what_other_settings_need(tmp_path, changes, anew):
  old = made(tmp_path / "old", 2)
  run = workdirs.open(str(old), config(changes), fork=str(tmp_path / "new"))
  assert run.not_restored == anew
  like = {name: x for name, x in STATE.items() if name not in anew}
  step, restored, data = run.start.restore(like, without=run.not_restored)
  assert (step, data) == (2, {"step": 2}) and restored.keys() == like.keys()


def test_a_fork_takes_no_folder_that_is_not_its_own(tmp_path):
  old = made(tmp_path / "old", 2)
  taken = made(tmp_path / "taken", 2)
  (tmp_path / "file").write_text("")
  (tmp_path / "empty").mkdir()
  before = contents(tmp_path)
  for name in ("old", "taken", "file"):
    with pytest.raises(workdirs.WorkdirError):
      workdirs.open(str(old), config(), fork=str(tmp_path / name))
  workdirs.open(str(taken), config(), fork=str(tmp_path / "of_taken")).begin(2)
  with pytest.raises(workdirs.WorkdirError):
    workdirs.open(str(old), config(), fork=str(tmp_path / "of_taken"))
  workdirs.open(str(old), config(), fork=str(tmp_path / "empty"))
  with pytest.raises(checkpoint.CheckpointError):
    workdirs.open(str(tmp_path / "none"), config(), fork=str(tmp_path / "new"))
  assert {p: x for p, x in contents(tmp_path).items() if p in before} == before
  assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b"\x00\xff"])
def test_a_damaged_file_is_named(tmp_path, content):
  folder = made(tmp_path / "run", 2)
  (folder / "config.json").write_bytes(content)
  with pytest.raises(workdirs.WorkdirError, match="config.json"):
    workdirs.open(str(folder), config())
  (folder / "forked_from.json").write_bytes(content)
  with pytest.raises(workdirs.WorkdirError, match="forked_from.json"):
    workdirs.open(str(folder), config())
