"""A small batch with a long tail, speculation and spot training on.

    python -m experiments.train --config=experiments/configs/tail.py --workdir=runs/tail

4 prompts x 8 responses, up to 1,024 tokens each, of `countdown.py:small`, with its drafter:
after a second all but a few responses have ended. The benchmarks `step` and `run`
measure on it. `:32` is another number of responses per slice, where there are two slices;
`:16,1536` another limit of tokens too. The entries are those of `configs/countdown.py`.
"""

import re

import ml_collections

from experiments.configs import countdown


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  numbers = re.fullmatch(r"(\d+)(?:,(\d+))?", arg)
  usual = countdown.MAX_TOKENS
  slots, cap = (int(numbers[1]), int(numbers[2] or usual)) if numbers else (16, usual)
  if slots < 4 or slots % 2 or cap < usual:
    raise ValueError(
      "an even number of responses per slice, 4 or more, and a limit of "
      f"{usual:,} tokens or more, not {arg!r}"
    )
  config = countdown.get_config("small" if numbers else arg or "small")
  config.batch = dict(prompts=4, responses=slots // 2)
  config.drafter = countdown.SMALL_DRAFTER  # of `smoke` too
  config.strategies = "up to 4 live: off or 3_1_4 or 8_1_9; up to 16 live: off or 3_1_4"
  halves = [slots >> i for i in range(1, slots.bit_length())]  # down to 1
  longest = cap + countdown.MAX_PROMPT
  config.rollout.update(
    slots=slots,
    buckets=(slots, *halves),
    chunk=64,
  )
  # Fewer rows for few responses: an empty row costs as much as a full one.
  packed = tuple((rows // 2, length) for rows, length in config.learner.buckets)
  if cap > usual:
    config.sampling.max_tokens = cap
    packed = (*packed, (2, longest))
  config.learner.buckets = packed
  return config
