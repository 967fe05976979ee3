"""Workdirs: who may go on in which, and that asking changes nothing."""

import errno
import json
import os
import pathlib
import signal
import socket

import jax.numpy as jnp
import pytest

from experiments import config as config_lib
from experiments import trees
from experiments import workdirs
from tests import commands
from tests import forked
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
  files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
  return {p: p.read_bytes() for p in files}


def steps(path: pathlib.Path) -> list[int]:
  return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run_text(text: str, folder: pathlib.Path):
  """Starts a process that can use `workdirs` and `folder`."""
  begin = "import os, time\nfrom experiments import workdirs\n"
  begin += f"folder = {str(folder)!r}\n"
  return forked.start(["-c", begin + text], str(commands.ROOT), os.environ)


LOCKS = "workdirs.lock(workdirs.pathlib.Path(folder))\nprint('mine', flush=True)\n"


def take(folder: pathlib.Path) -> str:
  """What another process says that locks a folder: 'mine', or its error."""
  with run_text(LOCKS, folder) as process:
    out, error = process.communicate()
  return out.strip() or error.splitlines()[-1]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_is_one_jobs_until_that_ends(tmp_path, is_new):
  """From when it is opened on; another process is refused with the name of this one."""
  folder = tmp_path / "runs" / "run" if is_new else made(tmp_path / "run", 2)
  workdirs.open(str(folder), config())
  workdirs.open(str(folder), config())
  owner = f"in use by process {os.getpid()} on {socket.gethostname()}"
  assert owner in take(folder)
  workdirs.unlock(folder)
  assert take(folder) == "mine"


def test_of_many_that_start_together_one_has_the_folder(tmp_path):
  """The others name it, also where an earlier owner left its name."""
  for folder in (tmp_path / "new", tmp_path / "old"):
    if folder.name == "old":
      folder.mkdir()
      (folder / ".lock").write_text("process 1 on other\n")
    end = tmp_path / f"end {folder.name}"
    waits = LOCKS + f"while not os.path.exists({str(end)!r}): time.sleep(0.02)\n"
    started = [run_text(waits, folder) for _ in range(4)]
    errors, winners = [], []
    for process in started:
      if process.stdout.readline():
        winners.append(process)
      else:
        errors.append(process.communicate()[1].splitlines()[-1])
    [winner] = winners
    assert len(errors) == 3
    assert all(f"in use by process {winner.pid} on" in line for line in errors)
    end.touch()
    for process in started:
      with process:
        process.wait()
    assert folder.exists() == (folder.name == "old") and take(folder) == "mine"


def test_a_kill_frees_a_folder_though_children_live_on(tmp_path):
  """Those that were forked have the open file, too."""
  text = LOCKS + (
    "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(100)\n"
  )
  process = run_text(text, tmp_path / "run")
  assert process.stdout.readline() == "mine\n"
  child = int(process.stdout.readline())
  try:
    assert f"in use by process {process.pid}" in take(tmp_path / "run")
    process.kill()
    process.wait()
    os.kill(child, 0)  # it is there
    assert take(tmp_path / "run") == "mine"
  finally:
    os.kill(child, signal.SIGKILL)
    with process:
      process.wait()


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, caplog):
  def flock(file, how):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(workdirs.fcntl, "flock", flock)
  run = workdirs.open(str(tmp_path / "run"), config())
  run.begin(0)
  assert (tmp_path / "run" / "config.json").exists()
  assert "without locks (No locks available): make sure that no second" in caplog.text
  workdirs.unlock(tmp_path / "run")


def test_a_lock_that_its_owner_removes_meanwhile_is_no_lock(tmp_path, monkeypatch):
  """Between opening and locking the file: else two could have the folder."""
  folder, inner, left = tmp_path / "run", workdirs.fcntl.flock, [1]

  def flock(file, how):
    if left:
      left.pop()
      (folder / ".lock").unlink()
      folder.rmdir()
    inner(file, how)

  monkeypatch.setattr(workdirs.fcntl, "flock", flock)
  workdirs.lock(folder)
  assert (folder / ".lock").exists() and "in use by" in take(folder)
  workdirs.unlock(folder)
  assert not folder.exists()


def test_a_new_folder_is_gone_if_the_run_does_not_begin(tmp_path):
  """With the folders that were made for it."""
  folder = tmp_path / "runs" / "run"
  run = workdirs.open(str(folder), config(), fork="")
  assert run.start is None and run.log is None
  assert [path.name for path in folder.iterdir()] == [".lock"]
  workdirs.unlock(folder)
  assert not (tmp_path / "runs").exists()
  workdirs.open(str(folder), config(), fork="").begin(0)
  workdirs.unlock(folder)
  read = json.loads((folder / "config.json").read_text())
  assert trees.validate(config_lib.RunConfig, read) == config()
  assert not (folder / ".lock").exists()


def test_results_go_to_no_workdir(tmp_path):
  workdirs.lock_output(tmp_path / "results")
  with pytest.raises(workdirs.WorkdirError, match="is the workdir of a run"):
    workdirs.lock_output(made(tmp_path / "run"))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"policy": "b"}, "policy was"),
    ({"seed": 1, "drafter": ""}, "drafter was .* seed was"),
    ({"rollout.slots": 8}, "rollout.slots was"),
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


def test_a_run_from_before_responses_were_carried_over_goes_on(tmp_path):
  folder = made(tmp_path / "run", 2)
  file = folder / workdirs.CONFIG
  old = json.loads(file.read_text())
  del old["rollout"]["carry"]
  file.write_text(json.dumps(old))
  assert workdirs.open(str(folder), config()).start.latest() == 2


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
