"""One process of a job: its flags, how it joins the others, how it ends when it fails.

The job is of JAX's distributed runtime; docs/distributed.md says how to launch one. What
the processes of a run agree on is in `tlt_jax.processes`.
"""

import os
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

from absl import flags
import jax

from tlt_jax import processes

PULSE_FD = "TLT_PULSE_FD"  # names the pipe on which a launcher listens for signs of life
PULSE_S = 1.0
LIVES, JOINED = b".", b"+"  # what is written there: it runs; it has joined the others
# JAX takes a process that is silent for so long for dead. The launcher, which can say
# which one it was, waits less.
HEARTBEAT_S = 55
# A process that lost another one waits for so long before it ends: its launcher will have
# named the other one, and ended both.
_LAUNCHER_S = 60
_JOIN_S = 300  # that a process waits for the others to join
_ALONE = (
  f"this process has waited {_JOIN_S} s for the others of its job: one was not started, "
  "has ended, or cannot reach process 0 (--coordinator); start all of them again"
)
STOPPED = 143  # exit status of a run that SIGTERM has stopped: as of one that it killed


class JobError(ValueError):
  """A process that cannot join its job; the message names the remedy."""


def define_flags() -> None:
  """Defines the flags of a process of a job."""
  of = flags.FLAGS
  if "distributed" in of:
    return
  flags.DEFINE_bool(
    "distributed",
    False,
    "Be one process of a job. Which one, and of how many, JAX asks Slurm, GKE or the TPU "
    "pod; elsewhere --coordinator, --num_processes and --process_id say it. See "
    "docs/distributed.md.",
    flag_values=of,
  )
  flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.", flag_values=of)
  told = "Processes of the job."
  flags.DEFINE_integer("num_processes", None, told, lower_bound=1, flag_values=of)
  told = "Number of this process."
  flags.DEFINE_integer("process_id", None, told, lower_bound=0, flag_values=of)
  flags.DEFINE_integer(
    "cpu_devices",
    None,
    "Devices that JAX shows of this process on a machine with CPUs only; default: 2, or "
    "1 in each process of a job.",
    lower_bound=1,
    flag_values=of,
  )


def flag(name: str):
  """The value of one of the flags; None where a command has not defined them."""
  return flags.FLAGS[name].value if name in flags.FLAGS else None


def join() -> None:
  """Joins the job, if the flags ask for it; before anything touches a device.

  Raises:
    JobError: not all of what that takes is known, or not all processes have come
  """
  told = {name: flag(name) for name in ("coordinator", "num_processes", "process_id")}
  if not flag("distributed"):
    if given := [name for name, value in told.items() if value is not None]:
      raise JobError(f"--{given[0]} is for a process of a job: add --distributed")
    return
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # It would take SIGTERM for itself; see `processes.stop_on_signals`.
  jax.config.update("jax_enable_preemption_service", False)
  _show_signs_of_life()
  if told["coordinator"] is not None:
    _check_port(told["coordinator"], listens=told["process_id"] == 0)
  # JAX would abort this process, and show its stack.
  late = threading.Timer(_JOIN_S, fail, (f"error: {_ALONE}",))
  late.start()
  try:
    jax.distributed.initialize(
      told["coordinator"],
      told["num_processes"],
      told["process_id"],
      initialization_timeout=2 * _JOIN_S,
      heartbeat_timeout_seconds=HEARTBEAT_S,
    )
  except (ValueError, RuntimeError) as e:
    missing = [f"--{name}" for name, value in told.items() if value is None]
    raise JobError(
      f"this process cannot join its job ({_first_line(e)}); give "
      f"{', '.join(missing) or 'other values of these flags'}, or start it by Slurm, GKE "
      "or experiments.launch (docs/distributed.md)"
    ) from e
  finally:
    late.cancel()
  if PULSE_FD in os.environ:
    os.write(int(os.environ[PULSE_FD]), JOINED)
  if not processes.is_first():
    sys.stdout = open(os.devnull, "w")  # what is to be read is printed by the first one


def _check_port(coordinator: str, listens: bool) -> None:
  """Raises JobError for an address that JAX would crash on.

  Args:
    coordinator: the address of process 0
    listens: whether this is process 0
  """
  port = coordinator.rpartition(":")[2]
  if not port.isdigit():
    raise JobError(f"--coordinator={coordinator} names no port; give HOST:PORT")
  if listens:
    try:
      socket.create_server(("", int(port))).close()
    except (OSError, OverflowError) as e:
      raise JobError(
        f"--coordinator={coordinator}: process 0 cannot listen on that port ({e}); give "
        "all processes another one"
      ) from e


def _first_line(error: BaseException) -> str:
  return str(error).strip().splitlines()[0][:200]


def _show_signs_of_life() -> None:
  """Tells a launcher, if there is one, that this process runs, and ends with it."""
  if PULSE_FD not in os.environ:
    return
  pipe = int(os.environ[PULSE_FD])

  def beat():
    while True:
      try:
        os.write(pipe, LIVES)
      except OSError:
        os._exit(1)
      time.sleep(PULSE_S)

  threading.Thread(target=beat, name="signs of life", daemon=True).start()


def fail(line: str | None) -> NoReturn:
  """Ends this process after an error; the others cannot go on without it.

  At once: an orderly end would wait for them.

  Args:
    line: what is told; None: the error at hand, with its traceback
  """
  if line is None:
    traceback.print_exc()
  else:
    print(line, file=sys.stderr)
  sys.stderr.flush()
  os._exit(1)


def lost(error: BaseException) -> NoReturn:
  """Ends this process because another one is gone; a launcher may say first which.

  Args:
    error: by which it noticed, see `programs.loss`
  """
  if wants_traceback():
    traceback.print_exc()
  if PULSE_FD in os.environ:
    time.sleep(_LAUNCHER_S)
  fail(
    "error: another process of the job is gone, or this one's device failed: "
    f"{_first_line(error)} (process {processes.index()}); run the same command again: it "
    "goes on from the last checkpoint. TLT_TRACEBACK=1 shows where"
  )


def wants_traceback() -> bool:
  """Whether errors are shown with their tracebacks: TLT_TRACEBACK asks for it."""
  return bool(os.environ.get("TLT_TRACEBACK"))
