"""The drafter's training on the devices: each slice's own updates, and their exchange.

A slice that trains updates a drafter of its own, micro-batch by micro-batch, and waits
for nobody (local SGD, https://arxiv.org/abs/1805.09767). Now and then, in a program
between two chunks, slices exchange what they have learnt: `make_exchange`. Until then
all draft with what was handed out last.
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
from tlt_jax import packing
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import state as state_lib


@flax.struct.dataclass
class Training:
  """The input of a program that trains."""

  states: state_lib.State  # of each slice: [slices ...] each
  rows: rows_lib.Rows
  most: jax.Array  # i32[]  micro-batches of a slice that has nothing to decode
  # Where it is part of a chunk, i32[]: micro-batches of a slice that runs dry in it, if it
  # did at its start; and the chunk's steps.
  later: jax.Array | None = None
  expected: jax.Array | None = None


@flax.struct.dataclass
class Trained:
  """The result of a program that trains."""

  states: state_lib.State  # of each slice: [slices ...] each
  totals: jax.Array  # f32[slices n]  of each slice, see `Trainer.account`


ROWS, WHOLE = slices.ROWS, slices.WHOLE
_COUNTS = ("micro_batches", "skipped", "updates", "new_rows", "new_agreement")
TRAINING_SPECS = Training(ROWS, ROWS, WHOLE, WHOLE, WHOLE)
TRAINED_SPECS = Trained(ROWS, ROWS)


class Account(NamedTuple):
  """What came of a program that trains; on the host, but for the states."""

  states: state_lib.State  # of each slice: [slices ...] each
  micro_batches: np.ndarray  # i32[slices]
  updates: np.ndarray  # i32[slices]
  skipped: int  # updates and micro-batches left out, of all slices: they were not finite
  # "new_rows", that were not trained on before, "new_agreement" of drafter and target on
  # these, mean of all steps; and means over all updates, if there are any.
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The training of one drafter for one target: micro-batches, updates, exchanges."""

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
    """The layout of the features that are trained on."""
    return features_lib.of_drafter(self.drafter, train=True)

  def _rotations(self) -> layers.Rotation:
    """Tables for all positions, for the loops over micro-batches."""
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
    """The loss of a micro-batch and its metrics, sums over tokens; see `loss.loss`."""
    return loss_lib.loss(
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
    """`_loss` and its gradient. Jitted: traced once for all the programs that train."""
    return jax.jit(jax.value_and_grad(self._loss, has_aux=True))

  def train(self, target_params, training: Training, most: jax.Array) -> Trained:
    """Trains a slice's own drafter on `most` i32[] micro-batches.

    Those at the end that make no whole update wait in the state for the next ones.
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
      counts = one, means.pop("skipped"), means.pop("updated")
      new = training.rows.is_new(i) & (metrics["tokens"] > 0)
      agreement = jnp.where(new, self.loss.agreement(metrics), 0.0)
      counts = *counts, new.astype(jnp.float32), agreement
      return state, totals + jnp.stack([*counts, *_in_order(means)])

    totals = slices.varying(jnp.zeros(len(self._names), jnp.float32))
    state, totals = jax.lax.fori_loop(0, most, micro_batch, (start, totals))
    return Trained(jax.tree.map(lambda x: x[None], state), totals[None])

  @property
  def _names(self) -> list[str]:
    """The names of what `train` counts and sums up."""
    names = {*self.loss.metrics, "loss", "grad_norm"} - {"tokens"}
    return [*_COUNTS, *sorted(names)]

  def account(self, states: state_lib.State, totals: np.ndarray) -> Account:
    """The account of what was trained; `totals` is that of `Trained`, on the host."""
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

    All slices go on from the mean of the drafters, their moments and averages, weighted
    by the updates that each slice has made since the last time. One that trained alone
    is taken as it is. Counts are those of the slice that has most. Of the micro-batches
    that wait for an update, in whichever slice, each slice gets an equal share.
    """
    equal = 1 / self.mesh.shape[axes.DATA]

    def exchange(states, updates):
      made = slices.total(updates[0])
      share = jnp.where(made > 0, updates[0] / jnp.maximum(made, 1), equal)

      is_count = lambda x: jnp.issubdtype(x.dtype, jnp.integer)
      times = lambda share, tree: jax.tree.map(
        lambda x: x[0] if is_count(x) else (share * x[0]).astype(x.dtype), tree
      )
      over_slices = lambda x: (
        jax.lax.pmax(x, axes.DATA) if is_count(x) else slices.total(x)
      )
      mine = times(share, states).replace(waiting=times(equal, states.waiting))
      state = slices.combined(over_slices, mine)
      return jax.tree.map(lambda x: slices.varying(x)[None], state), state.drafting

    mapped = slices.per_slice(self.mesh, exchange, (ROWS, ROWS), (ROWS, WHOLE))
    shardings = (self.trained_shardings.states, slices.shardings(self.abstract.params))
    return jax.jit(mapped, out_shardings=shardings)

  def init_states(self, params) -> state_lib.State:
    """The state of every slice before the first update, from parameters of any layout."""
    args = self.drafter, self.optimizer, self.mesh, params
    return self.spread(state_lib.init_state(*args, **self._kept))

  @property
  def _kept(self) -> dict:
    """What a state keeps beside parameters, moments and counts."""
    waiting = self.loss.metrics if self.per_update > 1 else ()
    return dict(averages=self.average > 0, waiting=waiting)

  @functools.cached_property
  def abstract(self) -> state_lib.State:
    """Shapes, dtypes and shardings of a state that is the same on every slice."""
    args = self.drafter, self.optimizer, self.mesh
    return state_lib.abstract_state(*args, **self._kept)

  @functools.cached_property
  def spread(self) -> Callable[[state_lib.State], state_lib.State]:
    """A state -> [slices ...] each: every slice has its own."""
    n = self.mesh.shape[axes.DATA]
    own = lambda state: jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), state)
    return jax.jit(own, out_shardings=self.trained_shardings.states)

  @functools.cached_property
  def gather(self) -> Callable[[state_lib.State], state_lib.State]:
    """The states of all slices, which are equal -> one that all have."""

    def first(states):
      is_first = jax.lax.axis_index(axes.DATA) == 0
      mine = lambda x: jnp.where(is_first, x[0], jnp.zeros_like(x[0]))
      return slices.combined(slices.total, jax.tree.map(mine, states))

    mapped = slices.per_slice(self.mesh, first, in_specs=(ROWS,), out_specs=WHOLE)
    return jax.jit(mapped, out_shardings=slices.shardings(self.abstract))

  def abstract_states(self) -> state_lib.State:
    """Shapes, dtypes and shardings of the states of all slices."""
    num_slices = self.mesh.shape[axes.DATA]

    def own(x):
      over = axes.sharding(self.mesh, axes.DATA, *x.sharding.spec)
      return jax.ShapeDtypeStruct((num_slices, *x.shape), x.dtype, sharding=over)

    return jax.tree.map(own, self.abstract)

  @functools.cached_property
  def trained_shardings(self) -> Trained:
    """The shardings of what programs that train give back."""
    states = slices.shardings(self.abstract_states())
    return Trained(states, axes.sharding(self.mesh, axes.DATA))


def _in_order(means: dict) -> list:
  """The values by their names in order."""
  return [means[name] for name in sorted(means)]
