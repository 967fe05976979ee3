"""Trains a drafter on sequences of its target; the target stays as it is.

One jitted program per update, as in `learner`: for each bucket a loop over its
micro-batches, in which the target's features are computed and the drafter's gradient
is added up, then one optimizer step. Parameters are replicated over `data`, rows of a
micro-batch are split over it.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import accumulate
from tlt_jax import axes
from tlt_jax import packing
from tlt_jax import programs
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import state as state_lib


@dataclasses.dataclass(frozen=True)
class DraftLearner:
  """Trains a drafter, update by update; see `make`."""

  config: config_lib.ModelConfig
  drafter: drafter_lib.DrafterConfig
  loss: loss_lib.Loss
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  buckets: tuple[packing.Bucket, ...]
  pool: programs.Pool = dataclasses.field(default_factory=programs.Pool)

  def abstract_state(self) -> state_lib.State:
    """Shapes, dtypes and shardings of the state."""
    return state_lib.abstract_state(self.drafter, self.optimizer, self.mesh)

  def init(self, params) -> state_lib.State:
    """The state before the first update, from parameters of any layout."""
    return state_lib.init_state(self.drafter, self.optimizer, self.mesh, params)

  def train(
    self,
    state: state_lib.State,
    target_params,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
  ) -> tuple[state_lib.State, dict[str, float]]:
    """Makes one update on a batch of sequences; the state is donated.

    Args:
      target_params: of the target, laid out by `axes.ROLLOUT`
      prompts, responses: i32[...] each, one pair per sequence
    Returns:
      the new state, and `drafter/*`: loss, and per drafting step k loss_k and
      agreement_k, means over response tokens
    """
    packed = packing.pack(prompts, responses, self.buckets)
    placed = packing.place(packed, self.mesh)
    key = (len(prompts),)
    state, metrics = self.pool.run("update", key, self.update, state, target_params, placed)
    return state, {f"drafter/{k}": float(v) for k, v in jax.device_get(metrics).items()}

  @functools.cached_property
  def update(self):
    """(state, target params, packed buckets) -> (state, metrics)."""
    shardings = slices.shardings(self.abstract_state())
    return jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))

  def _update(self, state, target_params, packed):
    positions = jnp.arange(self.buckets[-1].length)  # tables of them, for the loops
    rotations = layers.rotation(self.config, positions)
    draft_rotations = layers.rotation(self.drafter.layer, positions)
    layout = features_lib.of_drafter(self.drafter, train=True)

    def loss(params, batch):
      batch = jax.tree.map(self._over_slices, batch)
      final, tapped, _ = target.Target(self.config).apply(
        {"params": target_params},
        batch.tokens,
        batch.positions,
        layout.taps,
        packing.segment_mask(batch.segments, batch.positions),
        rotations=rotations,
        method=target.Target.with_taps,
      )
      return loss_lib.loss(
        self.loss,
        self.drafter,
        self.config,
        params,
        target_params,
        batch,
        layout.split(layout.join(tapped, final)),
        draft_rotations,
      )

    grad = jax.value_and_grad(loss, has_aux=True)
    total = None
    for bucket in packed:
      micro_batch = lambda i, bucket=bucket: grad(state.params, bucket.micro_batch(i))
      total = accumulate.sum_over(bucket.count, micro_batch, total)
    (value, metrics), grads = total
    return state_lib.update(self.optimizer, state, value, metrics, grads)

  def _over_slices(self, x):
    """Splits an array by rows over the slices."""
    if not x.ndim:
      return x
    return jax.lax.with_sharding_constraint(x, axes.sharding(self.mesh, axes.DATA))


def make(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig,
  loss: loss_lib.Loss,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  buckets: Sequence[tuple[ranges.Count, ranges.Tokens]],
) -> DraftLearner:
  """A learner for one target, drafter, loss, optimizer and mesh.

  Args:
    config: of the target
    drafter, loss, optimizer: what is trained, for what, and how
    mesh: whose slices share the rows of a micro-batch
    buckets: (rows, tokens per row) of micro-batches, by increasing tokens; rows are
      rounded up to a multiple of the slices
  Raises:
    ValueError: `buckets` are none or out of order
  """
  buckets = packing.over_slices(buckets, mesh.shape[axes.DATA])
  return DraftLearner(config, drafter, loss, optimizer, mesh, buckets)
