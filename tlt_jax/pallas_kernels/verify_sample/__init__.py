import chex
import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import implementations
from tlt_jax.pallas_kernels import shards
from tlt_jax.pallas_kernels.verify_sample import parts


def verify_sample(
  logits: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
  cut: jax.Array | None = None,
  *,
  impl: str | None = None,
) -> parts.Sample:
  """Samples a token per row, with its log-probabilities.

  The argmax of logits f32[R V] / T + Gumbel noise, over logits not below `cut` f32[R]
  (None: over all); at temperature 0 the first of the largest logits. With a kernel, a row's
  results are the same bits in every batch.

  Inside a function that is automatic over the mesh axis `model`, each shard samples from
  its part of the vocabulary. `key` u32[R 2] is `noise.row_key`.
  """
  R = logits.shape[0]
  chex.assert_type(logits, jnp.float32)
  chex.assert_shape(key, (R, 2))
  chex.assert_shape([temperature] if cut is None else [temperature, cut], (R,))
  impl = implementations.choose(impl)

  def draw(axis, logits, key, temperature, cut=None):
    shard = 0 if axis is None else jax.lax.axis_index(axis)
    offset = jnp.int32(shard * logits.shape[1])
    part = _sample_part(impl, logits, key, temperature, cut, offset)
    return parts.finish(parts.over_shards(part, axis), temperature)

  filters = () if cut is None else (cut,)
  return shards.over_vocabulary(draw, logits, key, temperature, *filters)


def _sample_part(impl: str, *args: jax.Array | None) -> parts.Part:
  sample_part = implementations.load(__name__, impl).sample_part
  return sample_part(*args, **({"interpret": True} if impl == "interpret" else {}))
