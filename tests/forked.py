"""Commands in processes of their own that need not import their libraries again.

Importing these takes some five seconds, most of what a short command takes. So one process
of each test worker imports them, once, and is forked for every command. It runs no command
itself and touches no device. Where processes cannot be forked so, each imports anew.
"""

import atexit
from collections.abc import Mapping, Sequence
import functools
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import threading
import warnings

# What takes long to import. No command is among it: each defines flags as it is imported.
_LIBRARIES = (
  "flax.linen",
  "grain",
  "jax",
  "jax.experimental.pallas",
  "matplotlib.figure",
  "ml_collections",
  "optax",
  "orbax.checkpoint",
  "reasoning_gym",
  "tlt_jax.api",
  "tlt_jax.rl.evaluation",
  "tokenizers",
  "transformers",
)
# Libraries read these as they are imported.
_READ_EARLY = ("JAX_", "XLA_", "HF_", "TF_", "PYTHON")


def _read_early() -> dict[str, str]:
  return {k: x for k, x in os.environ.items() if k.startswith(_READ_EARLY)}


@functools.cache
def _server():
  """What starts processes, and the environment that they begin with."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload([__name__, *_LIBRARIES])
  return context, _read_early()


class Process:
  """A process with pipes from its output; of `subprocess.Popen` what tests use."""

  def __init__(self, process, stdout, stderr):
    """Of one that is started, and the ends of its pipes, which are read as text."""
    self._process = process
    self.stdout, self.stderr = stdout, stderr

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.stdout.close()
    self.stderr.close()
    self._process.join()

  @property
  def pid(self) -> int:
    return self._process.pid

  @property
  def returncode(self) -> int | None:
    """Its exit status; minus the signal that ended it; None: it still runs."""
    return self._process.exitcode

  def send_signal(self, number: int) -> None:
    if self.returncode is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    self._process.kill()

  def wait(self) -> None:
    self._process.join()

  def communicate(self, timeout: float | None = None) -> tuple[str, str]:
    """Waits for its end, and returns what it wrote meanwhile.

    Raises:
      subprocess.TimeoutExpired: it did not end within so many seconds
    """
    told = {}

    def read(name):
      told[name] = getattr(self, name).read()

    readers = [threading.Thread(target=read, args=[n]) for n in ("stdout", "stderr")]
    for reader in readers:
      reader.daemon = True
      reader.start()
    self._process.join(timeout)
    if self.returncode is None:
      raise subprocess.TimeoutExpired(self._process.name, timeout)
    for reader in readers:
      reader.join()
    return told["stdout"], told["stderr"]


def start(
  args: Sequence[str], cwd: str, env: Mapping[str, str]
) -> Process | subprocess.Popen:
  """Runs `python -m MODULE ...` or `python -c TEXT ...` with its output in pipes.

  Args:
    args: of Python
    cwd: the folder in which it runs
    env: its environment
  """
  args, env = list(args), dict(env)
  context, early = _server()
  if early != _read_early():
    return subprocess.Popen(
      [sys.executable, *args],
      cwd=cwd,
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
  pipes = [context.Pipe(duplex=False) for _ in range(2)]
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  writers = [writer for _, writer in pipes]
  process = context.Process(target=_run, args=(args, cwd, env, limit, *writers))
  process.start()
  for writer in writers:
    writer.close()
  texts = [os.fdopen(os.dup(reader.fileno()), "r") for reader, _ in pipes]
  for reader, _ in pipes:
    reader.close()
  return Process(process, *texts)


def _run(args, cwd, env, limit, stdout, stderr):
  """What the forked process does."""
  os.dup2(stdout.fileno(), 1)
  os.dup2(stderr.fileno(), 2)
  stdout.close()
  stderr.close()
  # What the first process has may lead to files; of pipes less can be asked.
  sys.stdout = open(1, "w", closefd=False)
  sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
  os.chdir(cwd)
  resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  os.environ.clear()
  os.environ.update(env)
  sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
  kind, what, *rest = args
  sys.argv = [kind if kind == "-c" else what, *rest]
  try:
    if kind == "-c":
      exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
      runpy.run_module(what, run_name="__main__", alter_sys=True)
  finally:
    atexit._run_exitfuncs()  # a process that is forked so leaves them out


# jax and Python warn of threads; those of numpy and of allocators are made for it.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called|.*multi-threaded")
