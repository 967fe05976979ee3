"""Trains a drafter offline, on responses of its policy.

    python -m experiments.train_drafter --run=experiments/configs/qwen2_5_7b.py \\
        --run.policy=/models/Qwen2.5-7B-Instruct --run.prompts.path=train.jsonl \\
        --run.held_out.path=test.jsonl --workdir=runs/drafter \\
        "--config.learner.buckets=((4,1280),(1,5120))"

`--run` is the config of the RL run that the drafter is for (policy, prompts, sampling);
`--config` is that of the training. The policy responds to the prompts once. The drafter is
trained on these sequences, shuffled in each epoch, and on the policy's features of them,
which are kept on disk (`keep_features`; per token as many numbers as the policy is wide,
four times as many for EAGLE-3). At the end acceptance is measured on held-out prompts, by
strategy and temperature; strategies may include n-grams. The same --workdir resumes. The
result is a folder with a drafter for rollouts. The last line is JSON.
"""

from collections.abc import Sequence
import dataclasses
import json
import logging
import pathlib

from absl import flags
import jax
import numpy as np

from experiments import acceptance
from experiments import config as config_lib
from experiments import draft_vocab
from experiments import feature_files
from experiments import from_config
from experiments import launch
from experiments import memory_plan
from experiments import opening
from experiments import responses
from experiments import trees
from experiments import workdirs
from tlt_jax import checkpoint
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax import stopwatch
from tlt_jax import writing
from tlt_jax.models import config as model_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import families
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.spot import offline
from tlt_jax.spec_decode.spot import spot as spot_lib

_WORKDIR = flags.DEFINE_string("workdir", "runs/drafter", "Where everything goes.")

_RESPONSES, _FEATURES = "responses.npz", "features"
_SEED = 1 << 30  # added to the seed: RL draws other responses


def ask(
  models: from_config.Models,
  run: config_lib.RunConfig,
  wanted: config_lib.Answers,
  seed: int,
  records: Sequence[dict],
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Draws the policy's responses to the records, as (prompt, response) token ids."""
  sampler = from_config.make_sampler(run, models.model, models.mesh)
  sequences, usual = [], run.sampling.temperature
  for temperature in acceptance.at_temperatures(usual, wanted.temperatures):
    at = dataclasses.replace(
      sampler, sampling=sampler.sampling | {"temperature": temperature}
    )
    scored = at(
      models.params,
      records,
      acceptance.samples_at(temperature, wanted.samples),
      seed=seed + _SEED,
      first_request=len(sequences),
    )
    prompts = [scored.requests.prompt(i) for i in range(len(scored.requests))]
    sequences += [(p, scored.samples.response(i)) for i, p in enumerate(prompts)]
  return sequences


def first_drafter(
  model: model_lib.ModelConfig,
  config: config_lib.DrafterTraining,
  responses: Sequence[np.ndarray],
):
  """The drafter before its training, and its parameters.

  Args:
    responses: token ids; the most frequent are a new one's vocabulary
  """
  shape, run = config.drafter, config.run
  if config.init:
    return drafter_files.load(config.init, model)
  made = {"kind": shape.kind}
  if shape.architecture:
    family = families.find(shape.architecture)
    made |= {"architecture": shape.architecture, "qkv_bias": family.qkv_bias}
    made["qk_norm"] = family.qk_norm
  size = draft_vocab.size(shape.vocab_size, model.vocab_size, "drafter.vocab_size")
  if size:
    tokenizer = from_config.load_tokenizer(run.policy, run.chat.date)
    made["vocab"] = draft_vocab.choose(
      tokenizer, model.vocab_size, size, responses, "the responses"
    )
  drafter = drafter_lib.of_target(model, **made)
  return drafter, jax.jit(lambda key: drafter_lib.init_params(drafter, key))(
    jax.random.key(config.seed)
  )


def make_learner(
  models: from_config.Models,
  drafter: drafter_lib.DrafterConfig,
  config: config_lib.DrafterTraining,
) -> offline.DraftLearner:
  return offline.make(
    models.model,
    drafter,
    from_config.make_loss(config.loss, config.run.sampling.temperature),
    optimizer.make(**config.optimizer),
    models.mesh,
    config.learner.buckets,
  )


def check(models: from_config.Models, config: config_lib.DrafterTraining) -> None:
  """Raises ValueError for errors that would else appear only after the responses."""
  drafter, params = first_drafter(models.model, config, responses=[])
  make_learner(models, drafter, config)
  drafting = dataclasses.replace(models, drafter=spot_lib.Frozen(drafter, params))
  for strategy in config.evaluation.strategies:
    acceptance.sampler(config.run, drafting, strategy)


def train(
  learner: offline.DraftLearner,
  params,
  models: from_config.Models,
  config: config_lib.DrafterTraining,
  sequences: list[tuple[np.ndarray, np.ndarray]],
  workdir: pathlib.Path,
  checkpoints: checkpoint.Checkpoints,
):
  """Trains from the latest checkpoint to the last step; returns the parameters.

  Args:
    params: of the drafter, before the first step
    sequences: (prompt, response) token ids
  """
  features, state, step = None, learner.init(params), 0
  if checkpoints.latest() is not None:
    step, state, _ = checkpoints.restore(learner.abstract_state())
  if config.keep_features and step < config.steps:
    folder = workdir / _FEATURES
    features = feature_files.compute(folder, learner, models.params, sequences)
  n = min(config.sequences, len(sequences))
  per_epoch = len(sequences) // n
  watch, seconds, tokens = stopwatch.Stopwatch(), 0.0, 0

  def at_stop():
    return step, state, {}

  with processes.saving(), checkpoints.at_stop(at_stop):
    while step < config.steps:
      order = np.random.default_rng([config.seed, step // per_epoch])
      order = order.permutation(len(sequences))
      chosen = order[step % per_epoch * n :][:n]
      prompts, responses = zip(*[sequences[i] for i in chosen], strict=True)
      kept = None if features is None else [features[i] for i in chosen]
      with progress.shown(f"training the drafter, step {step + 1} of {config.steps}"):
        state, metrics = learner.train(state, models.params, prompts, responses, kept)
      if not np.isfinite(metrics["drafter/loss"]):
        raise FloatingPointError(f"the drafter's loss is not finite at step {step + 1}")
      step += 1
      tokens += sum(map(len, responses))
      path = workdir / "metrics.jsonl"
      if processes.is_first():
        with writing.to(path), path.open("a") as f:
          f.write(json.dumps({"step": step} | metrics) + "\n")
      if step % 20 == 0 or step == config.steps:
        depths = range(1, learner.loss.steps + 1)
        agreement = " ".join(f"{metrics[f'drafter/agreement_{k}']:.2f}" for k in depths)
        seconds += watch.lap()
        rate = tokens / seconds
        logging.info(
          f"step {step}/{config.steps}  loss {metrics['drafter/loss']:.4f}  "
          f"agreement {agreement}  {rate:.0f} tokens/s"
        )
      checkpoints.save(step, state, {}, force=step == config.steps)
      processes.stop_if_requested()
  return state.params


def main(config: config_lib.DrafterConfig, run: config_lib.RunConfig):
  launch.start()
  run = dataclasses.replace(
    run,
    drafter="",
    prompts=run.prompts | {"size": config.responses.prompts},
    held_out=run.held_out | {"size": config.evaluation.prompts},
  )
  config = config_lib.DrafterTraining(**vars(config), run=run)
  config = workdirs.keep_sizes(_WORKDIR.value, config)
  prompts = from_config.RunPrompts(config.run, whole=True)
  config = from_config.fill_training_sizes(config, prompts)
  run, wanted, measured = config.run, config.responses, config.evaluation
  asked = ("run", "seed", "responses")
  holds = {_RESPONSES: asked, _FEATURES: (*asked, "drafter", "init")}
  opened = workdirs.open(_WORKDIR.value, config, holds=holds)
  workdir, checkpoints = opened.path, opened.checkpoints
  records, held_out = prompts.train.records, prompts.held_out.records
  memory_plan.check(memory_plan.of_rollout(run))
  shape = config.init or f"a new {config.drafter.kind}"
  opening.log(
    [
      *opening.of_rollout(run, None, len(records), wanted.samples),
      f"trained, on these responses: {shape}, {config.steps:,} steps",
    ]
  )
  models = from_config.load_models(run)
  check(models, config)
  path = workdir / _RESPONSES
  if processes.on_first(lambda: not path.exists()):
    workdirs.record(workdir, config)
    found = ask(models, run, wanted, config.seed, records)
    if processes.is_first():
      responses.store(path, found)
    processes.barrier()
  sequences = responses.load(path, models.model.vocab_size)

  answers = [tokens for _, tokens in sequences]
  drafter, params = first_drafter(models.model, config, answers)
  learner = make_learner(models, drafter, config)
  workdirs.record(workdir, config)
  params = train(learner, params, models, config, sequences, workdir, checkpoints)
  drafter_files.save(workdir / "drafter", drafter, params)
  for_use = "for --config.drafter of train and --drafter of generate"
  logging.info("exported the drafter to %s, %s", workdir / "drafter", for_use)

  found = acceptance.measure(
    run,
    dataclasses.replace(models, drafter=spot_lib.Frozen(drafter, params)),
    strategies=measured.strategies,
    records=held_out,
    samples=measured.samples,
    seed=config.seed + _SEED,
    temperatures=measured.temperatures,
  )
  acceptance.report(found)
  print(json.dumps({"acceptance": found}))


if __name__ == "__main__":
  launch.run(
    main,
    joins_jobs=True,
    config=trees.from_flags("drafter", config_lib.DrafterConfig),
    run=trees.from_flags("countdown", config_lib.RunConfig),
  )
