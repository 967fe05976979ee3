"""Devices whose work only takes simulated time; scheduling and decisions are real."""

import dataclasses
import functools

import jax
import numpy as np

from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
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

  def wait_until(self, seconds: float) -> None:
    self.seconds = max(self.seconds, seconds)


@dataclasses.dataclass(frozen=True)
class Trainer(trainer_lib.Trainer):
  """Only counts what it trains: a state is the micro-batches that wait for an update."""

  def init_states(self, params: None) -> tuple[np.ndarray, None]:
    return np.zeros(self.mesh.size), None

  def init_features(self, abstract: jax.ShapeDtypeStruct) -> None:
    """None are kept."""

  def place(self, x: np.ndarray) -> np.ndarray:
    return x

  def account(self, states: np.ndarray, micro_batches: np.ndarray) -> trainer_lib.Account:
    updates, waiting = np.divmod(states + micro_batches, self.per_update)
    return trainer_lib.Account(
      waiting, micro_batches, updates.astype(np.int32), 0, {"new_rows": 0}
    )


class Counts(samples_lib.Samples):
  """Samples without tokens: only their numbers."""

  def extend(self, i, start, emitted, row) -> None:
    self.length[i] = start + int(emitted.count[row])


class Devices:
  """The `Backend` of simulated rollouts.

  The loops of `decoding.decode` and `speculation.speculate`, without tokens; response i
  of the next rollout gets `lengths[i]`.
  """

  def __init__(
    self,
    shapes: backend_lib.Shapes,
    costs: costs_lib.Costs,
    timer: Timer,
    acceptance: acceptance_lib.Acceptance | None,
    trainer: Trainer | None,
    row_tokens: int,
  ):
    """Spends the costs of what it is asked to do; `row_tokens`: of a micro-batch."""
    self.shapes, self._costs, self._timer = shapes, costs, timer
    self._acceptance, self._trainer = acceptance, trainer
    self.lengths = np.zeros(0, np.int32)  # i32[B]  tokens of each response
    self._micro_batch_s = costs.micro_batch_s(row_tokens)
    self._quota = jax.jit(jax.vmap(fused.quota, in_axes=(_TRAINING, _EMITTED)))
    self._running: running_lib.Running | None = None
    self._filled: dict[int, int] = {}  # tokens in the drafter's KV, of each request

  def samples(self, requests: requests_lib.Requests) -> samples_lib.Samples:
    most = self.shapes.room.longest if self._acceptance else None
    samples = vars(samples_lib.empty(requests, most=most))
    # Read, for a request's last token, and never written.
    tokens = np.broadcast_to(np.int32(0), samples["tokens"].shape)
    nothing = np.zeros(0, np.float32)
    return Counts(**samples | {"tokens": tokens, "logp": nothing, "logp_filtered": nothing})

  def begin(self, running: running_lib.Running) -> None:
    self._running = running

  def free(self) -> None:
    self._filled = {}

  def weights(self, target: None, draft: None) -> chunk_lib.Weights:
    return chunk_lib.Weights(target, draft)

  def compute(self, weights: chunk_lib.Weights, work: running_lib.Work) -> None:
    rows, block = self.shapes.options.prefill_rows, self.shapes.prefill_block
    calls = sum(1 for _ in work.calls(rows, block))
    self._timer.spend(calls * self._costs.prefill_s(rows * block))

  def place(self, moved: bool) -> None:
    """Nothing to place."""

  def finished(self, prompt: np.ndarray, response: np.ndarray) -> None:
    """Nothing to learn from."""

  def features_of(self, request: int) -> np.ndarray:
    raise ValueError("features are not simulated")

  def store(self, spot: spot_lib.Spot, pieces: np.ndarray, count: np.ndarray) -> None:
    """Nothing to copy."""

  def train(self, params: None, training: trainer_lib.Training) -> trainer_lib.Account:
    self._timer.spend(int(training.most) * self._micro_batch_s)
    trained = np.where(training.rows.order[:, 0] > 0, training.most, 0)
    return self._trainer.account(training.states, trained)

  def exchange(self, states: np.ndarray, updates: np.ndarray) -> tuple[np.ndarray, None]:
    self._timer.spend(self._costs.exchange_s(self.shapes.slices))
    return np.full_like(states, states.mean()), None

  def peak_bytes(self) -> int:
    return 0

  def state(self) -> dict:
    return {}

  def restore(self, state: dict) -> None:
    """Nothing was learnt."""

  def time_step(
    self, weights, bucket, arm, stops, training, slices=None, length=None
  ) -> float:
    seen = bucket * (length or self.shapes.options.max_length // 4)
    return self._costs.step_s(bucket, arm, seen)

  def run(
    self,
    weights: chunk_lib.Weights,
    arm: clock_lib.Arm,
    limits: chunk_lib.Limits,
    training: trainer_lib.Training | None,
  ) -> backend_lib.ChunkResult:
    running, owner = self._running, self._running.owner
    drafts = arm is not None and arm.source == strategy_lib.MODEL
    if drafts:
      self._fill()
    left = np.where(owner < 0, 0, self.lengths[owner] - running.drawn[owner])
    seen = np.where(owner < 0, 0, running.position[owner] + 1)
    if arm is None:
      count = np.minimum(left, int(limits.tokens))
      steps, accepted = count.max(1), None
    else:
      start = np.where(owner < 0, 0, running.drawn[owner])
      count, steps, accepted = self._speculate(owner, left, start, arm, limits)
    mean_seen = (seen + count / 2).sum(1)  # while the chunk runs
    step_s = functools.partial(self._costs.step_s, running.bucket, arm)
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
      slice_s = busy_s + mine * self._micro_batch_s
      trained = self._trainer.account(training.states, mine)
    if drafts:
      known = running.known_after(emitted)
      self._filled = {i: self.shapes.room.filled(n) for i, n in known.items()}
    self._timer.spend(self._costs.host_s + float(slice_s.max()))
    return backend_lib.ChunkResult(emitted, trained, slice_s)

  def _fill(self) -> None:
    """Computes the drafter's KV of tokens that were drawn without it."""
    running = self._running
    known = running.position + 1

    def missing(i: int) -> int:
      return max(self.shapes.room.filled(int(known[i])) - self._filled.get(i, 0), 0)

    tokens = [sum(missing(i) for i in row if i >= 0) for row in running.owner.tolist()]
    self._timer.spend(self._costs.fill_s(max(tokens)))

  def _speculate(self, owner, left, start, arm, limits):
    """Tokens drawn i32[slices batch], passes i32[slices], Emitted.accepted."""
    slices, most = len(owner), self.shapes.room.longest
    steps, accepted = np.zeros(slices, np.int64), np.zeros((slices, most), np.int64)
    where = np.nonzero(left)
    s, left_of = where[0], left[where]
    request = self._running.requests.request[owner[where]]
    ahead = self._acceptance.ahead(request, start[where], int(limits.tokens), arm)
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
    slices = self.shapes.slices
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
