"""The default run: GRPO on Countdown, from the warm start in the repo.

    python -m experiments.train --workdir=runs/countdown

A character-level policy of 8.8M parameters that writes its search out, and few prompts a
step: its rollouts end in a tail of few long responses, which are drafted for, while the
slices that have none left train the drafter. There is none at the start: it learns from
random weights while the run goes.
It begins with searches of which half give up at a dead end (`configs/warm_start.py`); 30
steps, 5 to 10 minutes on 2 CPU cores once all is compiled, lift the accuracy on held-out
problems from 39% to 72%. Every fifth rollout is repeated plainly, and with the drafter of
the start, to tell what is gained. `--config.drafter=experiments/drafters/countdown_9m`
begins with a good one that was trained offline.

`:carried` does not wait for the longest responses: eight prompts are in flight, a step
trains on the oldest four that are complete, and the other responses go on in the next step
under its policy, over four policies at most. The loss corrects for it.

`:small` has a policy of 1.5M parameters, which is decoded nearly as fast plainly, and
many responses a step: 26 steps, about 12 minutes on 2 CPU cores, lift the accuracy on
held-out problems from 63.3% to 71.9% +- 2.4 (500 problems x 4 responses, three seeds).
`:smoke` drafts with a good drafter, which trains on; it finishes in a minute and a half on
a CPU, one of which compiles.

What the entries of a section mean is said where they are declared: behind "see".
"""

import pathlib

import ml_collections

_HERE = pathlib.Path(__file__).parents[1]
POLICY, SMALL_POLICY = (
  str(_HERE / "policies" / name) for name in ("countdown_9m", "countdown")
)
SMALL_DRAFTER = str(_HERE / "drafters" / "countdown")
MAX_PROMPT, MAX_TOKENS = 32, 1024  # of a prompt, and of a response
PROBLEMS = dict(
  source="tlt_jax.tasks.countdown.Problems",  # called with the other entries
  four_share=0.125,
)


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  if arg not in ("", "carried", "small", "smoke"):
    raise ValueError(
      f"this config takes the argument carried, small, smoke or none, not {arg!r}"
    )
  smoke = arg == "smoke"
  max_tokens = 64 if smoke else MAX_TOKENS
  longest = MAX_PROMPT + max_tokens
  config = ml_collections.ConfigDict(
    dict(
      seed=0,
      steps=30,
      policy=POLICY,  # Hugging Face folder
      tensor_parallel=1,  # devices per slice; the other devices are slices
      # A folder of `train_drafter`; a new "eagle2", "eagle3" or "block"; "": none.
      drafter="eagle2",
      # Ways to decode by live requests per slice, see spec_decode.speculation.levels.
      strategies="up to 4 live: off or 3_1_4; up to 16 live: off or 1_1_2",
      strategy_rule="predictive",
      # How the drafter trains: by the recipe, see spec_decode.spot.spot.Options.
      spot=dict(max_batch=8, updates_per_exchange=4),
      prompts=PROBLEMS | dict(split="train", size=10**9),
      held_out=PROBLEMS | dict(split="held_out", size=4 if smoke else 64),
      # What is done with longer prompts: refuse or drop; see prompt_checks.Unusable.
      unusable_prompts=dict(too_long="refuse"),
      chat=dict(system=""),  # see rl.sample.make
      reward="tlt_jax.tasks.countdown.score",
      solved_at=1.0,  # the least reward of a solved response, see rl.judge.Judge
      verifier=dict(processes=0 if smoke else 2),  # see rl.judge.Options
      batch=dict(prompts=4, responses=8),
      sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=max_tokens),
      # See spec_decode.rollout.Options.
      rollout=dict(
        max_prompt=MAX_PROMPT,
        slots=16,
        buckets=(16, 8, 4, 2),  # slots that programs are compiled for
        chunk=32,
      ),
      # Credit for each token, with ten times the signal of one number per response; see
      # rl.grpo_gae.make.
      algorithm=dict(
        name="grpo_gae",
        trace_decay=0.97,
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.0,
        aggregation="token",
      ),
      # See rl.optimizer.make.
      optimizer=dict(
        name="adamw",
        learning_rate=3e-4,
        warmup=2,
        total=30,
        weight_decay=0.0,
        max_grad_norm=1.0,
      ),
      # See rl.learner.make; of the policy the last quarter is trained.
      learner=dict(
        only="head|final_norm|layer_(9|1[01])",
        updates=1,
        buckets=((16, 128), (8, 256), (4, 512), (2, longest)),
      ),
      evaluation=dict(every=30, samples=2),  # held-out prompts; also first and last
      # Every n-th rollout once more plainly, and with the first drafter, to tell what
      # drafts and the drafter's training bring.
      compare=dict(every=5),
      checkpoint=dict(every=5, keep=2),
    )
  )
  if arg == "carried":
    config.rollout.update(
      slots=32, buckets=(32, 16, 8, 4, 2), carry=dict(prompts=8, versions=4)
    )
    config.algorithm.update(importance_cap=2.0, importance_mask=5.0)
  if arg in ("small", "smoke"):
    config.update(
      steps=26,
      policy=SMALL_POLICY,
      drafter=SMALL_DRAFTER,
      strategies="up to 2 live: off or 3_1_4; up to 8 live: off or 2_1_3",
      # A good drafter gets worse by small updates.
      spot=dict(micro_batches_per_update=8, loss=dict(cross_entropy_updates=0)),
      batch=dict(prompts=32, responses=8),
      rollout=dict(
        slots=64,
        buckets=(64, 32, 16, 8),
      ),
      learner=dict(
        only="head|norm|layer_[4-7]",  # the later half
        buckets=((16, 256), (4, 512), (4, longest)),
      ),
      evaluation=dict(every=13),
      compare=dict(every=0),
    )
  if smoke:
    config.update(
      steps=3,
      strategies="up to 4 live: 2_1_3",
      batch=dict(prompts=4, responses=2),
      rollout=dict(slots=4, buckets=(), chunk=8),
      learner=dict(buckets=((8, 128),)),
    )
  return config
