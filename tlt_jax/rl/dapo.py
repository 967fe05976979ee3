"""DAPO: GRPO with a wider clip above, a mean over tokens, and a filter of prompts.

Yu et al. 2025 (https://arxiv.org/abs/2503.14476): the loss of equation 8 with advantages of
equation 9, clipped wider above 1 than below; only prompts of which some responses are
solved and some are not (equation 11); a soft punishment of responses that come near their
limit (equation 13).

Departures from the paper:
- Prompts that equation 11 excludes are left out of the update (`keeps`). They are replaced
  only if `batch.most_prompts` says so; `dynamic_sampling` lists the differences.
- The buffer of equation 13 is a share of the limit. The default is the paper's: 4,096 of
  20,480 tokens. It is 0 where the reward punishes already (`tasks.form.overlong`).
- 1e-6 is added to the deviation that advantages are divided by.
"""

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import grpo


def make(
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.28,
  overlong_share: ranges.ShareBelowOne = 0.2,
  dual_clip: ranges.NotNegative = 0.0,
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes DAPO.

  Args:
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    overlong_share: last share of a response's limit in which a punishment grows from 0 to
      1; 0: none
    dual_clip: how often a bad token's advantage counts at most (above 1); 0: no limit
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  """
  ranges.check(make, locals())
  made = grpo.make(
    clip_low,
    clip_high,
    dual_clip=dual_clip,
    entropy_coef=entropy_coef,
    importance_cap=importance_cap,
    importance_mask=importance_mask,
  )

  def advantages(responses: algorithm.Responses) -> jax.Array:
    reward = jnp.asarray(responses.reward)
    if overlong_share:
      reward = reward - overlong(responses.length, responses.max_tokens, overlong_share)
    return advantage.group_relative(reward, normalize_std=True)

  def keeps(responses: algorithm.Responses) -> jax.Array:
    return jnp.any(responses.solved, 1) & ~jnp.all(responses.solved, 1)

  return made._replace(advantages=advantages, keeps=keeps)


def overlong(length: jax.Array, max_tokens: jax.Array, share: float) -> jax.Array:
  """The punishment of equation 13, negated: 0 up to the buffer, 1 at the limit."""
  buffer = share * max_tokens
  return jnp.clip((length - (max_tokens - buffer)) / buffer, 0, 1)
