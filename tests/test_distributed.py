"""Jobs of several processes: they do what one process does, and faults end all of them."""

import os
import pathlib
import shutil
import signal
import socket
import sys
import threading
import time

import jax
import numpy as np
import pytest

from experiments import distributed
from experiments import launcher
from experiments import outcomes
from tests import commands
from tlt_jax import checkpoint
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax import programs

home = commands.home

# A process of a job, without JAX. Process 1 does what it is told, the others wait.
CHILD = """
import os, pathlib, signal, sys, time
told = dict(arg.lstrip("-").split("=") for arg in sys.argv[1:] if "=" in arg)
me, what = int(told["process_id"]), told["what"] if told["process_id"] == "1" else "waits"
on_sigterm = {"cannot save": lambda *_: os._exit(1), "is late": signal.SIG_IGN}
signal.signal(signal.SIGTERM, on_sigterm.get(what, lambda *_: sys.exit(143)))
if what == "never begins":
  time.sleep(60)
tell = lambda sign: os.write(int(os.environ["TLT_PULSE_FD"]), sign)
tell(b".")
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
with open(pathlib.Path(__file__).parent / f"{me}.log", "a") as log:
  print(cores, told["coordinator"], file=log)
if told["what"] not in ("fails", "never begins"):
  tell(b"+")
if what == "again" and len(open(log.name).readlines()) < 3 or what == "fails":
  sys.exit(7)
if what == "dies":
  os.kill(os.getpid(), signal.SIGKILL)
if what == "hangs":
  os.kill(os.getpid(), signal.SIGSTOP)
if what == "stops":
  sys.exit(143)
while told["what"] not in ("ends", "again"):
  time.sleep(0.1)
  tell(b".")
"""

# Two processes of JAX that see and measure different things, and go by the first one's.
AGREES = """
import sys
import jax
from tlt_jax import processes
told = dict(arg.lstrip("-").split("=") for arg in sys.argv[1:] if "=" in arg)
me = int(told["process_id"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(told["coordinator"], 2, me)
assert processes.on_first(lambda: {"seen": [me, None]}) == {"seen": [0, None]}
def missing():
  raise OSError(f"process {me} finds no file")
try:
  processes.on_first(missing)
except (OSError, ValueError) as e:
  assert str(e) == "process 0 finds no file", e
  assert type(e) is (OSError, ValueError)[me]
else:
  raise AssertionError
assert processes.on_this_host() == 2
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
  """Launches two processes that do something; gives the exit status and what is told."""
  (tmp_path / "child.py").write_text(CHILD)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

  def run(what: str, *options: str) -> tuple[int, list[str]]:
    status = launcher.main([*options, "--", "child", f"--what={what}"])
    return status, capfd.readouterr().err.splitlines()

  yield run
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize(
  "what, told",
  [
    ("fails", "process 1 of 2 ended with status 7"),
    ("dies", "process 1 of 2 was killed by SIGKILL, as by a system that is out of memory"),
    ("hangs", "process 1 of 2 has given no sign of life for 2 s"),
    ("never begins", "process 1 of 2 has given no sign of life for 2 s"),
  ],
)
def test_a_process_that_fails_ends_all(launch, monkeypatch, what, told):
  """With one line that names it."""
  monkeypatch.setattr(launcher, "_HANG_S", 2.0)
  monkeypatch.setattr(launcher, "_START_S", 2.0)
  assert launch(what) == (1, [f"error: {told}: the job has ended"])


@pytest.mark.parametrize(
  "ends, told",
  [
    ("kill(getpid(), 9) if me else _exit(1)", "process 1 of 2 was killed by SIGKILL"),
    ("_exit(1) if me else abort()", "process 1 of 2 ended with status 1"),
  ],
)
def test_of_two_that_fail_the_cause_is_named(ends, told):
  """Others notice, and end with a status; or JAX aborts them."""
  code = f"from os import *; import sys; me = int(sys.argv[-1][-1]); {ends}"
  with launcher.Job([sys.executable, "-c", code], 2, pin=False, stop_s=60.0) as job:
    while None in [process.status for process in job._all]:
      time.sleep(0.01)
    assert job.look().startswith(told)


def test_a_job_ends_well_on_cores_of_its_own(launch, tmp_path):
  assert launch("ends", "--processes=2") == (0, [])
  (cores, address), (others, same) = (
    (tmp_path / f"{i}.log").read_text().split() for i in range(2)
  )
  assert address == same
  if len(os.sched_getaffinity(0)) > 1:
    assert not set(cores.split(",")) & set(others.split(","))


def test_a_job_that_fails_starts_again(launch, tmp_path):
  """As often as it may."""
  fails = "error: process 1 of 2 ended with status 7: the job has ended"
  again = [f"{fails}; starting again ({left} restarts left)" for left in (4, 3)]
  assert launch("again", "--restarts=5") == (0, again)
  assert len((tmp_path / "1.log").read_text().splitlines()) == 3


def test_a_job_that_fails_before_it_has_begun_does_not_start_again(launch, tmp_path):
  """As with a flag that does not exist: it would fail again."""
  fails = "error: process 1 of 2 ended with status 7: the job has ended"
  assert launch("fails", "--restarts=5") == (1, [fails])


@pytest.mark.parametrize(
  "what, told",
  [
    ("cannot save", "process 1 of 2 ended with status 1"),
    ("is late", "process 1 did not end within 0.5 s of SIGTERM"),
  ],
)
def test_a_job_that_fails_as_it_stops_does_not_start_again(launch, what, told):
  """It was told to end."""
  threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
  found = launch(what, "--restarts=1", "--stop_s=0.5")
  assert found == (1, [f"error: {told}: the job has ended"])


@pytest.mark.parametrize("what", ["stops", "ends on SIGTERM"])
def test_a_job_that_is_told_to_stop_stops(launch, what):
  """Whoever was told: one of the processes, or the launcher."""
  if what != "stops":
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
  assert launch("stops" if what == "stops" else "waits") == (distributed.STOPPED, [])


def test_processes_go_by_what_the_first_one_sees(launch, tmp_path):
  """What it returns and raises, which programs it has time for; and who is where."""
  (tmp_path / "child.py").write_text(AGREES)
  assert launch("agrees") == (0, [])


def test_a_lost_process_is_told_apart_from_other_errors(monkeypatch, tmp_path):
  """Even where other errors have come of it. No checkpoint waits for it."""
  monkeypatch.setattr(processes, "count", lambda: 2)
  gone = jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset by peer")
  full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
  gloo = ValueError("UNKNOWN: Gloo all-reduce failed")
  damaged, late, user = ValueError("cannot be restored"), TimeoutError(), ValueError("no")
  damaged.__cause__ = gone
  late.__context__ = gloo
  told = [programs.loss(e) for e in (gone, gloo, damaged, late, full, user)]
  assert told == [gone, gloo, gone, gloo, None, None]
  checkpoints = checkpoint.Checkpoints(tmp_path)
  monkeypatch.setattr(checkpoints, "close", lambda: pytest.fail("it waits"))
  with pytest.raises(jax.errors.JaxRuntimeError), checkpoints:
    raise gone
  monkeypatch.setattr(processes, "count", lambda: 1)
  assert programs.loss(gone) is None


@pytest.mark.parametrize(
  "told, message",
  [
    ({"num_processes": 2}, r"\(no address\); give --coordinator, --process_id, or start"),
    ({"coordinator": "host"}, "--coordinator=host names no port; give HOST:PORT"),
    ({"coordinator": "taken", "process_id": 0}, "cannot listen on that port .*another one"),
  ],
)
def test_a_process_that_cannot_join_says_why(monkeypatch, told, message):
  """A flag is missing, or wrong."""

  def initialize(*args, **options):
    raise ValueError("no address")

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  monkeypatch.setattr(jax.config, "update", lambda *setting: None)
  with socket.create_server(("", 0)) as server:
    if told.get("coordinator") == "taken":
      told = told | {"coordinator": f"localhost:{server.getsockname()[1]}"}
    monkeypatch.setattr(distributed, "flag", ({"distributed": True} | told).get)
    with pytest.raises(distributed.JobError, match=message):
      distributed.join()


def test_a_stop_saves_a_snapshot(tmp_path):
  """Once, if there is one; after any other error nothing is saved."""
  state = {"w": np.arange(3.0)}
  snapshot = lambda: (2, state, {"next": 5})
  with pytest.raises(KeyError), checkpoint.Checkpoints(tmp_path).at_stop(snapshot):
    raise KeyError
  stopped = pytest.raises(processes.Stopped)
  with stopped, checkpoint.Checkpoints(tmp_path).at_stop(lambda: None):
    raise processes.Stopped
  assert checkpoint.latest(tmp_path) is None
  with stopped, checkpoint.Checkpoints(tmp_path, every=5).at_stop(snapshot) as run:
    run.save(1, state, {}, force=True)
    raise processes.Stopped
  assert checkpoint.Checkpoints(tmp_path).data() == (2, {"next": 5})


ARGS = (*commands.DRAFTING.items(), ("steps", 4))


@pytest.fixture(scope="module")
def one(home, tmp_path_factory):
  """A run of one process with two devices that trains a drafter."""
  workdir = tmp_path_factory.mktemp("one")
  args = commands.tiny_run(home, *ARGS)
  commands.succeed(commands.run(home, "train", *args, f"--workdir={workdir}"))
  return workdir


def job(home, workdir, schedule, *options, devices: int = 1, of=ARGS):
  """Runs the same as two processes, decided alike."""
  args = [*commands.tiny_run(home, *of), f"--workdir={workdir}"]
  args += [f"--schedule={schedule / 'rollouts.jsonl'}", f"--cpu_devices={devices}"]
  return commands.run(home, "launch", *options, "--", "experiments.train", *args)


def test_two_processes_draw_what_one_does(home, tmp_path):
  """One step with few programs, each of which three processes compile; the slow cases
  below train a drafter."""
  of = (("steps", 1), ("checkpoint.every", 1), ("learner.only", "head"))
  args = [*commands.tiny_run(home, *of), f"--workdir={tmp_path / 'one'}"]
  commands.succeed(commands.run(home, "train", *args))
  commands.succeed(job(home, tmp_path / "two", tmp_path / "one", of=of))
  found, expected = outcomes.of(tmp_path / "two"), outcomes.of(tmp_path / "one")
  assert found["responses"] == expected["responses"]


@pytest.mark.slow
def test_two_processes_end_as_one_with_two_devices(home, one, tmp_path):
  """Bit for bit: tokens, rewards, policy and drafter; one of them writes and tells.

  (`test_commands` has a run that was killed and goes on as two processes.)
  """
  result = commands.succeed(job(home, tmp_path, one))
  assert outcomes.updates(one) > 0
  assert outcomes.of(tmp_path) == outcomes.of(one)
  assert result.stderr.count("\nstep ") == 4
  assert "[1] 2 x cpu of 2 processes" in result.stderr
  assert result.stdout.count("all steps") == 1


@pytest.mark.slow
def test_two_processes_with_two_devices_each(home, tmp_path):
  """End as one with four: a slice of two devices in each."""
  of = (*ARGS, ("tensor_parallel", 2))
  args = [*commands.tiny_run(home, *of), f"--workdir={tmp_path / 'one'}"]
  commands.succeed(commands.run(home, "train", *args, "--cpu_devices=4"))
  commands.succeed(job(home, tmp_path / "two", tmp_path / "one", devices=2, of=of))
  assert outcomes.of(tmp_path / "two") == outcomes.of(tmp_path / "one")


@pytest.mark.slow
def test_without_a_schedule_the_first_process_decides(home, one, tmp_path):
  """Both draw the tokens of any other run, and its policy."""
  args = [*commands.tiny_run(home, *ARGS), f"--workdir={tmp_path}"]
  commands.succeed(commands.run(home, "launch", "--", "experiments.train", *args))
  same = ("policy", "responses")
  found, expected = outcomes.of(tmp_path), outcomes.of(one)
  assert [found[name] for name in same] == [expected[name] for name in same]
  assert outcomes.updates(tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_is_killed_starts_again_and_ends_the_same(home, one, tmp_path, which):
  """Whichever process it is."""
  # An `os._exit` in a reward, of one process and once, is as good as a kill.
  (home / "deadly.py").write_text(
    "import os, pathlib, signal\n"
    "from tlt_jax import processes\n"
    "from user_rewards import digits as score_digits\n\n\n"
    "def digits(prompt, response, answer):\n"
    f"  once = pathlib.Path({str(tmp_path / 'once')!r})\n"
    f"  if processes.index() == {which} and (once.parent / 'checkpoints' / '2').exists():\n"
    "    if not once.exists():\n"
    "      once.touch()\n"
    "      os.kill(os.getpid(), signal.SIGKILL)\n"
    "  return score_digits(prompt, response, answer)\n"
  )
  of = (*ARGS, ("reward", "deadly.digits"))
  result = commands.succeed(job(home, tmp_path, one, "--restarts=1", of=of))
  lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
  assert lines == [
    f"error: process {which} of 2 was killed by SIGKILL, as by a system that is out of "
    "memory: the job has ended; starting again (0 restarts left)"
  ]
  assert outcomes.of(tmp_path) == outcomes.of(one)


def stopping(home, run, number) -> pathlib.Path:
  """Makes the reward `stopping.digits`, which sends a signal to the run in that folder.

  Returns:
    a file that holds after how many steps; the signal comes once
  """
  at = home / "stop_at"
  (home / "stopping.py").write_text(
    "import os, pathlib\n"
    "from user_rewards import digits as score_digits\n"
    f"at = pathlib.Path({str(at)!r})\n"
    f"records = pathlib.Path({str(run)!r}, 'metrics.jsonl')\n"
    "\n\ndef digits(prompt, response, answer):\n"
    "  done = len(records.read_text().splitlines()) if records.exists() else 0\n"
    "  try:\n"
    "    if int(at.read_text()) == done:\n"
    "      at.unlink()\n"
    f"      os.kill(os.getpid(), {int(number)})\n"
    "  except FileNotFoundError:\n"
    "    pass\n"
    "  return score_digits(prompt, response, answer)\n"
  )
  return at


@pytest.mark.slow
@pytest.mark.parametrize(
  "number, job_of", [(signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGINT, 1)]
)
def test_a_signal_saves_and_the_run_goes_on(home, one, tmp_path, number, job_of):
  """Of one process or of two; Ctrl-C does as SIGTERM."""
  stopping(home, tmp_path, number).write_text("2")
  settings = (*ARGS, ("reward", "stopping.digits"))
  args = [*commands.tiny_run(home, *settings), f"--workdir={tmp_path}", "--cpu_devices=1"]
  args = args[:-1] if job_of == 1 else ["--", "experiments.train", *args]
  command = "train" if job_of == 1 else "launch"
  result = commands.run(home, command, *args)
  assert result.returncode == distributed.STOPPED, result.stderr
  assert "stopped as it was told; the same command goes on" in result.stderr
  assert checkpoint.latest(tmp_path / "checkpoints") == 3
  commands.succeed(commands.run(home, command, *args))
  same = ("policy", "responses")
  found, expected = outcomes.of(tmp_path), outcomes.of(one)
  assert [found[name] for name in same] == [expected[name] for name in same]


@pytest.mark.slow
def test_a_step_that_is_cut_short_leaves_no_trace(home, tmp_path):
  """A stop in the first step saves nothing. One in the plain repetition of a rollout skips
  no prompt.
  """
  at = stopping(home, tmp_path / "run", signal.SIGTERM)
  settings = dict(ARGS) | {
    "reward": "stopping.digits",
    "compare.every": 1,
  }
  args = commands.tiny_run(home, *settings.items())
  whole, run = tmp_path / "whole", tmp_path / "run"
  commands.succeed(commands.run(home, "train", *args, f"--workdir={whole}"))
  for done, saved in ((0, None), (3, 3)):
    at.write_text(str(done))
    result = commands.run(home, "train", *args, f"--workdir={run}")
    assert result.returncode == distributed.STOPPED, result.stderr
    assert checkpoint.latest(run / "checkpoints") == saved
  commands.succeed(commands.run(home, "train", *args, f"--workdir={run}"))
  found, expected = outcomes.of(run), outcomes.of(whole)
  same = "policy", "responses"
  assert [found[name] for name in same] == [expected[name] for name in same]
  assert outcomes.updates(run) > 0


@pytest.mark.slow
@pytest.mark.parametrize("devices, tensor_parallel", [(1, 1), (4, 1), (4, 2), (2, 2)])
def test_a_run_goes_on_with_other_slices(home, tmp_path, devices, tensor_parallel):
  """Drafter and all: its data are dealt out; the tokens of the next step are the same."""
  # It trains after each rollout: tiny slices may have no idle time.
  settings = commands.DRAFTING

  def train(workdir, devices, steps, tensor_parallel=1):
    sizes = (("steps", steps), ("tensor_parallel", tensor_parallel))
    args = commands.tiny_run(home, *settings.items(), *sizes)
    args += [f"--workdir={workdir}", f"--cpu_devices={devices}"]
    commands.succeed(commands.run(home, "train", *args))

  same, other = tmp_path / "same", tmp_path / "other"
  train(same, 2, steps=4)
  shutil.copytree(same, other)
  train(same, 2, steps=6)
  train(other, devices, 6, tensor_parallel)
  responses = [outcomes.of(folder)["responses"] for folder in (same, other)]
  assert responses[0][:5] == responses[1][:5]
  records = metrics.read(other / "metrics.jsonl")
  assert [r["drafter/updates"] > 0 for r in records[4:6]] == [True, True]
