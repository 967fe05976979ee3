"""Jobs of several processes: they do what one process does, and faults end all of them."""

import dataclasses
import os
import shutil
import signal
import threading

import numpy as np
import pytest

from experiments import distributed
from experiments import launcher
from experiments import outcomes
from tests import commands
from tlt_jax import checkpoint
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax.models import config as config_lib

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
def tell(sign):
  os.write(int(os.environ["TLT_PULSE_FD"]), sign)
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
    ("dies", "process 1 of 2 was killed by SIGKILL"),
    ("never begins", "process 1 of 2 has given no sign of life for 2 s"),
  ],
)
def test_a_process_that_fails_ends_all(launch, monkeypatch, what, told):
  monkeypatch.setattr(launcher, "_HANG_S", 2.0)
  monkeypatch.setattr(launcher, "_START_S", 2.0)
  status, (line,) = launch(what)
  assert status == 1 and told in line


def test_a_job_ends_well_on_cores_of_its_own(launch, tmp_path):
  assert launch("ends", "--processes=2") == (0, [])
  (cores, address), (others, same) = (
    (tmp_path / f"{i}.log").read_text().split() for i in range(2)
  )
  assert address == same
  if len(os.sched_getaffinity(0)) > 1:
    assert not set(cores.split(",")) & set(others.split(","))


def test_a_job_that_fails_starts_again(launch, tmp_path):
  """But not one that fails before it has begun, as with a flag that does not exist."""
  status, lines = launch("again", "--restarts=5")
  assert status == 0 and len(lines) == 2
  assert len((tmp_path / "1.log").read_text().splitlines()) == 3
  status, lines = launch("fails", "--restarts=5")
  assert status == 1 and len(lines) == 1


@pytest.mark.parametrize("what", ["cannot save", "is late"])
def test_a_job_that_fails_as_it_stops_does_not_start_again(launch, what):
  """It was told to end."""
  threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
  status, lines = launch(what, "--restarts=1", "--stop_s=0.5")
  assert status == 1 and len(lines) == 1


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


def test_a_stop_saves_a_snapshot(tmp_path):
  """Once, if there is one; after any other error nothing is saved."""
  state = {"w": np.arange(3.0)}

  def snapshot():
    return 2, state, {"next": 5}

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


EXPERTS = dataclasses.replace(
  commands.COUNTDOWN,
  architecture="Qwen3MoeForCausalLM",
  experts=config_lib.Experts(count=8, per_token=2, width=24, norm_weights=True),
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "devices, model", [(1, commands.COUNTDOWN), (2, commands.COUNTDOWN), (2, EXPERTS)]
)
def test_two_processes_end_as_one_with_their_devices(home, tmp_path, devices, model):
  """Bit for bit: tokens, rewards, policy and drafter; one of them writes.

  (`test_commands` has a run that was killed and goes on as two processes.)
  """
  policy = commands.write_policy(tmp_path / "policy", model)
  of = (*ARGS, ("tensor_parallel", devices), ("policy", policy))
  one, two = tmp_path / "one", tmp_path / "two"
  args = [*commands.tiny_run(home, *of), f"--workdir={one}"]
  commands.succeed(commands.run(home, "train", *args, f"--cpu_devices={2 * devices}"))
  result = commands.succeed(job(home, two, one, devices=devices, of=of))
  assert outcomes.updates(one) > 0
  assert outcomes.of(two) == outcomes.of(one)
  assert result.stdout.count("all steps") == 1


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_is_killed_starts_again_and_ends_the_same(home, one, tmp_path, which):
  """Whichever process it is."""
  signalling(home, tmp_path, signal.SIGKILL, which)
  of = (*ARGS, ("reward", "signalling.digits"))
  result = commands.succeed(job(home, tmp_path, one, "--restarts=1", of=of))
  lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
  assert len(lines) == 1 and f"process {which} of 2 was killed by SIGKILL" in lines[0]
  assert outcomes.of(tmp_path) == outcomes.of(one)


def signalling(home, run, number, which=0) -> None:
  """Makes the reward `signalling.digits`, which sends a signal to one of the processes of
  the run in that folder, once, after two steps."""
  (home / "signalling.py").write_text(f'''
import os, pathlib
from tlt_jax import processes
from user_rewards import digits as score_digits

run = pathlib.Path({str(run)!r})


def digits(prompt, response, answer):
  once, records = run.with_suffix(".once"), run / "metrics.jsonl"
  if processes.index() == {which} and records.exists() and not once.exists():
    if len(records.read_text().splitlines()) == 2:
      once.touch()
      os.kill(os.getpid(), {int(number)})
  return score_digits(prompt, response, answer)
''')


@pytest.mark.slow
@pytest.mark.parametrize("number, job_of", [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_saves_and_the_run_goes_on(home, one, tmp_path, number, job_of):
  """Of one process or of two; Ctrl-C does as SIGTERM."""
  signalling(home, tmp_path, number)
  settings = (*ARGS, ("reward", "signalling.digits"))
  args = [*commands.tiny_run(home, *settings), f"--workdir={tmp_path}", "--cpu_devices=1"]
  args = args[:-1] if job_of == 1 else ["--", "experiments.train", *args]
  command = "train" if job_of == 1 else "launch"
  result = commands.run(home, command, *args)
  assert result.returncode == distributed.STOPPED, result.stderr
  assert "stopped; the same command resumes" in result.stderr
  assert checkpoint.latest(tmp_path / "checkpoints") == 3
  commands.succeed(commands.run(home, command, *args))
  same = ("policy", "responses")
  found, expected = outcomes.of(tmp_path), outcomes.of(one)
  assert [found[name] for name in same] == [expected[name] for name in same]


@pytest.mark.slow
@pytest.mark.parametrize("devices, tensor_parallel", [(1, 1), (4, 2)])
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
