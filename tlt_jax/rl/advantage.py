"""Estimators of advantages that algorithms share, as pure functions of arrays."""

import jax
import jax.numpy as jnp

from tlt_jax.rl import algorithm
from tlt_jax.rl import losses

EPSILON = 1e-6  # added to a standard deviation before it divides


def group_relative(reward: jax.Array, normalize_std: bool) -> jax.Array:
  """Rewards less their prompt's mean, optionally over their deviation: f32[P R]."""
  centred = reward - jnp.mean(reward, 1, keepdims=True)
  if not normalize_std:
    return centred
  return centred / (jnp.std(reward, 1, keepdims=True) + EPSILON)


def is_token(length: jax.Array, T: int) -> jax.Array:
  return jnp.arange(T) < length[..., None]


def kl_to_reference(
  responses: algorithm.Responses, estimator: losses.KlEstimator
) -> jax.Array:
  """Estimates KL(sampler || reference) at each token: f32[P R T]."""
  mask = is_token(responses.length, responses.logp.shape[-1])
  difference = jnp.where(mask, responses.reference_logp - responses.logp, 0.0)
  return losses.kl(difference, estimator)


def token_rewards(responses: algorithm.Responses, T: int) -> jax.Array:
  """The reward at the last token of each response, zero elsewhere: f32[P R T]."""
  last = responses.length[..., None] - 1
  return jnp.where(jnp.arange(T) == last, responses.reward[..., None], 0.0)


def discounted_sum(x: jax.Array, decay: float) -> jax.Array:
  """x_t + decay * x_{t+1} + decay^2 * x_{t+2} + ...: f32[... T]."""

  def step(after, now):
    total = now + decay * after
    return total, total

  by_token = jnp.moveaxis(jnp.asarray(x, jnp.float32), -1, 0)
  _, sums = jax.lax.scan(step, jnp.zeros_like(by_token[0]), by_token, reverse=True)
  return jnp.moveaxis(sums, 0, -1)


def gae(
  reward: jax.Array,
  value: jax.Array,
  length: jax.Array,
  discount: float,
  trace_decay: float,
) -> jax.Array:
  """Generalised advantage estimates (https://arxiv.org/abs/1506.02438, equation 16).

  `reward` f32[P R T] is at each token, `value` before each token, and zero after the last
  one; `length` is i32[P R]. The result f32[P R T] is zero beyond a response.
  """
  mask = is_token(length, value.shape[-1])
  value = jnp.where(mask, value, 0.0)
  following = jnp.pad(value, ((0, 0), (0, 0), (0, 1)))[..., 1:]
  step = jnp.where(mask, reward + discount * following - value, 0.0)
  return jnp.where(mask, discounted_sum(step, discount * trace_decay), 0.0)


def whitened(x: jax.Array, mask: jax.Array) -> jax.Array:
  """x less its mean, over its deviation, both over the mask; zero elsewhere."""
  count = jnp.maximum(jnp.sum(mask), 1)
  centred = jnp.where(mask, x - jnp.sum(jnp.where(mask, x, 0.0)) / count, 0.0)
  return centred / (jnp.sqrt(jnp.sum(centred**2) / count) + EPSILON)
