"""What every command does before its own work: devices, config, logging, errors."""

from collections.abc import Callable, Iterator
import concurrent.futures
import importlib
import json
import logging
import os
import pathlib
import shutil
import sys

from absl import app
import jax
import ml_collections
from ml_collections import config_flags

from tlt_jax import data
from tlt_jax.models import convert
from tlt_jax.rl import reward
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout

_CPU_SLICES = 2
_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "generation_config.json",
)


def config_flag(default: str):
  """`--config=FILE.py[:arg]` with `--config.a.b=value` overrides, locked."""
  return config_flags.DEFINE_config_file("config", default, lock_config=True)


def run(main: Callable[[], None]) -> None:
  """Runs a command; what a user can mend ends in one line and exit status 1."""

  def guarded(argv):
    if len(argv) > 1:
      sys.exit(f"error: unexpected argument {argv[1]!r}; flags start with --")
    try:
      main()
    except (ValueError, FloatingPointError, FileNotFoundError) as e:
      if os.environ.get("TLT_TRACEBACK"):
        raise
      sys.exit(f"error: {e}")

  try:
    app.run(guarded)
  except (AttributeError, KeyError) as e:  # ml_collections: an override's typo
    if "--config" not in " ".join(sys.argv):
      raise
    sys.exit(f"error: {e}")


def start(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> dict:
  """Sets up devices and logging, writes `workdir/config.json`.

  On a machine with CPUs only, JAX shows `_CPU_SLICES` devices; must therefore run
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
  jax.config.update("jax_num_cpu_devices", _CPU_SLICES)
  plain = config.to_dict()
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / "config.json"
  partial = path.with_suffix(".tmp")
  partial.write_text(json.dumps(plain, indent=2) + "\n")
  os.replace(partial, path)
  devices = jax.devices()
  logging.info("%d x %s", len(devices), devices[0].device_kind)
  return plain


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


def sampler(config: dict, model, mesh) -> sample.Sampler:
  """What answers prompts and scores the answers, for `config`'s policy and task."""
  max_length = config["rollout"]["max_prompt"] + config["sampling"]["max_tokens"]
  options = rollout.Options(max_length=max_length, **config["rollout"])
  return sample.Sampler(
    rollout=rollout.make(model, mesh, options),
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
