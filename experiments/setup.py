"""What every command does before its own work: devices, config, logging, errors."""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import ctypes
import difflib
import importlib
import itertools
import json
import logging
import os
import pathlib
import shutil
import sys

from absl import app
from absl import flags
import jax
import ml_collections
from ml_collections import config_flags

from tlt_jax import data
from tlt_jax import metrics
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_models
from tlt_jax.models import drafter_files
from tlt_jax.rl import optimizer
from tlt_jax.rl import reward
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import schedule
from tlt_jax.spec_decode.speculation import adaptive
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot

_COMPILED = pathlib.Path("~/.cache/tlt_jax/compiled").expanduser()
_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "generation_config.json",
)


def config_flag(default: str):
  """`--config=FILE.py[:arg]` with `--config.a.b=value` overrides, locked.

  Ends the command in one line if the file or an override's key does not exist.
  """
  _check_overrides(sys.argv[1:], default)
  return config_flags.DEFINE_config_file("config", default, lock_config=True)


def _check_overrides(argv: Sequence[str], path: str) -> None:
  """Exits naming the nearest key, where ml_collections would show a traceback."""
  overrides, given = [], False
  for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
    name, equals, value = arg.partition("=")
    flag, _, key = name.lstrip("-").partition(".")
    if not arg.startswith("-") or flag.removeprefix("no") != "config":
      continue
    if key:
      overrides.append(key)
    else:
      path, given = value if equals else following, True
  if not overrides and not given:
    return
  if not pathlib.Path(path.partition(":")[0]).is_file():
    sys.exit(f"error: --config={path}: no such file (in folder {pathlib.Path.cwd()})")
  try:
    keys = _keys(read_config(path))
  except flags.Error as e:  # its message is a whole traceback
    sys.exit(f"error: --config={path}: {str(e).splitlines()[-1]}")
  for key in overrides:
    if key not in keys:
      near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
      hint = f"did you mean --config.{near[0]}?" if near else f"see {path}"
      sys.exit(f"error: --config.{key}: the config has no such key; {hint}")


def _keys(section: dict, prefix: str = "") -> list[str]:
  """The dotted name of every section and value."""
  keys = []
  for name, value in section.items():
    keys.append(prefix + name)
    if isinstance(value, dict):
      keys += _keys(value, f"{prefix}{name}.")
  return keys


def run(main: Callable[[], None]) -> None:
  """Runs a command; what a user can mend ends in one line and exit status 1."""

  def parse(argv):
    try:
      return flags.FLAGS(argv)
    except flags.Error as e:
      sys.exit(_one_line(e))

  def guarded(argv):
    if len(argv) > 1:
      sys.exit(f"error: unexpected argument {argv[1]!r}; flags start with --")
    try:
      main()
    except (ValueError, FloatingPointError, MemoryError, OSError) as e:
      if os.environ.get("TLT_TRACEBACK"):
        raise
      sys.exit(_one_line(e))

  app.run(guarded, flags_parser=parse)


def _one_line(e: Exception) -> str:
  return "error: " + " ".join(str(e).split())


def start(
  workdir: pathlib.Path, config: ml_collections.ConfigDict, cpu_slices: int = 2
) -> dict:
  """Sets up devices and logging, writes `workdir/config.json`.

  On a machine with CPUs only, JAX shows `cpu_slices` devices; must therefore run
  before anything touches a device.

  Returns:
    the config as plain dicts and tuples
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
  plain = config.to_dict()
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "config.json"
  partial = path.with_suffix(".tmp")
  partial.write_text(json.dumps(plain, indent=2) + "\n")
  os.replace(partial, path)
  devices = jax.devices()
  logging.info("%d x %s", len(devices), devices[0].device_kind)
  return plain


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


def build(spec: dict):
  """Calls the dotted name in `spec["source"]` with the other entries."""
  args = dict(spec)
  module, _, name = args.pop("source").rpartition(".")
  try:
    factory = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as e:
    raise ValueError(f"source {spec['source']!r} cannot be imported: {e}") from e
  try:
    return factory(**args)
  except TypeError as e:
    raise ValueError(f"source {spec['source']!r}: {e}") from e


def read_config(path: str) -> dict:
  """The config that `FILE.py[:arg]` names, as plain dicts and tuples."""
  loaded = config_flags.DEFINE_config_file(
    "config", path, flag_values=flags.FlagValues(), sys_argv=[]
  )
  return loaded.default.to_dict()


def load_drafter(config: dict, model, mesh):
  """The config's drafter, what drafts when, and the drafter's parameters; None each."""
  if not config["drafter"]:
    return None, speculation(config), None
  if config["drafter"] in drafter_models.KINDS:  # from scratch
    drafter = drafter_models.of_target(model, config["drafter"])
    params = drafter_models.init_params(drafter, jax.random.key(config["seed"]))
  else:
    drafter, params = drafter_files.load(config["drafter"], model, mesh)
  return drafter, speculation(config), params


def several(names: str | Sequence[str]) -> Sequence[str]:
  """The strategies that an entry of `config["strategies"]` names: one, or several."""
  return (names,) if isinstance(names, str) else names


def speculation(config: dict) -> strategy.Policy | None:
  """Which strategy runs when: as the config says, or learnt where it names several.

  Without a drafter only n-grams are left, or nothing.
  """
  able = lambda arm: arm is None or config["drafter"] or arm.source == strategy.NGRAM
  arms = [
    (most, [*filter(able, map(strategy.parse, several(names)))] or [None])
    for most, names in config["strategies"]
  ]
  if all(arm is None for _, some in arms for arm in some):
    return None
  if all(len(some) == 1 for _, some in arms):
    return strategy.ByLiveBatch([(most, arm) for most, (arm,) in arms])
  if config["strategy_rule"] not in adaptive.RULES:
    raise ValueError(
      f"strategy_rule is one of {', '.join(adaptive.RULES)}, not "
      f"{config['strategy_rule']!r}"
    )
  return adaptive.RULES[config["strategy_rule"]](arms)


def spot_training(config: dict, model, mesh, drafter, params) -> spot.Spot | None:
  """What trains the drafter in rollouts; None if there is none, or it stays as it is."""
  section = dict(config["spot"])
  if drafter is None or not section.pop("every"):
    return None
  loss, options = section.pop("loss"), section.pop("optimizer")
  temperature = config["sampling"]["temperature"] or 1.0
  return spot.make(
    *(model, drafter, mesh, params),
    optimizer=optimizer.make(**options),
    longest=_max_length(config),
    loss=draft_loss.Loss(**loss, temperature=temperature),
    options=spot.Options(**section),
  )


def decisions(workdir: pathlib.Path, other: str) -> Callable:
  """step -> what the clock is to decide in its rollout, or what another run logged.

  Steps that this run has done before, when it was killed, are done again alike.

  Args:
    other: a run's rollouts.jsonl to follow; "": only this run's own
  Raises:
    metrics.MetricError: there is no other file, or it is damaged
  """
  path = pathlib.Path(other or workdir / "rollouts.jsonl")
  known = {}
  if other or path.exists():
    known = {r["step"]: r.get("decisions") for r in metrics.read(path)}
  return lambda step: schedule.Decisions(known.get(step), strict=bool(other))


def _max_length(config: dict) -> int:
  return config["rollout"]["max_prompt"] + config["sampling"]["max_tokens"]


def sampler(
  config: dict, model, mesh, drafter=None, policy=None, training=None
) -> sample.Sampler:
  """What answers prompts and scores the answers, for `config`'s policy and task.

  Args:
    drafter, policy, training: speculation, see `rollout.make`
  """
  options = rollout.Options(max_length=_max_length(config), **config["rollout"])
  args = (drafter, policy, config["verification"], training)
  return sample.Sampler(
    rollout=rollout.make(model, mesh, options, *args),
    tokenizer=data.Tokenizer.load(config["policy"]),
    score=reward.make(config["reward"]),
    sampling=config["sampling"],
    chat=config["chat"]["apply"],
    system=config["chat"]["system"],
  )


def export(folder: pathlib.Path, source: str, model, params) -> None:
  """Writes a Hugging Face folder; tokenizer and the like are those of `source`."""
  convert.save_hf(folder, model, params)
  for path in pathlib.Path(source).iterdir():
    if path.name in _TOKENIZER_FILES:
      shutil.copyfile(path, folder / path.name)
  logging.info("exported the policy to %s", folder)


def prefetch(iterator: Iterator) -> Iterator:
  """The same items, the next one being made in a background thread."""
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    item = pool.submit(next, iterator)
    while True:
      ready = item.result()
      item = pool.submit(next, iterator)
      yield ready
