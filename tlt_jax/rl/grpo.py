"""GRPO: advantages relative to the other responses of the same prompt.

Shao et al. 2024 (https://arxiv.org/abs/2402.03300), equation 3, with the k3 estimator of
the KL of equation 4 and the advantages of section 4.1.2 (outcome supervision).

Departures from the paper, as the defaults are:
- The clip range is wider above than below, and the loss is a mean over the tokens of all
  responses, as in DAPO (https://arxiv.org/abs/2503.14476). `aggregation="sequence"` is
  GRPO's own mean over responses of each one's mean over tokens.
- No KL to a reference (`kl_coef=0`), as in DAPO.
- Log-probabilities of the policy that sampled are computed by the learner, not by the
  sampler, so that both sides of the ratio are rounded alike.
- 1e-6 is added to the deviation that advantages are divided by. Without the division
  (`normalize_std=False`) they are those of Dr. GRPO (https://arxiv.org/abs/2503.20783).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import algorithm

# Estimators of KL(policy || other) from a sampled token, by d = log other - log
# policy (Schulman 2020, http://joschu.net/blog/kl-approx.html). k1 and k3 are
# unbiased, k2 is biased and has the gradient of a squared log-ratio.
_KL = {
  "k1": lambda d: -d,
  "k2": lambda d: d**2 / 2,
  "k3": lambda d: jnp.expm1(d) - d,
}
KlEstimator = Literal[tuple(_KL)]
Aggregation = Literal["token", "sequence"]


def make(
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.28,
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: KlEstimator = "k3",
  aggregation: Aggregation = "token",
  normalize_std: bool = True,
) -> algorithm.Algorithm:
  """Makes GRPO.

  Args:
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens
    normalize_std: whether a prompt's advantages are divided by their standard deviation
  Metrics:
    policy/kl: KL to the reference, or to the sampling policy if there is none
    policy/clip_frac: share of tokens whose gradient the clip removed
    Both are means over the tokens of prompts whose rewards differ, unless there is a
    reference.
  Raises:
    ValueError: an argument out of its range
  """
  ranges.check(make, locals())

  def advantages(rewards: jax.Array, lengths: jax.Array) -> jax.Array:
    del lengths
    centred = rewards - jnp.mean(rewards, 1, keepdims=True)
    if not normalize_std:
      return centred
    return centred / (jnp.std(rewards, 1, keepdims=True) + 1e-6)

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    per_token = tokens.mask / tokens.packed_tokens
    weight = _weight(tokens, aggregation)
    ratio = jnp.exp(jnp.where(tokens.mask, tokens.logp - tokens.old_logp, 0.0))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    gain = jnp.minimum(ratio * tokens.advantage, clipped * tokens.advantage)
    other = tokens.reference_logp if kl_coef else tokens.old_logp
    kl = _KL[kl_estimator](jnp.where(tokens.mask, other - tokens.logp, 0.0))
    share = -jnp.sum(gain * weight)
    if kl_coef:
      share += kl_coef * jnp.sum(kl * weight)
    metrics = {
      "policy/kl": jnp.sum(kl * per_token),
      "policy/clip_frac": jnp.sum((gain < ratio * tokens.advantage) * per_token),
    }
    return share, metrics

  return algorithm.Algorithm(
    advantages,
    loss,
    uses_reference=bool(kl_coef),
    skips_zero_advantage=not kl_coef,
  )


def _weight(tokens: algorithm.Tokens, aggregation: str) -> jax.Array:
  """The weight of each token in the loss, f32[rows T]; over the whole batch it is 1."""
  if aggregation == "token":
    return tokens.mask / tokens.total_tokens
  # Padding counts as sequence 0, which may be without a response token.
  return tokens.mask / (jnp.maximum(tokens.length, 1) * tokens.total_sequences)
