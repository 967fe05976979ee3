"""The drafter's training on the devices: micro-batches of a slice, the update of all.

Gradients are summed per slice first; only `exchange_and_update` talks to other slices.
"""

from collections.abc import Callable
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax

from tlt_jax import accumulate
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
class Sums:
  """Sums over micro-batches."""

  loss: jax.Array  # f32[]
  metrics: dict  # f32[] each, see `loss.Loss.metrics`
  grads: dict  # f32, of the drafter's parameters


@flax.struct.dataclass
class Pending:
  """The work of slices since the last update, not exchanged yet."""

  micro_batches: jax.Array  # i32[slices]
  sums: Sums  # f32[slices ...] each


@flax.struct.dataclass
class Training:
  """The input of a program that trains."""

  state: state_lib.State
  pending: Pending
  rows: rows_lib.Rows
  most: jax.Array  # i32[]  micro-batches of a slice; 0: not even counts are exchanged
  expected: jax.Array | None = None  # i32[]  steps of the chunk, where it is part of one


@flax.struct.dataclass
class Trained:
  """The result of a program that trains."""

  state: state_lib.State
  pending: Pending
  micro_batches: jax.Array  # i32[slices]
  exchanged: jax.Array  # bool[]  whether gradients were summed over the slices
  metrics: dict  # of the update, f32[] each; zeros if there was none


def on_host(trained: Trained) -> Trained:
  """Fetches what the host looks at; state and pending stay on the devices."""
  told = (trained.micro_batches, trained.exchanged, trained.metrics)
  micro_batches, exchanged, metrics = jax.device_get(told)
  return trained.replace(
    micro_batches=micro_batches, exchanged=exchanged, metrics=metrics
  )


ROWS, WHOLE = slices.ROWS, slices.WHOLE
TRAINING_SPECS = Training(
  state=WHOLE, pending=ROWS, rows=ROWS, most=WHOLE, expected=WHOLE
)
TRAINED_SPECS = Trained(
  state=WHOLE, pending=ROWS, micro_batches=WHOLE, exchanged=WHOLE, metrics=WHOLE
)


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The training of one drafter for one target: micro-batches and updates."""

  config: config_lib.ModelConfig
  drafter: drafter_lib.DrafterConfig
  mesh: jax.sharding.Mesh
  loss: loss_lib.Loss
  optimizer: optax.GradientTransformation
  longest: int  # tokens of the longest sequence

  @property
  def layout(self) -> features_lib.Layout:
    """The layout of the features that are trained on."""
    return features_lib.of_drafter(self.drafter, train=True)

  def _rotations(self) -> layers.Rotation:
    """Tables for all positions, for the loops over micro-batches."""
    return layers.rotation(self.drafter.layer, jnp.arange(self.longest))

  def _loss(
    self, params, target_params, rotations, packed: packing.Packed, features: jax.Array
  ):
    """The loss of a micro-batch and its metrics, sums over tokens."""
    return loss_lib.loss(
      self.loss,
      self.drafter,
      self.config,
      params,
      target_params,
      packed,
      self.layout.split(features),
      rotations,
    )

  @functools.cached_property
  def _value_and_grad(self) -> Callable:
    """`_loss` and its gradient. Jitted: traced once for all the programs that train."""
    return jax.jit(jax.value_and_grad(self._loss, has_aux=True))

  def accumulate(self, target_params, training: Training, count: jax.Array) -> Sums:
    """Sums over what is pending of this slice and `count` i32[] micro-batches more."""
    params, rotations = apart(training.state.params), self._rotations()

    def micro_batch(i):
      packed, features = training.rows.micro_batch(i)
      (loss, metrics), grads = self._value_and_grad(
        params, target_params, rotations, packed, features
      )
      return Sums(loss, metrics, grads)

    pending = jax.tree.map(lambda x: x[0], training.pending.sums)
    return accumulate.sum_over(count, micro_batch, pending)

  def exchange_and_update(
    self, training: Training, sums: Sums, mine: jax.Array, per_update: int
  ) -> Trained:
    """Sums over the slices, and one update, if there are micro-batches enough.

    The only collectives over `data`. What was summed too early for an update stays
    pending.

    Args:
      sums: of this slice, from `accumulate`
      mine: i32[]  micro-batches of this slice that were added to them just now
      per_update: micro-batches of all slices, at least, that make an update
    """
    here = jnp.arange(self.mesh.shape[axes.DATA]) == jax.lax.axis_index(axes.DATA)

    def update(state, sums):
      total = jax.lax.psum(sums, axes.DATA)
      state, metrics = state_lib.update(
        self.optimizer, state, total.loss, total.metrics, total.grads
      )
      return state, jax.tree.map(slices.varying, _zeros(sums)), metrics

    def exchange(state, pending):
      waiting, sums = pending
      # The counts are exchanged after the training, never before: a slice that waited
      # for them would not train until all others have decoded.
      counts = jnp.where(here, jnp.stack([mine, waiting + mine])[:, None], 0)
      counts = slices.after(counts, sums.metrics["tokens"])
      now, since = jax.lax.psum(counts, axes.DATA)
      enough = jnp.sum(since) >= per_update
      state, sums, metrics = jax.lax.cond(enough, update, _skip(update), state, sums)
      left = jnp.where(enough, 0, jnp.sum(jnp.where(here, since, 0)))
      return state, (left, sums), (now, enough, metrics)

    pending = (training.pending.micro_batches[0], sums)
    state, (left, sums), told = jax.lax.cond(
      training.most > 0, exchange, _skip(exchange), training.state, pending
    )
    now, enough, metrics = told
    return Trained(
      state=state,
      pending=Pending(left[None], jax.tree.map(lambda x: x[None], sums)),
      micro_batches=now,
      exchanged=enough,
      metrics=metrics,
    )

  def make_train(self) -> Callable:
    """(target params, Training) -> Trained: all slices train, and an update follows."""

    def train(target_params, training):
      mine = jnp.where(training.rows.filled > 0, training.most, 0)
      sums = self.accumulate(target_params, training, mine)
      return self.exchange_and_update(training, sums, mine, per_update=1)

    mapped = slices.per_slice(
      self.mesh, train, in_specs=(WHOLE, TRAINING_SPECS), out_specs=TRAINED_SPECS
    )
    return jax.jit(mapped, out_shardings=self.trained_shardings)

  def make_judge(self, held_out_rows: int) -> Callable:
    """(target params, draft params, others, Rows) -> (the better ones, bool[]).

    By the loss on the rows that are not trained on; the others must be no worse.
    """

    def judge(target_params, params, others, rows):
      rotations = self._rotations()

      def both(i):
        packed, features = rows.row(i)
        value = lambda params: self._loss(
          params, target_params, rotations, packed, features
        )[0]
        return jnp.stack([value(params), value(others)])

      zeros = slices.varying(jnp.zeros(2, jnp.float32))
      old, new = jax.lax.psum(accumulate.sum_over(held_out_rows, both, zeros), axes.DATA)
      better = jnp.isfinite(new) & ~(new > old)
      return jax.tree.map(lambda a, b: jnp.where(better, b, a), params, others), better

    mapped = slices.per_slice(
      self.mesh, judge, in_specs=(WHOLE, WHOLE, WHOLE, ROWS), out_specs=WHOLE
    )
    shardings = (self.trained_shardings.state.params, axes.sharding(self.mesh))
    return jax.jit(mapped, out_shardings=shardings)

  def init_pending(self) -> Pending:
    """Pending work of no micro-batch, on every slice."""
    return slices.zeros(self.abstract_pending())

  def abstract_pending(self) -> Pending:
    """Shapes, dtypes and shardings of pending work."""
    num_slices = self.mesh.shape[axes.DATA]
    grads = state_lib.abstract_state(self.drafter, self.optimizer, self.mesh).params
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    metrics = dict.fromkeys(self.loss.metrics, scalar)
    shapes = Pending(jax.ShapeDtypeStruct((), jnp.int32), Sums(scalar, metrics, grads))
    over = lambda x, s: jax.ShapeDtypeStruct((num_slices, *x.shape), x.dtype, sharding=s)
    return jax.tree.map(over, shapes, self.trained_shardings.pending)

  @functools.cached_property
  def trained_shardings(self) -> Trained:
    """The shardings of what programs that train give back."""
    abstract = state_lib.abstract_state(self.drafter, self.optimizer, self.mesh)
    state = slices.shardings(abstract)
    over, whole = axes.sharding(self.mesh, axes.DATA), axes.sharding(self.mesh)
    grads = jax.tree.map(
      lambda s: axes.sharding(self.mesh, axes.DATA, *s.spec), state.params
    )
    sums = Sums(over, dict.fromkeys(self.loss.metrics, over), grads)
    return Trained(state, Pending(over, sums), whole, whole, whole)


def apart(params):
  """Parameters as values that may differ between slices.

  A gradient with respect to replicated ones is summed over the slices where it is made,
  inside the loop; slices with other trip counts would never arrive there.
  """
  return jax.tree.map(slices.varying, params)


def _skip(step: Callable) -> Callable:
  """A branch beside `step`, (a, b) -> (a, b, ...): these, and zeros for the third."""
  return lambda a, b: (a, b, _zeros(jax.eval_shape(step, a, b)[2]))


def _zeros(shapes):
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
