"""Runs untrusted Python code, such as a model's, and leaves nothing behind.

    ran = sandbox.run("print(int(input()) + 1)", "1", sandbox.Limits(wall_s=5.0))
    assert ran == sandbox.Ran(0, "2\\n")

A program has Python's standard library, numpy and the packages that are installed with it,
resource limits and a fresh folder in memory, /tmp. It is the module __main__, as a file is
that Python runs. Linear algebra has one thread.

util-linux's `unshare`, without root, gives it namespaces of users, mounts, processes,
network and IPC: no network, no privileges, no /proc and /sys, of /dev only its open files,
null, zero, full, random and urandom, other files read-only, and its children end with it.

Limits of this: it can read its user's files. System calls are not filtered: only a virtual
machine protects from kernel bugs. Some containers refuse namespaces, which `check` detects.
With `isolation="limits"` a program can write its user's files (nobody's, if root runs it)
and use the network, and children in another session may outlive it.
"""

import dataclasses
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Literal, NamedTuple

import numpy as np
import psutil

from tlt_jax import ranges

Isolation = Literal["namespaces", "limits"]

_NOBODY = 65534
_STACK = 2**26  # bytes, which programs may raise: for recursion of functions with a cache
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | dict.fromkeys(
  ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"), "1"
)
_ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--no-new-privs")
_NAMESPACES = (
  "unshare --user --map-root-user --net --ipc --pid --mount --fork --kill-child sh -ec"
).split()
# $0 is the options of /tmp, $1 the folder of packages, the rest the command, without the
# right to mount. `mount -c --bind .` mounts the current folder, even if another mount
# hides it: packages below /tmp, and the open files of this process, later the program's.
_MOUNT = """
for each in $(cut -d " " -f 2 /proc/mounts); do
  mount -o remount,bind,ro "$each" || mount -t tmpfs -o ro none "$each" || test ! -d "$each"
done 2> /dev/null
cd "$1"
shift
mount -t tmpfs -o "$0" none /tmp
mount -t tmpfs -o mode=755 none /sys
mkdir /sys/packages /sys/fd
mount -c --rbind . /sys/packages
cd /proc/self/fd
mount -c --bind . /sys/fd
for each in null zero full random urandom; do
  : > /sys/$each
  mount --bind /dev/$each /sys/$each
done
ln -s fd/0 /sys/stdin
ln -s fd/1 /sys/stdout
ln -s fd/2 /sys/stderr
ln -s /tmp /sys/shm
mount --rbind /sys /dev
mount -o remount,bind,ro /dev
cd /tmp
for each in /proc /sys; do mount -t tmpfs -o ro none $each; done
exec setpriv --bounding-set=-all --inh-caps=-all "$@"
"""
# Signals that it runs, sets the limits, and executes the program from a file, which it can
# read itself. What it prints to stderr goes nowhere, and so counts for no limit.
_RUN = """
import json, os, resource, site, sys
source, started, limits, packages = json.loads(sys.argv[1])
os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
os.write(started, b".")
os.close(started)
for name, most in limits.items():
  limit = getattr(resource, "RLIMIT_" + name)
  hard = resource.getrlimit(limit)[1]
  most = most if hard == resource.RLIM_INFINITY else min(most, hard)
  resource.setrlimit(limit, (most, hard if name == "STACK" else most))
site.setquit(); site.setcopyright(); site.sethelper()
sys.path.append(packages)
main = sys.modules["__main__"] = type(sys)("__main__")
sys.argv[:] = [f"/dev/fd/{source}"]
main.__file__ = sys.argv[0]
program = open(source, encoding="utf-8", closefd=False).read()
exec(compile(program, main.__file__, "exec"), vars(main))
"""


class SandboxError(ValueError):
  """Programs cannot be isolated on this machine."""


class Ran(NamedTuple):
  status: int | None  # exit status, negative for a signal; None: timeout
  stdout: str


@dataclasses.dataclass(frozen=True)
class Limits:
  wall_s: ranges.Positive = 10.0
  cpu_s: ranges.Positive = 5.0  # of each process, rounded up
  memory_mb: ranges.Count = 1024  # address space of each process
  processes: ranges.Count = 8  # and threads, at a time
  file_mb: ranges.Count = 4  # all files together, and stdout

  def __post_init__(self):
    ranges.check(Limits, vars(self))


def run(
  program: str, stdin: str, limits: Limits, isolation: Isolation = "namespaces"
) -> Ran:
  """Runs Python source to its end or timeout; any thread may call this."""
  is_isolated = isolation == "namespaces"
  size = limits.file_mb * 2**20
  packages = pathlib.Path(np.__file__).resolve().parents[1]
  user = None if is_isolated or os.getuid() else _NOBODY
  most = {
    "CPU": int(limits.cpu_s + 0.999),
    "AS": limits.memory_mb * 2**20,
    "NPROC": limits.processes + (0 if is_isolated else _running(user or os.getuid())),
    "FSIZE": size,
    "NOFILE": 64,
    "STACK": _STACK,
    "CORE": 0,
  }
  with (
    tempfile.TemporaryDirectory(prefix="tlt_jax_sandbox_") as folder,
    _file(program) as source,
    _file(stdin) as given,
    _file() as stdout,
    _file() as stderr,
    _file() as started,
  ):
    os.chmod(folder, 0o777)
    python = os.path.realpath(sys.executable)  # not a link of a virtual environment
    seen = "/dev/packages" if is_isolated else str(packages)
    args = json.dumps([source.fileno(), started.fileno(), most, seen])
    command = [python, "-I", "-S", "-B", "-c", _RUN, args]
    if is_isolated:
      options = f"size={size},nr_inodes=64,mode=1777,nosuid,nodev"
      command = [*_NAMESPACES, _MOUNT, options, str(packages), *command]
    try:
      process = subprocess.Popen(
        [*_ENDS_WITH_PARENT, *command],
        stdin=given,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=_ENVIRONMENT,
        pass_fds=[source.fileno(), started.fileno()],
        start_new_session=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
      )
      try:
        status = process.wait(limits.wall_s)
      except subprocess.TimeoutExpired:
        status = None
      finally:
        _kill(process)
      error = (_content(stderr, 10_000).strip().splitlines() or ["it did not start"])[-1]
    except OSError as e:
      error = str(e)
    printed, has_started = _content(stdout, size), _content(started, 1)
  if not has_started and status is not None:
    raise SandboxError(
      f"code cannot be isolated on this machine ({error}); run where Linux allows user "
      "namespaces (a container with --security-opt seccomp=unconfined) and with "
      "util-linux 2.33 or later, or, where code may use files and network, say "
      "isolation='limits'"
    )
  return Ran(status, printed)


def check(isolation: Isolation) -> None:
  """Raises SandboxError unless programs can be isolated so on this machine."""
  if run("print(1)", "", Limits(wall_s=60.0, cpu_s=60.0), isolation) != Ran(0, "1\n"):
    raise SandboxError(f"isolation={isolation!r}: Python does not start when isolated so")


def _file(text: str = "") -> tempfile._TemporaryFileWrapper:
  """An open file without a name, which any user may open again as /dev/fd/N.

  Writes append: those to /dev/stdout, as it was opened again, overwrite none to stdout.
  """
  file = tempfile.TemporaryFile()
  os.fchmod(file.fileno(), 0o666)
  fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
  file.write(text.encode(errors="surrogatepass"))
  file.seek(0)
  return file


def _content(file, most: int) -> str:
  return os.pread(file.fileno(), most, 0).decode(errors="replace")


def _kill(process: subprocess.Popen) -> None:
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  process.wait()


def _running(uid: int) -> int:
  count = 0
  for process in psutil.process_iter():
    try:
      count += process.num_threads() if process.uids().real == uid else 0
    except psutil.Error:
      continue
  return count
