"""The drafter of the default policy: EAGLE-2, from scratch, on its own responses.

    python -m experiments.train_drafter --workdir=runs/drafter

0.9M parameters (one layer of the policy's shape); about 40 minutes on 2 CPU cores. What
`experiments/drafters/countdown_9m` holds was made so, for the policy before it learned to
give up (`configs/warm_start.py`). Of another policy or task: `--run=CONFIG`
(see `train_drafter`), and buckets that hold its longest sequence.

`:small` is the drafter of `countdown.py:small`, 0.2M parameters; what
`experiments/drafters/countdown` holds was made by two runs, the second going on with
other responses. The first takes about half an hour; chains of 5 drafts give 3.55 tokens
per pass then:

    python -m experiments.train_drafter --config=experiments/configs/drafter.py:small \
        --run=experiments/configs/countdown.py:small --workdir=runs/small_drafter
    python -m experiments.train_drafter --config=experiments/configs/drafter.py:small \
        --run=experiments/configs/countdown.py:small --workdir=runs/small_drafter_2 \
        --config.init=runs/small_drafter/drafter --config.seed=1 \
        --config.loss.cross_entropy_updates=0 \
        --config.responses.prompts=512 --config.steps=900 \
        --config.optimizer.total=900 --config.optimizer.learning_rate=2e-3

`:smoke`, with `--run=experiments/configs/countdown.py:smoke`, takes a minute and learns
little.

`:smollm2` is the drafter of `configs/smollm2.py`, with a vocabulary of the 4,096 tokens
that are most frequent in the policy's responses:

    python -m experiments.train_drafter --config=experiments/configs/drafter.py:smollm2 \\
        --run=experiments/configs/smollm2.py --workdir=runs/smollm2_drafter
"""

import ml_collections

from experiments.configs import countdown


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "small", "smoke", "smollm2"):
    raise ValueError(
      f"this config takes the argument small, smoke, smollm2 or none, not {arg!r}"
    )
  smoke = arg == "smoke"
  longest = countdown.MAX_PROMPT + countdown.MAX_TOKENS
  config = ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=4 if smoke else 1000,
      sequences=16 if smoke else 8,  # per step: many small updates learn faster
      init="",  # a drafter's folder to start from; empty: from scratch
      # With temperatures=(0.0, 1.0) one drafter serves greedy decoding as well as sampling.
      responses=dict(
        prompts=8 if smoke else 192, samples=2 if smoke else 8, temperatures=()
      ),
      # `vocab_size`: it may predict only the most frequent tokens of the responses.
      drafter=dict(kind="eagle2"),
      # A new drafter begins with cross-entropy; of a good one 0 is better.
      loss=dict(steps=4, cross_entropy_updates=200),
      optimizer=dict(
        name="adamw", learning_rate=4e-3, warmup=20, total=1000, b2=0.99, weight_decay=0.0
      ),
      learner=dict(
        buckets=((8, 128),) if smoke else ((8, 128), (4, 256), (2, 512), (2, longest))
      ),
      evaluation=dict(
        prompts=4 if smoke else 32,
        samples=2,
        strategies=("3_1_4", "5_1_6", "7_1_8", "ngram_5"),
        temperatures=(),
      ),
      checkpoint=dict(every=2 if smoke else 100, keep=2),
    )
  )
  if arg == "small":
    config.update(
      steps=1200,
      responses=dict(prompts=256),
      loss=dict(steps=5),
      optimizer=dict(total=1200),
      learner=dict(buckets=((4, 256), (2, 512), (2, longest))),
    )
  if arg == "smollm2":
    config.update(
      steps=400,
      sequences=16,
      responses=dict(prompts=512, samples=2),
      drafter=dict(vocab_size=4096),
      loss=dict(steps=3, distance="cross_entropy"),
      optimizer=dict(learning_rate=1e-3, warmup=15, total=400, floor=0.05),
      learner=dict(buckets=((1, 512),)),
      evaluation=dict(samples=1, strategies=("3_1_4", "ngram_3")),
      checkpoint=dict(every=50),
    )
  return config
