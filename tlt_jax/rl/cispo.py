"""CISPO: importance weights are clipped, not gradients.

MiniMax 2025, MiniMax-M1 (https://arxiv.org/abs/2506.13585), equations 4 and 5: REINFORCE
with the clipped ratio to the sampling policy as a weight that has no gradient, so that no
token is left out of the update; advantages relative to the prompt's responses; a mean over
the tokens of all responses.

Departures from the paper: 1e-6 is added to the deviation that advantages are divided by. As
in the paper's runs there is no lower bound of the ratio by default; the paper does not give
the upper bound.
"""

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import losses


def make(
  clip_low: ranges.Share = 1.0,
  clip_high: ranges.NotNegative = 1.0,
  aggregation: losses.Aggregation = "token",
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: losses.KlEstimator = "k3",
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes CISPO.

  Args:
    clip_low: how far below 1 the weight of a token may be; 1: any weight
    clip_high: how far above 1 the weight of a token may be
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens;
      constant: responses' sums, over a constant
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  Metrics:
    policy/clip_frac: share of tokens whose weight was clipped
  """
  ranges.check(make, locals())
  correction = losses.Correction(importance_cap, importance_mask)

  def advantages(responses: algorithm.Responses) -> jax.Array:
    return advantage.group_relative(responses.reward, normalize_std=True)

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    ratio = jnp.exp(losses.log_ratio(tokens))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return losses.policy_loss(
      tokens,
      gain=weight * tokens.advantage * tokens.logp,
      clipped=weight != ratio,
      aggregation=aggregation,
      kl_coef=kl_coef,
      kl_estimator=kl_estimator,
      entropy_coef=entropy_coef,
      correction=correction,
    )

  return algorithm.Algorithm(
    advantages,
    loss,
    uses_reference=bool(kl_coef),
    skips_zero_advantage=not (kl_coef or entropy_coef),
  )
