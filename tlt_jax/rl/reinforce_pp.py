"""REINFORCE++: PPO's loss without a critic, with advantages normalised over the batch.

Hu et al. 2025 (https://arxiv.org/abs/2501.03262). A token's advantage is the response's
reward, less the KL to a reference from that token on, and is then normalised by mean and
deviation over the tokens of the whole batch. With `baseline="group"` it is
REINFORCE++-baseline: rewards are less the mean of their prompt's, normalised over the
batch, and the KL is a term of the loss, by the k2 estimator.

Departures from the paper: no reference by default. The loss is a mean over tokens of all
responses; `aggregation="sequence"` is the mean over responses of each one's mean. 1e-6 is
added to the deviation.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import losses


def make(
  baseline: Literal["batch", "group"] = "batch",
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.2,
  kl_coef: ranges.NotNegative = 0.0,
  aggregation: losses.Aggregation = "token",
  dual_clip: ranges.NotNegative = 0.0,
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes REINFORCE++ or REINFORCE++-baseline.

  Args:
    baseline: whose mean reward is subtracted first: the batch's, or the prompt's
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    kl_coef: weight of the KL to the reference, in the reward, or in the loss where the
      baseline is the prompt's; 0: no reference is kept
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens;
      constant: responses' sums, over a constant
    dual_clip: how often a bad token's advantage counts at most (above 1); 0: no limit
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  """
  ranges.check(make, locals())
  correction = losses.Correction(importance_cap, importance_mask)
  kl_in_loss = kl_coef if baseline == "group" else 0.0

  def advantages(responses: algorithm.Responses) -> jax.Array:
    T = responses.logp.shape[-1]
    if baseline == "group":
      centred = advantage.group_relative(responses.reward, normalize_std=False)
      responses = responses.replace(reward=centred)
    reward = advantage.token_rewards(responses, T)
    if kl_coef and not kl_in_loss:
      reward = reward - kl_coef * advantage.kl_to_reference(responses, "k1")
    mask = advantage.is_token(responses.length, T)
    return advantage.whitened(advantage.discounted_sum(reward, 1.0), mask)

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    ratio = jnp.exp(losses.log_ratio(tokens))
    gain, clipped = losses.clip(ratio, tokens.advantage, clip_low, clip_high, dual_clip)
    return losses.policy_loss(
      tokens,
      gain,
      clipped,
      aggregation=aggregation,
      kl_coef=kl_in_loss,
      kl_estimator="k2",
      entropy_coef=entropy_coef,
      correction=correction,
    )

  return algorithm.Algorithm(
    advantages,
    loss,
    uses_reference=bool(kl_coef),
    skips_zero_advantage=not (kl_in_loss or entropy_coef),
  )
