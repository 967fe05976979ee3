"""Watches a drafter follow a policy: its agreement in each program that trains it.

    python -m experiments.figures.following --steps=12

RL steps of two sides in turn, which draw the same tokens: on one the drafter trains (in
idle slices, and after rollouts), on the other it stays as it was. Agreement is the share
of probability that drafter and policy put on the same token, 1 less their total variation,
on the rows that are trained on. The flags are those of `bench.step`. The last line is
JSON.
"""

import json

from absl import flags

from benchmarks import interleave
from benchmarks import step as step_lib
from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from experiments import trees
from tlt_jax import axes
from tlt_jax import data
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib

SIDES = ("tlt", "frozen")


def sides(config: config_lib.RunConfig) -> dict[str, step_lib.Learning]:
  """Both sides, with the same policy."""
  mesh = axes.make_mesh(config.tensor_parallel)
  model, params = hf.load(config.policy, mesh, axes.TRAIN, dtype="float32")
  algorithm = algorithm_lib.make(**config.algorithm)
  learner = from_config.make_learner(
    config.learner, config.optimizer, model, algorithm, mesh
  )
  return {name: step_lib.Learning(name, config, learner, params) for name in SIDES}


def main(config: config_lib.RunConfig):
  launch.start(flags.FLAGS.slices)
  config, asked = from_config.complete(config)
  prompts = data.prompt_iterator(asked.train.records, config.batch.prompts, config.seed)
  made, agreement, accepted = sides(config), [], {name: [] for name in SIDES}
  for step in range(flags.FLAGS.steps):
    records, hashes = next(prompts), set()
    for name in interleave.in_turn(SIDES, step):
      _, scored, digest = made[name].step(step, records)
      hashes.add(digest)
      accepted[name].append(scored.samples.acceptance_rate)
      if name == "tlt":
        done = [m for m in scored.samples.training if m["updates"]]
        agreement.append([float(m["agreement_1"]) for m in done])
    if len(hashes) > 1:
      raise ArithmeticError(f"step {step}: the sides differ in tokens or parameters")
    first = {name: rates[-1][:1] for name, rates in accepted.items()}
    print(f"step {step}: {len(agreement[-1])} programs, {first}", flush=True)
  print(json.dumps({"agreement": agreement, "acceptance_rate_pos": accepted}))


if __name__ == "__main__":
  read = trees.from_flags("tail", config_lib.RunConfig)
  launch.run(main, config=read)
