"""Sizes that a config leaves open: they follow from the prompts, the model and the memory.

None stands for such a size. No size changes a token; what a wrong one costs is time,
memory, or a prompt that is refused. A run that is resumed has the sizes that it began
with: they are in the config.json of its folder, however much memory is free now.
"""

from collections.abc import Iterator, Mapping, Sequence
import copy
import logging
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import declarations
from experiments import workdirs
from tlt_jax import memory
from tlt_jax import packing
from tlt_jax import processes
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode import rollout

# By section; of a drafter's training the section `run` has them too.
OPEN = {
  "rollout": (
    *("max_prompt", "slots", "buckets"),
    *("prompt_rows", "prefill_rows", "prefill_block"),
  ),
  "learner": ("buckets",),
}
_KV_SHARE = 0.25  # of the free memory: it holds weights, moments and activations as well


class Asked(NamedTuple):
  """What is asked of a policy at a time."""

  longest: int  # tokens of the longest prompt
  prompts: int
  responses: int  # of each prompt


class Machine(NamedTuple):
  """What sizes depend on of the machine."""

  slices: int
  free: int  # bytes of memory, of each slice
  is_cpu: bool  # which computes few tokens at a time as well as many

  @classmethod
  def here(cls, tensor_parallel: int) -> "Machine":
    """This machine, with so many devices to a slice."""
    devices = jax.local_devices()
    slices = max(jax.device_count() // tensor_parallel, 1)
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
      free = (stats["bytes_limit"] - stats["bytes_in_use"]) * tensor_parallel
    else:
      free = memory.machine().free // slices
    if processes.count() > 1:  # all need the same sizes
      free = int(processes.of_first(free))
    return cls(slices, free, devices[0].platform == "cpu")

  @classmethod
  def planned(cls, devices: int, free: int, tensor_parallel: int) -> "Machine":
    """Accelerators that are not there, with so many bytes free on each."""
    return cls(max(devices // tensor_parallel, 1), free * tensor_parallel, False)


def is_open(config: Mapping, section: str) -> bool:
  """Whether a section of a config leaves a size open."""
  return any(config[section].get(name) is None for name in OPEN[section])


def fit_rollout(
  config: dict,
  model: config_lib.ModelConfig,
  asked: Asked,
  machine: Machine,
  most_slots: int | None = None,
) -> dict:
  """The config with every size of the rollout; those that it left open are logged.

  Args:
    config: of a run
    model: the policy's
    asked: at a time
    machine: that answers
    most_slots: if slots are left open; None: as many as the memory holds
  Raises:
    ValueError: the longest prompt and a response exceed the model's context
  """
  o, max_tokens = dict(config["rollout"]), config["sampling"]["max_tokens"]
  left_open = [name for name in OPEN["rollout"] if o.get(name) is None]
  if "max_prompt" in left_open:
    check_context(asked.longest, max_tokens, model)
  size = {name: value for name, value in o.items() if value is not None}
  most_block, most_rows = (64, 4) if machine.is_cpu else (256, 8)
  per_slice = lambda n: power_of_two(-(-n // machine.slices))
  longest = size.get("max_prompt", asked.longest)
  block = size.setdefault("prefill_block", min(power_of_two(longest), most_block))
  size.setdefault("max_prompt", -(-longest // block) * block)
  rows = size.setdefault("prefill_rows", min(per_slice(asked.prompts), most_rows))
  size.setdefault("prompt_rows", max(min(per_slice(asked.prompts), 8), rows))
  length = size["max_prompt"] + max_tokens
  needed = per_slice(asked.prompts * asked.responses)
  fitting = fitting_slots(model, length, machine)
  size.setdefault("slots", min(needed, fitting, most_slots or fitting))
  size.setdefault("buckets", _buckets(size["slots"], length))
  told = ", ".join(f"{name} {_shown(size[name])}" for name in left_open)
  logging.info("sizes: %s", told)
  return config | {"rollout": o | size}


def fit_learner(config: dict, longest: int, machine: Machine) -> dict:
  """The config with the learner's buckets for sequences up to `longest` tokens.

  One bucket: sequences share its rows.
  """
  length = max(-(-longest // 128) * 128, 512)
  tokens = 1024 if machine.is_cpu else 16384  # of a micro-batch
  buckets = ((max(tokens // length, machine.slices), length),)
  logging.info("sizes: learner.buckets %s", _shown(buckets))
  return config | {"learner": config["learner"] | {"buckets": buckets}}


def _buckets(slots: int, length: int) -> tuple[tuple[int, int], ...]:
  """A ladder whose last rungs, all of the full length, have a quarter of the slots.

  Programs of a large model take long to compile, and a step with half the slots is
  hardly faster.
  """
  rungs = rollout.ladder(slots, length, shortest=512)
  full = [rung for rung in rungs if rung.length == length]
  return tuple(rung for rung in rungs if rung in (*full[::2], full[-1]) or rung not in full)


def power_of_two(least: int) -> int:
  """The least power of two that is no less: other prompts find programs compiled."""
  return 1 << max(least - 1, 0).bit_length()


def kv_bytes(model: config_lib.ModelConfig) -> int:
  """Bytes of the keys and values of one token, in all layers."""
  values = 2 * model.num_layers * model.num_kv_heads * model.head_dim
  return values * jnp.dtype(model.dtype).itemsize


def fitting_slots(model: config_lib.ModelConfig, length: int, machine: Machine) -> int:
  """Requests of `length` tokens per slice, a power of two, whose KV the memory holds."""
  each = length * kv_bytes(model)
  fitting = max(int(_KV_SHARE * machine.free / each), 1)
  return min(1 << (fitting.bit_length() - 1), 64 if machine.is_cpu else 256)


def check_context(longest: int, max_tokens: int, model: config_lib.ModelConfig) -> None:
  """Raises ValueError unless a prompt and a response fit the model's context."""
  room = model.max_position - longest
  if max_tokens > room:
    raise ValueError(
      f"a prompt of {longest} tokens leaves {max(room, 0)} of the model's context of "
      f"{model.max_position} tokens for a response, which may have {max_tokens}; allow "
      "fewer (sampling.max_tokens), or drop such prompts (rollout.max_prompt, "
      "unusable_prompts.too_long=drop)"
    )


def resumed(config: dict, workdir: str, declared: declarations.Section) -> dict:
  """The config with the open sizes of the same run, if that began in this folder.

  Args:
    config: that was asked for
    workdir: where its config.json may be
    declared: keys of the config; those that config.json lacks had their defaults
  """
  filled = copy.deepcopy(config)
  try:
    old = workdirs.read(pathlib.Path(workdir), declared, "")
    for new, section, name in _open(filled):
      was = old["run"] if new is filled.get("run") else old
      value = was[section][name]
      new[section][name] = tuple(map(tuple, value)) if isinstance(value, list) else value
  except (OSError, ValueError, LookupError, TypeError):
    return config  # `workdirs.open` says what is wrong with it
  return filled if workdirs.is_same_run(old, filled) else config


def _open(config: dict) -> Iterator[tuple[dict, str, str]]:
  """Yields (config, section, name) of what is open in a config, and in that of its run."""
  for part in (config, config.get("run", {})):
    for section, names in OPEN.items():
      for name in names:
        if section in part and name in part[section] and part[section][name] is None:
          yield part, section, name


def _shown(value: Any) -> str:
  """A number, or buckets as "16x128 8x256"."""
  if isinstance(value, int):
    return str(value)
  return " ".join("x".join(map(str, bucket)) for bucket in value)


def max_length(config: dict) -> int:
  """Tokens of the longest sequence."""
  return config["rollout"]["max_prompt"] + config["sampling"]["max_tokens"]


def check_sizes(config: dict) -> None:
  """Raises ValueError unless a run's learner can take what its rollouts give."""
  check_longest(config, config["learner"]["buckets"])
  responses = config["batch"]["prompts"] * config["batch"]["responses"]
  if responses % config["learner"]["updates"]:
    raise ValueError(
      f"{responses} responses cannot be shared out over {config['learner']['updates']} "
      "updates: batch.prompts * batch.responses must be a multiple of learner.updates"
    )


def check_longest(config: dict, buckets: Sequence[tuple[int, int]]) -> None:
  """Raises ValueError unless the longest sequence of a run fits a learner's buckets."""
  longest, room = max_length(config), packing.over_slices(buckets, 1)[-1].length
  if longest > room:
    raise ValueError(
      f"sequences of this run may have {longest} tokens (rollout.max_prompt + "
      f"sampling.max_tokens), the longest of learner.buckets holds {room}"
    )
