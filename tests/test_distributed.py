"""Jobs of several processes: they do what one process does, and faults end all of them."""

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

home = commands.home

# A process of a job, without JAX. Process 1 does what it is told, the others wait.
CHILD = """
import os, pathlib, signal, sys, time
told = dict(arg.lstrip("-").split("=") for arg in sys.argv[1:] if "=" in arg)
me, folder = int(told["process_id"]), pathlib.Path(__file__).parent
os.write(int(os.environ["TLT_PULSE_FD"]), b".")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
with open(folder / f"{me}.log", "a") as log:
  print(cores, told["coordinator"], file=log)
while me != 1 and told["what"] not in ("ends", "again"):
  time.sleep(0.1)
  os.write(int(os.environ["TLT_PULSE_FD"]), b".")
if me == 1 and told["what"] == "fails":
  sys.exit(7)
if me == 1 and told["what"] == "dies":
  os.kill(os.getpid(), signal.SIGKILL)
if me == 1 and told["what"] == "hangs":
  os.kill(os.getpid(), signal.SIGSTOP)
if me == 1 and told["what"] == "stops":
  sys.exit(143)
if me == 1 and told["what"] == "again" and len(open(log.name).readlines()) < 3:
  sys.exit(7)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
  """Launches two processes that do something; gives the exit status and what is told."""
  (tmp_path / "child.py").write_text(CHILD)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  before = signal.getsignal(signal.SIGTERM)

  def run(what: str, *options: str) -> tuple[int, list[str]]:
    status = launcher.main([*options, "--", "child", f"--what={what}"])
    return status, capfd.readouterr().err.splitlines()

  yield run
  signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
  "what, told",
  [
    ("fails", "process 1 of 2 ended with status 7"),
    ("dies", "process 1 of 2 was killed by SIGKILL, as by a system that is out of memory"),
    ("hangs", "process 1 of 2 has given no sign of life for 2 s"),
  ],
)
def test_a_process_that_fails_ends_all(launch, monkeypatch, what, told):
  """With one line that names it."""
  monkeypatch.setattr(launcher, "_HANG_S", 2.0)
  assert launch(what) == (1, [f"error: {told}: the job has ended"])


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
  again = [f"{fails}; starting again ({left} restarts left)" for left in (5, 4)]
  assert launch("again", "--restarts=5") == (0, again)
  assert len((tmp_path / "1.log").read_text().splitlines()) == 3


@pytest.mark.parametrize("what", ["stops", "ends on SIGTERM"])
def test_a_job_that_is_told_to_stop_stops(launch, what):
  """Whoever was told: one of the processes, or the launcher."""
  if what != "stops":
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
  assert launch("stops" if what == "stops" else "waits") == (distributed.STOPPED, [])


def test_what_is_left_standing_is_saved_at_a_stop(tmp_path):
  """Once; after any other error nothing is."""
  state = {"w": np.arange(3.0)}
  standing = lambda: (2, state, {"next": 5})
  with pytest.raises(KeyError), checkpoint.Checkpoints(tmp_path).at_stop(standing):
    raise KeyError
  assert checkpoint.latest(tmp_path) is None
  stopped = pytest.raises(processes.Stopped)
  with stopped, checkpoint.Checkpoints(tmp_path, every=5).at_stop(standing) as run:
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


@pytest.mark.slow
def test_two_processes_end_as_one_with_two_devices(home, one, tmp_path):
  """Bit for bit: tokens, rewards, policy and drafter; one of them writes and tells.

  (The short form is in `test_commands`: a run that was killed goes on as two processes.)
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
  lines = [line for line in result.stderr.splitlines() if "error" in line]
  assert lines == [
    f"error: process {which} of 2 was killed by SIGKILL, as by a system that is out of "
    "memory: the job has ended; starting again (0 restarts left)"
  ]
  assert outcomes.of(tmp_path) == outcomes.of(one)


@pytest.mark.slow
@pytest.mark.parametrize("job_of", [1, 2])
def test_sigterm_saves_and_the_run_goes_on(home, one, tmp_path, job_of):
  """In the middle of a rollout, of one process or of two."""
  args = [*commands.tiny_run(home, *ARGS), f"--workdir={tmp_path}", "--cpu_devices=1"]
  args = args[:-1] if job_of == 1 else ["--", "experiments.train", *args]
  process = commands.start(home, "train" if job_of == 1 else "launch", *args)
  for line in process.stderr:
    if line.startswith("step 3/"):
      process.send_signal(signal.SIGTERM)
      break
  _, told = process.communicate(timeout=60)
  assert process.returncode == distributed.STOPPED, told
  assert "stopped by SIGTERM; the same command goes on from there" in told
  assert checkpoint.latest(tmp_path / "checkpoints") == 3
  commands.succeed(commands.run(home, "train" if job_of == 1 else "launch", *args))
  same = ("policy", "responses")
  found, expected = outcomes.of(tmp_path), outcomes.of(one)
  assert [found[name] for name in same] == [expected[name] for name in same]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_a_run_goes_on_with_other_slices(home, one, tmp_path, devices):
  """Drafter and all: its data are dealt out; the tokens of the next step are the same."""
  workdir = shutil.copytree(one, tmp_path / "run")
  of = (*commands.DRAFTING.items(), ("steps", 6))
  args = [*commands.tiny_run(home, *of), f"--workdir={workdir}"]
  commands.succeed(commands.run(home, "train", *args, f"--cpu_devices={devices}"))
  commands.succeed(
    commands.run(home, "train", *args[:-1], f"--workdir={one}", "--cpu_devices=2")
  )
  responses = [outcomes.of(folder)["responses"] for folder in (workdir, one)]
  assert responses[0][:5] == responses[1][:5]
  records = metrics.read(workdir / "metrics.jsonl")
  assert [r["drafter/updates"] > 0 for r in records[4:6]] == [True, True]
