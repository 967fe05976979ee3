"""Runs Python code that nobody trusts, such as a model's, and leaves nothing behind.

    limits = sandbox.Limits(wall_s=5.0)
    ran = sandbox.run("print(int(input()) + 1)", "1", limits)
    assert ran == sandbox.Ran(0, "2\\n")

Each program has a process, a file system, a PID namespace and an unconnected network of
its own, without privileges, and limits on what it uses: `isolation` tells how. It has
Python's standard library. System calls are not filtered: against a hole in the kernel only
a virtual machine helps. What Linux needs for it, user namespaces, some containers
refuse; `check` tells. `isolation="limits"` does without: then a program can read and
write what its user can (nobody, where root runs it), and use the network.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Literal, NamedTuple

from tlt_jax import isolation
from tlt_jax import ranges

Isolation = Literal["namespaces", "limits"]
_LATE_S = 60.0  # for starting and clearing up, a last resort
_FILES = 64


class SandboxError(ValueError):
  """Programs cannot be isolated on this machine, or not run at all."""


class Ran(NamedTuple):
  """What became of a program."""

  status: int | None  # its exit status, modulo 256; None: its time was over
  stdout: str


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one program may use."""

  wall_s: ranges.Positive = 10.0  # seconds that pass
  cpu_s: ranges.Positive = 5.0  # seconds of CPU time of each process, rounded up
  memory_mb: ranges.Count = 512  # address space of each process
  processes: ranges.Count = 4  # and threads, at a time
  file_mb: ranges.Count = 4  # all files together, and what it prints

  def __post_init__(self):
    ranges.check(Limits, vars(self))


def run(
  program: str,
  stdin: str,
  limits: Limits,
  isolation: Isolation = "namespaces",
) -> Ran:
  """Runs a program to its end, or to that of its time; any thread may call this.

  Args:
    program: Python source
    stdin: what it can read
    limits: what it may use
    isolation: "namespaces", or "limits" for none but those
  Raises:
    SandboxError: it cannot be isolated so on this machine
  """
  with tempfile.TemporaryDirectory(
    prefix="tlt_jax_sandbox_", ignore_cleanup_errors=True
  ) as root:
    job = {
      "program": program,
      "stdin": stdin,
      "isolation": isolation,
      "root": root,
      "wall_s": limits.wall_s,
      "cpu_s": limits.cpu_s,
      "memory_bytes": limits.memory_mb * 2**20,
      "processes": limits.processes,
      "file_bytes": limits.file_mb * 2**20,
      "files": _FILES,
    }
    try:
      done = subprocess.run(
        [_PYTHON, "-I", "-S", _SCRIPT],
        input=json.dumps(job).encode(),
        capture_output=True,
        timeout=limits.wall_s + _LATE_S,
        env={"PATH": os.environ.get("PATH", "")},
        start_new_session=True,
      )
    except subprocess.TimeoutExpired:
      return Ran(None, "")
  try:
    report = json.loads(done.stdout)
  except ValueError:
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it died"])[-1]
    report = {"error": last}
  if "error" in report:
    raise SandboxError(
      f"code cannot be isolated on this machine ({report['error']}); run where Linux "
      "allows user namespaces (a container with --security-opt seccomp=unconfined), or, "
      "where code may use files and network, say isolation='limits'"
    )
  return Ran(report["status"], report["stdout"])


_PYTHON = sys.executable
_SCRIPT = str(pathlib.Path(isolation.__file__).resolve())


def check(isolation: Isolation) -> None:
  """Raises SandboxError unless programs can be isolated so on this machine."""
  limits = Limits(wall_s=60.0, cpu_s=60.0)
  if run("print(1)", "", limits, isolation) != Ran(0, "1\n"):
    raise SandboxError(f"isolation={isolation!r}: Python does not start when isolated so")
