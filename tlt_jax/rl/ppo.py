"""PPO: advantages from a critic, which is trained alongside the policy.

Schulman et al. 2017 (https://arxiv.org/abs/1707.06347): the clipped surrogate of equation 7
with generalised advantage estimates (equations 11 and 12). The reward comes at the last
token; with a reference, every token also costs its KL (`kl_in="reward"`, as in Ouyang et
al. 2022, https://arxiv.org/abs/2203.02155, equation 2). The critic predicts the sum of
advantage and old value, by half the squared error; where its value has moved further than
`value_clip` from the old one, the larger error of the two counts, as in the authors'
implementation (https://github.com/openai/baselines, `ppo2`).

Departures from the paper: the critic shares neither parameters nor optimizer with the
policy (see `critic`). gamma and lambda are 1 by default, as the only reward
comes at the end of long responses. Advantages are whitened over the tokens of the batch.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import losses
from tlt_jax.rl import optimizer


def make(
  discount: ranges.Share = 1.0,
  trace_decay: ranges.Share = 1.0,
  normalize: bool = True,
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.2,
  value_clip: ranges.NotNegative = 0.2,
  critic_learning_rate: ranges.NotNegative = 3e-4,
  critic_warmup: ranges.StepsOrZero = 0,
  critic_max_grad_norm: ranges.Positive = 1.0,
  kl_coef: ranges.NotNegative = 0.0,
  kl_in: Literal["reward", "loss"] = "reward",
  kl_estimator: losses.KlEstimator = "k1",
  aggregation: losses.Aggregation = "token",
  dual_clip: ranges.NotNegative = 0.0,
  entropy_coef: ranges.NotNegative = 0.0,
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """Makes PPO.

  Args:
    discount: GAE's gamma, per token
    trace_decay: GAE's lambda
    normalize: whether advantages are whitened over the tokens of the batch
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    value_clip: how far a value may move from the old one before it is clipped; 0: any
    critic_learning_rate: peak learning rate of the critic's AdamW
    critic_warmup: updates over which that learning rate rises to its peak
    critic_max_grad_norm: largest global norm of the critic's gradient
    kl_coef: weight of KL(policy || reference); 0: no reference is kept
    kl_in: where that KL counts
    kl_estimator: estimator of the KL from sampled tokens
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens;
      constant: responses' sums, over a constant
    dual_clip: how often a bad token's advantage counts at most (above 1); 0: no limit
    entropy_coef: weight of the policy's entropy, which is maximised
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  Metrics:
    critic/clip_frac: share of tokens whose value was clipped
  """
  ranges.check(make, locals())
  correction = losses.Correction(importance_cap, importance_mask)
  kl_in_loss = kl_coef if kl_in == "loss" else 0.0

  def estimates(responses: algorithm.Responses) -> jax.Array:
    reward = advantage.token_rewards(responses, responses.value.shape[-1])
    if kl_coef and not kl_in_loss:
      reward -= kl_coef * advantage.kl_to_reference(responses, kl_estimator)
    return advantage.gae(reward, responses.value, responses.length, discount, trace_decay)

  def advantages(responses: algorithm.Responses) -> jax.Array:
    result = estimates(responses)
    if not normalize:
      return result
    mask = advantage.is_token(responses.length, result.shape[-1])
    return advantage.whitened(result, mask)

  def returns(responses: algorithm.Responses) -> jax.Array:
    return estimates(responses) + responses.value

  def value_loss(values: algorithm.Values) -> tuple[jax.Array, dict[str, jax.Array]]:
    weight = values.mask / values.total_tokens
    value, old, target = (
      jnp.where(values.mask, x, 0.0)
      for x in (values.value, values.old_value, values.return_)
    )
    error = (value - target) ** 2
    removed = jnp.zeros_like(values.mask)
    if value_clip:
      near = old + jnp.clip(value - old, -value_clip, value_clip)
      clipped = (near - target) ** 2
      error, removed = jnp.maximum(error, clipped), clipped > error
    return jnp.sum(error * weight) / 2, {"critic/clip_frac": jnp.sum(removed * weight)}

  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    ratio = jnp.exp(losses.log_ratio(tokens))
    gain, clipped = losses.clip(ratio, tokens.advantage, clip_low, clip_high, dual_clip)
    return losses.policy_loss(
      tokens,
      gain,
      clipped,
      aggregation=aggregation,
      kl_coef=kl_in_loss,
      kl_estimator=kl_estimator,
      entropy_coef=entropy_coef,
      correction=correction,
    )

  rule = optimizer.make(
    "adamw", critic_learning_rate, warmup=critic_warmup, max_grad_norm=critic_max_grad_norm
  )
  return algorithm.Algorithm(
    advantages,
    loss,
    uses_reference=bool(kl_coef),
    skips_zero_advantage=not (kl_in_loss or entropy_coef),
    critic=algorithm.Critic(returns, value_loss, rule),
  )
