"""RLOO: REINFORCE with the mean of a prompt's other responses as baseline.

Ahmadian et al. 2024 (https://arxiv.org/abs/2402.14740): a whole response is one
action, with the gradient A * grad log p(response); its reward is less the KL to a
reference, log p - log reference summed over the response.

Departures from the paper: sums over the tokens of a response are divided by a constant,
its limit, so that the size of the loss does not depend on it. No reference by default. With
several updates per step, later ones take the gradient at their own policy, uncorrected, as
REINFORCE has neither ratio nor clip; one update is what the method is made for.
"""

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import losses


def make(
  kl_coef: ranges.NotNegative = 0.0,
  aggregation: losses.Aggregation = "constant",
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes RLOO.

  Args:
    kl_coef: weight of the KL to the reference in the reward; 0: no reference is kept
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens;
      constant: responses' sums, over a constant
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  """
  ranges.check(make, locals())
  correction = losses.Correction(importance_cap, importance_mask)

  def advantages(responses: algorithm.Responses) -> jax.Array:
    reward = jnp.asarray(responses.reward)
    if kl_coef:
      kl = advantage.kl_to_reference(responses, "k1")
      reward = reward - kl_coef * jnp.sum(kl, -1)
    others = jnp.sum(reward, 1, keepdims=True) - reward
    return reward - others / max(reward.shape[1] - 1, 1)

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    return losses.policy_loss(
      tokens,
      gain=tokens.logp * tokens.advantage,  # REINFORCE
      clipped=jnp.zeros_like(tokens.mask),
      aggregation=aggregation,
      entropy_coef=entropy_coef,
      correction=correction,
    )

  return algorithm.Algorithm(
    advantages, loss, uses_reference=bool(kl_coef), skips_zero_advantage=not entropy_coef
  )
