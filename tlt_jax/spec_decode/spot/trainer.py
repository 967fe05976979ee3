"""The drafter's training on the devices: each slice's own updates, and their exchange.

A slice that trains updates its own copy of the drafter, micro-batch by micro-batch,
without waiting (local SGD, https://arxiv.org/abs/1805.09767). Now and then, in a program
between two chunks, slices average their copies: `make_exchange`. Until then all draft
with the result of the last exchange.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import packing
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import objective
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import state as state_lib


@flax.struct.dataclass
class Training:
  states: state_lib.State  # of each slice: [slices ...] each
  rows: rows_lib.Rows
  most: jax.Array  # i32[]  micro-batches of a slice that has nothing to decode
  # i32[], in a chunk: as `most`, for a slice that becomes idle during it (`fused.quota`
  # scales it by the remaining steps); and the steps that the chunk is expected to run.
  quota_if_idle_midway: jax.Array | None = None
  expected_steps: jax.Array | None = None


@flax.struct.dataclass
class Trained:
  states: state_lib.State  # of each slice: [slices ...] each
  totals: jax.Array  # f32[slices n]  see `Trainer.account`


ROWS, WHOLE = slices.ROWS, slices.WHOLE
_COUNTS = ("micro_batches", "skipped", "updates", "new_rows", "new_agreement")
TRAINING_SPECS = Training(ROWS, ROWS, WHOLE, WHOLE, WHOLE)
TRAINED_SPECS = Trained(ROWS, ROWS)


class Account(NamedTuple):
  states: state_lib.State  # of each slice: [slices ...] each
  micro_batches: np.ndarray  # i32[slices]
  updates: np.ndarray  # i32[slices]
  skipped: int  # updates and micro-batches dropped as not finite, of all slices
  # "new_rows", at their first use; "new_agreement" of drafter and target on these, mean of
  # all steps; and means over all updates, if there are any.
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Trainer:
  config: config_lib.ModelConfig
  drafter: drafter_lib.DrafterConfig
  mesh: jax.sharding.Mesh
  loss: loss_lib.Loss
  optimizer: optax.GradientTransformation
  longest: int  # tokens of the longest sequence
  per_update: int = 1  # micro-batches of a slice that make an update
  average: float = 0.0  # decay per update of the weights' average; 0: none is kept

  @property
  def layout(self) -> features_lib.Layout:
    return features_lib.of_drafter(self.drafter, train=True)

  def _rotations(self) -> layers.Rotation:
    return layers.rotation(self.drafter.layer, jnp.arange(self.longest))

  def _loss(
    self,
    params,
    target_params,
    rotations,
    packed: packing.Packed,
    features: jax.Array,
    updates: jax.Array | None = None,
  ):
    return objective.of(self.drafter)(
      self.loss,
      self.drafter,
      self.config,
      params,
      target_params,
      packed,
      self.layout.split(features),
      rotations,
      updates,
    )

  @functools.cached_property
  def _value_and_grad(self) -> Callable:
    """Jitted: traced once for all programs that train."""
    return jax.jit(jax.value_and_grad(self._loss, has_aux=True))

  def train(self, target_params, training: Training, most: jax.Array) -> Trained:
    """Trains a slice's own drafter on `most` i32[] micro-batches.

    Those that make no whole update wait in the state for the next ones.
    """
    rotations = self._rotations()
    start = jax.tree.map(lambda x: x[0], training.states)

    def micro_batch(i, carry):
      state, totals = carry
      packed, features = training.rows.micro_batch(i)
      (loss, metrics), grads = self._value_and_grad(
        state.params, target_params, rotations, packed, features, state.step
      )
      one = jnp.ones_like(loss)
      sums = state_lib.Sums(loss, metrics, grads, micro_batches=one)
      state, means = state_lib.learn(
        self.optimizer, state, sums, self.per_update, self.average
      )
      new = training.rows.is_new(i) & (metrics["tokens"] > 0)
      counts = {
        "micro_batches": one,
        "skipped": means.pop("skipped"),
        "updates": means.pop("updated"),
        "new_rows": new.astype(jnp.float32),
        "new_agreement": jnp.where(new, self.loss.agreement(metrics), 0.0),
      }
      results = counts | means
      return state, totals + jnp.stack([results[name] for name in self._names])

    totals = slices.varying(jnp.zeros(len(self._names), jnp.float32))
    state, totals = jax.lax.fori_loop(0, most, micro_batch, (start, totals))
    return Trained(jax.tree.map(lambda x: x[None], state), totals[None])

  @property
  def _names(self) -> list[str]:
    names = {*self.loss.metrics, "loss", "grad_norm"} - {"tokens"}
    return [*_COUNTS, *sorted(names)]

  def account(self, states: state_lib.State, totals: np.ndarray) -> Account:
    micro_batches, skipped, updates = totals[:, :3].T.astype(np.int32)
    count = int(updates.sum())
    sums = dict(zip(self._names, totals.sum(0).tolist(), strict=True))
    new = int(sums["new_rows"])
    agreement = sums["new_agreement"] / new if new else 0.0
    means = {k: x / count for k, x in sums.items() if count and k not in _COUNTS}
    metrics = {"new_rows": new, "new_agreement": agreement, **means}
    return Account(states, micro_batches, updates, int(skipped.sum()), metrics)

  def make_train(self) -> Callable:
    """(target params, Training) -> Trained: all slices train, each its own drafter."""

    def train(target_params, training):
      mine = jnp.where(training.rows.filled > 0, training.most, 0)
      return self.train(target_params, training, mine)

    mapped = slices.per_slice(
      self.mesh, train, in_specs=(WHOLE, TRAINING_SPECS), out_specs=TRAINED_SPECS
    )
    return jax.jit(mapped, out_shardings=self.trained_shardings)

  def make_exchange(self) -> Callable:
    """(states, updates i32[slices]) -> (states, parameters that draft).

    All slices continue from the mean of drafters, moments and averages, weighted by each
    slice's updates since the last exchange. Counts are the maximum over slices.
    Micro-batches that wait for an update are divided evenly among the slices.
    """
    equal = 1 / self.mesh.shape[axes.DATA]

    def exchange(states, updates):
      made = slices.total(updates[0])
      share = jnp.where(made > 0, updates[0] / jnp.maximum(made, 1), equal)

      def weigh(share, tree):
        return jax.tree.map(
          lambda x: x[0] if _is_count(x) else (share * x[0]).astype(x.dtype), tree
        )

      def over_slices(x):
        return jax.lax.pmax(x, axes.DATA) if _is_count(x) else slices.total(x)

      mine = weigh(share, states).replace(waiting=weigh(equal, states.waiting))
      state = slices.combined(over_slices, mine)
      return jax.tree.map(lambda x: slices.varying(x)[None], state), state.drafting

    mapped = slices.per_slice(self.mesh, exchange, (ROWS, ROWS), (ROWS, WHOLE))
    shardings = (self.trained_shardings.states, slices.shardings(self.abstract.params))
    return jax.jit(mapped, out_shardings=shardings)

  def init_states(self, params) -> tuple[state_lib.State, dict]:
    """The state of every slice from parameters of any layout, and those that draft."""
    state = state_lib.init_state(
      self.drafter, self.optimizer, self.mesh, params, **self._kept
    )
    return self.spread(state), state.drafting

  def init_features(self, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    memory.announce(
      "the training data of the drafter", abstract, smaller="spot.rows, spot.row_tokens"
    )
    return slices.zeros(abstract)

  def place(self, x: np.ndarray) -> jax.Array:
    # On a CPU an array may share numpy's memory, which changes later.
    return slices.place(self.mesh, x.copy())

  @property
  def _kept(self) -> dict:
    waiting = self.loss.metrics if self.per_update > 1 else ()
    return dict(averages=self.average > 0, waiting=waiting)

  @functools.cached_property
  def abstract(self) -> state_lib.State:
    return state_lib.abstract_state(self.drafter, self.optimizer, self.mesh, **self._kept)

  @functools.cached_property
  def spread(self) -> Callable[[state_lib.State], state_lib.State]:
    n = self.mesh.shape[axes.DATA]

    def spread(state):
      return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), state)

    return jax.jit(spread, out_shardings=self.trained_shardings.states)

  @functools.cached_property
  def gather(self) -> Callable[[state_lib.State], state_lib.State]:
    def first(states):
      is_first = jax.lax.axis_index(axes.DATA) == 0
      mine = jax.tree.map(lambda x: jnp.where(is_first, x[0], jnp.zeros_like(x[0])), states)
      return slices.combined(slices.total, mine)

    mapped = slices.per_slice(self.mesh, first, in_specs=(ROWS,), out_specs=WHOLE)
    return jax.jit(mapped, out_shardings=slices.shardings(self.abstract))

  def abstract_states(self) -> state_lib.State:
    num_slices = self.mesh.shape[axes.DATA]

    def own(x):
      over = axes.sharding(self.mesh, axes.DATA, *x.sharding.spec)
      return jax.ShapeDtypeStruct((num_slices, *x.shape), x.dtype, sharding=over)

    return jax.tree.map(own, self.abstract)

  @functools.cached_property
  def trained_shardings(self) -> Trained:
    states = slices.shardings(self.abstract_states())
    return Trained(states, axes.sharding(self.mesh, axes.DATA))


def _is_count(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.integer)
