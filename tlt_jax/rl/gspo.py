"""GSPO: ratios and clipping of whole responses instead of tokens.

Zheng et al. 2025 (https://arxiv.org/abs/2507.18071): the objective of equation 5, with
advantages relative to the prompt's responses (equation 6) and the ratio of a response, the
geometric mean of its tokens' ratios (equation 7). `credit="token"` is the paper's
GSPO-token: each token has the response's ratio as its value and its own gradient, so that
advantages may differ from token to token; where they do not, both are the same.

Departures from the paper: 1e-6 is added to the deviation that advantages are divided by,
and a KL to a reference may be added to the loss (`kl_coef`).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import losses


def make(
  credit: Literal["sequence", "token"] = "sequence",
  clip_low: ranges.Share = 3e-4,
  clip_high: ranges.NotNegative = 4e-4,
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: losses.KlEstimator = "k3",
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes GSPO or GSPO-token.

  Args:
    credit: what gets the gradient: whole responses, or each of their tokens
    clip_low: how far below 1 the ratio of a response counts before it is clipped
    clip_high: how far above 1 the ratio of a response counts before it is clipped
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      are left out, from the gradient of a whole response as their share; 0: none
  """
  ranges.check(make, locals())
  correction = losses.Correction(importance_cap, importance_mask)

  def advantages(responses: algorithm.Responses) -> jax.Array:
    return advantage.group_relative(responses.reward, normalize_std=True)

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    of_token = losses.log_ratio(tokens)
    log_ratio = losses.sequence_mean(of_token, tokens)
    if credit == "token":  # the response's value, the token's gradient
      stop = jax.lax.stop_gradient
      log_ratio = stop(log_ratio) + of_token - stop(of_token)
    gain, clipped = losses.clip(jnp.exp(log_ratio), tokens.advantage, clip_low, clip_high)
    return losses.policy_loss(
      tokens,
      gain,
      clipped,
      aggregation="sequence",
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
