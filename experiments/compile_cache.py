"""Keeps compiled programs between runs, so that a second start compiles nothing.

In one folder: JAX's persistent cache of programs, XLA's choices of kernels by timing (per
fusion, on GPUs), and Triton's kernels. JAX's keys have the versions of jaxlib and driver,
the flags and the kind of device; XLA's have the device, but no version: each version of
jaxlib has a folder. XLA's file of kernels is left off: two programs that are compiled at a
time would write it, and it is read whole for each.

The limit is ours: by `jax_compilation_cache_max_size` JAX fails on entries of runs without
one, and locks the whole cache for every read. `JAX_COMPILATION_CACHE_DIR` names another
folder, which has no limit.
"""

import contextlib
import logging
import os
import pathlib
import re
import shutil
import tempfile
import warnings

import jax
import jaxlib

MOST_BYTES = 4 * 2**30
_LEAST_FREE = 2**28  # bytes on the disk: XLA fails where it cannot write its choices
_ELSEWHERE = "JAX_COMPILATION_CACHE_DIR=FOLDER keeps them elsewhere"
_ERROR = r"Error (reading|writing) persistent compilation cache entry for '(\w+)': (.*)"


def start() -> None:
  """Sets up the caches of this process, before it compiles anything."""
  if not jax.config.jax_enable_compilation_cache:
    return
  given = jax.config.jax_compilation_cache_dir
  if given and "://" in given:  # XLA and Triton write to disks only
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")
    return
  folder = pathlib.Path(given or usual())
  try:
    _check(folder)
  except OSError as e:
    logging.warning("compiled programs are not kept: %s; %s", e, _ELSEWHERE)
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton_"))
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
  warnings.filterwarnings("always", _ERROR)  # of programs with the same name, too
  warnings.showwarning = _Errors(folder, warnings.showwarning)
  if not given:
    prune(folder.parent)


def usual() -> pathlib.Path:
  """The folder of this version."""
  caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(caches) / "tlt_jax" / "compiled" / f"jaxlib_{jaxlib.__version__}"


def _check(folder: pathlib.Path) -> None:
  """Raises OSError unless the folder can be written to."""
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=folder) as file:
    file.write(b"0")
  if (free := shutil.disk_usage(folder).free) < _LEAST_FREE:
    raise OSError(f"the disk of {folder} is full ({free / 2**20:.0f} MiB are free)")


def prune(folder: pathlib.Path, most: int = MOST_BYTES) -> None:
  """Removes files, those that were not used for longest first, down to `most` bytes."""
  found = []
  for parent, _, names in os.walk(folder):
    for path in (os.path.join(parent, name) for name in names):
      try:
        stat = os.stat(path)
      except OSError:  # another process has removed it
        continue
      found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
  held = sum(size for _, size, _ in found)
  for _, size, path in sorted(found):
    if held <= most:
      break
    pathlib.Path(path).unlink(missing_ok=True)
    held -= size


class _Errors:
  """Shows warnings; of JAX's about its cache the first, in a line of the log.

  JAX compiles a program whose entry it cannot read, and would not write it again; of one
  that it cannot write, as on a full disk, a part is left.
  """

  def __init__(self, folder: pathlib.Path, show):
    self._folder, self._show = folder, show
    self._shown = False

  def __call__(self, message, *args, **kwargs) -> None:
    error = re.match(_ERROR, str(message), re.DOTALL)
    if error is None:
      return self._show(message, *args, **kwargs)
    if not self._shown:
      self._shown = True
      logging.warning(
        "%s compiled programs fails: %s; the run goes on; %s",
        error[1],
        " ".join(error[3].split())[:200],
        _ELSEWHERE,
      )
    with contextlib.suppress(OSError):  # another process has removed it
      entries = self._folder.glob(f"{error[2]}-*-cache")
      entries = sorted(entries, key=lambda file: file.stat().st_mtime_ns)
      for file in entries if error[1] == "reading" else entries[-1:]:
        file.unlink()
