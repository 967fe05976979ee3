"""GRPO with credit for each token, by a baseline that knows how long a response is.

Advantages are generalised advantage estimates (Schulman et al. 2016,
https://arxiv.org/abs/1506.02438, equation 16). The value of a response that still runs
after t tokens is the mean reward of the prompt's other responses that did so as well,
drawn towards that of the whole batch. A decision late in a response, such as to call its
search finished, is thus compared with going on from there, and tokens long before it get
little of its noise. The loss is GRPO's.

The combination is this project's own; it stands on GAE's paper and on GRPO's. Departures
from the former: there is no critic to train, but that baseline, and no discount
(gamma = 1), as the only reward comes at the end. From GRPO: advantages are of tokens, and
not divided by a deviation.
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
) -> algorithm.Algorithm:
  """Makes GRPO with GAE.

  With lambda = 1 it is REINFORCE with that baseline, unbiased. With less, what happens
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
  Raises:
    ValueError: an argument out of its range
  """
  ranges.check(make, locals())
  made = grpo.make(clip_low, clip_high, kl_coef, kl_estimator, aggregation)

  def advantages(responses: algorithm.Responses) -> jax.Array:
    T = 1 << max(int(jnp.max(responses.length)) - 1, 0).bit_length()
    return _advantages(responses.reward, responses.length, trace_decay, prior, T)

  return made._replace(advantages=advantages)


def _advantages(rewards, lengths, trace_decay: float, prior: float, T: int) -> jax.Array:
  """Estimates the advantage of each token.

  Args:
    rewards: f32[P R]
    lengths: i32[P R]  of responses, at most T
    trace_decay, prior: see `make`
    T: a power of two, so that few shapes are compiled
  Returns:
    f32[P R T], zero beyond a response and where a prompt's rewards are all the same
  """
  lengths, reward = lengths[..., None], jnp.asarray(rewards, jnp.float32)[..., None]
  t = jnp.arange(T)
  runs = (lengths > t).astype(jnp.float32)
  # Sums over the prompt's, and the batch's, other responses of more than t tokens.
  others = lambda x, axes: jnp.sum(x, axes, keepdims=True) - x
  count, total = others(runs, 1), others(runs * reward, 1)
  batch = others(runs * reward, (0, 1)) / jnp.maximum(others(runs, (0, 1)), 1)
  value = (total + prior * batch) / (count + prior)
  following = jnp.where(lengths > t + 1, jnp.roll(value, -1, -1), reward)
  step = runs * (following - value)

  found = advantage.discounted_sum(step, trace_decay)
  differ = jnp.max(reward, 1, keepdims=True) > jnp.min(reward, 1, keepdims=True)
  return jnp.where(differ, runs * found, 0.0)
