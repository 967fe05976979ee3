"""Starts a command: flags and configs, errors in one line, devices, logging.

A command ends with `launch.run(main, config=("countdown", keys.RUN))`. That defines
`--config`, parses the command line, checks the config and calls `main(config)`, which
begins with `launch.start()`. Nothing happens before `run`: any command can be imported.

    python -m experiments.launch --processes=2 -- experiments.train --workdir=DIR

runs a command as several processes; see `launcher`.
"""

from collections.abc import Callable, Sequence
import ctypes
import importlib.util
import logging
import os
import pathlib
import sys
import typing

from absl import app
from absl import flags
import jax
import ml_collections
from ml_collections import config_dict
from ml_collections import config_flags

from experiments import declarations
from experiments import distributed
from experiments import launcher
from experiments import logs
from tlt_jax import named
from tlt_jax import processes
from tlt_jax import programs
from tlt_jax import ranges

CONFIGS = pathlib.Path(__file__).parent / "configs"
_COMPILED = pathlib.Path("~/.cache/tlt_jax/compiled").expanduser()
_HELP = ("help", "helpshort", "helpfull", "?")


def run(
  main: Callable[..., None],
  takes_arguments: bool = False,
  joins_jobs: bool = False,
  **configs: tuple[str, declarations.Section],
) -> None:
  """Runs a command; what a user can mend ends in one line and exit status 1.

  Modules of the current folder can be named in a config, as those that are installed.

  Args:
    main: called with the configs, as plain dicts and tuples, by the names of their flags
    takes_arguments: whether `main` takes what is on the command line without -- first
    joins_jobs: whether several processes may run it as one job (--distributed)
    configs: flag name -> (default file in `configs/`, its keys). A config is given as
      `--name=FILE.py[:arg]`, with overrides `--name.a.b=value`; see `config_flag`
  """
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())

  distributed.define_flags()

  def parse(argv):
    try:
      for name, (default, section) in configs.items():
        argv = config_flag(name, str(CONFIGS / f"{default}.py"), section, argv)
      return flags.FLAGS(argv)
    except (flags.Error, declarations.ConfigError) as e:
      sys.exit(_one_line(e))

  def guarded(argv):
    if argv[1:] and not takes_arguments:
      sys.exit(f"error: unexpected argument {argv[1]!r}; flags start with --")
    if distributed.flag("distributed") and not joins_jobs:
      name = pathlib.Path(argv[0]).stem
      sys.exit(f"error: --distributed: {name} writes its files from one process only")
    given = {name: flags.FLAGS[name].value.to_dict() for name in configs}
    try:
      for name, (_, section) in configs.items():
        declarations.check(section, given[name], name)
      main(*argv[1:], **given)
    except processes.Stopped:
      if processes.is_first():
        logging.info("stopped as it was told; the same command goes on")
      sys.exit(distributed.STOPPED)
    except KeyboardInterrupt:  # before there is anything to save
      sys.exit("stopped by Ctrl-C")
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

  app.run(guarded, flags_parser=parse)


def _one_line(e: Exception) -> str | None:
  """What to tell of an error that a user can mend; None of any other."""
  mendable = flags.Error, ValueError, FloatingPointError, MemoryError, OSError
  if isinstance(e, mendable):
    return "error: " + (" ".join(str(e).split()) or type(e).__name__)
  if not programs.is_out_of_memory(e):
    return None
  told = str(e).splitlines()[0][:200]
  return (
    f"error: a device's memory is full ({told}); smaller values of rollout.slots, "
    "sampling.max_tokens, learner.buckets or spot.rows of the config need less"
  )


def config_flag(
  name: str, default: str, section: declarations.Section, argv: Sequence[str]
) -> list[str]:
  """Defines the overrides `--name.a.b=value` of the config that the command line names.

  An algorithm or a source of prompts that is chosen there starts from its own defaults:
  `--config.algorithm.name=my_package.my_algorithm --config.algorithm.scale=2`.

  Args:
    name: of the flag, which becomes the locked config
    default: its file, where the command line names none
    section: the keys it may have
    argv: the command line
  Returns:
    the command line without the file, for the flags that are left
  Raises:
    ConfigError: a file that is none, a key that does not exist, with the nearest
  """
  path, overrides, rest = _split(argv, name)
  path = path or default
  try:
    config = read_config(path)
  except declarations.ConfigError as e:
    raise declarations.ConfigError(f"--{name}={path}: {e}") from e
  declarations.fill_in(section, config, overrides, flag=name)
  rows = list(declarations.rows(section, config))
  known = [key for key, _, _ in rows]
  for key in overrides:
    if key not in known:
      hint = named.nearest(key, known) or f"; see {path}"
      raise declarations.ConfigError(f"--{name}.{key}: the config has no such key{hint}")
  # ml_collections reads a text as the type of the value that it replaces.
  for key, value, declared in rows:
    kind = declarations.plain_type(declared.type)
    none = f"--{name}.{key}=None"
    if none in rest and type(None) in typing.get_args(declared.type):
      rest = [arg for arg in rest if arg != none]
      value = None
    if declared.type == tuple[str, ...] and key in overrides:
      rest = _names_quoted(rest, f"{name}.{key}")
    if value is None:
      _put(config, key, config_dict.placeholder(kind))
    elif type(value) is int and kind is float:
      _put(config, key, float(value))
  help_string = f"Config file, FILE.py[:ARG]; its entries are set by --{name}.KEY=VALUE."
  if any(arg.lstrip("-") in _HELP for arg in argv):
    help_string += "".join(
      f"\n--{name}.{key}={value!r}: {declared.meaning} [{ranges.words(declared.type)}]"
      for key, value, declared in rows
    )
  config = ml_collections.ConfigDict(config)
  config_flags.DEFINE_config_dict(name, config, help_string, flags.FLAGS, sys_argv=rest)
  flags.FLAGS[name].default_as_str = repr(path)
  # `--help` shows the flags of the command's own file.
  flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS[name])
  return rest


def _split(argv: Sequence[str], name: str) -> tuple[str, dict[str, str], list[str]]:
  """A config's file ("" if none is named), its overrides, and what is left for absl."""
  path, overrides, rest, args = "", {}, [], list(argv)
  while args:
    arg = args.pop(0)
    before, equals, value = arg.partition("=")
    flag, _, key = before.lstrip("-").partition(".")
    if not arg.startswith("-") or flag.removeprefix("no") != name:
      rest.append(arg)
    elif key:
      rest.append(arg)
      overrides[key] = value if equals else "".join(args[:1])
    else:
      path = value if equals else "".join(args[:1])
      args = args if equals else args[1:]
  return path, overrides, rest


def _names_quoted(args: Sequence[str], flag: str) -> list[str]:
  """The command line with a flag's names a,b as ("a","b"); else 3_1_4 is a number."""
  found = list(args)
  for i, arg in enumerate(args):
    before, equals, value = arg.partition("=")
    if before.lstrip("-") != flag or not before.startswith("-"):
      continue
    value = value if equals else "".join(args[i + 1 : i + 2])
    if value and value[0] not in "([\"'":
      found[i : i + (1 if equals else 2)] = [f"--{flag}={tuple(value.split(','))!r}"]
  return found


def _put(config: dict, key: str, value) -> None:
  """Sets the entry of a dotted key."""
  *sections, last = key.split(".")
  for section in sections:
    config = config[section]
  config[last] = value


def read_config(path: str) -> dict:
  """The config that `FILE.py[:arg]` names, as plain dicts and tuples.

  One of `configs/` can be named alone, as in `countdown:smoke`.

  Raises:
    ConfigError: no such file, or one that gives no config
  """
  file, _, arg = path.partition(":")
  if file.isidentifier() and (CONFIGS / f"{file}.py").is_file():
    file = str(CONFIGS / f"{file}.py")
  if not pathlib.Path(file).is_file():
    raise declarations.ConfigError(f"no such file (in folder {pathlib.Path.cwd()})")
  spec = importlib.util.spec_from_file_location("config", file)
  if spec is None:
    raise declarations.ConfigError("a config is a Python file, FILE.py")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    made = module.get_config(*filter(None, [arg]))
    if not isinstance(made, ml_collections.ConfigDict | dict):
      raise TypeError(f"get_config gives a {type(made).__name__}, not a ConfigDict")
    return ml_collections.ConfigDict(made).to_dict()
  except (Exception, SystemExit) as e:  # whatever the file does
    raise declarations.ConfigError(f"{type(e).__name__}: {e}") from e


def start(cpu_slices: int = 2) -> None:
  """Sets up devices and logging; with --distributed, joins the job.

  On a machine with CPUs only, JAX shows `cpu_slices` devices, unless --cpu_devices says
  otherwise, or one of each process of a job; must therefore run before anything touches a
  device.
  """
  logs.start()
  keep_freed_memory()
  usual = 1 if distributed.flag("distributed") else cpu_slices
  shown = distributed.flag("cpu_devices") or usual
  jax.config.update("jax_num_cpu_devices", shown)
  if shown >= len(launcher.cores()):
    # Else devices share their threads: a slice that decodes would be faster while another
    # one is idle, and slower once that trains.
    alone = "--xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {alone}".strip()
  # Queued ahead, programs of one CPU device can take all places in its queue while
  # another device waits for it in a collective: a deadlock, seen on two cores.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if not jax.config.jax_compilation_cache_dir:  # the second start compiles nothing
    jax.config.update("jax_compilation_cache_dir", str(_COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  distributed.join()
  devices, of = jax.devices(), ""
  if processes.count() > 1:
    logs.start(processes.index())
    of = f" of {processes.count()} processes"
  logging.info("%d x %s%s", len(devices), devices[0].device_kind, of)


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


def release_freed_memory() -> None:
  """Gives back what `keep_freed_memory` keeps; for moments between phases.

  The large blocks of the next phase do not fit between the small ones of the last, and
  would come on top of them. No effect elsewhere.
  """
  try:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
  except (OSError, AttributeError):
    return


if __name__ == "__main__":
  sys.exit(launcher.main(sys.argv[1:]))
