"""Measures how a drafter follows the policy: their agreement after every update.

    python -m experiments.figures.following --steps=12

RL steps of two sides in turn, which draw the same tokens: the drafter of "tlt" trains (in
idle slices, and after rollouts), that of "frozen" does not. Agreement is 1 less the total
variation distance of drafter and policy, on the rows that are trained on. The last line is
JSON.
"""

import json

from absl import flags

from experiments import config as config_lib
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import memory_plan
from experiments import sides as sides_lib
from experiments import trees
from tlt_jax import axes
from tlt_jax import data

_STEPS = flags.DEFINE_integer("steps", 10, "RL steps.", lower_bound=1)
_SLICES = flags.DEFINE_integer("slices", 2, "Devices on a CPU.", lower_bound=1)

SIDES = ("tlt", "frozen")


def main(config: config_lib.RunConfig):
  launch.start(_SLICES.value)
  config, asked = from_config.complete(config)
  config = memory_plan.choose_remat(config)
  prompts = data.prompt_iterator(asked.train.records, config.batch.prompts, config.seed)
  mesh = axes.make_mesh(config.tensor_parallel)
  sides = sides_lib.make_training_sides(SIDES, config, mesh, asked.train.records)
  agreement, accepted = [], {name: [] for name in SIDES}
  for step in range(_STEPS.value):
    records, hashes = next(prompts), set()
    for name in interleave.in_turn(SIDES, step):
      _, scored, digest = sides[name].step(step, records)
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
