"""Stand-ins for a rollout's device side; they spend simulated time.

Scheduling and decisions stay with the objects of `spec_decode.rollout`.
"""

import dataclasses
import functools

import jax
import numpy as np

from tlt_jax import programs as pool_lib
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import batch as batch_lib
from tlt_jax.spec_decode.rollout import chunks as chunks_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation.sources import model as model_lib
from tlt_jax.spec_decode.spot import fused
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


class Timer:
  """The simulated time, in seconds."""

  def __init__(self):
    self.seconds = 0.0

  def now(self) -> float:
    return self.seconds

  def spend(self, seconds: float) -> None:
    self.seconds += seconds


class Programs:
  """Replaces `rollout.programs.Programs`: knows the shapes, runs only training."""

  def __init__(
    self,
    shapes: programs_lib.Shapes,
    costs: costs_lib.Costs,
    timer: Timer,
    row_tokens: int,
  ):
    self.shapes, self.costs, self.timer = shapes, costs, timer
    self.pool = pool_lib.Pool(shapes.options.budget)
    self.micro_batch_s = costs.micro_batch_s(row_tokens)

  def run(self, name: str, key: tuple, *args):
    """Trains on all slices, outside of a chunk, or exchanges."""
    del key
    if name == "exchange":
      self.timer.spend(self.costs.exchange_s(self.shapes.slices))
      return None, None
    if name != "train":
      raise ValueError(f"program {name!r} is not simulated")
    training = args[1]
    filled = training.rows.order[:, 0]
    self.timer.spend(int(training.most) * self.micro_batch_s)
    trained = np.where(filled > 0, training.most, 0)
    return trainer_lib.Trained(training.states, trained)


@dataclasses.dataclass(frozen=True)
class Trainer(trainer_lib.Trainer):
  """Has neither loss nor optimizer, and only counts what it trains."""

  def account(
    self, states: np.ndarray, micro_batches: np.ndarray
  ) -> trainer_lib.Account:
    """A state is just the micro-batches that wait for an update."""
    updates, waiting = np.divmod(states + micro_batches, self.per_update)
    return trainer_lib.Account(
      waiting, micro_batches, updates.astype(np.int32), 0, {"new_rows": 0}
    )


class Spot(spot_lib.Spot):
  """The drafter's training: a real buffer, no arrays."""

  def __init__(self, trainer: trainer_lib.Trainer, options: spot_lib.Options):
    """`trainer` has neither loss nor optimizer."""
    self.trainer, self.options = trainer, options
    self.row_tokens = spot_lib.row_tokens(trainer, options)
    self.buffer = spot_lib.make_buffer(trainer, options)
    self.investment = self._new_investment()
    self._features, self._states = None, np.zeros(len(self.buffer.rows))
    self._reset_counts()

  @property
  def params(self):
    return None

  def rows(self) -> rows_lib.Rows:
    return rows_lib.Rows(None, None, self.buffer.order())

  def exchange(self, program) -> None:
    program(None, None)
    self._states = np.full_like(self._states, self._states.mean())
    self._reset_counts()


class Batch(batch_lib.Batch):
  """The slots of a rollout, without arrays."""

  def follow(self, plan, params, tokens) -> None:
    running = self.running
    if plan.bucket != running.bucket:
      running.resize(plan.bucket)
    prompts, work = running.requests.prompts, [0] * self._shapes.slices
    for p in plan.prefills:
      work[p.slice] += len(prompts[p.prompt])
      running.hold(*p)
    self.programs.timer.spend(self.programs.costs.prefill_s(max(work)))
    for a in plan.admissions:
      running.share(a.slice, a.row, a.request)
      running.seat(a.slice, a.request)
    self.extend(tokens)

  def extend(self, tokens) -> None:
    self.running.pages.assign(self.running.owner, self.running.end(tokens))

  def store(self, rows, pieces, count) -> None:
    """Nothing to copy."""


class Drafter(model_lib.Model):
  """A drafter without weights, whose KV of new tokens takes time to compute."""

  def __init__(self, programs: Programs):
    self._programs = programs
    self.reset()

  def prepare(self, weights, slots, running) -> None:
    missing = [
      sum(max(self._lacking_from(r) - self._filled.get(r.request, 0), 0) for r in row if r)
      for row in running
    ]
    self._programs.timer.spend(self._programs.costs.fill_s(max(missing)))

  def _lacking_from(self, request) -> int:
    return max(len(request.tokens) - 1 - self._programs.shapes.room.longest, 0)

  def release(self, state, running) -> None:
    self._keep_filled(running)


def make_source(name: str, programs: Programs) -> source_lib.Source:
  """A source that drafts nothing; only a drafter's takes time."""
  is_drafter = name == strategy_lib.MODEL
  return Drafter(programs) if is_drafter else source_lib.Source(None)


class Chunks:
  """Replaces `rollout.chunks.Chunks`: counts a chunk's tokens, and spends its time.

  The loops of `decoding.decode` and `speculation.speculate`, without tokens; response i
  gets `lengths[i]`.
  """

  def __init__(
    self,
    programs: Programs,
    acceptance: acceptance_lib.Acceptance | None,
    lengths: np.ndarray,
    spot: Spot | None,
  ):
    self._programs, self._acceptance, self._lengths = programs, acceptance, lengths
    self._spot = spot
    self._quota = jax.jit(jax.vmap(fused.quota, in_axes=(_TRAINING, _EMITTED)))

  def run(self, batch, mode, draft_state, limits, training) -> chunks_lib.ChunkResult:
    running, programs = batch.running, self._programs
    owner = running.owner
    left = np.where(owner < 0, 0, self._lengths[owner] - running.drawn[owner])
    seen = np.where(owner < 0, 0, running.position[owner] + 1)
    if mode.arm is None:
      count = np.minimum(left, int(limits.tokens))
      steps, accepted = count.max(1), None
    else:
      start = np.where(owner < 0, 0, running.drawn[owner])
      count, steps, accepted = self._speculate(owner, left, start, mode.arm, limits)
    mean_seen = (seen + count / 2).sum(1)  # while the chunk runs
    step_s = functools.partial(programs.costs.step_s, running.bucket, mode.arm)
    shared_s = np.array([step_s(s) for s in mean_seen])  # while other slices decode
    busy_s, last = steps * shared_s, int(np.argmax(steps))
    if alone := steps[last] - np.delete(steps, last).max(initial=0):
      busy_s[last] += alone * (step_s(mean_seen[last], alone=True) - shared_s[last])
    emitted = slots_lib.Emitted(
      tokens=np.broadcast_to(np.int32(0), (owner.size, max(int(count.max()), 1))),
      logp=None,
      logp_filtered=None,
      count=count.reshape(-1).astype(np.int32),
      remaining=(left - count).reshape(-1).astype(np.int32),
      steps=steps.astype(np.int32),
      accepted=accepted,
    )
    slice_s, trained = busy_s, None
    if training is not None:
      mine = self._micro_batches(training, emitted)
      slice_s = busy_s + mine * programs.micro_batch_s
      trained = self._spot.trainer.account(training.states, mine)
    programs.timer.spend(programs.costs.host_s + float(slice_s.max()))
    return chunks_lib.ChunkResult(emitted, None, trained, slice_s)

  def _speculate(self, owner, left, start, arm, limits):
    """Tokens drawn i32[slices batch], passes i32[slices], Emitted.accepted."""
    slices, most = len(owner), self._programs.shapes.room.longest
    steps, accepted = np.zeros(slices, np.int64), np.zeros((slices, most), np.int64)
    where = np.nonzero(left)
    s, left_of = where[0], left[where]
    ahead = self._acceptance.ahead(owner[where], start[where], int(limits.tokens), arm)
    drawn, row = np.zeros_like(left_of), np.arange(len(s))
    passes = []
    while True:
      live = drawn < left_of
      fullest = np.zeros(slices, np.int64)
      np.maximum.at(fullest, s[live], drawn[live])
      room = fullest + int(limits.depth) + 1 <= int(limits.tokens)
      runs = np.zeros(slices, bool)
      runs[s[live]] = True
      runs &= room & (steps < int(limits.steps))
      at = row[live & runs[s]]
      if not len(at):
        break
      drew = np.minimum(ahead[at, drawn[at]] + 1, left_of[at] - drawn[at])
      drawn[at] += drew
      steps += runs
      passes.append((s[at], drew))
    of, drew = (np.concatenate(x) for x in zip(*passes, strict=True))
    for a in range(most):
      accepted[:, a] = np.bincount(of[drew > a], minlength=slices)
    count = np.zeros_like(left)
    count[where] = drawn
    return count, steps, accepted

  def _micro_batches(self, training, emitted) -> np.ndarray:
    """The micro-batches that each slice trains, i32[slices]."""
    slices = self._programs.shapes.slices
    view = emitted.replace(
      tokens=None,
      count=None,
      accepted=None,
      remaining=emitted.remaining.reshape(slices, -1),
      steps=emitted.steps[:, None],
    )
    return np.asarray(self._quota(training, view))


# The axis of the slices in the arguments of `fused.quota`.
_TRAINING = trainer_lib.Training(
  states=None,
  rows=rows_lib.Rows(None, None, 0),
  most=None,
  quota_if_idle_midway=None,
  expected_steps=None,
)
_EMITTED = slots_lib.Emitted(
  tokens=None, logp=None, logp_filtered=None, count=None, remaining=0, steps=0
)
