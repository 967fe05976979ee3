"""The first lines of a command's log: what it trains, on what, how it decodes, what is off.

Each part of a run has a function that returns its lines; they follow from the config and
from the policy's config.json.
"""

from collections.abc import Iterator, Mapping, Sequence
import logging
import math
from typing import Any

import flax.linen as nn
import jax

from experiments import config as config_lib
from experiments import from_config
from experiments import workdirs
from tlt_jax import axes
from tlt_jax import processes
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


def log(lines: Sequence[str]) -> None:
  """Logs lines, on the first process."""
  if processes.is_first():
    for line in lines:
      logging.info("%s", line)


def of_run(
  run: config_lib.RunConfig, prompts: from_config.RunPrompts, workdir: workdirs.Workdir
) -> list[str]:
  """The lines of `experiments.train`.

  Args:
    run: its config, with every size
    prompts: of the run
    workdir: of the run, open
  """
  mesh = from_config.make_mesh(run.tensor_parallel, run.policy)
  return [
    _steps(run, workdir),
    *of_policy(run, mesh),
    *_stops(run),
    *_updates(run),
    *_carried(run, mesh.shape[axes.DATA]),
    *of_prompts(run, prompts),
    *_decoding(run),
    *_drafter(run, mesh),
    *_measured(run),
  ]


def of_rollout(
  run: config_lib.RunConfig,
  selector: selector_lib.Selector | None,
  prompts: int,
  responses: int,
) -> list[str]:
  """The lines of a command that only asks a policy.

  Args:
    run: its config, with the sizes of the rollout
    selector: of the strategies that it runs; None: plain decoding
    prompts: that it asks
    responses: to each
  """
  how = "plainly, nothing is drafted"
  if selector is not None:
    drafter = _source(run) if run.drafter else "no drafter"
    how = f"with {' or '.join(map(str, selector.strategies))}; {drafter}"
  return [
    *of_policy(run, from_config.make_mesh(run.tensor_parallel, run.policy)),
    *_stops(run),
    f"asked: {_asked(run, prompts, responses)}",
    f"decoding: {how}",
  ]


def _steps(run: config_lib.RunConfig, workdir: workdirs.Workdir) -> str:
  where = f"{run.steps:,} steps, in {workdir.path}"
  if workdir.start is None:
    return f"{where}, from the beginning"
  return f"{where}, on from step {workdir.start.latest():,} of {workdir.start.folder}"


def of_policy(run: config_lib.RunConfig, mesh: jax.sharding.Mesh) -> list[str]:
  """The policy, and where it computes; warns of float32 on an accelerator."""
  model, device = hf.load_config(run.policy), mesh.devices.flat[0]
  slices = mesh.shape[axes.DATA]
  if device.platform != "cpu" and model.dtype == "float32":
    logging.warning(
      "the policy computes in float32 on %s, which takes twice the memory of bfloat16 and "
      'more time; to change it: "torch_dtype": "bfloat16" in %s/config.json',
      device.device_kind,
      run.policy,
    )
  size = _size(target.abstract_params(model))
  return [
    f"policy: {run.policy}, {model.architecture} of {size}, in {model.dtype} on "
    f"{mesh.size} x {device.device_kind}: {_number(slices, 'slice')} of "
    f"{_number(run.tensor_parallel, 'device')}"
  ]


def _stops(run: config_lib.RunConfig) -> list[str]:
  tokenizer = from_config.load_tokenizer(run.policy, run.chat.date)
  if not tokenizer.stop_tokens:
    logging.warning("%s", tokenizer.describe_stops())
    return []
  return [tokenizer.describe_stops()]


def _updates(run: config_lib.RunConfig) -> Iterator[str]:
  only = f" (parameters that match {run.learner.only})" if run.learner.only else ""
  yield (
    f"trained: the policy{only} by {run.algorithm['name']}, for the reward {run.reward}; "
    f"solved: reward >= {run.solved_at:g}"
  )
  yield f"a step: {_asked(run, run.batch.prompts, run.batch.responses)}"


def _carried(run: config_lib.RunConfig, slices: int) -> Iterator[str]:
  """What goes on in the next step; warns of what that costs."""
  carry, P, R = run.rollout.carry, run.batch.prompts, run.batch.responses
  if not carry.prompts:
    return
  yield (
    f"carried over: {carry.prompts:,} prompts are in flight, a step trains on the oldest "
    f"{P:,} that are complete, and no response spans more than {carry.versions:,} policies"
  )
  if not (run.algorithm.get("importance_cap") or run.algorithm.get("importance_mask")):
    logging.warning(
      "tokens that earlier policies drew count as if the current one had; to correct for "
      "it: --config.algorithm.importance_cap=2"
    )
  if run.rollout.slots * slices < carry.prompts * R:
    logging.warning(
      "%d slots in all do not hold the %d responses in flight: more tokens are drawn than "
      "are kept; raise rollout.slots, or lower rollout.carry.prompts",
      run.rollout.slots * slices,
      carry.prompts * R,
    )


def _asked(run: config_lib.RunConfig, prompts: int, responses: int) -> str:
  return (
    f"{prompts:,} prompts of up to {run.rollout.max_prompt:,} tokens x {responses:,} "
    f"responses of up to {run.sampling.max_tokens:,}, at temperature "
    f"{run.sampling.temperature:g}"
  )


def of_prompts(run: config_lib.RunConfig, prompts: from_config.RunPrompts) -> list[str]:
  """What is asked, in training and in evaluations."""
  held_out, every = prompts.held_out.records, run.evaluation.every
  when = f"first, last and every {every:,} steps" if every else "at the end only"
  return [
    f"prompts: {len(prompts.train.records):,} of {_name(run.prompts)}; held out, asked "
    f"{when}: {len(held_out):,} of {_name(run.held_out)}"
  ]


def _name(source: Mapping[str, Any]) -> str:
  return str(source.get("path") or source["source"])


def _decoding(run: config_lib.RunConfig) -> Iterator[str]:
  """Which strategies run at how many live requests; else why none does."""
  wanted, selector = levels.parse(run.strategies), from_config.make_selector(run)
  drafts = [arm for level in wanted for arm in level.arms if arm is not None]
  if selector is None:
    why = 'strategies has none but "off"' if wanted else "strategies is empty"
    if drafts:
      why = f"{_names(drafts)} of strategies need a drafter, and drafter is ''"
    yield f"decoding: plainly, nothing is drafted: {why}"
    return
  run_at = [levels.Level(level.most, selector.arms(level.most)) for level in wanted]
  rule = ", chosen by " + run.strategy_rule
  choice = rule if any(len(level.arms) > 1 for level in run_at) else ""
  lost = [arm for arm in drafts if arm not in selector.strategies]
  without = f"; not {_names(lost)}: no drafter" if lost else ""
  yield (
    f"decoding, by live requests of a slice: {levels.write(run_at)}{choice}; plainly above"
    f"{without}"
  )


def _names(strategies: Sequence[strategy_lib.Strategy]) -> str:
  return ", ".join(dict.fromkeys(map(str, strategies)))


def _source(run: config_lib.RunConfig) -> str:
  """The drafter and where it is from."""
  model, name = hf.load_config(run.policy), run.drafter
  shape = from_config.drafter_shape(run, model)
  size = _size(drafter_lib.abstract_params(shape))
  if shape.vocab:
    size += f" that predicts {len(shape.vocab):,} of {model.vocab_size:,} tokens"
  if drafters.is_kind(name):
    return f"a new {name} of {size}, random at first"
  return f"{name}, {shape.kind} of {size}"


def _drafter(run: config_lib.RunConfig, mesh: jax.sharding.Mesh) -> Iterator[str]:
  """The drafter, and when it trains; else why it does not."""
  if not run.drafter:
    yield "drafter: none, and so none trains (drafter=eagle2 begins with a new one)"
    return
  selector = from_config.make_selector(run)
  drafts = selector and any(map(strategy_lib.uses_drafter, selector.strategies))
  unused = "" if drafts else ", which no strategy uses"
  yield f"drafter: {_source(run)}{unused}; trains {_times(run, mesh.shape[axes.DATA])}"


def _times(run: config_lib.RunConfig, slices: int) -> str:
  """When the drafter trains, and why not at other times."""
  spot, buckets = run.spot, from_config.rollout_options(run).buckets
  if not spot.train:
    return "not at all: spot.train is off"
  if not spot.learning_rate:
    return "to no effect: spot.learning_rate is 0"
  idle = [n for n in buckets if n <= (spot.max_batch or n)]
  in_idle, after = f"in idle slices of up to {max(idle, default=0)} slots", ""
  if slices == 1:
    in_idle = "not in idle slices: the only slice is never idle"
  elif not idle:
    in_idle = f"not in idle slices: spot.max_batch is below {min(buckets)} slots"
  if spot.after_rollout_share:
    after = f"after rollouts for up to {spot.after_rollout_share:.0%} of their time"
  trains = slices > 1 and idle
  if not after:
    return f"{in_idle}; not after rollouts: spot.after_rollout_share is 0"
  if trains:
    return f"{in_idle}, and {after}, while that pays"
  return f"{after}, while that pays; {in_idle}"


def _measured(run: config_lib.RunConfig) -> Iterator[str]:
  if from_config.make_selector(run) is None:
    return
  if not run.compare.every:
    yield "gain: not measured; compare.every=5 repeats every fifth rollout plainly for that"
    return
  frozen = " and with the first drafter" if run.drafter and run.spot.train else ""
  yield f"gain: measured, every {run.compare.every:,} steps a rollout plainly{frozen} again"


def _number(count: int, noun: str) -> str:
  return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _size(params: Any) -> str:
  """The number of parameters, of shapes."""
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(nn.meta.unbox(params)))
  for unit, size in (("B", 10**9), ("M", 10**6)):
    if count >= size:
      return f"{count / size:.1f}{unit} parameters"
  return f"{count:,} parameters"
