"""The parts of policy losses that algorithms share, as pure functions of `Tokens`.

A *surrogate* says, token by token, what is to be maximised: a ratio of probabilities
times an advantage, clipped in some way. `make` turns one into a loss: it aggregates over
tokens, and adds what any method may have beside it (KL, entropy, a correction of the
sampler).
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax.rl import algorithm

# Estimators of KL(policy || other) from a sampled token, by d = log other - log
# policy (Schulman 2020, http://joschu.net/blog/kl-approx.html). k1 and k3 are
# unbiased, k2 is biased and has the gradient of a squared log-ratio.
KL = {
  "k1": lambda d: -d,
  "k2": lambda d: d**2 / 2,
  "k3": lambda d: jnp.expm1(d) - d,
}
KlEstimator = Literal[tuple(KL)]
Aggregation = Literal["token", "sequence", "constant"]

Surrogate = Callable[[algorithm.Tokens], tuple[jax.Array, jax.Array]]


def make(
  surrogate: Surrogate,
  *,
  aggregation: Aggregation = "token",
  kl_coef: float = 0.0,
  kl_estimator: KlEstimator = "k3",
  entropy_coef: float = 0.0,
  importance_cap: float = 0.0,
) -> Callable[[algorithm.Tokens], tuple[jax.Array, dict[str, jax.Array]]]:
  """Makes a loss: the negated surrogate, a KL to the reference, an entropy bonus.

  Args:
    surrogate: Tokens -> f32[rows T] to be maximised, and bool[rows T], where a clip acts
    aggregation: how tokens are weighted, see `weight`
    kl_coef: weight of KL(policy || reference)
    kl_estimator: estimator of that KL
    entropy_coef: weight of the entropy, which is maximised
    importance_cap: of `sampler_correction`; 0: there is none
  """

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    weights = weight(tokens, aggregation)
    gain, clipped = surrogate(tokens)
    other = tokens.reference_logp if kl_coef else tokens.old_logp
    kl = KL[kl_estimator](jnp.where(tokens.mask, other - tokens.logp, 0.0))
    per_token = tokens.mask / tokens.packed_tokens
    metrics = {
      "policy/kl": jnp.sum(kl * per_token),
      "policy/clip_frac": jnp.sum(clipped * per_token),
    }
    if importance_cap:
      correction = sampler_correction(tokens, importance_cap)
      gain = correction * gain
      metrics["policy/importance_weight"] = jnp.sum(correction * per_token)
    share = -jnp.sum(jnp.where(tokens.mask, gain, 0.0) * weights)
    if kl_coef:
      share += kl_coef * jnp.sum(kl * weights)
    if entropy_coef:
      entropy = jnp.where(tokens.mask, tokens.entropy, 0.0)
      share -= entropy_coef * jnp.sum(entropy * weights)
    return share, metrics

  return loss


def make_algorithm(
  advantages: Callable[[algorithm.Responses], jax.Array],
  surrogate: Surrogate,
  *,
  kl_coef: float,
  entropy_coef: float,
  **others,
) -> algorithm.Algorithm:
  """Makes an algorithm whose KL and entropy, if any, are in the loss.

  Where there are none, responses of advantage 0 have no gradient.

  Args:
    advantages: see `algorithm.Algorithm`
    surrogate, kl_coef, entropy_coef, others: as of `make`
  """
  return algorithm.Algorithm(
    advantages,
    make(surrogate, kl_coef=kl_coef, entropy_coef=entropy_coef, **others),
    uses_reference=bool(kl_coef),
    skips_zero_advantage=not (kl_coef or entropy_coef),
  )


def weight(tokens: algorithm.Tokens, aggregation: Aggregation) -> jax.Array:
  """The weight of each token in the loss, f32[rows T].

  token: a mean over all response tokens (DAPO, https://arxiv.org/abs/2503.14476, eq. 8);
  sequence: a mean over responses of each one's mean (GRPO,
  https://arxiv.org/abs/2402.03300, eq. 3); constant: sums over responses, divided by what
  does not depend on them, the tokens that they might have had (Dr. GRPO,
  https://arxiv.org/abs/2503.20783).
  """
  if aggregation == "token":
    return tokens.mask / tokens.total_tokens
  if aggregation == "constant":
    return tokens.mask / tokens.total_max_tokens
  # Padding counts as sequence 0, which may be without a response token.
  return tokens.mask / (jnp.maximum(tokens.length, 1) * tokens.total_sequences)


def log_ratio(tokens: algorithm.Tokens) -> jax.Array:
  """log policy - log sampling policy, zero where no response token is: f32[rows T]."""
  return jnp.where(tokens.mask, tokens.logp - tokens.old_logp, 0.0)


def clipped(
  ratio: jax.Array,
  advantage: jax.Array,
  low: float,
  high: float,
  dual_clip: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, equation 7).

  Args:
    ratio, advantage: f32[rows T]
    low, high: how far from 1 the ratio counts, below and above
    dual_clip: how often the advantage of a bad token counts, at most (Ye et al. 2020,
      https://arxiv.org/abs/1912.09729, equation 5); 0: no such limit
  Returns:
    f32[rows T] to be maximised, and bool[rows T], where a clip removed the gradient
  """
  plain = ratio * advantage
  gain = jnp.minimum(plain, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
  removed = gain < plain
  if dual_clip:
    least = dual_clip * advantage
    too_bad = (advantage < 0) & (gain < least)
    gain, removed = jnp.where(too_bad, least, gain), removed | too_bad
  return gain, removed


def clipped_ratio(low: float, high: float, dual_clip: float = 0.0) -> Surrogate:
  """Makes the surrogate of PPO and GRPO: `clipped` of each token's own ratio."""

  def surrogate(tokens: algorithm.Tokens) -> tuple[jax.Array, jax.Array]:
    ratio = jnp.exp(log_ratio(tokens))
    return clipped(ratio, tokens.advantage, low, high, dual_clip)

  return surrogate


def sampler_correction(tokens: algorithm.Tokens, cap: float) -> jax.Array:
  """Truncated importance weights between the learner and the rollout: f32[rows T].

  The two compute the same policy in programs of different shapes, and perhaps of
  different precision. min(learner / rollout, cap) of each token corrects for the
  difference; it has no gradient (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl;
  truncation: Ionides 2008, https://doi.org/10.1198/106186008X320456).
  """
  difference = jnp.where(tokens.mask, tokens.old_logp - tokens.sampler_logp, 0.0)
  return jax.lax.stop_gradient(jnp.minimum(jnp.exp(difference), cap))


def sequence_mean(x: jax.Array, tokens: algorithm.Tokens) -> jax.Array:
  """The mean of x over the response tokens of each token's own sequence: f32[rows T].

  Worked row: x 1 2 3 4 5, sequences 7 7 9 9 9, no prompt: 1.5 1.5 4 4 4.

  Args:
    x: f32[rows T]
    tokens: a sequence lies in one row, in one piece
  """
  T = x.shape[1]
  starts = jnp.diff(tokens.sequence_idx, axis=1) != 0
  piece = jnp.pad(jnp.cumsum(starts, 1), ((0, 0), (1, 0)))
  sums = lambda x, piece: jax.ops.segment_sum(x, piece, T)
  by_piece = jax.vmap(sums)(jnp.where(tokens.mask, x, 0.0), piece)
  return jnp.take_along_axis(by_piece, piece, 1) / jnp.maximum(tokens.length, 1)
