"""Starts the processes of a job on this machine, and monitors them.

    python -m experiments.launch --processes=2 -- experiments.train --workdir=runs/mine

Each process is pinned to separate cores. If one dies, runs out of memory or hangs, all of
them end, with one line that names it; with --restarts=N they start again, and a run resumes
from its last checkpoint. SIGTERM and Ctrl-C are passed on to all: after SIGTERM the exit
status is 143, or 1 if a process failed to save, and nothing restarts.
"""

import argparse
from collections.abc import Sequence
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

from experiments import distributed
from tlt_jax import processes

_HANG_S = 40.0  # without a heartbeat, after which a process is taken for dead
_START_S = 300.0  # the same before its first one, while it imports modules
_POLL_S = 0.2


class Process:
  """A process of the job."""

  def __init__(self, number: int, command: Sequence[str], own: Sequence[int]):
    """Starts it on the cores `own`, or on any if there are none."""
    self.number = number
    self.pulse, its_end = os.pipe()
    environment = os.environ | {distributed.PULSE_FD: str(its_end)}
    self._child = subprocess.Popen(command, env=environment, pass_fds=[its_end])
    os.close(its_end)
    if own and hasattr(os, "sched_setaffinity"):  # before it has any threads
      os.sched_setaffinity(self._child.pid, own)
    self._beat_s = time.monotonic()  # of its start, then of its last heartbeat
    self._limit_s = _START_S  # after which the next one is overdue
    self.joined = False  # whether it has joined the others

  @property
  def status(self) -> int | None:
    """Its exit status, negative for a signal; None: it runs."""
    return self._child.poll()

  def listen(self) -> None:
    """Reads its heartbeats from the pipe, if there are any."""
    if read := os.read(self.pulse, 4096):
      self._beat_s, self._limit_s = time.monotonic(), _HANG_S
      self.joined |= distributed.JOINED in read

  def fault(self, stopping: bool) -> str | None:
    """Its fault; None if it has none. SIGTERM may end it while the job stops."""
    status = self.status
    if status is None:
      silent_s = time.monotonic() - self._beat_s
      hangs = silent_s > self._limit_s
      return f"has given no sign of life for {silent_s:.0f} s" if hangs else None
    if status in (0, distributed.STOPPED) or (stopping and status == -signal.SIGTERM):
      return None
    if status < 0:
      name = signal.Signals(-status).name
      memory = ", as by a system that is out of memory" if name == "SIGKILL" else ""
      return f"was killed by {name}{memory}"
    return f"ended with status {status}"

  @property
  def blame(self) -> int:
    """Of several processes that failed at once, the one with the highest is the cause.

    Processes that notice the failure of another end without a signal, except that JAX
    aborts them if process 0 is gone.
    """
    status = self.status or 0
    return 1 if status >= 0 else 0 if status == -signal.SIGABRT else 2

  def send(self, number: int) -> None:
    if self.status is None:
      self._child.send_signal(number)

  def close(self) -> None:
    self.send(signal.SIGKILL)
    self._child.wait()
    os.close(self.pulse)


class Job:
  """The processes of one attempt; leaving its `with` block ends them."""

  def __init__(self, command: Sequence[str], count: int, pin: bool, stop_s: float):
    """Starts it; `stop_s` limits the seconds from SIGTERM to its end."""
    given = ["--distributed", f"--coordinator=localhost:{_free_port()}"]
    given.append(f"--num_processes={count}")
    there, each = cores(), len(cores()) // count
    shares = [there[i * each : (i + 1) * each] if pin else [] for i in range(count)]
    self._all = [
      Process(i, [*command, *given, f"--process_id={i}"], own)
      for i, own in enumerate(shares)
    ]
    self._stop_s = stop_s
    self._deadline: float | None = None  # by which all must have ended

  def __enter__(self) -> "Job":
    return self

  def __exit__(self, *_):
    for process in self._all:
      process.close()

  @property
  def stopping(self) -> bool:
    """Whether the processes have been asked to stop."""
    return self._deadline is not None

  @property
  def joined(self) -> bool:
    return any(process.joined for process in self._all)

  def stop(self) -> None:
    """Asks all processes to save and end."""
    if self._deadline is None:
      self._deadline = time.monotonic() + self._stop_s
      for process in self._all:
        process.send(signal.SIGTERM)

  def look(self) -> str | None:
    """Waits `_POLL_S`; returns how the job ended, None if it runs.

    "" after success, "stopped" after SIGTERM, else the error.
    """
    time.sleep(_POLL_S)
    listening = {p.pulse: p for p in self._all}
    for pulse in select.select([*listening], [], [], 0)[0]:
      listening[pulse].listen()
    statuses = [p.status for p in self._all]
    if distributed.STOPPED in statuses:
      self.stop()
    faults = [(p, fault) for p in self._all if (fault := p.fault(self.stopping))]
    if faults:
      process, fault = max(faults, key=lambda found: found[0].blame)
      return f"process {process.number} of {len(self._all)} {fault}"
    if None not in statuses:
      return "stopped" if self.stopping else ""
    if self.stopping and time.monotonic() > self._deadline:
      late = statuses.index(None)
      return f"process {late} did not end within {self._stop_s:g} s of SIGTERM"
    return None


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def cores() -> list[int]:
  """The CPU cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


class Outcome(NamedTuple):
  """How an attempt ended."""

  end: str  # see `Job.look`
  may_restart: bool  # it failed after processes had joined, without a request to stop


def _run(options: argparse.Namespace, command: Sequence[str], is_stopped) -> Outcome:
  """Runs the job once."""
  with Job(command, options.processes, options.pin, options.stop_s) as job:
    while True:
      if is_stopped():
        job.stop()
      if (end := job.look()) is not None:
        return Outcome(end, may_restart=job.joined and not job.stopping)


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
  """The options of the launcher, and the command that it launches."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.launch",
    usage="%(prog)s [options] -- MODULE [its flags]",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add, pin = parser.add_argument, argparse.BooleanOptionalAction
  add("--processes", type=int, default=2, help="processes of the job (2)")
  add("--restarts", type=int, default=0, help="how often it may start again (0)")
  add("--pin", action=pin, default=True, help="whether each process has its own cores")
  add(
    "--stop_s",
    type=float,
    default=60.0,
    help="seconds for processes to save and end after SIGTERM (60)",
  )
  cut = argv.index("--") if "--" in argv else len(argv)
  options, command = parser.parse_args(argv[:cut]), argv[cut + 1 :]
  if options.processes < 1 or options.restarts < 0 or options.stop_s <= 0 or not command:
    parser.error(
      "takes --processes >= 1, --restarts >= 0, --stop_s > 0, and -- MODULE with its flags"
    )
  return options, [sys.executable, "-m", *command]


def main(argv: Sequence[str]) -> int:
  """Returns the exit status."""
  options, command = _parsed(argv)
  signals = []

  def remember(number, _):
    signals.append(number)
    if number == signal.SIGINT:
      signal.signal(number, signal.default_int_handler)
      processes.write_line("\nstopping; Ctrl-C again ends at once")

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, remember)
  for left in reversed(range(options.restarts + 1)):
    try:
      end, may_restart = _run(options, command, lambda: bool(signals))
    except KeyboardInterrupt:
      processes.write_line("\nended at once by the second Ctrl-C")
      return 130
    if end in ("", "stopped"):
      return distributed.STOPPED if end else 0
    then = f"; starting again ({left - 1} restarts left)" if left and may_restart else ""
    processes.write_line(f"error: {end}: the job has ended{then}")
    if not may_restart:
      break
  return 1
