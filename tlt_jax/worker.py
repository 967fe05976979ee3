"""Calls a function in a process of its own, each call under a limit of CPU time.

For what may take forever or end its process, such as a verifier that gives a model's
output to a computer algebra system:

    equal = worker.Worker("my_package.algebra.equal", cpu_s=1.0)
    try:
      found = equal(answer, text)
    except worker.Stopped:
      found = False

CPU time, unlike wall time, does not depend on what else the machine does. A call that
exceeds it is killed by the kernel (SIGPROF), even inside C code. The process is a fresh
Python, not a fork, so that threads of the parent do not matter; arguments and results
travel through pipes, one line of JSON each. JAX, should the function use it, has only the
CPU there: accelerators are the parent's.

The process has a session and a folder for temporary files of its own. When it ends, and
when its parent does, all processes that it started in this session end too, and the
folder goes. SIGTERM and SIGINT, which often reach all processes of a job, do not end it:
its parent may want the results of calls before it stops.
"""

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
import weakref

from tlt_jax import named

_SERVE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tlt_jax import worker
worker.serve(*json.loads(sys.argv[2]))
"""
_START_S = 300.0  # wall time for a process to start and to import its module
_LOOK_S = 1.0  # between two looks of a process whether its parent is still there
_SPARED = (signal.SIGTERM, signal.SIGINT)  # signals that do not end a process


class Stopped(Exception):
  """A call that was stopped: out of time, or its process ended in the middle of it."""


class WorkerError(RuntimeError):
  """A process that does not start, or a function that raised an exception."""


class Worker:
  """A function in a process of its own; any thread may call it, one call runs at a time.

  The process starts with the first call. A call that is stopped ends it, and the next
  call starts another.

  Args:
    function: its dotted name; arguments and result are what JSON holds
    cpu_s: CPU seconds, of user and system together, that a call may take
    wall_s: seconds that a call may take, a last resort should it wait for something
    warm_up: arguments of calls that a new process makes first, without a limit, so that
      what the first calls take longer counts for none
  """

  def __init__(
    self,
    function: str,
    *,
    cpu_s: float,
    wall_s: float = 30.0,
    warm_up: tuple[tuple, ...] = (),
  ):
    self._arguments = (function, cpu_s, warm_up)
    self._wall_s = wall_s
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None
    self._remove_folder = lambda: None  # that of the process

  def __call__(self, *args: Any) -> Any:
    """The function's result.

    Raises:
      Stopped: the call exceeded its time, or ended the process
      WorkerError: the function raised an exception or returned what JSON cannot hold, or
        the process does not start
    """
    name = self._arguments[0]
    with self._lock:
      if self._process is None or _has_ended(self._process):
        self.close()
        self._start()
      reply = self._ask(json.dumps(args) + "\n", self._wall_s)
      if reply is None:
        raise Stopped(f"{name} took too long, or ended its process")
    if "error" in reply:
      raise WorkerError(f"{name} failed: {reply['error']}")
    return reply["result"]

  def close(self) -> None:
    """Ends the process; the next call starts another."""
    if self._process is not None:
      _kill(self._process)
      for pipe in (self._process.stdin, self._process.stdout):
        with contextlib.suppress(OSError):  # of what was not sent
          pipe.close()
      self._process.wait()
      self._process = None
      self._remove_folder()

  def _start(self) -> None:
    folder = tempfile.mkdtemp(prefix="tlt_jax_worker_")
    os.chmod(folder, 0o711)  # another user's programs may run in folders within
    self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, True)
    arguments = json.dumps([*self._arguments, os.getpid(), folder])
    self._process = subprocess.Popen(
      [sys.executable, "-c", _SERVE, json.dumps(sys.path), arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "TMPDIR": folder},
      start_new_session=True,
    )
    reply = self._ask("", _START_S)
    if reply is None or "error" in reply:
      self.close()
      reason = reply["error"] if reply else "its process ended"
      raise WorkerError(f"{self._arguments[0]} cannot be called: {reason}")

  def _ask(self, line: str, wall_s: float) -> dict | None:
    """Sends a line and returns the reply; None, and no process, if there is none."""
    process, killed = self._process, threading.Event()

    def kill():  # ends a write to a full pipe as well as a read
      killed.set()
      _kill(process)

    timer = threading.Timer(wall_s, kill)
    timer.daemon = True
    timer.start()
    try:
      try:
        process.stdin.write(line)
        process.stdin.flush()
        reply = process.stdout.readline()
      except BrokenPipeError:
        reply = ""
      finally:
        timer.cancel()
        timer.join()  # from here on it kills nothing
    except BaseException:  # Ctrl-C: the next call must not get the reply of this one
      self.close()
      raise
    is_whole = reply.endswith("\n")
    if killed.is_set() or not is_whole:
      self.close()
    return json.loads(reply) if is_whole else None


def _has_ended(process: subprocess.Popen) -> bool:
  """Whether a process has ended; its number stays its own until it is waited for."""
  if process.returncode is not None:
    return True
  state = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, process.pid, state) is not None


def _kill(process: subprocess.Popen) -> None:
  """Kills a process and those of its session, unless it has been waited for."""
  if process.returncode is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)


def serve(
  function: str, cpu_s: float, warm_up: list[list], parent: int, folder: str
) -> None:
  """Answers calls from stdin on stdout, a line of JSON each, until stdin ends.

  Args:
    function: its dotted name
    cpu_s: CPU seconds that a call may take
    warm_up: arguments of calls that are made first
    parent: process number of the parent
    folder: of temporary files, which is removed in the end
  """
  _spare_from_signals()
  _end_with(parent, folder)
  # What the function prints must not mix with the replies, nor may it read the calls.
  requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  os.register_at_fork(after_in_child=replies.close)  # they end with this process

  def reply(text: str) -> None:
    replies.write(text + "\n")
    replies.flush()

  def answer(args: list, limit_s: float) -> str:
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
      return json.dumps({"result": call(*args)})
    except Exception as e:
      return json.dumps({"error": f"{type(e).__name__}: {e}"})
    finally:
      signal.setitimer(signal.ITIMER_PROF, 0.0)

  try:
    call = named.load(function)
  except named.NameNotFound as e:
    return reply(json.dumps({"error": str(e)}))
  for args in warm_up:
    answer(args, limit_s=0.0)
  reply(json.dumps({"result": None}))
  for line in requests:
    reply(answer(json.loads(line), cpu_s))


def _spare_from_signals() -> None:
  """This process survives SIGTERM and SIGINT; what it starts ends by them, as usual."""

  def restore():
    for number in _SPARED:
      signal.signal(number, signal.SIG_DFL)

  for number in _SPARED:
    signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs would inherit
    signal.siginterrupt(number, False)
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  os.register_at_fork(after_in_child=restore)


def _end_with(parent: int, folder: str) -> None:
  """Sees to it that this process ends with its parent, and its session with it."""

  def end():
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)

  def watch():
    while os.getppid() == parent:
      time.sleep(_LOOK_S)
    end()

  atexit.register(end)
  atexit.register(sys.stdout.flush)  # before that
  os.register_at_fork(after_in_child=lambda: atexit.unregister(end))
  threading.Thread(target=watch, daemon=True).start()
