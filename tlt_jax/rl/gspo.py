"""GSPO: ratios and clipping of whole responses instead of tokens.

Zheng et al. 2025 (https://arxiv.org/abs/2507.18071): the objective of equation 5, with
advantages relative to the prompt's responses (equation 6) and the ratio of a response, the
geometric mean of its tokens' ratios (equation 7). `credit="token"` is the paper's
GSPO-token: each token has the response's ratio as its value and a gradient of its own, so
that advantages may differ from token to token; where they do not, both are the same.

Departures from the paper: 1e-6 is added to the deviation that advantages are divided by,
and a KL to a reference may be added to the loss (`kl_coef`).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import policy_loss


def make(
  credit: Literal["sequence", "token"] = "sequence",
  clip_low: ranges.Share = 3e-4,
  clip_high: ranges.NotNegative = 4e-4,
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: policy_loss.KlEstimator = "k3",
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes GSPO or GSPO-token.

  Args:
    credit: what has a gradient of its own: responses, or their tokens
    clip_low: how far below 1 the ratio of a response counts before it is clipped
    clip_high: how far above 1 the ratio of a response counts before it is clipped
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding; 0: none
  Raises:
    ValueError: an argument out of its range
  """
  ranges.check(make, locals())

  def advantages(responses: algorithm.Responses) -> jax.Array:
    return advantage.group_relative(responses.reward, normalize_std=True)

  def surrogate(tokens: algorithm.Tokens) -> tuple[jax.Array, jax.Array]:
    own = policy_loss.log_ratio(tokens)
    of_response = policy_loss.sequence_mean(own, tokens)
    if credit == "token":
      stop = jax.lax.stop_gradient
      of_response = stop(of_response) + own - stop(own)
    return policy_loss.clipped(jnp.exp(of_response), tokens.advantage, clip_low, clip_high)

  return policy_loss.make_algorithm(
    advantages,
    surrogate,
    aggregation="sequence",
    kl_coef=kl_coef,
    kl_estimator=kl_estimator,
    entropy_coef=entropy_coef,
    importance_cap=importance_cap,
  )
