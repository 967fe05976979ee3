import jax
import jax.numpy as jnp

from tlt_jax.rl import algorithm


def make() -> algorithm.Algorithm:
  def loss(tokens: algorithm.Tokens) -> tuple[jax.Array, dict]:
    return -jnp.sum(tokens.logp * tokens.mask) / tokens.total_tokens, {}

  return algorithm.Algorithm(lambda responses: jnp.ones_like(responses.reward), loss)
