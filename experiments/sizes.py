"""Defaults of sizes that a config leaves open (None), by prompts, model and memory.

No size changes a token; a bad one costs time or memory, or rejects a prompt. A resumed run
keeps the sizes of its config.json, whatever memory is free (`workdirs.keep_sizes`).
"""

from collections.abc import Sequence
import dataclasses
import logging
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from experiments import config as config_lib
from experiments import memory_phases
from tlt_jax import memory
from tlt_jax import packing
from tlt_jax import processes
from tlt_jax.models import cache
from tlt_jax.models import config as model_lib
from tlt_jax.models import hf
from tlt_jax.spec_decode import rollout

# By section of a run's config.
OPEN = {
  "rollout": (
    "max_prompt",
    "slots",
    "buckets",
  ),
  "learner": ("buckets", "remat"),
  "chat": ("date",),
}
# Tokens, about, that a layer with a window keeps beside it: a chunk, drafts, and two pages.
_BEYOND_WINDOW = 3 * cache.PAGE
_KV_SHARE = 0.25  # of the free memory: it holds weights, moments and activations as well

Learner = TypeVar("Learner", config_lib.Learner, config_lib.DraftLearner)


class Asked(NamedTuple):
  """Requests of a rollout."""

  longest: int  # tokens of the longest prompt
  prompts: int
  responses: int  # of each prompt


class Machine(NamedTuple):
  """Properties of the machine that sizes depend on."""

  slices: int
  free: int  # bytes of memory, of each slice
  is_cpu: bool  # on which larger batches gain little

  @classmethod
  def here(
    cls, tensor_parallel: int, planned: memory_phases.Machine | None = None
  ) -> "Machine":
    """This machine or a planned one, with `tensor_parallel` devices per slice."""
    if planned is not None:
      slices = max(planned.devices // tensor_parallel, 1)
      return cls(slices, planned.room.free * tensor_parallel, False)
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


def is_open(section: Any) -> bool:
  names = OPEN["rollout" if isinstance(section, config_lib.Rollout) else "learner"]
  return any(getattr(section, name) is None for name in names)


def fill_rollout(
  run: config_lib.RunConfig,
  asked: Asked,
  planned: memory_phases.Machine | None = None,
  most_slots: int | None = None,
) -> config_lib.RunConfig:
  """A run's config with all sizes of its rollouts, see `fit_rollout`."""
  made = fit_rollout(
    run.rollout,
    run.sampling.max_tokens,
    hf.load_config(run.policy),
    asked,
    Machine.here(run.tensor_parallel, planned),
    most_slots,
  )
  return dataclasses.replace(run, rollout=made)


def fit_rollout(
  options: config_lib.Rollout,
  max_tokens: int,
  model: model_lib.ModelConfig,
  asked: Asked,
  machine: Machine,
  most_slots: int | None = None,
) -> config_lib.Rollout:
  """Fills in the open sizes, and logs them.

  Args:
    most_slots: limit of slots that are open; None: by memory only
  Raises:
    ValueError: the longest prompt and a response exceed the model's context
  """
  names = [name for name in OPEN["rollout"] if getattr(options, name) is None]
  if not names:
    return options
  if "max_prompt" in names:
    check_context(asked.longest, max_tokens, model)

  def per_slice(n: int) -> int:
    return power_of_two(-(-n // machine.slices))

  given = {name: getattr(options, name) for name in OPEN["rollout"]}
  size = {name: value for name, value in given.items() if value is not None}
  block = min(power_of_two(asked.longest), 64)
  size.setdefault("max_prompt", -(-asked.longest // block) * block)
  length = size["max_prompt"] + max_tokens
  needed = per_slice(asked.prompts * asked.responses)
  fitting = fitting_slots(model, length, machine)
  size.setdefault("slots", min(needed, fitting, most_slots or fitting))
  size.setdefault("buckets", rollout.ladder(size["slots"]))
  logging.info("sizes: %s", ", ".join(f"{name} {_shown(size[name])}" for name in names))
  return dataclasses.replace(options, **size)


def fit_learner(options: Learner, longest: int, machine: Machine) -> Learner:
  """Fills in open buckets: one, for sequences of up to `longest` tokens."""
  if options.buckets is not None:
    return options
  length = max(-(-longest // 128) * 128, 512)
  tokens = 1024 if machine.is_cpu else 16384  # of a micro-batch
  buckets = ((max(tokens // length, machine.slices), length),)
  logging.info("sizes: learner.buckets %s", _shown(buckets))
  return dataclasses.replace(options, buckets=buckets)


def power_of_two(least: int) -> int:
  """The next power of two, so that other prompts reuse compiled programs."""
  return 1 << max(least - 1, 0).bit_length()


def kv_bytes(model: model_lib.ModelConfig, length: int) -> int:
  """Bytes of the keys and values of a sequence, in all layers."""
  kinds = map(model.layer_kind, range(model.num_layers))
  tokens = sum(min(length, (k.window or length) + _BEYOND_WINDOW) for k in kinds)
  values = 2 * model.num_kv_heads * model.head_dim
  return tokens * values * jnp.dtype(model.dtype).itemsize


def fitting_slots(model: model_lib.ModelConfig, length: int, machine: Machine) -> int:
  """Requests of `length` tokens per slice, a power of two, whose KV the memory holds."""
  each = kv_bytes(model, length)
  fitting = max(int(_KV_SHARE * machine.free / each), 1)
  return min(1 << (fitting.bit_length() - 1), 64 if machine.is_cpu else 256)


def check_context(longest: int, max_tokens: int, model: model_lib.ModelConfig) -> None:
  """Raises ValueError unless a prompt and a response fit the model's context."""
  room = model.context - longest
  if max_tokens > room:
    raise ValueError(
      f"a prompt of {longest} tokens leaves {max(room, 0)} of the model's context of "
      f"{model.context} tokens for a response, which may have {max_tokens}; allow "
      "fewer (sampling.max_tokens), or drop such prompts (rollout.max_prompt, "
      "unusable_prompts.too_long=drop)"
    )


def check_learner(run: config_lib.RunConfig) -> None:
  """Raises ValueError unless a run's learner can take what its rollouts give."""
  check_longest(run.max_length, run.learner.buckets)
  responses = run.batch.prompts * run.batch.responses
  if responses % run.learner.updates:
    raise ValueError(
      f"{responses} responses cannot be shared out over {run.learner.updates} "
      "updates: batch.prompts * batch.responses must be a multiple of learner.updates"
    )


def check_longest(longest: int, buckets: Sequence[tuple[int, int]]) -> None:
  """Raises ValueError unless sequences of a run's length fit a learner's buckets."""
  room = packing.over_slices(buckets, 1)[-1].length
  if longest > room:
    raise ValueError(
      f"sequences of this run may have {longest} tokens (rollout.max_prompt + "
      f"sampling.max_tokens), the longest of learner.buckets holds {room}"
    )


def _shown(value: Any) -> str:
  """A number, numbers of slots, or buckets as "16x128 8x256"."""
  if isinstance(value, int):
    return str(value)
  if value and isinstance(value[0], int):
    return " ".join(map(str, value))
  return " ".join("x".join(map(str, bucket)) for bucket in value)
