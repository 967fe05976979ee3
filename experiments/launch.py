"""Starts a command: flags and configs, errors in one line, devices, logging.

A command ends with `launch.run(main, config=FILE)`. That defines `--config`, parses the
command line and calls `main(config)`, which begins with `launch.start(workdir, config)`.
Nothing happens before `run`: any command can be imported.
"""

from collections.abc import Callable, Sequence
import ctypes
import itertools
import json
import logging
import os
import pathlib
import sys

from absl import app
from absl import flags
import jax
from ml_collections import config_flags

from tlt_jax import named

_COMPILED = pathlib.Path("~/.cache/tlt_jax/compiled").expanduser()


def run(main: Callable[..., None], **configs: str) -> None:
  """Runs a command; what a user can mend ends in one line and exit status 1.

  Args:
    main: called with the configs, as plain dicts and tuples, by the names of their flags
    configs: flag name -> default file. Each is given as `--name=FILE.py[:arg]`, with
      overrides `--name.a.b=value`; a key that does not exist is an error that names the
      nearest one.
  """

  def parse(argv):
    try:
      for name, default in configs.items():
        config_flag(name, default, argv)
      return flags.FLAGS(argv)
    except flags.Error as e:
      sys.exit(_one_line(e))

  def guarded(argv):
    if len(argv) > 1:
      sys.exit(f"error: unexpected argument {argv[1]!r}; flags start with --")
    given = {name: flags.FLAGS[name].value.to_dict() for name in configs}
    try:
      main(**given)
    except (ValueError, FloatingPointError, MemoryError, OSError) as e:
      if os.environ.get("TLT_TRACEBACK"):
        raise
      sys.exit(_one_line(e))

  app.run(guarded, flags_parser=parse)


def _one_line(e: Exception) -> str:
  return "error: " + " ".join(str(e).split())


def config_flag(name: str, default: str, argv: Sequence[str]) -> None:
  """Defines `--name=FILE.py[:arg]` with overrides `--name.a.b=value`, locked.

  Args:
    name: of the flag
    default: its file
    argv: the command line, in which its file or the key of an override may be missing;
      that ends the command in one line
  """
  path, given, overrides = default, False, []
  for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
    before, equals, value = arg.partition("=")
    flag, _, key = before.lstrip("-").partition(".")
    if not arg.startswith("-") or flag.removeprefix("no") != name:
      continue
    if key:
      overrides.append(key)
    else:
      path, given = value if equals else following, True
  if overrides or given:
    _check_overrides(name, path, overrides)
  help_string = f"Config file, FILE.py[:ARG]; its entries are set by --{name}.KEY=VALUE."
  config_flags.DEFINE_config_file(name, default, help_string, lock_config=True)
  # `--help` shows the flags of the command's own file.
  flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS[name])


def _check_overrides(name: str, path: str, overrides: Sequence[str]) -> None:
  """Exits naming the nearest key, where ml_collections would show a traceback."""
  if not pathlib.Path(path.partition(":")[0]).is_file():
    sys.exit(f"error: --{name}={path}: no such file (in folder {pathlib.Path.cwd()})")
  try:
    keys = _keys(read_config(path))
  except flags.Error as e:  # its message is a whole traceback
    sys.exit(f"error: --{name}={path}: {str(e).splitlines()[-1]}")
  for key in overrides:
    if key not in keys:
      hint = named.nearest(key, keys) or f"; see {path}"
      sys.exit(f"error: --{name}.{key}: the config has no such key{hint}")


def _keys(section: dict, prefix: str = "") -> list[str]:
  """The dotted name of every section and value."""
  keys = []
  for name, value in section.items():
    keys.append(prefix + name)
    if isinstance(value, dict):
      keys += _keys(value, f"{prefix}{name}.")
  return keys


def read_config(path: str) -> dict:
  """The config that `FILE.py[:arg]` names, as plain dicts and tuples."""
  loaded = config_flags.DEFINE_config_file(
    "config", path, flag_values=flags.FlagValues(), sys_argv=[]
  )
  return loaded.default.to_dict()


def start(workdir: pathlib.Path, config: dict, cpu_slices: int = 2) -> None:
  """Sets up devices and logging, and writes `workdir/config.json`.

  On a machine with CPUs only, JAX shows `cpu_slices` devices; must therefore run
  before anything touches a device.
  """
  logging.basicConfig(
    level=logging.INFO,
    format="%(asctime)s %(message)s",
    datefmt="%H:%M:%S",
    stream=sys.stderr,
    force=True,
  )
  for name in ("absl", "jax", "orbax"):
    logging.getLogger(name).setLevel(logging.WARNING)
  # A read that fails in orbax is raised, and would be logged again by each task.
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  keep_freed_memory()
  jax.config.update("jax_num_cpu_devices", cpu_slices)
  # Queued ahead, programs of one CPU device can take all places in its queue while
  # another device waits for it in a collective: a deadlock, seen on two cores.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if not jax.config.jax_compilation_cache_dir:  # the second start compiles nothing
    jax.config.update("jax_compilation_cache_dir", str(_COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "config.json"
  partial = path.with_suffix(".tmp")
  partial.write_text(json.dumps(config, indent=2) + "\n")
  os.replace(partial, path)
  devices = jax.devices()
  logging.info("%d x %s", len(devices), devices[0].device_kind)


def keep_freed_memory() -> None:
  """Makes glibc keep large freed blocks instead of unmapping them.

  XLA's CPU matrix products allocate scratch of megabytes in every call; mapping it
  anew each time took over half of a decoding step. No effect elsewhere.
  """
  try:
    mallopt = ctypes.CDLL("libc.so.6").mallopt
  except (OSError, AttributeError):
    return
  trim_threshold, mmap_max, arena_max = -1, -4, -8
  mallopt(mmap_max, 0)
  mallopt(arena_max, 1)  # an arena of its own gives back what is above 32 MiB
  mallopt(trim_threshold, 2**30)
