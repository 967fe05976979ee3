"""Warm starts of the policies in the repo: supervised on written-out Countdown searches.

    python -m experiments.warm_start --workdir=runs/warm_start
    python -m experiments.warm_start --config=experiments/configs/warm_start.py:9m \
        --workdir=runs/warm_start_9m
    python -m experiments.warm_start --config=experiments/configs/warm_start.py:9m \
        --config.begin_as=runs/warm_start_9m/policy --config.give_up=0.5 --config.steps=20 \
        --config.optimizer.learning_rate=1e-3 --config.optimizer.warmup=5 \
        --config.optimizer.total=40 --workdir=runs/gives_up

The first is the small one, 1.5M parameters (8 layers x 128), which
`experiments/configs/countdown.py:small` starts from. About 20 minutes on 2 CPU cores;
resumable. It solves 63.3% +- 3.0 of held-out problems then.

`:9m` is that of the default run, 8.8M parameters (12 layers x 256): a pass costs what its
weights cost to read, as one of a real model does. It begins as the small one of the repo,
so that it need not learn everything anew (`experiments.growth`); the weights are exported
in bfloat16, 18 MB. After 50 steps, of 25 s on 2 CPU cores with nothing beside, it solves
66.4% +- 4.9 (250 problems x 2, the small one 59.6%).

The third command goes on from there with searches of which half give up at a dead end. It
solves 38.0% then (of the same problems), with short responses: RL has something to teach,
to go on, and the responses grow while it does. `experiments/policies/countdown_9m` was
made so; the drafter beside it was trained for the policy before.

`:smollm2` teaches a real LLM to search, SmolLM2-135M-Instruct (`configs/smollm2.py` says
where it comes from), of which the later half of the layers are trained. The second command
teaches it to give up, so that its responses end:

    python -m experiments.warm_start --config=experiments/configs/warm_start.py:smollm2 \
        --workdir=runs/smollm2_searches
    python -m experiments.warm_start --config=experiments/configs/warm_start.py:smollm2 \
        --config.steps=126 --config.optimizer.total=165 --config.give_up=0.5 \
        --config.problems.four_share=0.25 --workdir=runs/smollm2_searches \
        --fork=runs/smollm2_gives_up

They took 35 minutes on 2 CPU cores, at 105 to 145 tokens a second.

`:smoke` takes a minute and learns nothing.
"""

import ml_collections

from experiments.configs import countdown
from experiments.configs import smollm2


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke", "9m", "smollm2"):
    raise ValueError(
      f"this config takes the argument smoke, 9m, smollm2 or none, not {arg!r}"
    )
  smoke = arg == "smoke"
  max_response = 256 if smoke else countdown.MAX_TOKENS  # characters of a written search
  longest = countdown.MAX_PROMPT + max_response
  config = ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=4 if smoke else 300,
      sequences=16 if smoke else 128,  # per step
      max_response=max_response,
      give_up=0.0,
      checkpoint=dict(every=2 if smoke else 25, keep=2),
      export="",  # folder of the exported policy; empty: WORKDIR/policy
      export_dtype="float32",
      policy="",  # an LLM's folder, to begin with it instead of a new model
      begin_as="",  # see experiments.growth
      problems=dict(four_share=0.125),
      model=dict(
        architecture="Qwen3ForCausalLM",
        vocab_size=24,
        width=128,
        mlp_width=352,
        num_layers=2 if smoke else 8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        max_position=2048,
        qk_norm=True,
        norm_eps=1e-6,
      ),
      # Stopped in mid-schedule, at 63%: RL should have something left to do.
      optimizer=dict(name="muon", learning_rate=4e-3, warmup=20, total=600),
      learner=dict(
        only="",
        buckets=((8, longest),) if smoke else ((16, 256), (4, 512), (4, longest)),
      ),
    )
  )
  if arg == "9m":
    config.update(
      steps=50,
      export_dtype="bfloat16",
      checkpoint=dict(every=10),
      begin_as=countdown.SMALL_POLICY,
      model=dict(
        width=256,
        mlp_width=704,
        num_layers=12,
        num_heads=8,
        num_kv_heads=4,
        norm_eps=5e-7,  # half: of a mean over as many zeros more, at first
      ),
      optimizer=dict(learning_rate=2e-3, total=200),
      learner=dict(buckets=((16, 128), (8, 256), (4, 512), (2, longest))),
    )
  if arg == "smollm2":
    longest = countdown.MAX_PROMPT + 512
    config.update(
      policy=smollm2.POLICY,
      steps=100,
      sequences=16,
      max_response=512,
      checkpoint=dict(every=20),
      problems=dict(four_share=0.5),
      optimizer=dict(name="adamw", learning_rate=3e-4, warmup=10, total=100),
      learner=dict(only=smollm2.LATER_HALF, buckets=((8, 128), (4, 256), (2, longest))),
    )
  return config
