"""Dr. GRPO: GRPO without the two terms that favour some responses over others.

Liu et al. 2025 (https://arxiv.org/abs/2503.20783): advantages are not divided by the
deviation of the prompt's rewards, which would favour prompts that are very easy or very
hard, and sums over the tokens of a response are divided by a constant instead of the
response's length, which would favour long wrong responses.

Departures from the paper: the constant is the limit of a response's length, so that the
loss does not depend on the number of responses either. A KL to a reference may be added to
the loss (`kl_coef`).
"""

from tlt_jax import ranges
from tlt_jax.rl import algorithm
from tlt_jax.rl import grpo
from tlt_jax.rl import losses


def make(
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.2,
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: losses.KlEstimator = "k3",
  dual_clip: ranges.NotNegative = 0.0,
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes Dr. GRPO.

  Args:
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    dual_clip: how often a bad token's advantage counts at most (above 1); 0: no limit
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  """
  return grpo.make(**locals(), aggregation="constant", normalize_std=False)
