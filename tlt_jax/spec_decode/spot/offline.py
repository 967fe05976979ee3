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

from tlt_jax import axes
from tlt_jax import packing
from tlt_jax import programs
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot


@dataclasses.dataclass(frozen=True)
class DraftLearner:
  """See `make`."""

  config: config_lib.ModelConfig
  drafter: drafter_lib.DrafterConfig
  loss: draft_loss.Loss
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  buckets: tuple[packing.Bucket, ...]
  pool: programs.Pool = dataclasses.field(default_factory=programs.Pool)

  def abstract_state(self) -> spot.State:
    """Shapes, dtypes and shardings of the state."""
    return spot.abstract_state(self.drafter, self.optimizer, self.mesh)

  def init(self, params) -> spot.State:
    """The state before the first update, from parameters of any layout."""
    return spot.init_state(self.drafter, self.optimizer, self.mesh, params)

  def train(
    self,
    state: spot.State,
    target_params,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
  ) -> tuple[spot.State, dict[str, float]]:
    """One update on a batch of sequences; the state is donated.

    Returns:
      the new state, and `drafter/*`: loss, and per drafting step k loss_k and
      agreement_k, means over response tokens
    """
    packed = packing.pack(prompts, responses, self.buckets)
    args = (state, target_params, packing.place(packed, self.mesh))
    run = self.pool.get("update", (len(prompts),), self.update, *args)
    state, metrics = run(*args)
    return state, {f"drafter/{k}": float(v) for k, v in jax.device_get(metrics).items()}

  @functools.cached_property
  def update(self):
    """(state, target params, packed buckets) -> (state, metrics)."""
    shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
    return jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))

  def _update(self, state, target_params, packed):
    model = target.Target(self.config)
    taps = self.drafter.taps
    positions = jnp.arange(self.buckets[-1].length)  # tables of them, for the loops
    rotations = layers.rotation(self.config, positions)
    draft_rotations = layers.rotation(self.drafter.layer, positions)

    def loss(params, batch):
      batch = jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, axes.sharding(self.mesh, axes.DATA))
        if x.ndim
        else x,
        batch,
      )
      mask = packing.segment_mask(batch.segments, batch.positions)
      features, tapped, _ = model.apply(
        {"params": target_params},
        *(batch.tokens, batch.positions, taps, mask),
        rotations=rotations,
        method=target.Target.with_taps,
      )
      return draft_loss.loss(
        self.loss,
        self.drafter,
        self.config,
        params,
        target_params,
        batch,
        features,
        tapped if taps else features,
        draft_rotations,
      )

    grad = jax.value_and_grad(loss, has_aux=True)
    total = None
    for bucket in packed:
      one = lambda i, bucket=bucket: grad(state.params, bucket.micro_batch(i))
      if total is None:
        shapes = jax.eval_shape(one, 0)
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      add = lambda i, t, one=one: jax.tree.map(jnp.add, t, one(i))
      total = jax.lax.fori_loop(0, bucket.count, add, total)
    (value, metrics), grads = total
    return spot.update(self.optimizer, state, value, metrics, grads)


def make(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig,
  loss: draft_loss.Loss,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  buckets: Sequence[tuple[int, int]],
) -> DraftLearner:
  """A learner for one target, drafter, loss, optimizer and mesh.

  Args:
    buckets: (rows, length) of micro-batches, by increasing length; rows are rounded
      up to a multiple of the slices
  """
  buckets = packing.over_slices(buckets, mesh.shape[axes.DATA])
  return DraftLearner(config, drafter, loss, optimizer, mesh, buckets)
