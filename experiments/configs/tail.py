"""A small batch with a long tail, speculation and spot training on.

    python -m experiments.train --config=experiments/configs/tail.py --workdir=runs/tail

4 prompts x 8 responses, up to 1,024 tokens each, with the drafter in the repo: after a
second all but a few responses have ended. `bench_step` and `bench_spot` measure on it.
`:32` and the like is another number of responses per slice, where there are two slices.
The entries are those of `configs/countdown.py`.
"""

import ml_collections

from experiments.configs import countdown


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  slots = int(arg) if arg.isdecimal() else 16
  if slots < 4 or slots % 2:
    raise ValueError(f"an even number of responses per slice, 4 or more, not {slots}")
  config = countdown.get_config("" if arg.isdecimal() else arg)
  config.batch = dict(prompts=4, responses=slots // 2)
  config.drafter = "experiments/drafters/countdown"  # of `smoke` too
  config.strategies = ((4, ("off", "3_1_4", "8_1_9")), (16, ("off", "3_1_4")))
  halves = [slots >> i for i in range(1, slots.bit_length() - 1)]  # down to 2
  config.rollout.update(
    slots=slots,
    buckets=(
      *((slots, 256), (slots, 512)),
      *((batch, 512) for batch in halves[:2]),
      *((batch, 1056) for batch in halves),
    ),
    chunk=64,
    budget=dict(programs=None, compile_s=None),
  )
  return config
