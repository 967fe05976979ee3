"""GRPO: advantages relative to the other responses of the same prompt.

Shao et al. 2024 (https://arxiv.org/abs/2402.03300), equation 3, with the k3 estimator of
the KL of equation 4 and the advantages of section 4.1.2 (outcome supervision).

Departures from the paper, as the defaults are:
- The clip range is wider above than below, and the loss is a mean over the tokens of all
  responses, as in DAPO (https://arxiv.org/abs/2503.14476). `aggregation="sequence"` is
  GRPO's own mean over responses of each one's mean over tokens.
- No KL to a reference (`kl_coef=0`), as in DAPO.
- Log-probabilities of the sampling policy are computed by the learner, not by the sampler,
  so that both sides of the ratio have the same rounding.
- 1e-6 is added to the deviation that advantages are divided by. Without the division
  (`normalize_std=False`) they are those of Dr. GRPO (https://arxiv.org/abs/2503.20783).
"""

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import losses


def make(
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.28,
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: losses.KlEstimator = "k3",
  aggregation: losses.Aggregation = "token",
  normalize_std: bool = True,
  dual_clip: ranges.NotNegative = 0.0,
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes GRPO.

  Args:
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens;
      constant: responses' sums, over a constant
    normalize_std: whether a prompt's advantages are divided by their standard deviation
    dual_clip: how often a bad token's advantage counts at most (above 1); 0: no limit
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  Metrics:
    policy/kl: KL to the reference, or to the sampling policy if there is none
    policy/clip_frac: share of tokens whose gradient the clip removed
    policy/importance_weight: mean weight, with `importance_cap`
    policy/masked_share: share of tokens that `importance_mask` leaves out
    All are means over the tokens of prompts whose rewards differ, unless there is a
    reference.
  """
  ranges.check(make, locals())
  correction = losses.Correction(importance_cap, importance_mask)

  def advantages(responses: algorithm.Responses) -> jax.Array:
    return advantage.group_relative(responses.reward, normalize_std)

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    ratio = jnp.exp(losses.log_ratio(tokens))
    gain, clipped = losses.clip(ratio, tokens.advantage, clip_low, clip_high, dual_clip)
    return losses.policy_loss(
      tokens,
      gain,
      clipped,
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
