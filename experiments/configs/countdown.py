"""The default run: GRPO on Countdown, from the warm start in the repo.

    python -m experiments.train --workdir=runs/countdown

A 1.5M-parameter character-level policy that writes its search out; few very long
responses keep the rollout waiting. `:smoke` finishes in a minute on a CPU.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke"):
    raise ValueError(f"this config takes the argument 'smoke' or none, not {arg!r}")
  smoke = arg == "smoke"
  max_tokens = 64 if smoke else 1024
  return ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=3 if smoke else 26,
      policy="experiments/policies/countdown",  # Hugging Face folder
      tensor_parallel=1,  # devices per slice; the other devices are slices
      # Speculative decoding: a folder of `train_drafter`, "eagle2" or "eagle3" for a
      # new drafter, "" for none; and which strategy runs up to how many live requests
      # per slice, see `strategy.parse`. Of several, ("off", "3_1_4"), the rule picks:
      # "predictive" or "epsilon_greedy", see `adaptive`.
      drafter="" if smoke else "experiments/drafters/countdown",
      strategies="up to 2 live: off or 3_1_4; up to 8 live: off or 2_1_3",
      strategy_rule="predictive",
      verification="coupled",  # no token changes; or "rejection"
      # Idle slices train the drafter in every n-th rollout; 0: it stays as it is.
      spot=dict(
        every=1,
        length=128,  # tokens of a row of training data, which is a micro-batch
        context=32,  # of them that a piece of a longer sequence repeats, untrained
        rows=128,  # per slice
        carried=64,  # of them that stay for the next rollout
        shadow=0,  # of them that are held out, to judge whether what was trained drafts
        slots=8,  # of the widest bucket whose programs train (0: all do)
        chunk=128,  # tokens of a chunk in which a slice trains, at most
        least=6,  # micro-batches that it should have time for
        share=0.0,  # of a rollout's time that a single slice, never idle, trains after it
        cold_s=0.0,  # seconds that all slices train after the first rollouts, for a
        cold_rollouts=1,  # new drafter, and after how many of them
        per_update=1,  # micro-batches, at least, of which an update is made
        loss=dict(steps=3, decay=0.8, distance="total_variation", regression=0.1),
        optimizer=dict(
          name="adamw",
          learning_rate=3e-4,
          total=1000,  # updates until it is `floor` of it; 1.0: it stays
          floor=1.0,
          b2=0.99,
          weight_decay=0.0,
        ),
      ),
      # "source" is a dotted name, called with the other entries
      prompts=dict(
        source="tlt_jax.tasks.countdown.Problems",
        split="train",
        size=10**9,
        four_share=0.125,
        seed=0,
      ),
      held_out=dict(
        source="tlt_jax.tasks.countdown.Problems",
        split="held_out",
        size=4 if smoke else 64,
        four_share=0.125,
        seed=0,
      ),
      chat=dict(apply=False, system=""),  # wrap prompts in the chat template
      reward="tlt_jax.tasks.countdown.score",
      batch=dict(prompts=4 if smoke else 32, responses=2 if smoke else 8),
      sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=max_tokens),
      rollout=dict(
        max_prompt=32,
        slots=64,  # per slice
        # (slots, tokens) of compiled programs; the largest is added
        buckets=((64, 256), (64, 512), (32, 512), (32, 1056), (16, 1056), (8, 1056)),
        chunk=32,
        prompt_rows=8,
        prefill_rows=8,
        prefill_block=32,
        rebalance=False,  # move live requests to slices that have fewer
        budget=dict(programs=48, compile_s=180.0),
      ),
      algorithm=dict(
        # Credit for each token, with ten times the signal of one number per response.
        name="grpo_gae",
        trace_decay=0.97,
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.0,
        aggregation="token",
      ),
      optimizer=dict(
        name="adamw",
        learning_rate=3e-4,
        warmup=2,
        total=30,  # updates
        weight_decay=0.0,
        max_grad_norm=1.0,
      ),
      learner=dict(
        # What is trained: the later half; "" for everything.
        only="head|norm|layer_[4-7]",
        updates=1,  # optimizer updates per step, each on its share of the prompts
        # (rows, length) of a micro-batch, by increasing length
        buckets=((8, 128),) if smoke else ((16, 256), (4, 512), (4, 1056)),
        remat=False,
      ),
      evaluation=dict(every=13, samples=2),  # held-out prompts; also first and last
      checkpoint=dict(every=5, keep=2),
    )
  )
