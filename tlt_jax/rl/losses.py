"""The parts of policy losses that algorithms share, as pure functions of `Tokens`.

An algorithm gives each token's gain, f32[rows T], to be maximised: a ratio times an
advantage, clipped. `policy_loss` aggregates it, and adds what any method may have.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax import axes
from tlt_jax.models import moe
from tlt_jax.rl import algorithm

KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]


@dataclasses.dataclass(frozen=True)
class Correction:
  """What a token's gain counts, by its ratio learner / rollout before the first update.

  Both may have computed the same policy, in programs of different shapes and perhaps of
  different precision; or an earlier policy drew the token, in a response that was carried
  over from an earlier step. Neither field needs the other. With a cap of at least `bound`
  it is IcePop, but for bounds that are each other's inverse.

  Raises:
    ValueError: `bound` is between 0 and 1, so that no ratio would be within
  """

  cap: float  # of the weights, see `sampler_correction`; 0: no weights
  bound: float  # of the ratios that count, see `left_out`; 0: all do

  def __post_init__(self):
    if 0 < self.bound < 1:
      raise ValueError(
        f"importance_mask must be 0, so that all tokens count, or at least 1, got "
        f"{self.bound}: ratios from 1 / importance_mask to importance_mask count"
      )


def policy_loss(
  tokens: algorithm.Tokens,
  gain: jax.Array,
  clipped: jax.Array,
  *,
  aggregation: Aggregation,
  entropy_coef: float,
  correction: Correction,
  kl_coef: float = 0.0,
  kl_estimator: KlEstimator = "k3",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The negated gain, plus a KL to the reference, less an entropy bonus; and metrics.

  `gain` f32[rows T] is to be maximised, `clipped` bool[rows T] counts in metrics. For the
  rest see `weight`, `Correction`, `kl`; without `kl_coef` the metric is the KL to the
  sampler. Tokens whose gain is left out still count in KL, entropy and all totals.
  """
  weights = weight(tokens, aggregation)
  other = tokens.reference_logp if kl_coef else tokens.old_logp
  divergence = kl(jnp.where(tokens.mask, other - tokens.logp, 0.0), kl_estimator)
  per_token = tokens.mask / tokens.packed_tokens
  metrics = {
    "policy/kl": jnp.sum(divergence * per_token),
    "policy/clip_frac": jnp.sum(clipped * per_token),
  }
  if correction.cap:
    trust = sampler_correction(tokens, correction.cap)
    gain = trust * gain
    metrics["policy/importance_weight"] = jnp.sum(trust * per_token)
  if correction.bound:
    without = left_out(tokens, correction.bound)
    gain = jnp.where(without, 0.0, gain)
    metrics["policy/masked_share"] = jnp.sum(without * per_token)
  share = -jnp.sum(jnp.where(tokens.mask, gain, 0.0) * weights)
  if kl_coef:
    share += kl_coef * jnp.sum(divergence * weights)
  if entropy_coef:
    entropy = jnp.where(tokens.mask, tokens.entropy, 0.0)
    share -= entropy_coef * jnp.sum(entropy * weights)
  return share, metrics


def kl(difference: jax.Array, estimator: KlEstimator) -> jax.Array:
  """Estimates KL(policy || other) from sampled tokens' log other - log policy.

  k1 and k3 are unbiased, k2 is biased and has the gradient of a squared log-ratio
  (Schulman 2020, http://joschu.net/blog/kl-approx.html).
  """
  if estimator == "k1":
    return -difference
  if estimator == "k2":
    return difference**2 / 2
  return jnp.expm1(difference) - difference


def weight(tokens: algorithm.Tokens, aggregation: Aggregation) -> jax.Array:
  """The weight of each token in the loss, f32[rows T].

  token: a mean over all response tokens (DAPO, https://arxiv.org/abs/2503.14476, eq. 8);
  sequence: a mean over responses of each one's mean (GRPO,
  https://arxiv.org/abs/2402.03300, eq. 3); constant: sums over responses, divided by their
  limits (Dr. GRPO, https://arxiv.org/abs/2503.20783).
  """
  if aggregation == "token":
    return tokens.mask / tokens.total_tokens
  if aggregation == "constant":
    return tokens.mask / tokens.total_max_tokens
  # Padding counts as sequence 0, which may be without a response token.
  return tokens.mask / (jnp.maximum(tokens.length, 1) * tokens.total_sequences)


def log_ratio(tokens: algorithm.Tokens) -> jax.Array:
  """log policy - log sampling policy, zero outside of responses: f32[rows T]."""
  return jnp.where(tokens.mask, tokens.logp - tokens.old_logp, 0.0)


def clip(
  ratio: jax.Array, advantage: jax.Array, low: float, high: float, dual_clip: float = 0.0
) -> tuple[jax.Array, jax.Array]:
  """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, equation 7).

  Returns f32[rows T] to be maximised, and bool[rows T], where a clip removed the gradient.
  The ratio counts down to 1 - low and up to 1 + high; a bad token's advantage counts at
  most `dual_clip` times (Ye et al. 2020, https://arxiv.org/abs/1912.09729, equation 5).
  """
  plain = ratio * advantage
  gain = jnp.minimum(plain, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
  removed = gain < plain
  if dual_clip:
    least = dual_clip * advantage
    too_bad = (advantage < 0) & (gain < least)
    gain, removed = jnp.where(too_bad, least, gain), removed | too_bad
  return gain, removed


def sampler_correction(tokens: algorithm.Tokens, cap: float) -> jax.Array:
  """Truncated importance weights between the learner and the rollout: f32[rows T].

  min(learner / rollout, cap) of each token corrects for what made the two differ (see
  `Correction`); it has no gradient (Yao et al. 2025,
  https://fengyao.notion.site/off-policy-rl; truncation: Ionides 2008,
  https://doi.org/10.1198/106186008X320456).
  """
  ratio = jnp.exp(_log_learner_by_rollout(tokens))
  return jax.lax.stop_gradient(jnp.minimum(ratio, cap))


def left_out(tokens: algorithm.Tokens, bound: float) -> jax.Array:
  """Whether learner / rollout is above `bound` or below 1 / `bound`: bool[rows T].

  Such tokens are too far from what the learner would draw to be corrected by a weight
  (IcePop: Ling team 2025, https://arxiv.org/abs/2510.18855, with two bounds).
  """
  return jnp.abs(_log_learner_by_rollout(tokens)) > math.log(bound)


def _log_learner_by_rollout(tokens: algorithm.Tokens) -> jax.Array:
  return jnp.where(tokens.mask, tokens.old_logp - tokens.sampler_logp, 0.0)


def sequence_mean(x: jax.Array, tokens: algorithm.Tokens) -> jax.Array:
  """The mean of x over the response tokens of each token's sequence: f32[rows T].

  Worked row: x 1 2 3 4 5, sequences 7 7 9 9 9, no prompt: 1.5 1.5 4 4 4. A sequence must be
  contiguous within one row.
  """
  T = x.shape[1]
  starts = jnp.diff(tokens.sequence_idx, axis=1) != 0
  segment = jnp.pad(jnp.cumsum(starts, 1), ((0, 0), (1, 0)))

  def row_sums(x, segment):
    return jax.ops.segment_sum(x, segment, T)

  sums = jax.vmap(row_sums)(jnp.where(tokens.mask, x, 0.0), segment)
  return jnp.take_along_axis(sums, segment, 1) / jnp.maximum(tokens.length, 1)


def balance(load: moe.Load, total_tokens: jax.Array) -> jax.Array:
  """This slice's share in how uneven the load of experts is; 1: even.

  E * sum_e f_e P_e of each micro-batch, as a mean over their tokens, `total_tokens` in all:
  f is each expert's share of the choices and P its mean probability, over all layers and
  tokens (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equation 4). The loss that
  transformers adds for `router_aux_loss_coef` is k times it.

  Args:
    load: by layer, f32[L E] each, of this slice's tokens
    total_tokens: f32[] of all micro-batches and slices
  """
  L, E = load.chosen.shape
  chosen = jax.lax.psum(jnp.sum(load.chosen, 0), axes.DATA)
  shares = chosen / jnp.maximum(jnp.sum(chosen), 1.0)
  return E * jnp.sum(shares * jnp.sum(load.probability, 0)) / (L * total_tokens)
