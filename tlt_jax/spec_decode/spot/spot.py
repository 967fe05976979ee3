"""Spot training: a slice that has nothing left to decode trains the drafter.

A fused chunk (`fused`) is one program: each slice decodes; one that becomes idle trains on
its own finished sequences until shortly before the chunk's expected end. It updates its
own copy of the drafter, so no slice waits. Once there are enough updates, and when the
rollout ends, slices average their copies (`trainer`), and the result drafts. Tokens drawn
do not depend on the drafter.

Departures from TLT (https://arxiv.org/abs/2511.16665): no separate process group and
no coordinator; training is deterministic, by a logged schedule; slices train apart and
are averaged; an average over updates drafts.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tlt_jax import axes
from tlt_jax import processes
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.spot import buffer as buffer_lib
from tlt_jax.spec_decode.spot import investment as investment_lib
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import objective
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import state as state_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


@ranges.options
class Settings:
  """How much is trained on, and when. Rows are per slice.

  The defaults, with those of `loss.Loss` and `OPTIMIZER`, are the recipe by which a drafter
  of random weights learnt fastest of 28 (a policy of 20M parameters, 360 responses in their
  order; tokens per pass of chains of three after 10 and 25 rollouts' idle time): 1.88 and
  2.50; rows of 128 tokens, three unrolled steps and total variation from the start gave
  1.69 and 2.07. `experiments/log/2026-11.md` has the table, of 2026-11-27.
  """

  row_tokens: ranges.Tokens = ranges.field(
    256, "tokens of one training row; a row is a micro-batch"
  )
  rows: ranges.Count = ranges.field(64, "training rows kept per slice")
  max_batch: ranges.CountOrZero = ranges.field(
    0, "most slots of a bucket in which slices train; 0: in all buckets"
  )
  chunk_tokens: ranges.Tokens = ranges.field(
    128, "most tokens per slot in a chunk that also trains"
  )
  min_micro_batches: ranges.Count = ranges.field(
    3, "micro-batches that a chunk that trains should have time for"
  )
  micro_batches_per_update: ranges.Count = ranges.field(
    1,
    "micro-batches whose gradients a slice sums up for an optimizer update; those that "
    "make no whole update in a chunk, or in a rollout, wait for the next one",
  )
  updates_per_exchange: ranges.Count = ranges.field(
    16, "least updates, of all slices, after which these exchange what they have learnt"
  )
  average: ranges.ShareBelowOne = ranges.field(
    0.99,
    "decay, per update, of the average of the drafter's weights, which drafts; 0: the "
    "last weights do",
  )
  after_rollout_share: ranges.NotNegative = ranges.field(
    0.5,
    "most time of training after a rollout, as a share of the rollout's; how much of it "
    "is used follows from what it gains",
  )


@ranges.options
class Options(Settings):
  """The settings, with what follows from them unless it is given."""

  context_tokens: ranges.Tokens | None = ranges.field(
    None,
    "tokens repeated from the row before, as context only, where a sequence is cut in "
    "rows; None: an eighth of row_tokens",
  )
  carried_rows: ranges.CountOrZero | None = ranges.field(
    None,
    "most training rows per slice that are carried over to the next rollout; None: three "
    "quarters of rows",
  )

  def __post_init__(self):
    if self.context_tokens is None:
      object.__setattr__(self, "context_tokens", max(self.row_tokens // 8, 1))
    if self.carried_rows is None:
      object.__setattr__(self, "carried_rows", 3 * self.rows // 4)
    if self.carried_rows > self.rows:
      raise ValueError(
        f"carried_rows ({self.carried_rows}) must be at most rows ({self.rows})"
      )
    if self.context_tokens > self.row_tokens // 2:
      raise ValueError(
        f"context_tokens ({self.context_tokens}) must be at most half of row_tokens "
        f"({self.row_tokens})"
      )


# Part of the recipe, see `Settings`: arguments of `rl.optimizer.make`.
OPTIMIZER = dict(
  name="adamw", learning_rate=1e-3, warmup=20, total=3000, floor=0.1, b2=0.99
)


def row_tokens(trainer: trainer_lib.Trainer, options: Options) -> int:
  return min(options.row_tokens, trainer.longest)


def make_buffer(trainer: trainer_lib.Trainer, options: Options) -> buffer_lib.Buffer:
  return buffer_lib.Buffer(
    trainer.mesh.shape[axes.DATA],
    rows=options.rows,
    length=row_tokens(trainer, options),
    carried=options.carried_rows,
    context=options.context_tokens,
  )


def abstract_features(
  trainer: trainer_lib.Trainer, options: Options
) -> jax.ShapeDtypeStruct:
  dtype, size = trainer.config.dtype, trainer.layout.size
  length = row_tokens(trainer, options)
  return features_lib.abstract(trainer.mesh, options.rows, dtype, length, size)


@dataclasses.dataclass
class Frozen:
  """A drafter that no rollout trains."""

  config: drafter_lib.DrafterConfig
  params: Any  # laid out by `axes.ROLLOUT`
  # One of this shape that trains, whose programs this one shares.
  spot: "Spot | None" = None


class Spot:
  """A drafter and its training through a run: its state and its data."""

  def __init__(self, trainer: trainer_lib.Trainer, options: Options, params):
    self.trainer, self.options, self.config = trainer, options, trainer.drafter
    self.row_tokens = row_tokens(trainer, options)
    self.buffer = make_buffer(trainer, options)
    self.investment = self._new_investment()
    self._states, self._params = trainer.init_states(params)
    self._reset_counts()
    self._features = trainer.init_features(abstract_features(trainer, options))
    # On the devices, by part of the buffer: its version there, and the array.
    self._placed: dict[str, tuple[Any, jax.Array]] = {}

  def _new_investment(self) -> investment_lib.Investment:
    return investment_lib.Investment(self.options.after_rollout_share)

  @property
  def spot(self) -> "Spot":
    """Itself; see `Frozen.spot`."""
    return self

  @property
  def states(self) -> state_lib.State:
    return self._states

  @property
  def state(self) -> state_lib.State:
    return self.trainer.gather(self._states)

  @property
  def params(self):
    return self._params

  def trains_in(self, batch: int) -> bool:
    """Whether idle slices train in buckets of `batch`; a single slice is never idle."""
    alone = self.trainer.mesh.shape[axes.DATA] == 1
    return not alone and batch <= (self.options.max_batch or batch)

  def training(
    self, most: int, expected_steps: int | None = None, quota_if_idle_midway: int = 0
  ) -> trainer_lib.Training:
    training = trainer_lib.Training(self._states, self.rows(), np.int32(most))
    if expected_steps is None:
      return training
    return training.replace(
      quota_if_idle_midway=np.int32(quota_if_idle_midway),
      expected_steps=np.int32(expected_steps),
    )

  def on_nothing(self) -> trainer_lib.Training:
    """A trial input of the same shape: one empty row per slice."""
    order = np.zeros_like(self.buffer.order())
    order[:, 0] = 1
    table = self.trainer.place(np.zeros_like(self.buffer.table))
    rows = rows_lib.Rows(self._features, table, self.trainer.place(order))
    one = self.options.micro_batches_per_update
    return self.training(most=one, expected_steps=1).replace(rows=rows)

  def take(self, trained: trainer_lib.Account) -> None:
    self._states = trained.states
    self._updates = self._updates + trained.updates
    self.apart |= bool(trained.micro_batches.any())
    self.buffer.trained(trained.micro_batches)

  @property
  def updates(self) -> np.ndarray:
    """Updates since the last exchange, i32[slices]."""
    return self._updates

  def exchange(self, program: Callable) -> None:
    updates = self.trainer.place(self._updates[:, None])
    self._states, self._params = program(self._states, updates)
    self._reset_counts()

  def _reset_counts(self) -> None:
    self._updates = np.zeros(len(self.buffer.rows), np.int32)  # of each slice
    self.apart = False  # whether a slice has trained since the last exchange

  def restart(self, state: state_lib.State) -> None:
    """Continues from another state of the drafter, with the present data."""
    self.investment = self._new_investment()
    self._states, self._params = self.trainer.spread(state), state.drafting
    self._reset_counts()

  @property
  def features(self) -> jax.Array:
    return self._features

  def take_features(self, features: jax.Array) -> None:
    self._features = features

  def arrays(self) -> dict:
    """The arrays of a checkpoint; `data` is the rest, as JSON."""
    return {"state": self.state, "features": self._features, "table": self.rows().table}

  def data(self) -> dict:
    return {
      "buffer": self.buffer.state(),
      "investment": self.investment.state(),
      "vocab": list(self.config.vocab),
    }

  def saved_arrays(self, data: dict) -> dict:
    """The shapes of the `arrays` saved with `data`, perhaps with other slices."""
    count = sum(map(len, data["buffer"]["rows"]))

    def of_rows(x):
      spec = x.sharding.spec
      if count % self.trainer.mesh.shape[axes.DATA]:
        spec = (None, *spec[1:])
      over = axes.sharding(self.trainer.mesh, *spec)
      return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=over)

    arrays = self.arrays()
    return arrays | {name: of_rows(arrays[name]) for name in ("features", "table")}

  def restore(self, arrays: dict, data: dict) -> None:
    """Resumes from what was saved with any number of slices."""
    source = self.buffer.set_state(data["buffer"], processes.fetch(arrays["table"]))
    self.restart(arrays["state"])
    self.investment.restore(data["investment"])
    over, self._features = self._features.sharding, arrays["features"]
    if len(data["buffer"]["rows"]) != len(source):
      deal = jax.jit(_rows_of, out_shardings=over)
      self._features = deal(self._features, source.reshape(-1))

  def rows(self) -> rows_lib.Rows:
    buffer = self.buffer
    table = self._placed_once("table", buffer.version, lambda: buffer.table)
    order = self._placed_once("order", (buffer.version, buffer.turn), buffer.order)
    return rows_lib.Rows(self._features, table, order)

  def _placed_once(
    self, name: str, change: Any, make: Callable[[], np.ndarray]
  ) -> jax.Array:
    if name not in self._placed or self._placed[name][0] != change:
      self._placed[name] = change, self.trainer.place(make())
    return self._placed[name][1]

  def most_pieces(self, slots: int, length: int) -> int:
    return slots * self.buffer.most_pieces(length)


def saved_vocab(data: Mapping[str, Any]) -> tuple[int, ...]:
  """The drafter's `vocab` in a checkpoint's `Spot.data`; older ones are of all tokens."""
  return tuple(data.get("vocab", ()))


def _rows_of(x: jax.Array, index: np.ndarray) -> jax.Array:
  return jnp.where(index.reshape(-1, *[1] * (x.ndim - 1)) >= 0, x[index], 0)


def make_trainer(
  config: config_lib.ModelConfig,
  drafter: drafter_lib.DrafterConfig,
  mesh: jax.sharding.Mesh,
  *,
  optimizer: optax.GradientTransformation,
  longest: int,
  loss: loss_lib.Loss,
  options: Options,
) -> trainer_lib.Trainer:
  """ValueError: pieces repeat less than the loss unrolls."""
  loss = objective.options_of(drafter, loss)
  if options.row_tokens < longest and options.context_tokens < loss.steps:
    raise ValueError(
      f"context_tokens ({options.context_tokens}) must be at least the drafting steps of "
      f"the loss ({loss.steps}): the first tokens of a piece have no earlier steps"
    )
  return trainer_lib.Trainer(
    config=config,
    drafter=drafter,
    mesh=mesh,
    loss=loss,
    optimizer=optimizer,
    longest=longest,
    per_update=options.micro_batches_per_update,
    average=options.average,
  )
