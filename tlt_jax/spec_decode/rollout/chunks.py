"""Chunks: their programs, how far one goes, the call, and the result."""

from collections.abc import Callable
import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import batch as batch_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.spot import fused
from tlt_jax.spec_decode.spot import trainer as trainer_lib


class ChunkMode(NamedTuple):
  """How a chunk decodes."""

  arm: clock_lib.Arm  # the strategy; None: plain decoding
  source: source_lib.Source | None  # of its drafts
  weights: chunk_lib.Weights  # that are read

  @property
  def name(self) -> str:
    """The name of the program, without training."""
    if self.source is None:
      return "chunk"
    return f"speculate_{self.source.program(self.arm)}"


class ChunkResult(NamedTuple):
  """The result of a chunk."""

  emitted: slots_lib.Emitted  # on the host
  draft_state: Any
  trained: trainer_lib.Account | None
  slice_s: np.ndarray  # f[slices]  seconds until each had decoded, and trained
  stop: bool = False  # whether the job was asked to stop meanwhile

  @property
  def seconds(self) -> float:
    """Until the last slice was done."""
    return float(self.slice_s.max())

  @property
  def steps(self) -> int:
    """Iterations of the busiest slice."""
    return int(self.emitted.steps.max())

  @property
  def tokens(self) -> int:
    """Tokens that all slots drew."""
    return int(self.emitted.count.sum())

  @property
  def accepted(self) -> list[int]:
    """Passes that drew more than 0, 1, ... tokens; none without speculation."""
    by_slice = self.emitted.accepted
    return [] if by_slice is None else by_slice.sum(0).tolist()

  @property
  def passes(self) -> int:
    """Passes of the target over a live request; each gives a token, or more if drafted."""
    return self.accepted[0] if self.accepted else self.tokens


def limits(
  schedule: schedule_lib.Schedule, arm: clock_lib.Arm, exact_steps: bool
) -> tuple[chunk_lib.Limits, int]:
  """How far the next chunk goes, and the steps that this is at most.

  Args:
    exact_steps: see `Schedule.steps_within`
  """
  tokens = np.int32(schedule.tokens)
  if arm is None:
    return chunk_lib.Limits(tokens), schedule.tokens
  bucket = schedule.running.bucket
  within = functools.partial(schedule.steps_within, bucket, arm, exact_steps)
  steps = schedule.decide("steps", within)
  return chunk_lib.Limits(tokens, np.int32(steps), np.int32(arm.depth)), steps


class Chunks:
  """Makes the programs of chunks, one per mode and bucket, and runs them."""

  def __init__(
    self,
    shapes: programs_lib.Shapes,
    pool: pool_lib.Pool,
    trainer: trainer_lib.Trainer | None,
    *,
    tokens: int,
  ):
    """`tokens` is the most that a slot may draw in a chunk."""
    self._shapes, self._pool, self._trainer = shapes, pool, trainer
    self._tokens = tokens
    self._jitted: dict[tuple[str, bool], Callable] = {}

  def program(
    self,
    key: tuple,
    mode: ChunkMode,
    slots: slots_lib.Slots,
    draft_state: Any,
    limits: chunk_lib.Limits,
    training: trainer_lib.Training | None,
  ) -> Callable[[], chunk_lib.Done]:
    """A compiled chunk, with its arguments; see `decoding.chunk`."""
    name, trains = mode.name, training is not None
    if (name, trains) not in self._jitted:
      self._jitted[name, trains] = self._make(mode, trains)
    jitted = self._jitted[name, trains]
    args = (mode.weights, slots, draft_state, limits, training)
    name = f"{name}+training" if trains else name
    program = self._pool.get(name, key, jitted, *args)
    return lambda: program(*args)

  def _make(self, mode: ChunkMode, trains: bool) -> Callable:
    s, kernels = self._shapes, self._shapes.options.kernels
    slots = slots_lib.slots_shardings(s.mesh, s.config, s.layout, kernels)
    if mode.source is None:
      run = decode.decode(s.config, self._tokens, s.layout)
      shardings = chunk_lib.Done(slots, None, None)
    else:
      run = speculate.decode(mode.source, mode.arm, self._tokens)
      shardings = chunk_lib.Done(slots, mode.source.state_shardings, None)
    if trains:
      return fused.make(self._trainer, run, shardings, kernels)
    run = chunk_lib.without_training(run)
    return chunk_lib.make(s.mesh, run, shardings, kernels=kernels)

  def run(
    self,
    batch: batch_lib.Batch,
    mode: ChunkMode,
    draft_state: Any,
    limits: chunk_lib.Limits,
    training: trainer_lib.Training | None,
  ) -> ChunkResult:
    """Runs a chunk on a batch, and replaces the slots of the batch.

    Args:
      draft_state: of the source of drafts; it is donated
      training: for slices that run dry; None: the program does not train
    """
    program = self.program(batch.key, mode, batch.slots, draft_state, limits, training)
    jax.block_until_ready((batch.slots, draft_state, mode.weights.draft))
    began = time.perf_counter()  # compiling, and what was queued before, is not timed
    done = program()
    batch.slots = done.slots
    slice_s, stop = processes.agree(slices.ready_s(done.emitted.steps, began))
    trained_totals = done.training and done.training.totals
    emitted, totals = processes.gather((done.emitted, trained_totals))
    trained = done.training and self._trainer.account(done.training.states, totals)
    return ChunkResult(emitted, done.draft_state, trained, slice_s, stop)
