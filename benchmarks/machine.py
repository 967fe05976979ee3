"""The machine of a benchmark: devices, memory, versions, commit. The last line is JSON.

python -m benchmarks.machine
"""

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import subprocess

import jax
import jaxlib

from tlt_jax import memory

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGES = ("triton", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def describe() -> dict:
  """Describes the machine; initialises jax's devices."""
  devices = jax.devices()
  room, shared = memory.room(devices)
  return {
    "platform": jax.default_backend(),
    "device": devices[0].device_kind,
    "devices": len(devices),
    "capability": str(getattr(devices[0], "compute_capability", "")),
    "memory_bytes": room.total,
    "memory_is_shared": shared,
    "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "runtime": jax.devices()[0].client.platform_version.splitlines()[0],
    "host": f"{platform.system()} {platform.release()} {platform.machine()}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    **{name: _version(name) for name in _PACKAGES},
  }


def commit() -> str:
  """The commit of this checkout, and a hash of changes to tracked files."""
  git = ("git", "-C", str(_ROOT))
  found = _output(*git, "rev-parse", "HEAD")
  if found is None:
    return "unknown"
  changes = subprocess.run([*git, "diff", "HEAD"], capture_output=True).stdout
  return found + (f"-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")


def today() -> str:
  return datetime.date.today().isoformat()


def free_bytes() -> int:
  """Free memory of the first device."""
  return memory.room(jax.devices()[:1])[0].free


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _output(*command: str) -> str | None:
  """The first line that a program prints; None if it cannot run."""
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return (done.stdout.splitlines() or [None])[0] if done.returncode == 0 else None


if __name__ == "__main__":
  try:
    print(json.dumps(describe()))
  except RuntimeError as e:  # of jax, if the requested platform is missing
    print(json.dumps({"platform": None, "error": " ".join(str(e).split())}))
