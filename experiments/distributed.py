"""A process of a job: its flags, joining the others, and ending after an error.

Jobs use JAX's distributed runtime (docs/distributed.md). How processes agree on something
during a run is in `tlt_jax.processes`.
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

PULSE_FD = "TLT_PULSE_FD"  # the pipe on which a launcher receives heartbeats
PULSE_S = 1.0
LIVES, JOINED = b".", b"+"  # written there: a heartbeat; once, that it has joined
# Without a heartbeat for so long, JAX takes a process for dead. The launcher, which can
# name the process, waits less.
HEARTBEAT_S = 55
# A process that lost another one waits for so long before it ends: meanwhile the launcher
# names the other one, and ends both.
_LAUNCHER_S = 60
_JOIN_S = 300  # that a process waits for the others to join
_ALONE = (
  f"this process has waited {_JOIN_S} s for the others of its job: one was not started, "
  "has ended, or cannot reach process 0 (--coordinator); start all of them again"
)
STOPPED = processes.STOPPED


class JobError(ValueError):
  """A process that cannot join its job; the message names the remedy."""


def define_flags() -> None:
  of = flags.FLAGS
  if "distributed" in of:
    return
  flags.DEFINE_bool(
    "distributed",
    False,
    "Run as a process of a job. Under Slurm, on GKE and on TPU pods JAX finds the other "
    "processes; elsewhere give --coordinator, --num_processes and --process_id. See "
    "docs/distributed.md.",
    flag_values=of,
  )
  flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.", flag_values=of)
  flags.DEFINE_integer(
    "num_processes", None, "Processes of the job.", lower_bound=1, flag_values=of
  )
  flags.DEFINE_integer(
    "process_id", None, "Number of this process.", lower_bound=0, flag_values=of
  )
  flags.DEFINE_integer(
    "cpu_devices",
    None,
    "Devices of this process on a machine with CPUs only; default: 2, or 1 in each "
    "process of a job.",
    lower_bound=1,
    flag_values=of,
  )


def flag(name: str):
  """The value of one of the flags; None where a command has not defined them."""
  return flags.FLAGS[name].value if name in flags.FLAGS else None


def join() -> None:
  """Joins the job, if the flags ask for it; before anything touches a device.

  Raises:
    JobError: a flag is missing, or not all processes have joined in time
  """
  given = {name: flag(name) for name in ("coordinator", "num_processes", "process_id")}
  if not flag("distributed"):
    if names := [name for name, value in given.items() if value is not None]:
      raise JobError(f"--{names[0]} is for a process of a job: add --distributed")
    return
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # It would handle SIGTERM; see `processes.stop_on_signals`.
  jax.config.update("jax_enable_preemption_service", False)
  _start_heartbeat()
  if given["coordinator"] is not None:
    _check_port(given["coordinator"], listens=given["process_id"] == 0)
  # JAX would abort this process, and show its stack.
  late = threading.Timer(_JOIN_S, fail, (f"error: {_ALONE}",))
  late.start()
  try:
    jax.distributed.initialize(
      given["coordinator"],
      given["num_processes"],
      given["process_id"],
      initialization_timeout=2 * _JOIN_S,
      heartbeat_timeout_seconds=HEARTBEAT_S,
    )
  except (ValueError, RuntimeError) as e:
    missing = [f"--{name}" for name, value in given.items() if value is None]
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
    sys.stdout = open(os.devnull, "w")  # only the first process prints


def _check_port(coordinator: str, listens: bool) -> None:
  """Raises JobError for an address on which JAX would crash."""
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


def _start_heartbeat() -> None:
  """Sends heartbeats to the launcher, if there is one; ends with it."""
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

  threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def fail(line: str | None) -> NoReturn:
  """Ends this process after an error, at once: an orderly end would wait for the others.

  Args:
    line: the message; None: the current exception with its traceback
  """
  if line is None:
    traceback.print_exc()
  else:
    processes.write_line(line)
  sys.stderr.flush()
  os._exit(1)


def lost(error: BaseException) -> NoReturn:
  """Ends this process because another one is gone, after the launcher could name that.

  Args:
    error: see `programs.loss`
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
  return bool(os.environ.get("TLT_TRACEBACK"))
