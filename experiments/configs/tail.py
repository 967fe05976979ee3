"""A small batch with a long tail, speculation and spot training on.

    python -m experiments.train --config=experiments/configs/tail.py --workdir=runs/tail

4 prompts x 8 responses, up to 1,024 tokens each, with the drafter in the repo: after a
second all but a few responses have ended. `bench_spot` measures on it. The entries are
those of `configs/countdown.py`.
"""

import ml_collections

from experiments.configs import countdown


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  config = countdown.get_config(arg)
  config.batch = dict(prompts=4, responses=8)
  config.drafter = "experiments/drafters/countdown"  # of `smoke` too
  config.strategies = ((2, ("off", "2_1_3", "3_1_4")), (4, ("off", "2_1_3")))
  config.spot.slots = 0
  config.rollout.update(
    slots=16,
    buckets=((16, 256), (16, 512), (8, 512), (8, 1056), (4, 1056), (2, 1056)),
    chunk=64,
    budget=dict(programs=None, compile_s=None),
  )
  return config
