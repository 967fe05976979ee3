"""EAGLE-2's drafter, whose output is the target's next feature.

Li et al. 2024 (https://arxiv.org/abs/2406.16858), with the model of EAGLE
(https://arxiv.org/abs/2401.15077, section 3.1). The feature is the target's last hidden
state, after the final norm. `fc` projects it and the embedding of the next token; the
layer has no input norm, and the target's head reads its output.

Departures from the paper:
- With a `vocab`, only these columns of the target's head are used, as in FR-Spec
  (https://arxiv.org/abs/2502.14856), and here in training as well.
- The layer is one of the target's family (with its biases, norms of q and k, and RoPE),
  not always one of Llama's.
"""

import jax
import jax.numpy as jnp

from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters


def _inputs(
  drafter: drafter_lib.Drafter, e: jax.Array, h: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x = drafter.apply_fc(jnp.concatenate([e, h], -1))
  return x, x


KIND = drafters.Kind(
  inputs=_inputs, fc_width=lambda config: 2 * config.layer.width, predicts_features=True
)
