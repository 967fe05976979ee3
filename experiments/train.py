"""Trains a policy by reinforcement learning, straight down.

Each step: prompts, a rollout of R responses each, in which idle slices train the drafter,
rewards, updates, weight sync, metrics. Running the same --workdir again resumes; with
other settings --fork=NEW_WORKDIR goes on elsewhere.
"""

import contextlib

from absl import flags
import jax

from experiments import config as config_lib
from experiments import equal_rewards
from experiments import evaluations
from experiments import from_config
from experiments import launch
from experiments import memory_phases
from experiments import memory_plan
from experiments import opening
from experiments import plot
from experiments import repeats
from experiments import summary
from experiments import trees
from experiments import workdirs
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import metrics as metrics_lib
from tlt_jax import processes
from tlt_jax import stopwatch
from tlt_jax import wandb_board
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import carry as carry_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import dynamic_sampling
from tlt_jax.rl import sample

_WORKDIR = flags.DEFINE_string("workdir", "runs/countdown", "Where everything goes.")
_FORK = flags.DEFINE_string("fork", "", workdirs.FORK)
_SCHEDULE = flags.DEFINE_string("schedule", "", workdirs.SCHEDULE)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, memory_plan.DRY_RUN)
_DRY_RUN_ON = flags.DEFINE_string("dry_run_on", "", memory_plan.DRY_RUN_ON)


def main(config: config_lib.RunConfig):
  launch.start()
  compiled_s = stopwatch.compiled_s()  # when the last record was written
  planned = memory_phases.Machine.parse(_DRY_RUN_ON.value)
  config = workdirs.keep_sizes(_WORKDIR.value, config, _FORK.value)
  carry = carry_lib.make(config.rollout.carry, config.batch)
  config, asked = from_config.complete(config, planned)
  config = memory_plan.choose_remat(config, planned)
  plan = memory_plan.of_run(config, planned)
  memory_plan.check(plan, _DRY_RUN.value or planned is not None)
  run = workdirs.open(_WORKDIR.value, config, _FORK.value)
  decisions = sample.replay(_SCHEDULE.value or run.log, strict=bool(_SCHEDULE.value))
  P, R, steps = config.batch.prompts, config.batch.responses, config.steps
  records, held_out = asked.train.records, asked.held_out.records
  opening.log(opening.of_run(config, asked, run))

  # What is trained, on what, and how.
  mesh = from_config.make_mesh(config.tensor_parallel, config.policy)
  model, params = hf.load(config.policy, mesh, axes.TRAIN, dtype="float32")
  algorithm = algorithm_lib.make(**config.algorithm)
  signal = equal_rewards.Watch(config, algorithm)
  learner = from_config.make_learner(config, model, algorithm, mesh)
  reference = learner.offload(from_config.copy_reference(algorithm, params))
  critic = critic_lib.make(algorithm.critic, learner, params)
  state = learner.init(params)
  kept = run.kept_drafter()  # by the checkpoint to go on from
  vocab = from_config.drafter_vocab(config, model, records, kept)
  drafter = from_config.make_drafter(config, model, mesh, vocab)
  spot = drafter and drafter.spot  # None: nothing trains the drafter
  selector = from_config.make_selector(config)
  sampler = from_config.make_sampler(config, model, mesh, drafter, selector)
  replace = dynamic_sampling.make(algorithm, P, config.batch.most_prompts)
  prompts = dynamic_sampling.Queue(data.prompt_iterator(records, P, config.seed))

  # Where it stands.
  step, saved = 0, {}
  same_drafter = "drafter" not in run.not_restored
  beside = {k: x for k, x in (("drafter", spot), ("critic", critic)) if x is not None}
  trained = lambda state: {"policy": state} | {k: x.arrays() for k, x in beside.items()}

  def snapshot():
    saved = {
      "prompts": prompts.get_state(),
      "drafter": spot.data() if spot else None,
      "rollout": sampler.rollout.state(),
      "repeats": repeated.state(),
      "carry": carry and carry.state(),
    }
    return step, trained(state), saved

  def at_stop():
    return None if step == first else snapshot()

  if run.start is not None:
    params = state = None  # the checkpoint's have their memory
    like = trained(learner.abstract_state())
    if spot and same_drafter:
      like["drafter"] = spot.saved_arrays(kept)
    step, restored, saved = run.start.restore(like, without=run.not_restored)
    state = restored["policy"]
    prompts.set_state(saved["prompts"])
    if "drafter" in restored:
      spot.restore(restored["drafter"], saved["drafter"])
    if "critic" in restored:
      critic.restore(restored["critic"])
    sampler.rollout.restore(saved.get("rollout"), same_drafter)
    longest = config.sampling.max_tokens
    carry = carry_lib.restored(carry, saved.get("carry"), step, longest)
  policy = learner.to_rollout(state.params)
  state = learner.offload(state)
  goes_on = (config.asked_prompts - P) * R  # responses, besides those that are trained on
  compiled = learner.to_compile(P, R, critic and critic.trainer, goes_on)
  sampler.begin_compiling(policy, compiled)
  repeated = repeats.make(config, model, mesh, sampler)
  repeated.restore(saved.get("repeats"), same_drafter)
  run.begin(step)
  board = wandb_board.make(config.wandb, run.path, trees.to_dict(config))
  writer = metrics_lib.Writer(run.path, resume_step=step, board=board)
  progress = metrics_lib.Progress(steps, step)

  first, watch = step, stopwatch.Stopwatch()
  saving = run.checkpoints.at_stop(at_stop)
  with processes.saving(), saving as checkpoints, contextlib.closing(progress):
    while True:
      metrics = {}
      if evaluations.is_due(config.evaluation, step, steps):
        metrics = evaluations.evaluate(
          config.evaluation,
          sampler,
          policy,
          held_out,
          config.seed,
          step,
          run.path,
        )
      if step == steps:
        metrics["compile/seconds_s"] = stopwatch.compiled_s() - compiled_s
        writer.write(step, metrics)
        break
      sampler.measure(policy)
      watch.lap()
      records = prompts.peek(carry.missing if carry else config.batch.most_prompts or P)
      scored = sampler(
        policy,
        records,
        R,
        seed=config.seed,
        first_request=step * len(records) * R,
        train=spot is not None,
        decide=decisions(step) if spot else None,
        replace=replace,
        carry=carry,
      )
      sampled_s = watch.lap()
      compared = repeated(step, policy, scored)
      watch.lap()
      policy = None  # the update has its memory
      launch.release_freed_memory()
      after = carry and scored.carry.scored(
        learner.score_responses, state.params, scored.trained.going_on
      )
      state, policy_metrics = learner.train(state, scored.batch(R), reference, critic)
      updated_s = watch.lap()
      policy = jax.block_until_ready(learner.to_rollout(state.params))
      state = learner.offload(state)
      synced_s = watch.lap()
      metrics |= (
        scored.metrics()
        | compared
        | policy_metrics
        | {
          "policy/seconds_s": updated_s,
          "weight_sync/seconds_s": synced_s,
          "step/seconds_s": sampled_s + updated_s + synced_s,
          "compile/seconds_s": stopwatch.compiled_s() - compiled_s,
        }
      )
      compiled_s = stopwatch.compiled_s()
      record = writer.write(step, metrics)
      writer.write_rollout(step, scored.record())
      # No earlier: a stop would skip them.
      prompts.take(len(records) if carry else len(scored.records) // R)
      carry = after
      step += 1
      name = f"train_{step:06}"
      evaluations.write_examples(scored, evaluations.EXAMPLES, run.path, name)
      checkpoints.save(*snapshot(), force=step == steps)
      progress.update(step, record)
      signal.update(record)
      processes.stop_if_requested()

  writer.close()
  hf.save(run.path / "policy", model, state.params, dtype=model.dtype)
  sampler.tokenizer.save(run.path / "policy")
  if spot:
    drafter_files.save(run.path / "drafter", drafter.config, drafter.params)
  plot.plot_all(run.path)
  if processes.is_first():
    print(summary.text(metrics_lib.read(run.path / "metrics.jsonl")), end="\n\n")
    print(summary.what_next(run.path, config, held_out[0]["prompt"]))


if __name__ == "__main__":
  read = trees.from_flags("countdown", config_lib.RunConfig)
  launch.run(main, joins_jobs=True, config=read)
