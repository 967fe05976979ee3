"""REINFORCE with the mean of the other responses as baseline (RLOO)."""

import jax
import jax.numpy as jnp

from tlt_jax import ranges
from tlt_jax.rl import algorithm


def make(scale: ranges.Positive = 1.0) -> algorithm.Algorithm:
  """RLOO, on-policy.

  Args:
    scale: factor of the advantages
  """

  def advantages(responses: algorithm.Responses) -> jax.Array:
    reward = responses.reward
    others = (jnp.sum(reward, 1, keepdims=True) - reward) / (reward.shape[1] - 1)
    return scale * (reward - others)

  def loss(tokens: algorithm.Tokens):
    weight = tokens.mask / tokens.total_tokens
    return -jnp.sum(tokens.logp * tokens.advantage * weight), {}

  return algorithm.Algorithm(advantages, loss, skips_zero_advantage=True)
