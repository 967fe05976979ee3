"""How long the drafter trains: as long as that saves more time than it takes.

Training costs time and saves time in the following rollouts. After a rollout three things
are known: how agreement with the target rose with updates, the time of an update, and the
time of the rollout's chunks as a function of agreement. From these it follows whether more
training pays off within the next rollouts. After a rollout all devices wait for training: a
second costs a second. In idle slices it costs what it slows the decoding slices down, a
fraction of that.

The curve: agreement q is 1 - TV, the total variation between the predictions of drafter and
target. No coupling accepts more drafts, and the one used here accepts hardly fewer. It is
measured on rows at their first use, since a drafter drafts for responses it has not seen.
-log(1 - q) grows about linearly with the logarithm of the updates, so returns diminish. The
slope is fitted to observations and a prior, so a new drafter trains before anything is
known. Training stops when it no longer pays off, until acceptance has dropped since,
or for a trial after a while.
"""

from collections.abc import Mapping, Sequence
import copy
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_AHEAD = 50  # rollouts within which training must pay off
_IDLE_PRICE = 0.1  # seconds lost by rollouts per second of training in idle slices
_SLOPE, _WEIGHT = 0.3, 1.0  # prior of the slope, and its weight in squared e-folds
_TRY = 0.25  # smallest share of the most that is trained after a rollout
_REMEMBERED = 100  # points that the slope is fitted to
_FALLEN = 0.95  # relative acceptance, below which the policy has moved on
_AGAIN = 20  # rollouts after which stopped training is tried again
_FEW = 64  # drafts, below which an acceptance rate is too uncertain
_LATE = 5  # recent rollouts, of which means are taken
# Most passes over the rows after a rollout: by more a drafter learns these by heart, which
# is no progress on new responses, as the curve assumes.
_PASSES = 4
# Updates of the flat start of a curve, and the agreement below which it is still flat:
# training is not weighed before.
_FLAT, _NEW = 400, 0.5


class Costs(NamedTuple):
  """Seconds of a rollout's chunks that had the same arms."""

  without_s: float  # without the drafter: as decoded, if it drafted nothing
  plain_s: float  # in plain steps
  # (depth, step time relative to plain) of each arm of the drafter
  arms: Sequence[Sequence[float]]

  def seconds(self, q: float) -> float:
    ratios = [cost / sum(q**k for k in range(int(depth) + 1)) for depth, cost in self.arms]
    return min(self.without_s, self.plain_s * min(ratios))


class Wanted(NamedTuple):
  """Training after a rollout; it ends with the first of the two."""

  seconds: float
  updates: float


class Progress(NamedTuple):
  updates: int
  on_new: int  # the first ones, on rows at their first use
  agreement: float | None  # 1 - TV on these, mean of drafting steps; None: no such rows


class Investment:
  """Decides how long a drafter trains: after a rollout, at most `share` of its time."""

  # Attributes that a checkpoint keeps.
  learnt = tuple(
    "points updates update_s idle costs accepted level rested "
    "in_idle_slices first invested_s saved_s".split()
  )

  def __init__(self, share: float):
    self._share = share
    self.in_idle_slices = True  # whether idle slices train
    self.points: list[list[float]] = []  # recent (log updates, -log(1 - q))
    self.updates = 0  # since the curve began
    self.update_s = 0.0  # seconds of one, after a rollout; 0: unknown
    # Of recent rollouts: updates and seconds of idle slices; costs of chunks.
    self.idle: list[list[float]] = []
    self.costs: list[list[Costs]] = []
    self.accepted: list[list[int]] = []  # recent first drafts: accepted and all
    self.level: float | None = None  # the largest share accepted since training stopped
    self.rested: int | None = None  # rollouts since then; None: training continues
    self.first: float | None = None  # -log(1 - q) of the first training
    self.invested_s = 0.0  # seconds of training after rollouts
    self.saved_s = 0.0  # estimate for all training
    self.begin_rollout()

  def begin_rollout(self) -> None:
    self._costs: dict[Any, Costs] = {}
    self._drafts = np.zeros(2, int)

  def observe(
    self,
    seen: selector_lib.Observation,
    arms: Sequence[selector_lib.Arm],
    step_s: selector_lib.StepSeconds,
  ) -> None:
    """Books a chunk, for which the selector could have chosen `arms`."""
    own = tuple(arm for arm in arms if strategy_lib.uses_drafter(arm))
    drafted = strategy_lib.uses_drafter(seen.strategy)
    if drafted and len(seen.accepted) > 1:
      self._drafts += [seen.accepted[1], seen.accepted[0]]
    if not own or not seen.passes or not seen.steps:
      return
    plain_step_s, plain_s = step_s(None), seen.seconds
    if seen.strategy is not None and plain_step_s:
      plain_s = seen.tokens / (seen.passes / seen.steps) * plain_step_s
    ratios = [step_s(arm) / plain_step_s if plain_step_s else 0.0 for arm in own]
    costs = [(arm.depth, ratio or 1.0) for arm, ratio in zip(own, ratios, strict=True)]
    before = self._costs.get((seen.bucket, own), Costs(0.0, 0.0, costs))
    without_s = before.without_s + (plain_s if drafted else seen.seconds)
    self._costs[seen.bucket, own] = Costs(without_s, before.plain_s + plain_s, costs)

  def end_rollout(
    self, rollout_s: float, progress: Progress, idle_s: float, updates_per_pass: float
  ) -> Wanted:
    """Books a rollout and idle slices' `progress`; returns what to train afterwards.

    `updates_per_pass` over the rows that are kept.
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
    most = _PASSES * updates_per_pass
    return Wanted(self._choose(rollout_s, most), most)

  def trained(self, progress: Progress, seconds: float) -> None:
    self.invested_s += seconds
    if progress.updates:
      self.update_s = seconds / progress.updates
    self._learn(progress)

  def _learn(self, progress: Progress) -> None:
    if progress.updates and progress.agreement is not None:
      at = self.updates + (min(progress.on_new, progress.updates) + 1) / 2
      point = [math.log(at), -math.log(1 - min(progress.agreement, 0.99))]
      self.points = [*self.points, point][-_REMEMBERED:]
      self.first = point[1] if self.first is None else self.first
    self.updates += progress.updates

  def _choose(self, rollout_s: float, most_updates: float) -> float:
    """Seconds to train now; also decides whether idle slices train in the next rollout."""
    if not any(self.costs):  # the drafter cannot draft there
      return 0.0
    most = self._share * rollout_s
    if self.rested is not None:
      return _TRY * most if self._resumes() else 0.0
    if not self.points or self._is_flat():
      return most
    updates, idle_s = np.mean(self.idle or [[0, 0.0]], axis=0)
    idle, idle_each = _IDLE_PRICE * idle_s, _IDLE_PRICE * idle_s / max(updates, 1e-9)
    each = self.update_s or idle_s / max(updates, 1e-9)
    most = min(most, most_updates * each) if each else most
    parts = (part * most for part in (1.0, 0.5, _TRY))
    seconds = next((part for part in parts if self._pays(part, each)), 0.0)
    if not (seconds or self._pays(idle, idle_each)):
      self.level, self.rested, self.in_idle_slices = self._accepted_share(), 0, False
    return seconds

  def _is_flat(self) -> bool:
    return self.updates < _FLAT and _share(self._curve()[1]) < _NEW

  def _resumes(self) -> bool:
    """Whether training that has stopped resumes after another rollout."""
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
    """Whether training that costs `seconds` in each of the next few rollouts pays off."""
    if not seconds or not update_s:
      return False
    (slope, now), updates = self._curve(), seconds / update_s

    def rollout_s(n):
      return self._seconds(_share(now + slope * math.log(n / self.updates)))

    total = []
    for count in (0, 1, 2, 4, 8, 16, 32):
      rollouts_s = [rollout_s(self.updates + i * updates) for i in range(count + 1)]
      later = (_AHEAD - count) * rollouts_s[-1]
      total.append(count * seconds + sum(rollouts_s[1:]) + later)
    return min(total) < total[0]

  def _curve(self) -> tuple[float, float]:
    """The slope of -log(1 - q) over the logarithm of updates, and its value now.

    The curve starts flat: points of few updates have less weight.
    """
    x, y = np.array(self.points).T
    weight = np.exp((x - math.log(self.updates)) / 2)
    mean_x, mean_y = np.average([x, y], axis=1, weights=weight)
    apart = x - mean_x
    slope = (weight * apart) @ y + _WEIGHT * _SLOPE
    slope = max(float(slope / ((weight * apart) @ apart + _WEIGHT)), 0.0)
    return slope, float(mean_y + slope * (math.log(self.updates) - mean_x))

  def _seconds(self, q: float) -> float:
    every = [Costs(*costs).seconds(q) for costs in itertools.chain(*self.costs)]
    return sum(every) / max(len(self.costs), 1)

  def _accepted_share(self) -> float | None:
    accepted, drafted = np.sum(self.accepted or [[0, 0]], axis=0)
    return float(accepted / drafted) if drafted else None

  def state(self) -> dict:
    return copy.deepcopy({name: getattr(self, name) for name in self.learnt})

  def restore(self, state: Mapping[str, Any]) -> None:
    for name in self.learnt:
      setattr(self, name, copy.deepcopy(state[name]))


def _share(y: float) -> float:
  """q of -log(1 - q)."""
  return 1 - math.exp(-y)
