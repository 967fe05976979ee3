"""A new kind of drafter, in one file.

The multi-token-prediction module of DeepSeek-V3, section 2.2
(https://arxiv.org/abs/2412.19437): `fc` joins the normed feature with the normed
embedding, a pre-norm layer follows, and a norm before the target's head.

Departure: the feature is the mean of the outputs of two layers of the target.
"""

import jax.numpy as jnp

from tlt_jax.models import drafters
from tlt_jax.models import layers


def _setup(drafter):
  for name in ("feature_norm", "embedding_norm", "input_norm", "norm"):
    setattr(drafter, name, layers.RMSNorm(drafter.config.layer.norm_eps))


def _inputs(drafter, e, h):
  joined = jnp.concatenate([drafter.feature_norm(h), drafter.embedding_norm(e)], -1)
  x = drafter.apply_fc(joined)
  return drafter.input_norm(x), x


KIND = drafters.Kind(
  inputs=_inputs,
  setup=_setup,
  feature=lambda drafter, x: sum(jnp.split(x, 2, -1)) / 2,
  before_head=lambda drafter, h: drafter.norm(h),
  fc_width=lambda config: 2 * config.layer.width,
  customary_taps=lambda num_layers: (num_layers // 2, num_layers - 1),
)
