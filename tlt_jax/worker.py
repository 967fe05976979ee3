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
travel through pipes, one line of JSON each. It ends when its parent does. JAX, should the
function use it, has only the CPU there: accelerators are the parent's.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from tlt_jax import named

_SERVE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tlt_jax import worker
worker.serve(*json.loads(sys.argv[2]))
"""
_START_S = 300.0  # wall time for a process to start and to import its module


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

  def __call__(self, *args: Any) -> Any:
    """The function's result.

    Raises:
      Stopped: the call exceeded its time, or ended the process
      WorkerError: the function raised an exception or returned what JSON cannot hold, or
        the process does not start
    """
    name = self._arguments[0]
    with self._lock:
      if self._process is None or self._process.poll() is not None:
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
      self._process.kill()
      self._process.communicate()  # closes the pipes and waits
      self._process = None

  def _start(self) -> None:
    paths, arguments = json.dumps(sys.path), json.dumps(self._arguments)
    self._process = subprocess.Popen(
      [sys.executable, "-c", _SERVE, paths, arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
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
      process.kill()

    timer = threading.Timer(wall_s, kill)
    timer.daemon = True
    timer.start()
    try:
      process.stdin.write(line)
      process.stdin.flush()
      reply = process.stdout.readline()
    except BrokenPipeError:
      reply = ""
    except BaseException:  # Ctrl-C: the next call must not get the reply of this one
      self.close()
      raise
    finally:
      timer.cancel()
      timer.join()  # from here on it kills nothing
    is_whole = reply.endswith("\n")
    if killed.is_set() or not is_whole:
      self.close()
    return json.loads(reply) if is_whole else None


def serve(function: str, cpu_s: float, warm_up: list[list]) -> None:
  """Answers calls from stdin on stdout, a line of JSON each, until stdin ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; meant for the parent
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  # What the function prints must not mix with the replies, nor may it read the calls.
  requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)

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
