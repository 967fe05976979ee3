"""Trains a drafter on sequences of its target, which is frozen.

A target is many times the size of its drafter. For sequences trained on more than once,
features can be computed once, by `DraftLearner.features`, and passed in (the offline
training of EAGLE, https://arxiv.org/abs/2401.15077).
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import accumulate
from tlt_jax import axes
from tlt_jax import packing
from tlt_jax import processes
from tlt_jax import programs
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import objective
from tlt_jax.spec_decode.spot import state as state_lib


@dataclasses.dataclass(frozen=True)
class DraftLearner:
  config: config_lib.ModelConfig
  drafter: drafter_lib.DrafterConfig
  loss: loss_lib.Loss
  optimizer: optax.GradientTransformation
  mesh: jax.sharding.Mesh
  buckets: tuple[packing.Bucket, ...]
  pool: programs.Pool = dataclasses.field(default_factory=programs.Pool)

  def abstract_state(self) -> state_lib.State:
    return state_lib.abstract_state(self.drafter, self.optimizer, self.mesh)

  def init(self, params) -> state_lib.State:
    return state_lib.init_state(self.drafter, self.optimizer, self.mesh, params)

  def train(
    self,
    state: state_lib.State,
    target_params,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    features: Sequence[np.ndarray] | None = None,
  ) -> tuple[state_lib.State, dict[str, float]]:
    """Makes one update on a batch of sequences; the state is donated.

    `features` f[T E] of each sequence of T tokens are computed if not given. Returns the
    new state, and `drafter/*`: loss, and per drafting step k loss_k and agreement_k, means
    over response tokens.
    """
    packed = packing.pack(prompts, responses, self.buckets)
    kept = None
    if features is not None:
      dtype = self.config.dtype
      kept = tuple(_packed(features, bucket, dtype) for bucket in packed)
    placed, kept = packing.place((packed, kept), self.mesh)
    key = (len(prompts), features is None)
    state, metrics = self.pool.run(
      "update", key, self.update, state, target_params, placed, kept
    )
    return state, {f"drafter/{k}": float(v) for k, v in jax.device_get(metrics).items()}

  def features(
    self, target_params, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """The target's features f[T E] of each sequence of T tokens, ordered by `Layout`."""
    packed = packing.pack(prompts, responses, self.buckets)
    placed = packing.place(packed, self.mesh)
    key = (len(prompts),)
    made = self.pool.run("features", key, self.all_features, target_params, placed)
    sizes = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    return _unpacked(processes.fetch(made), packed, sizes)

  @functools.cached_property
  def update(self):
    shardings = slices.shardings(self.abstract_state())
    return jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))

  def _update(self, state, target_params, packed, kept):
    draft_rotations = layers.rotation(self.drafter.layer, self._positions)
    features_of = self._features_of(target_params)

    def loss(params, batch, features):
      batch = jax.tree.map(self._over_slices, batch)
      return objective.of(self.drafter)(
        self.loss,
        self.drafter,
        self.config,
        params,
        target_params,
        batch,
        self.layout.split(features_of(batch) if features is None else features),
        draft_rotations,
        state.step,
      )

    grad = jax.value_and_grad(loss, has_aux=True)
    total = None
    for b, bucket in enumerate(packed):

      def micro_batch(i, b=b, bucket=bucket):
        features = None if kept is None else kept[b][i]
        return grad(state.params, bucket.micro_batch(i), features)

      total = accumulate.sum_over(bucket.count, micro_batch, total)
    (value, metrics), grads = total
    return state_lib.update(self.optimizer, state, value, metrics, grads)

  @functools.cached_property
  def all_features(self):
    """(target params, packed buckets) -> f[M rows T E] of each bucket."""
    return jax.jit(self._all_features)

  def _all_features(self, target_params, packed):
    features_of = self._features_of(target_params)

    def of_bucket(bucket):
      def add(i, made):
        return made.at[i].set(features_of(bucket.micro_batch(i)))

      shape = (*bucket.tokens.shape, self.layout.size)
      empty = jnp.zeros(shape, self.config.dtype)
      return jax.lax.fori_loop(0, bucket.count, add, empty)

    return tuple(map(of_bucket, packed))

  def _features_of(self, target_params):
    rotations = layers.rotation(self.config, self._positions)

    def features_of(batch):
      batch = jax.tree.map(self._over_slices, batch)
      final, tapped, _ = target.Target(self.config).apply(
        {"params": target_params},
        batch.tokens,
        batch.positions,
        self.layout.taps,
        packing.segment_mask(batch.segments, batch.positions),
        rotations=rotations,
        method=target.Target.with_taps,
      )
      return self.layout.join(tapped, final)

    return features_of

  @property
  def layout(self) -> features_lib.Layout:
    return features_lib.of_drafter(self.drafter, train=True)

  @property
  def _positions(self) -> jax.Array:
    return jnp.arange(self.buckets[-1].length)

  def _over_slices(self, x):
    if not x.ndim:
      return x
    return jax.lax.with_sharding_constraint(x, axes.sharding(self.mesh, axes.DATA))


def _packed(
  features: Sequence[np.ndarray], packed: packing.Packed, dtype: str
) -> np.ndarray:
  """Puts features f[T E] of each sequence where its tokens are: f[M rows T E]."""
  out = np.zeros((*packed.tokens.shape, features[0].shape[-1]), jnp.dtype(dtype))
  for i, where in _places(packed):
    out[where] = features[i]
  return out


def _unpacked(
  features: Sequence[np.ndarray], packed: Sequence[packing.Packed], sizes: Sequence[int]
) -> list[np.ndarray]:
  found: list[np.ndarray | None] = [None] * len(sizes)
  for made, bucket in zip(features, packed, strict=True):
    for i, where in _places(bucket):
      found[i] = made[where]
  return found


def _places(packed: packing.Packed) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
  """Yields (sequence, index of its tokens in [M rows T], by position) of a bucket."""
  for i in np.unique(packed.sequence_idx[packed.segments > 0]):
    yield i, np.nonzero((packed.sequence_idx == i) & (packed.segments > 0))


def make(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig,
  loss: loss_lib.Loss,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  buckets: Sequence[tuple[ranges.Count, ranges.Tokens]],
) -> DraftLearner:
  """A learner of a drafter for the target `config`.

  Buckets are (rows, tokens per row) of micro-batches, by increasing tokens; rows are
  rounded up to a multiple of the slices.
  """
  buckets = packing.over_slices(buckets, mesh.shape[axes.DATA])
  loss = objective.options_of(drafter, loss)
  return DraftLearner(config, drafter, loss, optimizer, mesh, buckets)
