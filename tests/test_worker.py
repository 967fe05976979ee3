"""A function in a process of its own: its results, its limits, and its end."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tlt_jax import worker

SOURCE = """
import os, pathlib, signal, subprocess, sys, tempfile, time

def echo(value):
  print("printed")  # must not be taken for the reply
  return value

def spin(value):
  while value:
    pass

def big(value):
  return value and len(str(value ** 10**9))  # within one call of C code

def sleep(value):
  time.sleep(value)

def leave(value):
  if value:
    sys.exit(0)

def fail(value):
  raise KeyError("k")

def unlike_json(value):
  return {1j} if value else None

def pid(value):
  return os.getpid()

def fork(how):
  child = os.fork()
  if not child:
    time.sleep(1000)
  pathlib.Path(how["file"]).write_text(str(child))
  while how["spins"]:
    pass

def told_to_stop(value):
  for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
  read, write = os.pipe()
  forked = os.fork()
  if not forked:
    os.write(write, b".")
    time.sleep(1000)
  started = subprocess.Popen(["sleep", "1000"])
  os.read(read, 1)  # until the child has got as far as its own code
  os.kill(forked, signal.SIGTERM)
  started.terminate()
  return [value, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), started.wait()]

def leave_file(value):
  return tempfile.mkstemp()[1]

def touch_and_wait(path):
  pathlib.Path(path).touch()
  time.sleep(1000)
"""


def wait_until(found) -> None:
  """Returns when `found()` is true; fails after a minute."""
  for _ in range(1200):
    if found():
      return
    time.sleep(0.05)
  raise AssertionError("waited for a minute")


def runs(pid: int) -> bool:
  """Whether a process runs; one that has ended may be there until it is waited for."""
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


@pytest.fixture
def made(tmp_path, monkeypatch):
  """Makes workers whose functions only this test can import, and ends them."""
  (tmp_path / "own_functions.py").write_text(SOURCE)
  monkeypatch.syspath_prepend(tmp_path)
  workers = []

  def make(name, **options):
    workers.append(worker.Worker(f"own_functions.{name}", **{"cpu_s": 0.05} | options))
    return workers[-1]

  yield make
  for each in workers:
    each.close()


def test_arguments_and_results_go_both_ways(made):
  """Of modules on the parent's path, whatever they print."""
  echo = made("echo")
  for value in (1.5, "ä\\n\n", None, [1, {"a": True}], "x" * 200000):
    assert echo(value) == value


@pytest.mark.parametrize("name, value", [("spin", 1), ("big", 7)])
def test_who_takes_too_much_cpu_time_is_stopped(made, name, value):
  """In Python and in C; the next call gets another process, and its full time."""
  slow = made(name)
  slow(0)
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  start_up_s = 5.0  # of CPU time, far more than a start takes
  with pytest.raises(worker.Stopped):
    slow(value)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert after.ru_utime - before.ru_utime < start_up_s
  assert slow(0) in (None, 0)


def test_who_waits_for_ever_is_stopped_by_the_clock(made):
  sleep = made("sleep", wall_s=0.2)
  with pytest.raises(worker.Stopped):
    sleep(1000)
  assert sleep(0) is None


def test_a_process_that_ends_within_a_call_stops_it(made):
  leave = made("leave")
  with pytest.raises(worker.Stopped):
    leave(1)
  assert leave(0) is None


def test_a_process_that_was_killed_meanwhile_is_replaced(made):
  pid = made("pid")
  first = pid(0)
  os.kill(first, signal.SIGKILL)
  while pid._process.poll() is None:
    time.sleep(0.01)
  assert pid(0) != first


def test_errors_are_told(made):
  """Of the function, and of a name that leads nowhere."""
  with pytest.raises(worker.WorkerError, match="own_functions.fail failed: KeyError"):
    made("fail")(0)
  unlike = made("unlike_json")
  with pytest.raises(worker.WorkerError, match="unlike_json failed: TypeError: .* set "):
    unlike(1)
  assert unlike(0) is None
  with pytest.raises(worker.WorkerError, match="cannot be called: .*has no 'ecko'"):
    made("ecko")(0)
  with pytest.raises(worker.WorkerError, match="cannot be called: no module 'nowhere'"):
    worker.Worker("nowhere.f", cpu_s=0.05)(0)


def test_a_clock_that_runs_out_after_the_reply_does_not_stop_the_next_call(
  made, monkeypatch
):
  """At whichever moment: the reply counts, and the next call gets another process."""
  echo = made("echo")
  echo(0)
  timers, process = [], echo._process

  class Timer(threading.Timer):
    def __init__(self, seconds, function):
      super().__init__(seconds, function)
      timers.append(self)

    def cancel(self):  # too late: it has begun to run
      if self is timers[0]:
        self.function()
      super().cancel()

  monkeypatch.setattr(threading, "Timer", Timer)
  assert echo(1) == 1
  assert echo(2) == 2
  assert echo._process is not process


def test_an_interrupted_call_leaves_no_reply_for_the_next(made, monkeypatch):
  echo = made("echo")
  echo(0)

  def interrupted():
    raise KeyboardInterrupt

  monkeypatch.setattr(echo._process.stdout, "readline", interrupted)
  with pytest.raises(KeyboardInterrupt):
    echo(1)
  assert echo(2) == 2


@pytest.mark.parametrize("spins", [True, False])
def test_its_children_end_with_it(made, tmp_path, spins):
  """Stopped or closed. They do not keep a call waiting for the reply of a dead process."""
  file = tmp_path / "child"
  fork = made("fork", wall_s=1000.0)
  if spins:
    with pytest.raises(worker.Stopped):
      fork({"file": str(file), "spins": True})
  else:
    fork({"file": str(file), "spins": False})
    assert runs(int(file.read_text()))
    fork.close()
  wait_until(lambda: not runs(int(file.read_text())))


def test_signals_to_all_of_a_job_end_no_call(made):
  """But they end what the function starts, which may rely on them."""
  ended = -signal.SIGTERM
  assert made("told_to_stop")(7) == [7, ended, ended]


def test_its_temporary_files_go_with_it(made):
  leave_file = made("leave_file")
  path = pathlib.Path(leave_file(0))
  assert path.exists() and leave_file._process.pid != os.getpid()
  leave_file.close()
  assert not path.parent.exists()
  assert pathlib.Path(leave_file(0)).exists()


PARENT = """
import os, pathlib, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from tlt_jax import worker
leave_file = worker.Worker("own_functions.leave_file", cpu_s=0.5)
print(leave_file(0), flush=True)
waits = worker.Worker("own_functions.touch_and_wait", cpu_s=0.5, wall_s=1000.0)
touched = pathlib.Path(sys.argv[1], "touched")
threading.Thread(target=waits, args=[str(touched)], daemon=True).start()
while not touched.exists():
  time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_its_parent(tmp_path):
  """Even if that is killed, idle or waiting, and its files go.

  The workers share their parent's stderr, which ends with the last of them.
  """
  (tmp_path / "own_functions.py").write_text(SOURCE)
  process = subprocess.run(
    [sys.executable, "-c", PARENT, tmp_path], capture_output=True, text=True, timeout=120
  )
  assert process.returncode == -signal.SIGKILL, process.stderr
  assert not pathlib.Path(process.stdout.strip()).parent.exists()
