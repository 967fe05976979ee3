import jax
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax.pallas_kernels.verify_sample import parts


def sample_part(
  logits: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
  cut: jax.Array | None,
  offset: jax.Array,
) -> parts.Part:
  """Samples from some tokens of each row, with the sums for their log-probabilities.

  The Gumbel-max trick: the argmax of logits / T + noise is distributed as their softmax.
  At temperature 0 there is no noise, and T is 1.
  `logits` f32[R V] are of tokens offset, offset + 1, ...; `cut` f32[R] is not divided by T.
  """
  random = (temperature > 0)[:, None]
  x = logits / jnp.where(random, temperature[:, None], 1.0)
  ids = offset + jnp.arange(logits.shape[1], dtype=jnp.int32)
  kept = logits >= (-jnp.inf if cut is None else cut[:, None])
  perturbed = x + jnp.where(random, noise.gumbel(key, ids), 0.0)
  runners = jnp.where(kept, perturbed, -jnp.inf)
  best = jnp.max(runners, -1)
  wins = kept & (runners == best[:, None])
  token = jnp.min(jnp.where(wins, ids, parts.NO_TOKEN), -1)
  top = jnp.maximum(jnp.max(x, -1), parts.LEAST)
  weight = jnp.exp(x - top[:, None])
  return parts.Part(
    best=best,
    token=token,
    at=jnp.max(jnp.where(ids == token[:, None], x, -jnp.inf), -1),
    top=top,
    total=jnp.sum(weight, -1),
    kept=jnp.sum(jnp.where(kept, weight, 0.0), -1),
  )
