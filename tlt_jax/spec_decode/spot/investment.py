"""How long the drafter trains: as long as that saves more time than it takes.

Training costs time, and what it teaches saves time in the rollouts that follow. At the end
of a rollout three things are known: how agreement with the target rose with updates, what
an update takes, and how long the rollout's chunks would take at another agreement. From
these follows whether more training pays within the next rollouts. After a rollout every
device waits for it: a second costs a second. In idle slices it costs what it takes from the
slices that decode, a fraction of that.

The curve: agreement q is 1 - TV, the total variation of what drafter and target predict.
No coupling accepts more drafts, and the one used here accepts hardly fewer. It is measured
on rows that are trained on for the first time, as drafts are on responses that the drafter
has not seen. -log(1 - q) grows about linearly with the logarithm of the updates, so that
further ones bring less and less. The slope is fitted to what was seen, together with a
first guess, so that a new drafter trains before anything is known of it. Once training pays
no longer it stops, until fewer drafts are accepted than at best since, as the policy moves
on, or for a try after a while.
"""

from collections.abc import Mapping, Sequence
import copy
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_AHEAD = 50  # rollouts within which training must have paid for itself
_IDLE_PRICE = 0.1  # seconds that rollouts lose per second of training in idle slices
_SLOPE, _WEIGHT = 0.3, 1.0  # first guess of the slope, and its weight in squared e-folds
_TRY = 0.25  # smallest part of the most that is trained after a rollout
_REMEMBERED = 100  # points that the slope is fitted to
_FALLEN = 0.95  # of the share of accepted drafts, below which the policy has moved on
_AGAIN = 20  # rollouts after which training that has stopped is tried again
_FEW = 64  # drafts that say too little of how often one is accepted
_LATE = 5  # rollouts that what another one takes, and brings, is the mean of
# Updates with which a curve begins flat, and agreement below which it is still to rise:
# of these updates none is weighed.
_FLAT, _NEW = 400, 0.5


class Costs(NamedTuple):
  """The seconds of a rollout's chunks in which the same arms were allowed."""

  without_s: float  # without the drafter, as they were decoded if it drafted nothing
  plain_s: float  # in plain steps
  # (depth, its steps' seconds over those of plain steps) of each arm that the drafter has
  arms: Sequence[Sequence[float]]

  def seconds(self, q: float) -> float:
    """The seconds that they take where drafts are accepted with probability q."""
    tokens = lambda depth: sum(q**k for k in range(int(depth) + 1))
    fastest = min(cost / tokens(depth) for depth, cost in self.arms)
    return min(self.without_s, self.plain_s * fastest)


class Progress(NamedTuple):
  """What training brought."""

  updates: int
  on_new: int  # the first ones, on rows that were not trained on before
  agreement: float | None  # 1 - TV on these, mean of drafting steps; None: there are none


class Investment:
  """The account of a drafter's training, and the choice of how long it goes on."""

  # What a checkpoint keeps.
  learnt = (
    *("points", "updates", "update_s", "idle", "costs", "accepted", "level", "rested"),
    *("in_idle_slices", "first", "invested_s", "saved_s"),
  )

  def __init__(self, share: float):
    """Knows nothing: idle slices train, and after rollouts the drafter does.

    Args:
      share: most time of training after a rollout, relative to the rollout's
    """
    self._share = share
    self.in_idle_slices = True  # whether idle slices train
    self.points: list[list[float]] = []  # (log updates, -log(1 - q)) of late trainings
    self.updates = 0  # since the curve began
    self.update_s = 0.0  # seconds of one, after a rollout; 0: unknown
    # Of late rollouts: updates of idle slices and the seconds of these; costs of chunks.
    self.idle: list[list[float]] = []
    self.costs: list[list[Costs]] = []
    self.accepted: list[list[int]] = []  # first drafts: accepted and all, of late rollouts
    self.level: float | None = None  # the largest share accepted since training stopped
    self.rested: int | None = None  # rollouts since then; None: it goes on
    self.first: float | None = None  # -log(1 - q) of the first training
    self.invested_s = 0.0  # seconds of training after rollouts
    self.saved_s = 0.0  # estimate of the seconds that all training has saved
    self.begin_rollout()

  def begin_rollout(self) -> None:
    """Begins the account of a rollout."""
    self._costs: dict[Any, Costs] = {}
    self._drafts = np.zeros(2, int)

  def observe(
    self,
    seen: selector_lib.Observation,
    arms: Sequence[selector_lib.Arm],
    step_s: selector_lib.StepSeconds,
  ) -> None:
    """Books a chunk.

    Args:
      seen: its account
      arms: that might have decoded it
      step_s: seconds of a step in its bucket, by arm
    """
    own = tuple(arm for arm in arms if strategy_lib.uses_drafter(arm))
    drafted = strategy_lib.uses_drafter(seen.strategy)
    if drafted and len(seen.accepted) > 1:
      self._drafts += [seen.accepted[1], seen.accepted[0]]
    if not own or not seen.passes or not seen.steps:
      return
    plain_step_s, plain_s = step_s(None), seen.seconds
    if seen.strategy is not None and plain_step_s:
      plain_s = seen.tokens / (seen.passes / seen.steps) * plain_step_s
    ratio = lambda arm: step_s(arm) / plain_step_s if plain_step_s else 0.0
    costs = [(arm.depth, ratio(arm) or 1.0) for arm in own]
    before = self._costs.get((seen.bucket, own), Costs(0.0, 0.0, costs))
    without_s = before.without_s + (plain_s if drafted else seen.seconds)
    together = Costs(without_s, before.plain_s + plain_s, costs)
    self._costs[seen.bucket, own] = together

  def end_rollout(
    self,
    rollout_s: float,
    progress: Progress,
    idle_s: float,
  ) -> float:
    """Books a rollout whose last token is drawn; returns the seconds to train after it.

    Args:
      rollout_s: that it took
      progress, idle_s: that idle slices made, and the seconds of these
    """
    self.costs = [*self.costs, list(self._costs.values())][-_LATE:]
    if self.in_idle_slices:
      self.idle = [*self.idle, [progress.updates, idle_s]][-_LATE:]
    self._learn(progress)
    if self._drafts[1] >= _FEW:
      self.accepted = [*self.accepted, self._drafts.tolist()][-_LATE:]
    if self.points:
      saved_s = self._seconds(_share(self.first)) - self._seconds(_share(self._curve()[1]))
      self.saved_s += max(saved_s, 0.0)
    return self._choose(rollout_s)

  def trained(self, progress: Progress, seconds: float) -> None:
    """Books training after a rollout, and the seconds that it took."""
    self.invested_s += seconds
    if progress.updates:
      self.update_s = seconds / progress.updates
    self._learn(progress)

  def _learn(self, progress: Progress) -> None:
    """Adds a point to the curve."""
    if progress.updates and progress.agreement is not None:
      at = self.updates + (min(progress.on_new, progress.updates) + 1) / 2
      point = [math.log(at), -math.log(1 - min(progress.agreement, 0.99))]
      self.points = [*self.points, point][-_REMEMBERED:]
      self.first = point[1] if self.first is None else self.first
    self.updates += progress.updates

  def _choose(self, rollout_s: float) -> float:
    """Seconds to train now; whether idle slices train in the next rollout is set."""
    if not any(self.costs):  # the drafter cannot draft there
      return 0.0
    most = self._share * rollout_s
    if self.rested is not None:
      return _TRY * most if self._goes_on() else 0.0
    if not self.points or self._begins():
      return most
    updates, idle_s = np.mean(self.idle or [[0, 0.0]], axis=0)
    idle, idle_each = _IDLE_PRICE * idle_s, _IDLE_PRICE * idle_s / max(updates, 1e-9)
    each = self.update_s or idle_s / max(updates, 1e-9)
    parts = (part * most for part in (1.0, 0.5, _TRY))
    seconds = next((part for part in parts if self._pays(part, each)), 0.0)
    if not (seconds or self._pays(idle, idle_each)):
      self.level, self.rested, self.in_idle_slices = self._accepted_share(), 0, False
    return seconds

  def _begins(self) -> bool:
    """Whether this is the flat beginning of the curve of a new drafter."""
    return self.updates < _FLAT and _share(self._curve()[1]) < _NEW

  def _goes_on(self) -> bool:
    """Whether training that has stopped goes on, as another rollout has passed."""
    self.rested += 1
    now = self._accepted_share()
    moved_on = self.level and now is not None and now < _FALLEN * self.level
    self.level = max(self.level or 0.0, now or 0.0) or None
    if moved_on:
      self.points, self.updates = [], 0  # another policy, another curve
    if moved_on or self.rested >= _AGAIN:
      self.rested, self.in_idle_slices = None, True
    return self.rested is None

  def _pays(self, seconds: float, update_s: float) -> bool:
    """Whether training pays that costs so much in each of the next few rollouts.

    Args:
      seconds, update_s: that it costs in a rollout, and per update
    """
    if not seconds or not update_s:
      return False
    (slope, now), updates = self._curve(), seconds / update_s
    at = lambda n: self._seconds(_share(now + slope * math.log(n / self.updates)))
    total = []
    for count in (0, 1, 2, 4, 8, 16, 32):
      rollouts_s = [at(self.updates + i * updates) for i in range(count + 1)]
      later = (_AHEAD - count) * rollouts_s[-1]
      total.append(count * seconds + sum(rollouts_s[1:]) + later)
    return min(total) < total[0]

  def _curve(self) -> tuple[float, float]:
    """The slope of -log(1 - q) over the logarithm of updates, and its value now.

    The curve begins flat: a point counts the less the fewer updates it was after.
    """
    x, y = np.array(self.points).T
    weight = np.exp((x - math.log(self.updates)) / 2)
    mean_x, mean_y = np.average([x, y], axis=1, weights=weight)
    apart = x - mean_x
    slope = (weight * apart) @ y + _WEIGHT * _SLOPE
    slope = max(float(slope / ((weight * apart) @ apart + _WEIGHT)), 0.0)
    return slope, float(mean_y + slope * (math.log(self.updates) - mean_x))

  def _seconds(self, q: float) -> float:
    """The seconds of a rollout, as the late ones, at another share of acceptance."""
    every = [Costs(*costs).seconds(q) for costs in itertools.chain(*self.costs)]
    return sum(every) / max(len(self.costs), 1)

  def _accepted_share(self) -> float | None:
    """Share of first drafts that were accepted in late rollouts; None: too few."""
    accepted, drafted = np.sum(self.accepted or [[0, 0]], axis=0)
    return float(accepted / drafted) if drafted else None

  def state(self) -> dict:
    """What it knows, for a checkpoint; JSON can hold it."""
    return copy.deepcopy({name: getattr(self, name) for name in self.learnt})

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from what `state` gave."""
    for name in self.learnt:
      setattr(self, name, copy.deepcopy(state[name]))


def _share(y: float) -> float:
  """q of -log(1 - q)."""
  return 1 - math.exp(-y)
