"""GRPO on a file of prompts with a Qwen2.5-7B-class model.

    python -m experiments.train --config=experiments/configs/qwen2_5_7b.py \\
        --config.policy=/models/Qwen2.5-7B-Instruct \\
        --config.prompts.path=gsm8k_train.jsonl \\
        --config.held_out.path=gsm8k_test.jsonl --workdir=runs/gsm8k

The files hold one {"question", "answer"} object per line, or are of another known layout;
without a held-out file 5% of the prompts are held out. The run begins with a new drafter,
which trains in idle slices and after rollouts. Made for 8
accelerators of 80 GB (2 slices of 4); shapes are checked on every test run, speed and
accuracy have not been measured. `:smoke` shrinks every size for a tiny model on a CPU. The
entries are those of `configs/countdown.py`.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke"):
    raise ValueError(f"this config takes the argument 'smoke' or none, not {arg!r}")
  smoke = arg == "smoke"
  prompts = dict(source="tlt_jax.data.load_prompts", path="train.jsonl")
  max_prompt, max_tokens = 1024, 16 if smoke else 4096
  longest = max_prompt + max_tokens
  return ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=2 if smoke else 200,
      policy="Qwen2.5-7B-Instruct",
      drafter="eagle2",
      strategies="up to 4 live: off or 5_1_6; up to 16 live: off or 3_1_4",
      strategy_rule="predictive",
      spot=dict(
        row_tokens=2048,
        rows=8,
        chunk_tokens=256,
        min_micro_batches=4,
        learning_rate=1e-4,
      ),
      tensor_parallel=1 if smoke else 4,
      prompts=prompts,
      held_out=prompts | dict(path=""),  # a share of the prompts
      unusable_prompts=dict(too_long="refuse", bad_answer="refuse"),
      chat=dict(
        apply=True,
        system="Reason step by step, and put your final answer within \\boxed{}.",
      ),
      reward="tlt_jax.tasks.gsm8k.score",
      solved_at=1.0,
      batch=dict(prompts=2 if smoke else 64, responses=2 if smoke else 8),
      sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=max_tokens),
      rollout=dict(
        max_prompt=max_prompt,
        slots=4 if smoke else 256,
        # The fewer run, the longer they are.
        buckets=() if smoke else (256, 128, 32, 8),
        chunk=8 if smoke else 64,
      ),
      algorithm=dict(name="grpo", clip_low=0.2, clip_high=0.28, kl_coef=1e-3),
      optimizer=dict(
        name="adamw",
        learning_rate=1e-6,
        warmup=10,
        weight_decay=0.01,
        max_grad_norm=1.0,
      ),
      learner=dict(
        updates=1 if smoke else 2,
        buckets=((2, longest),) if smoke else ((8, 1280), (4, longest)),
      ),
      evaluation=dict(every=20, samples=1),
      checkpoint=dict(every=10, keep=2),
    )
  )
