"""Starts a command: flags, errors in one line, devices, logging.

A command ends with `launch.run(main, config=trees.from_flags("countdown", RunConfig))`,
which parses the command line and calls `main(config)`; that begins with `launch.start()`.
Importing a command has no effects.

    python -m experiments.launch --processes=2 -- experiments.train --workdir=DIR

runs a command as several processes (see `launcher`).
"""

from collections.abc import Callable, Sequence
import ctypes
import logging
import os
import pathlib
import sys
from typing import Any

from absl import app
from absl import flags
import jax

from experiments import compile_cache
from experiments import distributed
from experiments import launcher
from experiments import logs
from tlt_jax import processes
from tlt_jax import programs


def run(
  main: Callable[..., None],
  takes_arguments: bool = False,
  joins_jobs: bool = False,
  **configs: Callable[[str, Sequence[str]], tuple[Any, list[str]]],
) -> None:
  """Runs a command; errors that a user can fix end in one line and exit status 1.

  Configs can name modules of the current folder as well as installed ones.

  Args:
    main: called with the configs, by the names of their flags
    takes_arguments: whether `main` takes positional arguments
    joins_jobs: whether several processes can run it as one job (--distributed)
    configs: flag name -> reader of a config, see `trees.from_flags`
  """
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())

  distributed.define_flags()
  given = {}

  def parse(argv):
    try:
      for name, read in configs.items():
        given[name], argv = read(name, argv)
      return flags.FLAGS(argv)
    except (flags.Error, ValueError) as e:
      sys.exit(_one_line(e))

  def guarded(argv):
    if argv[1:] and not takes_arguments:
      sys.exit(f"error: unexpected argument {argv[1]!r}; flags start with --")
    if distributed.flag("distributed") and not joins_jobs:
      name = pathlib.Path(argv[0]).stem
      sys.exit(f"error: --distributed: {name} writes its files from one process only")
    try:
      main(*argv[1:], **given)
    except distributed.JobError as e:
      distributed.fail(None if distributed.wants_traceback() else _one_line(e))
    except Exception as e:
      line = None if distributed.wants_traceback() else _one_line(e)
      if (found := programs.loss(e)) is not None:
        distributed.lost(found)
      if processes.count() > 1:
        distributed.fail(line and f"{line} (process {processes.index()})")
      if line is None:
        raise
      sys.exit(line)

  launched = distributed.PULSE_FD in os.environ
  processes.stop_on_signals(announces=not launched)
  try:
    app.run(guarded, flags_parser=parse)
  except processes.Stopped as e:
    if processes.is_first():
      processes.write_line(str(e))
    if programs.are_compiling() or (processes.count() > 1 and not e.together):
      os._exit(distributed.STOPPED)  # an orderly end would wait for threads, or others
    sys.exit(distributed.STOPPED)
  finally:
    processes.end_on_signals()


def _one_line(e: Exception) -> str | None:
  """The message of an error that a user can fix; None for any other."""
  fixable = flags.Error, ValueError, FloatingPointError, MemoryError, OSError
  if isinstance(e, fixable):
    return "error: " + (" ".join(str(e).split()) or type(e).__name__)
  if not programs.is_out_of_memory(e):
    return None
  line = str(e).splitlines()[0][:200]
  return (
    f"error: a device's memory is full ({line}); smaller values of rollout.slots, "
    "sampling.max_tokens, learner.buckets or spot.rows of the config need less"
  )


def start(cpu_slices: int = 2) -> None:
  """Sets up devices and logging, before JAX uses a device; may join a job.

  Args:
    cpu_slices: devices on a machine with CPUs only, unless --cpu_devices sets them; a
      process of a job has one
  """
  logs.start()
  keep_freed_memory()
  usual = 1 if distributed.flag("distributed") else cpu_slices
  shown = distributed.flag("cpu_devices") or usual
  jax.config.update("jax_num_cpu_devices", shown)
  if shown >= len(launcher.cores()):
    # Or devices would share threads: a slice would decode faster while another one is
    # idle, and slower while it trains.
    alone = "--xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {alone}".strip()
  # With asynchronous dispatch, programs of one CPU device can fill its queue while another
  # device waits for it in a collective: a deadlock, seen on two cores.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  compile_cache.start()
  distributed.join()
  devices, of = jax.devices(), ""
  if processes.count() > 1:
    logs.start(processes.index())
    of = f" of {processes.count()} processes"
  logging.info("%d x %s%s", len(devices), devices[0].device_kind, of)


def keep_freed_memory() -> None:
  """Makes glibc keep large freed blocks instead of unmapping them.

  XLA's CPU matrix products allocate megabytes of scratch in every call; mapping these each
  time took over half of a decoding step. No effect with other C libraries.
  """
  try:
    mallopt = ctypes.CDLL("libc.so.6").mallopt
  except (OSError, AttributeError):
    return
  trim_threshold, mmap_max, arena_max = -1, -4, -8
  mallopt(mmap_max, 0)
  mallopt(arena_max, 1)  # other arenas give back what is above 32 MiB
  mallopt(trim_threshold, 2**30)


def release_freed_memory() -> None:
  """Gives back the memory that `keep_freed_memory` keeps; to be called between phases.

  The large blocks of the next phase would not fit between the small ones of the last.
  """
  try:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
  except (OSError, AttributeError):
    return


if __name__ == "__main__":
  sys.exit(launcher.main(sys.argv[1:]))
