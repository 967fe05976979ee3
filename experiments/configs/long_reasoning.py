"""GRPO with responses of up to 32,768 tokens, a new drafter, and training in idle slices.

    python -m experiments.train \\
        --config=experiments/configs/long_reasoning.py:qwen2_5_32b \\
        --config.policy=/models/Qwen2.5-32B \\
        --config.prompts.path=math_train.jsonl \\
        --config.held_out.path=math_test.jsonl --workdir=runs/long

The policies of the TLT paper (https://arxiv.org/abs/2511.16665), and one of experts. The
files hold one {"problem", "answer"} object per line, the answer in LaTeX, without the
box.

| argument | model | made for |
|---|---|---|
| none, `:qwen2_5_7b` | Qwen2.5-7B | 8 devices of 80 GB, 2 slices of 4 |
| `:r1_distill_qwen_7b` | DeepSeek-R1-Distill-Qwen-7B | the same |
| `:qwen3_30b_a3b` | Qwen3-30B-A3B | 8 devices of 141 GB, 2 slices of 4, or 16 of 80 GB |
| `:qwen2_5_32b` | Qwen2.5-32B | 32 devices of 80 GB, 4 slices of 8 |
| `:llama3_3_70b` | Llama-3.3-70B-Instruct | 64 devices of 80 GB, 8 slices of 8 |
| `:tpu` | Qwen2.5-7B | 16 TPU cores of 32 GB, 4 slices of 4 |

More devices are more slices, up to 64 devices for each. `--dry_run_on=32x80` prints
what each phase takes on 32 devices of 80 GB, from the policy's `config.json` alone and
on any machine; a test holds the table above against that plan. On 8 devices of 80 GB
Qwen3-30B-A3B trains the later half of its layers, with
`"--config.learner.only=final_norm|layer_(2[4-9]|3[0-9]|4[0-7])"`: 60 GB in rollouts and
about 65 in updates, which the rollout's copy of the policy follows. All layers take 98
GB in updates, 97 as compiled for H200s. GPUs need XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 in
the environment: JAX takes three quarters of their memory otherwise. Expect the drafter,
which begins at random and predicts 32,768 of the policy's tokens, to draft little in the
first steps, and the tail of each rollout to run in few slots of many tokens. No such run
has been made: neither time nor memory nor accuracy was measured on any hardware. Devices
of several hosts take a process of this command on each host (docs/distributed.md), which
has not been tried on more than one machine. `:smoke` shrinks every size for a tiny model
on a CPU. Entries are those of `configs/qwen2_5_7b.py`.
"""

from typing import NamedTuple

import ml_collections

from experiments.configs import qwen2_5_7b

MAX_PROMPT, MAX_TOKENS = 1024, 32768  # of a prompt, and of a response


class Run(NamedTuple):
  """What differs between the models."""

  policy: str  # folder
  tensor_parallel: int  # devices per slice
  slots: int  # of a slice
  system: str = "Reason step by step, and put your final answer within \\boxed{}."


RUNS = {
  "qwen2_5_7b": Run("Qwen2.5-7B", 4, 128),
  # It was trained without a system message.
  "r1_distill_qwen_7b": Run("DeepSeek-R1-Distill-Qwen-7B", 4, 128, system=""),
  "qwen3_30b_a3b": Run("Qwen3-30B-A3B", 4, 64, system=""),
  "qwen2_5_32b": Run("Qwen2.5-32B", 8, 64),
  "llama3_3_70b": Run("Llama-3.3-70B-Instruct", 8, 64),
  "tpu": Run("Qwen2.5-7B", 4, 32),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke", *RUNS):
    raise ValueError(
      f"this config takes the argument {', '.join(RUNS)}, smoke or none, not {arg!r}"
    )
  smoke = arg == "smoke"
  config = qwen2_5_7b.get_config("smoke" if smoke else "")
  run = RUNS.get(arg, RUNS["qwen2_5_7b"])
  config.policy = run.policy
  config.strategies = "up to 4 live: off or 5_1_6; up to 16 live: off or 3_1_4"
  config.chat.system = run.system
  config.reward = "tlt_jax.tasks.latex.score"
  config.algorithm = dict(name="grpo", clip_low=0.2, clip_high=0.28, kl_coef=0.0)
  config.rollout.cache_tokens = None
  if smoke:
    return config
  config.tensor_parallel = run.tensor_parallel
  if arg == "qwen3_30b_a3b":
    config.learner.balance_coef = 0.001  # `router_aux_loss_coef` of its config.json
  config.batch = dict(prompts=32, responses=16)
  config.sampling.max_tokens = MAX_TOKENS
  slots, longest = run.slots, MAX_PROMPT + MAX_TOKENS
  config.spot.max_batch = slots // 4
  config.rollout.slots = slots
  # The longer requests are, the fewer run: the memory is the same.
  # In pages it keeps more requests running: simulated, 703 s a rollout instead of 1,068.
  config.rollout.cache_tokens = slots * 8192
  full = config.rollout.cache_tokens // longest
  config.rollout.buckets = (slots, slots // 2, full, 4)
  # A row holds one response of full length or many shorter ones.
  config.learner.buckets = ((1, 8192), (1, longest))
  return config
