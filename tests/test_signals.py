"""Real signals at every stage of a command: its exit status, its lines, what it saved."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import distributed
from tests import commands
from tests import tiny
from tlt_jax import checkpoint

home = commands.home

# Runs a command that sends signals to its own process group from one of its stages. There
# it then waits for long, in Python or, as a compiler does, outside of it.
SENDS = """
import hashlib, importlib, os, runpy, signal, sys, threading, time
command, stage, numbers, wait, home = sys.argv[1:6]
del sys.argv[1:6]
sys.path.insert(0, home)
os.setsid()
stage, nth = stage.split()
calls = int(nth)
owner, _, name = stage.rpartition(".")
module, _, kind = owner.partition(":")
owner = importlib.import_module(module)
owner = getattr(owner, kind) if kind else owner
known = getattr(owner, name)

def send():
  for number in numbers.split(","):
    os.killpg(0, int(number))
    time.sleep(0.5)

def called(*args, **options):
  global calls
  calls -= 1
  if calls:
    return known(*args, **options)
  setattr(owner, name, known)
  if "," in numbers:
    threading.Thread(target=send, daemon=True).start()
  else:
    send()
  if wait == "Python":
    time.sleep(100)
  if wait == "outside":
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
  return known(*args, **options)

setattr(owner, name, called)
sys.argv[0] = command
runpy.run_module(command, run_name="__main__")
"""
INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
# What is called there, and the how many-th call it is; whether the run saves a state then,
# and the step of the one that is left.
STAGES = {
  "compiling": ("tlt_jax.programs:Pool.get 1", False, None),
  "first evaluation": ("tlt_jax.rl.sample:Sampler._run 1", True, None),
  "rollout": ("tlt_jax.rl.sample:Sampler._run 3", True, 1),
  "update": ("tlt_jax.rl.learner:Learner.train 1", True, 1),
  "last evaluation": ("tlt_jax.rl.sample:Sampler._run 4", True, 2),
  "export": ("tlt_jax.models.hf.save 1", False, 2),
  "figures": ("experiments.plot.plot_all 1", False, 2),
}


def send(home, command, stage, numbers, wait, *args) -> subprocess.CompletedProcess:
  sent = stage, ",".join(map(str, numbers)), wait, home
  return commands.run_text(SENDS, f"experiments.{command}", *sent, *args)


def unusual(result: subprocess.CompletedProcess) -> list[str]:
  """Its lines on stderr that are neither the log nor empty."""
  usual = re.compile(r"\d\d:\d\d:\d\d |step \d+/\d+ ")
  return [x for x in result.stderr.splitlines() if x and not usual.match(x)]


def train(home, tmp_path) -> list[str]:
  own = {"steps": 2, "evaluation.every": 2}
  return [*commands.tiny_run(home, *own.items()), f"--workdir={tmp_path}"]


@pytest.mark.parametrize("number", [INT, tiny.slow(TERM)])
@pytest.mark.parametrize(
  "stage", [tiny.slow(x) if x in ("update", "figures") else x for x in STAGES]
)
def test_a_signal_ends_a_run_in_order(home, tmp_path, stage, number):
  """With what it has done saved, in a line or two, and the status that SIGTERM has."""
  where, saves, step = STAGES[stage]
  result = send(home, "train", where, [number], "no", *train(home, tmp_path))
  assert result.returncode == distributed.STOPPED, result.stderr
  *before, last = unusual(result)
  assert before == ["stopping; Ctrl-C again ends at once"] * (saves and number == INT)
  resumes = "; the same command resumes" * (stage != "compiling")
  assert last == f"stopped{resumes}"
  assert checkpoint.latest(tmp_path / "checkpoints") == step


@pytest.mark.parametrize("wait", ["Python", "outside"])
def test_a_second_ctrl_c_ends_at_once(home, tmp_path, wait):
  """Also where Python runs no handler, as while a program compiles."""
  where, _, _ = STAGES["update"]
  result = send(home, "train", where, [INT, INT], wait, *train(home, tmp_path))
  assert result.returncode == 130
  assert unusual(result) == [
    "stopping; Ctrl-C again ends at once",
    "ended at once by the second Ctrl-C; the same command resumes from the last checkpoint",
  ]


def test_a_long_compilation_does_not_keep_a_run_that_has_nothing_to_save(home, tmp_path):
  """The handler cannot run before it ends; the process does."""
  where, _, _ = STAGES["compiling"]
  result = send(home, "train", where, [INT], "outside", *train(home, tmp_path))
  assert result.returncode == distributed.STOPPED
  assert unusual(result) == ["stopped"]


@pytest.mark.parametrize(
  "command, stage, step",
  [
    tiny.slow("warm_start", "tlt_jax.rl.learner:Learner.train 2", 2),
    ("train_drafter", "tlt_jax.spec_decode.spot.offline:DraftLearner.train 2", 2),
  ],
)
def test_the_other_trainings_save_as_well(home, tmp_path, command, stage, step):
  configs = {"warm_start": "warm_start", "train_drafter": "drafter"}
  config = f"experiments/configs/{configs[command]}.py:smoke"
  args = [f"--config={config}", "--config.steps=4", f"--workdir={tmp_path}"]
  if command == "train_drafter":
    args += commands.tiny_run(home, flag="run")
    args += ["--config.learner.buckets=((2,64),)", "--config.responses.prompts=8"]
  result = send(home, command, stage, [INT], "no", *args)
  assert result.returncode == distributed.STOPPED, result.stderr
  assert unusual(result) == [
    "stopping; Ctrl-C again ends at once",
    "stopped; the same command resumes",
  ]
  assert checkpoint.latest(tmp_path / "checkpoints") == step


def test_a_command_that_saves_nothing_ends_in_one_line(home):
  stage = "tlt_jax.rl.sample:Sampler._run 1"
  args = [*commands.tiny_run(home), f"--model={home / 'policy'}", "--prompts=2"]
  result = send(home, "evaluate", stage, [INT], "Python", *args)
  assert result.returncode == distributed.STOPPED
  assert unusual(result) == ["stopped"]


# Ctrl-C of a terminal, which reaches the launcher, its processes, and their verifiers.
@pytest.mark.parametrize(
  "numbers, status", [([INT], distributed.STOPPED), tiny.slow([INT, INT], 130)]
)
def test_ctrl_c_reaches_all_processes_of_a_job(home, tmp_path, numbers, status):
  (home / "interrupting.py").write_text(f"""
import os, pathlib, signal, time
from tlt_jax import processes
from user_rewards import digits as score

run = pathlib.Path({str(tmp_path)!r})

def digits(prompt, response, answer):
  records = run / "metrics.jsonl"
  if records.exists() and len(records.read_text().splitlines()) == 2:
    if processes.is_first() and not (run / "sent").exists():
      (run / "sent").touch()
      for number in {numbers}:
        os.killpg(0, number)
        time.sleep(1.0)
  return score(prompt, response, answer)
""")
  own = {"steps": 4, "reward": "interrupting.digits", "verifier.processes": 0}
  args = [*commands.tiny_run(home, *own.items()), f"--workdir={tmp_path}"]
  command = ["experiments.launch", "--", "experiments.train", *args]
  env = os.environ | {"PYTHONPATH": f"{home}{os.pathsep}{commands.ROOT}"}
  result = subprocess.run(
    [sys.executable, "-m", *command],
    cwd=commands.ROOT,
    env=env,
    capture_output=True,
    text=True,
    start_new_session=True,
    timeout=300,
  )
  assert result.returncode == status, result.stderr
  lines = ["stopping; Ctrl-C again ends at once"]
  if status == 130:
    assert unusual(result) == [*lines, "ended at once by the second Ctrl-C"]
    return
  assert unusual(result) == [*lines, "stopped; the same command resumes"]
  assert checkpoint.latest(tmp_path / "checkpoints") == 3


STARTS = """
import os, signal, sys, threading, time
from tlt_jax.rl import judge
sys.path.insert(0, sys.argv[1])
os.setsid()
signal.signal(signal.SIGINT, lambda *_: None)

def interrupt():
  while True:
    os.killpg(0, signal.SIGINT)
    time.sleep(0.05)

threading.Thread(target=interrupt, daemon=True).start()
made = judge.Judge("user_rewards.digits")
scores = made(["p"], ["12ab"], [None])
print(scores.reward, list(scores.failure), flush=True)
os._exit(0)
"""


def test_verifiers_start_while_ctrl_c_reaches_them(home):
  result = commands.run_text(STARTS, home)
  assert (result.stdout, result.stderr) == ("[0.5] ['']\n", "")


def test_ctrl_c_while_a_command_imports_its_libraries_is_one_line():
  command = [sys.executable, "-m", "experiments.train"]
  process = subprocess.Popen(
    command, cwd=commands.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
  )
  while "jax" not in pathlib.Path(f"/proc/{process.pid}/maps").read_text():
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  _, lines = process.communicate(timeout=60)
  assert (process.returncode, lines) == (distributed.STOPPED, "\nstopped\n")
