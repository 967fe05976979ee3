"""The setting in which RL algorithms are compared: the default task, the small policy.

    python -m experiments.train --config=experiments/configs/algorithms.py \
        --config.algorithm.name=rloo --workdir=runs/rloo

`docs/train.md` has the table of all of them. Few parameters are
trained, the head and the norms, in four updates a step: so one number per response moves
the policy within a million tokens, with any algorithm. The entries are those of
`configs/countdown.py`.
"""

import ml_collections

from experiments.configs import countdown


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  config = countdown.get_config(arg or "small")
  config.learner.update(only="head|norm", updates=4)
  config.optimizer.update(learning_rate=1e-3, floor=1.0)  # constant after the warm-up
  if arg == "smoke":
    return config
  longest = countdown.MAX_PROMPT + countdown.MAX_TOKENS
  # All responses of a step decode at once, so that long ones start as early as short ones.
  config.rollout.update(
    slots=256,
    buckets=(256, 128, 64, 32, 16, 8),
  )
  config.learner.buckets = ((8, 128), (8, 256), (4, 512), (2, 768), (2, longest))
  return config
