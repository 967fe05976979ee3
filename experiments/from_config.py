"""Makes what a run's config describes: prompts, models, spot training, sampler.

The library takes plain arguments. Which entries of a config they are is known here, and
in `train.py`.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments import keys
from experiments import memory_phases
from experiments import sizes
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import memory
from tlt_jax import prompt_checks
from tlt_jax import tokenization
from tlt_jax.models import config as config_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import judge
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


@dataclasses.dataclass(frozen=True)
class Models:
  """A policy and, if there is one, its drafter, in the layout of rollouts."""

  mesh: jax.sharding.Mesh
  model: config_lib.ModelConfig  # the policy's
  params: Any  # the policy's
  drafter: drafter_lib.DrafterConfig | None = None
  draft_params: Any = None


@functools.cache
def tokenizer(policy: str) -> tokenization.Tokenizer:
  """The tokenizer of a policy's folder, which a command loads once.

  Raises:
    DataError: it has tokens that the model does not have
  """
  model, loaded = convert.load_config(policy), tokenization.Tokenizer.load(policy)
  if loaded.vocab_size > model.vocab_size:
    raise data.DataError(
      f"{policy}: tokenizer.json has tokens up to {loaded.vocab_size - 1:,}, the model in "
      f"config.json has {model.vocab_size:,}; use the model's own tokenizer files"
    )
  return loaded


def prompts(config: dict, source: dict, whole: bool = False) -> Sequence[dict]:
  """The records of a source that the config's policy can be asked.

  Args:
    config: of a run
    source: its section `prompts` or `held_out`
    whole: check every record now, and return a list; for sources that are read whole
  Raises:
    DataError: there is no such source, or a prompt in it is refused
  """
  name = str(source.get("path") or source["source"])
  limit = config["rollout"]["max_prompt"]
  found = data.source(**source)
  if isinstance(found, data.Mixture) and not whole:
    parts = [usable(config, part, name, limit) for part in found.parts]
    return data.Mixture(parts, found.weights)
  return usable(config, found, name, limit, whole)


def usable(
  config: dict,
  records: Sequence[dict],
  name: str,
  max_prompt: int | None,
  whole: bool = False,
) -> Sequence[dict]:
  """The records that the config's policy can be asked; see `prompt_checks.usable`.

  Args:
    config: of a run
    records: by index
    name: of their source
    max_prompt: tokens of a prompt, at most; None: any number
    whole: check every record now, and return a list
  """
  return prompt_checks.usable(records, name, _rules(config, max_prompt), whole)


def _rules(config: dict, max_prompt: int | None) -> prompt_checks.Rules:
  """Which prompts the config's policy can be asked, and what is done with the others."""
  return prompt_checks.Rules(
    tokenizer(config["policy"]),
    prompt_checks.Unusable(**config["unusable_prompts"]),
    max_prompt=max_prompt,
    chat=config["chat"]["apply"],
    system=config["chat"]["system"] or None,
  )


def complete(
  config: dict, workdir: str = "", planned: memory_phases.Machine | None = None
) -> dict:
  """A run's config with every size, checked; see `sizes`. Devices must have been set up.

  Args:
    config: of a run
    workdir: its folder; a run that began there keeps its sizes
    planned: devices that are not there, which sizes follow from; None: this machine's
  Raises:
    ValueError: the policy's context is too short, its learner cannot take what its
      rollouts give, or a prompt is refused
  """
  longest, max_tokens = config["rollout"]["max_prompt"], config["sampling"]["max_tokens"]
  if longest is not None:
    sizes.check_context(longest, max_tokens, convert.load_config(config["policy"]))
  config = sizes.resumed(config, workdir, keys.RUN) if workdir else config
  if sizes.is_open(config, "rollout"):
    asked = [prompts(config, config[part]) for part in ("prompts", "held_out")]
    batch = {k: config["batch"][k] for k in ("prompts", "responses")}
    config = sized(config, *asked, **batch, planned=planned)
  if sizes.is_open(config, "learner"):
    machine = _machine(config, planned)
    config = sizes.fit_learner(config, sizes.max_length(config), machine)
  sizes.check_sizes(config)
  return config


def complete_training(config: dict, run: dict, workdir: str) -> tuple[dict, dict]:
  """The configs of a drafter's training and of its run, as `complete` does.

  Args:
    config: of the training
    run: that the drafter is for
    workdir: of the training
  """
  config = sizes.resumed(config | {"run": run}, workdir, keys.TRAINING)
  run = config.pop("run")
  if sizes.is_open(run, "rollout"):
    most = {"prompts": config["responses"], "held_out": config["evaluation"]}
    asked = [prompts(run, run[p] | {"size": n["prompts"]}) for p, n in most.items()]
    wanted = config["responses"]
    run = sized(run, *asked, prompts=wanted["prompts"], responses=wanted["samples"])
  if sizes.is_open(config, "learner"):
    machine = sizes.Machine.here(run["tensor_parallel"])
    config = sizes.fit_learner(config, sizes.max_length(run), machine)
  sizes.check_longest(run, config["learner"]["buckets"])
  return config, run


def _machine(config: dict, planned: memory_phases.Machine | None) -> sizes.Machine:
  """What a run's sizes follow from."""
  if planned is None:
    return sizes.Machine.here(config["tensor_parallel"])
  free = planned.room.free
  return sizes.Machine.planned(planned.devices, free, config["tensor_parallel"])


def sized(
  config: dict,
  *records: Sequence[dict],
  prompts: int,
  responses: int,
  planned: memory_phases.Machine | None = None,
) -> dict:
  """The config with the sizes of the rollout that it leaves open; see `sizes`.

  Args:
    config: of a run
    records: sources of prompts; of each the longest counts
    prompts, responses: that are asked at a time, and of each prompt
    planned: see `complete`
  """
  if not sizes.is_open(config, "rollout"):
    return config
  longest = config["rollout"]["max_prompt"]
  if longest is None:
    longest = max(longest_prompt(config, source) for source in records)
  return sizes.fit_rollout(
    config,
    convert.load_config(config["policy"]),
    sizes.Asked(longest, prompts, responses),
    _machine(config, planned),
  )


def longest_prompt(config: dict, records: Sequence[dict]) -> int:
  """Tokens of the longest prompt.

  Of records that are made when they are asked for the first 1,000 are looked at, and
  others may be twice as long as these.
  """
  if isinstance(records, data.Mixture):
    return max(longest_prompt(config, part) for part in records.parts)
  is_list = isinstance(records, list)
  some = records if is_list else [records[i] for i in range(min(len(records), 1000))]
  rules = _rules(config, max_prompt=None)
  longest = max(rules.tokenizer.lengths([rules.text(r["prompt"]) for r in some]))
  return longest if is_list else 2 * longest


def make_mesh(config: dict, planned: int | None = None) -> jax.sharding.Mesh:
  """The devices in slices that can share the config's policy out.

  Args:
    config: of a run
    planned: devices that are not there, for shapes only; None: those of this machine
  Raises:
    ValueError: slices of so many devices do not divide the devices, or the policy's heads
  """
  devices, model = config["tensor_parallel"], convert.load_config(config["policy"])
  mesh = axes.make_mesh(devices, planned)
  model.check_split(devices)
  return mesh


def load_models(config: dict, dtype: str | None = None) -> Models:
  """Loads the config's policy and drafter onto this machine's devices.

  Args:
    config: of a run
    dtype: of the policy's weights and of what it computes; None: that of its config.json
  """
  mesh = make_mesh(config)
  dtype = dtype or convert.load_config(config["policy"]).dtype
  model, params = convert.load_hf(config["policy"], mesh, axes.ROLLOUT, dtype)
  model = dataclasses.replace(model, dtype=dtype)
  drafter, draft_params = load_drafter(config, model, mesh)
  return Models(mesh, model, params, drafter, draft_params)


def learner(
  config: dict,
  model: config_lib.ModelConfig,
  algorithm: algorithm_lib.Algorithm,
  mesh: jax.sharding.Mesh,
) -> learner_lib.Learner:
  """The learner of a run's policy, by its optimizer and its own section."""
  rule = optimizer.make(**config["optimizer"])
  return learner_lib.make(model, algorithm, rule, mesh, **config["learner"])


def reference(algorithm: algorithm_lib.Algorithm, params: Any) -> Any:
  """A copy of the policy before it is trained; None if the algorithm uses none."""
  if not algorithm.uses_reference:
    return None
  memory.announce("the reference policy", params, smaller="algorithm.kl_coef=0, policy")
  return jax.tree.map(jnp.copy, params)


def load_drafter(
  config: dict, model: config_lib.ModelConfig, mesh: jax.sharding.Mesh
) -> tuple[drafter_lib.DrafterConfig | None, Any]:
  """The config's drafter and its parameters, of a folder or new; None if it has none."""
  if not config["drafter"]:
    return None, None
  if not drafters.is_kind(config["drafter"]):
    return drafter_files.load(config["drafter"], model, mesh)
  drafter = drafter_lib.of_target(model, config["drafter"])
  return drafter, drafter_lib.new_params(drafter, mesh, config["seed"])


def selector(config: dict) -> selector_lib.Selector | None:
  """The selector of strategies; None if only plain decoding is left."""
  return levels.make(
    strategies=config["strategies"],
    rule=config["strategy_rule"],
    has_drafter=bool(config["drafter"]),
  )


def spot_trainer(
  config: dict,
  model: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  drafter: drafter_lib.DrafterConfig | None,
) -> tuple[trainer_lib.Trainer, spot_lib.Options] | None:
  """What trains the drafter in rollouts; None if it stays as it is.

  Args:
    config: of a run
    model: the policy's
    mesh: of the run
    drafter: of `load_drafter`
  """
  section = dict(config["spot"])
  if not section.pop("train") or drafter is None:
    return None
  loss, optimizer_options = section.pop("loss"), section.pop("optimizer")
  options = spot_lib.Options(**section)
  trainer = spot_lib.make_trainer(
    model,
    drafter,
    mesh,
    optimizer=optimizer.make(**optimizer_options),
    longest=sizes.max_length(config),
    loss=draft_loss.Loss(**loss, temperature=config["sampling"]["temperature"] or 1.0),
    options=options,
  )
  return trainer, options


def selector_of(text: str, config: dict) -> selector_lib.Selector | None:
  """The selector that a text asks for; None if it asks for plain decoding.

  Args:
    text: a strategy, which runs always; several by live requests, as in a config's
      `strategies`; or "auto", which chooses from what this project has, by what each is
      measured to bring
    config: of a run: its drafter and its rule
  Raises:
    ValueError: no such strategy, or a drafter's without one
  """
  has_drafter = bool(config["drafter"])
  if text == "auto":
    text = levels.automatic(has_drafter)
  if " live: " in text:
    return levels.make(text, config["strategy_rule"], has_drafter)
  strategy = strategy_lib.parse(text)
  if strategy_lib.uses_drafter(strategy) and not has_drafter:
    raise ValueError(f"strategy {text} needs a --drafter")
  return strategy and selector_lib.always(strategy)


def spot_training(
  config: dict,
  model: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  drafter: drafter_lib.DrafterConfig | None,
  draft_params,
) -> spot_lib.Spot | None:
  """The drafter's training in rollouts, from `draft_params`; see `spot_trainer`."""
  made = spot_trainer(config, model, mesh, drafter)
  return made and spot_lib.Spot(*made, draft_params)


def sampler(
  config: dict,
  model: config_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  drafter: drafter_lib.DrafterConfig | None = None,
  selector: selector_lib.Selector | None = None,
  spot: spot_lib.Spot | None = None,
  like: sample.Sampler | None = None,
) -> sample.Sampler:
  """The sampler of the config's task, which answers prompts and scores the answers.

  Args:
    config: of a run; the tokenizer is that of its policy's folder
    model: the policy's
    mesh: of the run
    drafter, selector, spot: speculation, see `rollout.make`
    like: another one of the same, compiled, whose programs this one shares
  """
  if like is None:
    options = rollout.Options(max_length=sizes.max_length(config), **config["rollout"])
  else:
    options = like.rollout.options
  engine = rollout.make(
    model,
    mesh,
    options,
    drafter=drafter,
    selector=selector,
    verification=config["verification"],
    spot=spot,
    pool=like and like.rollout.pool,
  )
  return sample.make(
    engine,
    tokenizer=tokenizer(config["policy"]),
    judge=_judge(
      config["reward"], config["solved_at"], judge.Options(**config["verifier"])
    ),
    sampling=config["sampling"],
    chat=config["chat"],
  )


@functools.cache
def _judge(text: str, solved_at: float, options: judge.Options) -> judge.Judge:
  """The judge of a task, whose processes all samplers of a command share."""
  return judge.Judge(text, solved_at, options)
