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
# A process that gives no sign of life for so long is dead to the others. The launcher,
# which can name it, is faster.
HEARTBEAT_S = 55
_LAUNCHER_S = 60  # that a process which lost the others leaves a launcher to name the cause
STOPPED = 143  # exit status after SIGTERM, as of a process that it has killed


class JobError(ValueError):
  """A process cannot join its job; the message names the remedy."""


def define_flags() -> None:
  """Defines the flags of a process of a job."""
  of = flags.FLAGS
  if "distributed" in of:
    return
  flags.DEFINE_bool(
    "distributed",
    False,
    "Be one process of a job: what Slurm, GKE or a TPU pod says of it counts, or else "
    "--coordinator, --num_processes and --process_id. See docs/distributed.md.",
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
    JobError: not all of what that takes is known
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
  try:
    jax.distributed.initialize(
      told["coordinator"],
      told["num_processes"],
      told["process_id"],
      heartbeat_timeout_seconds=HEARTBEAT_S,
    )
  except (ValueError, RuntimeError) as e:
    reason = str(e).splitlines()[0]
    raise JobError(
      f"this process cannot join its job ({reason}); name --coordinator=HOST:PORT, "
      "--num_processes and --process_id, or start it by Slurm, GKE or "
      "experiments.launch (docs/distributed.md)"
    ) from e
  if not processes.is_first():
    sys.stdout = open(os.devnull, "w")  # what is to be read is printed by the first one


def _show_signs_of_life() -> None:
  """Tells a launcher, if there is one, that this process runs, and ends with it."""
  if PULSE_FD not in os.environ:
    return
  pipe = int(os.environ[PULSE_FD])

  def beat():
    while True:
      try:
        os.write(pipe, b".")
      except OSError:
        os._exit(1)
      time.sleep(PULSE_S)

  threading.Thread(target=beat, name="signs of life", daemon=True).start()


def fail(line: str | None = None) -> NoReturn:
  """Ends this process after an error; the others cannot go on without it.

  At once: an orderly end would wait for them.

  Args:
    line: what is told; None: the error at hand, with its traceback
  """
  if line is None:
    traceback.print_exc()
  else:
    print(f"{line} (process {processes.index()})", file=sys.stderr)
  sys.stderr.flush()
  os._exit(1)


def is_lost(error: Exception) -> bool:
  """Whether an error of this process comes from another one that is gone.

  What jax raises of collectives between CPUs is a ValueError.
  """
  is_ours = programs.is_out_of_memory(error)
  of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
  return processes.count() > 1 and of_runtime and not is_ours


def lost(error: Exception) -> NoReturn:
  """Ends this process because another one is gone; a launcher may say first which."""
  if PULSE_FD in os.environ:
    time.sleep(_LAUNCHER_S)
  reason = str(error).splitlines()[0][:200]
  fail(
    f"error: another process of the job is gone, or does not answer ({reason}); run the "
    "same command again: it goes on from the last checkpoint"
  )
