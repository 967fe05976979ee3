"""One process of a job: its flags, how it joins the others, how it ends when it fails.

The job is of JAX's distributed runtime; docs/distributed.md says how to launch one. What
the processes of a run agree on is in `tlt_jax.processes`.
"""

import os
import sys
import threading
import time
import traceback
from typing import NoReturn

from absl import flags
import jax

from tlt_jax import processes
from tlt_jax import programs

PULSE_FD = "TLT_PULSE_FD"  # names the pipe on which a launcher listens for signs of life
PULSE_S = 1.0
LIVES, JOINED = b".", b"+"  # what is written there: it runs; it has joined the others
# JAX takes a process that is silent for so long for dead. The launcher, which can say
# which one it was, waits less.
HEARTBEAT_S = 55
# A process that lost another one waits for so long before it ends: its launcher will have
# named the other one, and ended both.
_LAUNCHER_S = 60
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
  flags.DEFINE_bool(
    "core_per_device",
    False,
    "On a CPU each device computes on one core: a slice that trains takes none from one "
    "that decodes.",
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
  # It would take SIGTERM for itself; see `processes.stop_on_sigterm`.
  jax.config.update("jax_enable_preemption_service", False)
  _show_signs_of_life()
  try:  # for as long as JAX waits for the others: 5 minutes
    jax.distributed.initialize(
      told["coordinator"],
      told["num_processes"],
      told["process_id"],
      heartbeat_timeout_seconds=HEARTBEAT_S,
    )
  except (ValueError, RuntimeError) as e:
    raise JobError(_cannot_join(e, told)) from e
  if PULSE_FD in os.environ:
    os.write(int(os.environ[PULSE_FD]), JOINED)
  if not processes.is_first():
    sys.stdout = open(os.devnull, "w")  # what is to be read is printed by the first one


def _cannot_join(error: Exception, told: dict[str, str | int | None]) -> str:
  """Says why a process does not join its job; `told` is what the flags say of that."""
  line = f"this process cannot join its job ({str(error).splitlines()[0][:200]}); "
  missing = [f"--{name}" for name, value in told.items() if value is None]
  if isinstance(error, ValueError):
    return line + (
      f"give {', '.join(missing) or 'other numbers'}, or start it by Slurm, GKE or "
      "experiments.launch (docs/distributed.md)"
    )
  return line + (
    "another process was not started, or cannot reach process 0, or the port of process 0 "
    "(--coordinator) is taken: start all of them again, if need be with another port"
  )


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


def loss(error: BaseException | None) -> BaseException | None:
  """The error by which a process noticed that another one is gone; None: it is another.

  It may be hidden by what came of it. A device of this process that fails looks the same.
  """
  if processes.count() == 1:
    return None
  chain = []
  while error is not None and error not in chain:
    chain.append(error)
    error = error.__cause__ or error.__context__
  if any(map(programs.is_out_of_memory, chain)):
    return None
  # What jax raises of collectives between CPUs is a ValueError.
  of_runtime = lambda e: isinstance(e, jax.errors.JaxRuntimeError) or "Gloo" in str(e)
  return next(filter(of_runtime, reversed(chain)), None)


def lost(error: BaseException) -> NoReturn:
  """Ends this process because of a `loss`; a launcher may say first which one is gone."""
  if wants_traceback():
    traceback.print_exc()
  if PULSE_FD in os.environ:
    time.sleep(_LAUNCHER_S)
  reason = str(error).splitlines()[0][:200]
  fail(
    "error: another process of the job is gone, or this one's device failed: "
    f"{reason} (process {processes.index()}); run the same command again: it goes on from "
    "the last checkpoint. TLT_TRACEBACK=1 shows where"
  )


def wants_traceback() -> bool:
  """Whether errors are shown with their tracebacks: TLT_TRACEBACK asks for it."""
  return bool(os.environ.get("TLT_TRACEBACK"))
