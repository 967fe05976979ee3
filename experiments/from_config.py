"""Makes what a run's config describes: prompts, models, spot training, sampler.

The library takes plain arguments. Which sections of a config they are is known here, and
in the commands; what takes a whole `RunConfig` puts several sections together.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import config as config_lib
from experiments import draft_vocab
from experiments import memory_phases
from experiments import sizes
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax import prompt_checks
from tlt_jax import tokenization
from tlt_jax.models import config as model_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import gold
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
  model: model_lib.ModelConfig  # the policy's
  params: Any  # the policy's
  drafter: spot_lib.Frozen | None = None


@functools.cache
def load_tokenizer(policy: str, date: str | None) -> tokenization.Tokenizer:
  """The tokenizer of a policy's folder, which a command loads once; see `Chat.date`.

  Raises:
    DataError: it has tokens that the model does not have
  """
  today = datetime.date.fromisoformat(date) if date else None
  model, loaded = hf.load_config(policy), tokenization.Tokenizer.load(policy, today)
  if loaded.vocab_size > model.vocab_size:
    raise data.DataError(
      f"{policy}: tokenizer.json has tokens up to {loaded.vocab_size - 1:,}, the model in "
      f"config.json has {model.vocab_size:,}; use the model's own tokenizer files"
    )
  return loaded


def prompt_rules(run: config_lib.RunConfig) -> prompt_checks.Rules:
  """Which prompts a run's policy can be asked, and what is done with the others."""
  tokenizer = load_tokenizer(run.policy, run.chat.date)
  if run.chat.apply is None and tokenizer.has_template:
    logging.info(
      "plain prompts are wrapped in the chat template of %s (as they are: "
      "--config.chat.apply=False)",
      run.policy,
    )
  trial = gold.Trial(
    make_judge(run.reward, run.solved_at, run.verifier),
    run.sampling.max_tokens,
    whole=run.unusable_prompts.bad_answer == "drop",
  )
  return prompt_checks.Rules(
    tokenizer,
    run.unusable_prompts,
    max_prompt=run.rollout.max_prompt,
    chat=run.chat.apply,
    system=run.chat.system or None,
    try_answers=trial,
  )


class Prompts(NamedTuple):
  """Records that a policy can be asked."""

  records: Sequence[dict]
  longest: int  # tokens of the longest prompt, see `prompt_checks.measured`


def load_prompts(
  source: Mapping[str, Any],
  rules: prompt_checks.Rules,
  whole: bool = False,
  section: str = "prompts",
) -> Prompts:
  """The records of a source that can be used.

  Args:
    source: section `prompts` or `held_out` of a run
    rules: what can be used
    whole: check every record now, and return a list; for sources that are read whole
    section: of the config, for error messages: prompts or held_out
  Raises:
    DataError: there is no such source, or a prompt in it is refused
  """
  try:
    return _load_prompts(source, rules, whole)
  except data.DataError as e:
    key = e.argument if e.argument in source else "path" if "path" in source else "source"
    section = "held_out" if key == "share" else section
    raise data.DataError(f"{section}.{key}: {e}") from e


def _load_prompts(
  source: Mapping[str, Any], rules: prompt_checks.Rules, whole: bool
) -> Prompts:
  name = str(source.get("path") or source["source"])
  with progress.shown(f"reading {name}"):
    found = data.source(**source)
  if isinstance(found, data.Mixture) and not whole:
    parts = [prompt_checks.measured(part, name, rules) for part in found.parts]
    records = data.Mixture([records for records, _ in parts], found.weights)
    return Prompts(records, max(longest for _, longest in parts))
  return Prompts(*prompt_checks.measured(found, name, rules, whole))


class RunPrompts:
  """The prompts of a run, each source read and tokenized once, when first asked for."""

  def __init__(self, run: config_lib.RunConfig, whole: bool = False):
    """Reads nothing; with `whole` those to train on are checked and read whole, too."""
    self._run, self._whole = run, whole

  @functools.cached_property
  def rules(self) -> prompt_checks.Rules:
    return prompt_rules(self._run)

  @functools.cached_property
  def train(self) -> Prompts:
    return load_prompts(self._run.prompts, self.rules, self._whole)

  @functools.cached_property
  def held_out(self) -> Prompts:
    return load_prompts(self._run.held_out, self.rules, True, "held_out")

  @property
  def longest(self) -> int:
    """Tokens of the longest prompt of all."""
    return max(self.train.longest, self.held_out.longest)


def complete(
  run: config_lib.RunConfig, planned: memory_phases.Machine | None = None
) -> tuple[config_lib.RunConfig, RunPrompts]:
  """A run's config with every size, and its prompts; see `fill_sizes`."""
  if run.chat.date is None and tokenization.reads_date(run.policy):
    date = processes.on_first(datetime.date.today().isoformat)
    run = dataclasses.replace(run, chat=dataclasses.replace(run.chat, date=date))
  prompts = RunPrompts(run)
  return fill_sizes(run, prompts, planned), prompts


def fill_sizes(
  run: config_lib.RunConfig,
  prompts: RunPrompts,
  planned: memory_phases.Machine | None = None,
) -> config_lib.RunConfig:
  """A run's config with every size, checked; see `sizes`. Devices must have been set up.

  Prompts are read only if a size follows from them.

  Args:
    run: its config
    prompts: of the run
    planned: devices that are not there, which sizes follow from; None: this machine's
  Raises:
    ValueError: the policy's context is too short, its learner cannot take what its
      rollouts give, or a prompt is refused
  """
  run = _fill_rollout(run, prompts, run.asked_prompts, run.batch.responses, planned)
  machine = sizes.Machine.here(run.tensor_parallel, planned)
  learner = sizes.fit_learner(run.learner, run.max_length, machine)
  run = dataclasses.replace(run, learner=learner)
  sizes.check_learner(run)
  return run


def fill_training_sizes(
  training: config_lib.DrafterTraining, prompts: RunPrompts
) -> config_lib.DrafterTraining:
  """The config of a drafter's training, and of its run, with every size.

  Args:
    training: its config
    prompts: that the policy answers
  """
  asked = training.responses
  run = _fill_rollout(training.run, prompts, asked.prompts, asked.samples)
  machine = sizes.Machine.here(run.tensor_parallel)
  learner = sizes.fit_learner(training.learner, run.max_length, machine)
  sizes.check_longest(run.max_length, learner.buckets)
  return dataclasses.replace(training, run=run, learner=learner)


def _fill_rollout(
  run: config_lib.RunConfig,
  prompts: RunPrompts,
  count: int,
  responses: int,
  planned: memory_phases.Machine | None = None,
) -> config_lib.RunConfig:
  """The sizes of a run's rollouts of `count` prompts."""
  longest, max_tokens = run.rollout.max_prompt, run.sampling.max_tokens
  if longest is not None:
    sizes.check_context(longest, max_tokens, hf.load_config(run.policy))
  if not sizes.is_open(run.rollout):
    return run
  if longest is None:
    longest = prompts.longest
  run = sizes.fill_rollout(run, sizes.Asked(longest, count, responses), planned)
  prompts.rules.max_prompt = run.rollout.max_prompt  # holds for what is drawn later
  return run


def make_mesh(
  tensor_parallel: int, policy: str, planned: int | None = None
) -> jax.sharding.Mesh:
  """The devices in slices that can share a policy out.

  Args:
    tensor_parallel: devices of a slice
    policy: its folder
    planned: devices that are not there, for shapes only; None: those of this machine
  Raises:
    ValueError: slices of so many devices do not divide the devices, or the policy's heads
  """
  model = hf.load_config(policy)
  mesh = axes.make_mesh(tensor_parallel, planned)
  model.check_split(tensor_parallel)
  return mesh


def load_models(
  run: config_lib.RunConfig, dtype: str | None = None, records: Sequence[dict] = ()
) -> Models:
  """Loads a run's policy and drafter onto this machine's devices.

  Args:
    run: its config
    dtype: of the policy's weights and of what it computes; None: that of its config.json
    records: that a new drafter's vocabulary follows from, see `drafter_vocab`
  """
  mesh = make_mesh(run.tensor_parallel, run.policy)
  dtype = dtype or hf.load_config(run.policy).dtype
  model, params = hf.load(run.policy, mesh, axes.ROLLOUT, dtype)
  model = dataclasses.replace(model, dtype=dtype)
  vocab = drafter_vocab(run, model, records)
  return Models(mesh, model, params, load_drafter(run, model, mesh, vocab))


def make_learner(
  config: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  algorithm: algorithm_lib.Algorithm,
  mesh: jax.sharding.Mesh,
) -> learner_lib.Learner:
  """The learner of a policy, with the kernels of the rollout."""
  rule, kernels = optimizer.make(**config.optimizer), config.rollout.kernels
  options = vars(config.learner)
  return learner_lib.make(model, algorithm, rule, mesh, **options, kernels=kernels)


def copy_reference(algorithm: algorithm_lib.Algorithm, params: Any) -> Any:
  """A copy of the policy before it is trained; None if the algorithm uses none."""
  if not algorithm.uses_reference:
    return None
  memory.announce("the reference policy", params, smaller="algorithm.kl_coef=0, policy")
  return jax.tree.map(jnp.copy, params)


def drafter_vocab(
  run: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  records: Sequence[dict],
  saved: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
  """The tokens that a run's new drafter may predict, the same on all processes; (): all.

  Args:
    run: its config
    model: the policy's
    records: whose prompts and gold answers are counted
    saved: what a checkpoint has of the drafter that it goes on with (`Spot.data`); None:
      the drafter begins
  """
  if saved is not None:
    return spot_lib.saved_vocab(saved)
  count = draft_vocab.size(run.drafter_vocab_size, model.vocab_size)
  if not count or not drafters.is_kind(run.drafter):
    return ()
  tokenizer = load_tokenizer(run.policy, run.chat.date)

  def chosen() -> list[int]:
    tokens = draft_vocab.tokens_of(tokenizer, records, run.chat)
    where = "prompts and gold answers"
    return list(draft_vocab.choose(tokenizer, model.vocab_size, count, tokens, where))

  return tuple(processes.on_first(chosen))


def drafter_shape(
  run: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  vocab: Sequence[int] | None = None,
) -> drafter_lib.DrafterConfig | None:
  """A run's drafter, of a folder or new by its kind; None without one.

  Args:
    run: its config
    model: the policy's
    vocab: of a new one, see `drafter_vocab`; None: any ids, as many as it will have
  """
  if not run.drafter:
    return None
  if not drafters.is_kind(run.drafter):
    return drafter_files.load_shape(run.drafter, model)
  if vocab is None:
    vocab = range(draft_vocab.size(run.drafter_vocab_size, model.vocab_size))
  return drafter_lib.of_target(model, run.drafter, vocab=tuple(vocab))


def load_drafter(
  run: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  vocab: Sequence[int] | None = None,
) -> spot_lib.Frozen | None:
  """A run's drafter before its training, see `drafter_shape`."""
  if run.drafter and not drafters.is_kind(run.drafter):
    return spot_lib.Frozen(*drafter_files.load(run.drafter, model, mesh))
  drafter = drafter_shape(run, model, vocab)
  if drafter is None:
    return None
  return spot_lib.Frozen(drafter, drafter_lib.new_params(drafter, mesh, run.seed))


def make_selector(run: config_lib.RunConfig) -> selector_lib.Selector | None:
  """The selector of strategies; None if only plain decoding is left."""
  return selector_lib.make(run.strategies, run.strategy_rule, bool(run.drafter))


def parse_selector(
  text: str, rule: str, drafter: drafter_lib.DrafterConfig | None
) -> selector_lib.Selector | None:
  """The selector that a text asks for; None if it asks for plain decoding.

  Args:
    text: a strategy, which runs always; several by live requests, as in a config's
      `strategies`; or "auto", which chooses from what this project has, by what each is
      measured to bring
    rule: that chooses, see a config's `strategy_rule`
    drafter: None: there is none
  Raises:
    ValueError: no such strategy, or a drafter's without one
  """
  if text == "auto":
    text = levels.automatic(drafter)
  has_drafter = drafter is not None
  if " live: " in text:
    return selector_lib.make(text, rule, has_drafter)
  strategy = strategy_lib.parse(text)
  if strategy_lib.uses_drafter(strategy) and not has_drafter:
    raise ValueError(f"strategy {text} needs a --drafter")
  return strategy and selector_lib.always(strategy)


def make_draft_trainer(
  spot: config_lib.Spot,
  temperature: float,
  longest: int,
  model: model_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  drafter: drafter_lib.DrafterConfig | None,
) -> tuple[trainer_lib.Trainer, spot_lib.Options] | None:
  """What trains the drafter in rollouts; None if it stays as it is.

  Args:
    spot: how it trains
    temperature: of sampling
    longest: tokens of the longest sequence
    model: the policy's
    mesh: of the run
    drafter: of `load_drafter`
  """
  if not spot.train or drafter is None:
    return None
  options = spot.options
  trainer = spot_lib.make_trainer(
    model,
    drafter,
    mesh,
    optimizer=optimizer.make(**spot_lib.OPTIMIZER | {"learning_rate": spot.learning_rate}),
    longest=longest,
    loss=make_loss(spot.loss, temperature),
    options=options,
  )
  return trainer, options


def make_loss(settings: draft_loss.Settings, temperature: float) -> draft_loss.Loss:
  """A drafter's objective at a temperature of sampling; 0 counts as 1."""
  return draft_loss.Loss(**vars(settings), temperature=temperature or 1.0)


def make_drafter(
  run: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  vocab: Sequence[int] | None = None,
) -> rollout.Drafter | None:
  """A run's drafter, with its training in rollouts if the config asks for that.

  See `drafter_shape`.
  """
  drafter = load_drafter(run, model, mesh, vocab)
  shape = drafter and drafter.config
  made = make_draft_trainer(
    run.spot, run.sampling.temperature, run.max_length, model, mesh, shape
  )
  return drafter if made is None else spot_lib.Spot(*made, drafter.params)


def rollout_options(run: config_lib.RunConfig) -> rollout.Options:
  """A run's sizes of rollouts, complete."""
  s = run.sampling
  filters = s.top_k > 0 or s.top_p < 1 or s.min_p > 0
  return rollout.Options(max_length=run.max_length, filters=filters, **run.rollout.sizes)


def make_sampler(
  run: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  drafter: rollout.Drafter | None = None,
  selector: selector_lib.Selector | None = None,
  like: sample.Sampler | None = None,
) -> sample.Sampler:
  """The sampler of a run's task, which answers prompts and scores the answers.

  Args:
    run: its config; the tokenizer is that of its policy's folder
    model: the policy's
    mesh: of the run
    drafter, selector: speculation, see `rollout.make`
    like: another one of the same, compiled, whose programs this one shares
  """
  engine = rollout.make(
    model,
    mesh,
    rollout_options(run) if like is None else like.rollout.options,
    drafter=drafter,
    selector=selector,
    pool=like and like.rollout.pool,
  )
  return sample.make(
    engine,
    tokenizer=load_tokenizer(run.policy, run.chat.date),
    judge=make_judge(run.reward, run.solved_at, run.verifier),
    sampling=vars(run.sampling),
    chat=vars(run.chat),
  )


@functools.cache
def make_judge(text: str, solved_at: float, options: judge.Options) -> judge.Judge:
  """The judge of a task, whose processes all samplers of a command share."""
  return judge.Judge(text, solved_at, options)
