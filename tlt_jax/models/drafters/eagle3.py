"""EAGLE-3's drafter, which reads three layers of the target and is trained on tokens only.

Li et al. 2025, section 3.1 (https://arxiv.org/abs/2503.01840). The feature is `fc` of
the hidden states after three layers, low, middle and high. Attention reads the normed
embedding and feature, concatenated; the residual stream is the feature before its norm.
The drafter has its own norm before the head.

Departures from the paper:
- Without a `vocab` the target's frozen head is used. With one, a head of U tokens is
  trained with the rest, as in the paper.
- The layer is one of the target's family (with its biases, norms of q and k, and RoPE),
  not always one of Llama's.
"""

import jax
import jax.numpy as jnp

from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models import layers


def _setup(drafter: drafter_lib.Drafter) -> None:
  eps = drafter.config.layer.norm_eps
  drafter.input_norm = layers.RMSNorm(eps)
  drafter.hidden_norm = layers.RMSNorm(eps)
  drafter.norm = layers.RMSNorm(eps)


def _inputs(
  drafter: drafter_lib.Drafter, e: jax.Array, h: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return jnp.concatenate([drafter.input_norm(e), drafter.hidden_norm(h)], -1), h


def _taps(num_layers: int) -> tuple[int, ...]:
  """The layers before layers 2, L/2 and L-3, which is the authors' choice."""
  before = (1, num_layers // 2 - 1, num_layers - 4)
  return tuple(sorted({min(max(i, 0), num_layers - 1) for i in before}))


KIND = drafters.Kind(
  inputs=_inputs,
  setup=_setup,
  feature=lambda drafter, x: drafter.apply_fc(x),
  before_head=lambda drafter, h: drafter.norm(h),
  fc_width=lambda config: config.feature_width,
  attention_width=lambda config: 2 * config.layer.width,
  customary_taps=_taps,
  own_head=True,
)
