"""GRPO with an advantage per token, by a baseline that depends on the position.

Advantages are generalised advantage estimates (Schulman et al. 2016,
https://arxiv.org/abs/1506.02438, equation 16). The value of a response that still runs
after t tokens is the mean reward of the prompt's other responses that did so as well,
shrunk towards that of the whole batch. A decision late in a response, such as to end its
search, is thus compared with continuing there, and tokens long before it get little of its
noise. The loss is GRPO's.

The combination is this project's. Departures from GAE's paper: that baseline instead of a
critic, and no discount (gamma = 1), as the only reward comes at the end. From GRPO:
advantages are of tokens, and not divided by a deviation.
"""

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import advantage
from tlt_jax.rl import algorithm
from tlt_jax.rl import grpo
from tlt_jax.rl import losses


def make(
  trace_decay: ranges.Share = 0.97,
  prior: ranges.Positive = 4.0,
  clip_low: ranges.Share = 0.2,
  clip_high: ranges.NotNegative = 0.28,
  kl_coef: ranges.NotNegative = 0.0,
  kl_estimator: losses.KlEstimator = "k3",
  aggregation: losses.Aggregation = "token",
  importance_cap: ranges.NotNegative = 0.0,
  importance_mask: ranges.NotNegative = 0.0,
) -> algorithm.Algorithm:
  """With lambda = 1 it is REINFORCE with that baseline, unbiased. With less, what happens
  at a token counts for those up to 1 / (1 - lambda) or so before it: as biased as the
  baseline is wrong, and less noisy.

  Args:
    trace_decay: GAE's lambda: 1 gives each token the whole outcome, less gives it mostly
      what follows soon
    prior: weight of the batch's mean reward in the baseline, in responses of the prompt
    clip_low: how far below 1 the ratio to the sampling policy counts before it is clipped
    clip_high: how far above 1 the ratio to the sampling policy counts before it is clipped
    kl_coef: weight of KL(policy || reference) in the loss; 0: no reference is kept
    kl_estimator: estimator of the KL from sampled tokens
    aggregation: what the loss is a mean of: tokens, or responses' means over their tokens
    importance_cap: largest weight that corrects for the rollout's rounding, and for tokens
      that an earlier policy drew; 0: none
    importance_mask: tokens whose ratio learner / rollout is above this or below 1 / this
      have no gradient from their advantage; 0: all have it
  """
  ranges.check(make, locals())
  made = grpo.make(
    clip_low,
    clip_high,
    kl_coef,
    kl_estimator,
    aggregation,
    importance_cap=importance_cap,
    importance_mask=importance_mask,
  )

  def advantages(responses: algorithm.Responses) -> jax.Array:
    # A power of two, so that few shapes are compiled.
    T = 1 << max(int(jnp.max(responses.length)) - 1, 0).bit_length()
    return _advantages(responses.reward, responses.length, trace_decay, prior, T)

  return made._replace(advantages=advantages)


def _advantages(rewards, lengths, trace_decay: float, prior: float, T: int) -> jax.Array:
  """The advantage of each token, zero where a prompt's rewards are equal: f32[P R T]."""
  lengths, reward = lengths[..., None], jnp.asarray(rewards, jnp.float32)[..., None]
  t = jnp.arange(T)
  runs = (lengths > t).astype(jnp.float32)
  # Over the prompt's, and the batch's, other responses of more than t tokens.
  count, total = _sum_of_others(runs, 1), _sum_of_others(runs * reward, 1)
  batch = _sum_of_others(runs * reward, (0, 1))
  batch = batch / jnp.maximum(_sum_of_others(runs, (0, 1)), 1)
  value = (total + prior * batch) / (count + prior)
  following = jnp.where(lengths > t + 1, jnp.roll(value, -1, -1), reward)
  sums = advantage.discounted_sum(runs * (following - value), trace_decay)
  differ = jnp.max(reward, 1, keepdims=True) > jnp.min(reward, 1, keepdims=True)
  return jnp.where(differ, runs * sums, 0.0)


def _sum_of_others(x: jax.Array, axes: int | tuple[int, ...]) -> jax.Array:
  return jnp.sum(x, axes, keepdims=True) - x
