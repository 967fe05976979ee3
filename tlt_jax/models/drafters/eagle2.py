"""EAGLE-2's drafter: what it gives is the target's next feature.

Li et al. 2024 (https://arxiv.org/abs/2406.16858), whose model is that of EAGLE (section
3.1 of https://arxiv.org/abs/2401.15077). The feature is the target's last hidden state,
after the final norm as in the authors' code. `fc` joins it with the embedding of the
token after it; the layer has no norm at its input, and the target's head reads what
comes out of it.

Departures from the paper:
- With a `vocab`, drafts are read by these columns of the target's head alone, as in FR-Spec
  (https://arxiv.org/abs/2502.14856); here the drafter is trained so, too.
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
  inputs=_inputs,
  fc_width=lambda config: 2 * config.layer.width,
  predicts_features=True,
)
