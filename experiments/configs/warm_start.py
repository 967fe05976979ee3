"""Warm start of the default policy: supervised on written-out Countdown searches.

    python -m experiments.warm_start --workdir=runs/warm_start

1.5M parameters (8 layers x 128). About 20 minutes on 2 CPU cores; resumable. It solves
63.3% +- 3.0 of held-out problems then. The exported folder is what
`experiments/configs/countdown.py` starts from. `:smoke` takes a minute and learns
nothing.
"""

import ml_collections

from experiments.configs import countdown


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "smoke"):
    raise ValueError(f"this config takes the argument 'smoke' or none, not {arg!r}")
  smoke = arg == "smoke"
  max_response = 256 if smoke else countdown.MAX_TOKENS  # characters of a written search
  longest = countdown.MAX_PROMPT + max_response
  return ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=4 if smoke else 300,
      sequences=16 if smoke else 128,  # per step
      max_response=max_response,
      checkpoint=dict(every=2 if smoke else 25, keep=2),
      export="",  # folder of the exported policy; empty: WORKDIR/policy
      problems=dict(four_share=0.125, seed=0),
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
      ),
      # Stopped in mid-schedule, at 63%: RL should have something left to do.
      optimizer=dict(name="muon", learning_rate=4e-3, warmup=20, total=600),
      learner=dict(
        buckets=((8, longest),) if smoke else ((16, 256), (4, 512), (4, longest)),
        remat=False,
      ),
    )
  )
