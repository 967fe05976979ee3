"""A rule that explores little: rates are predicted from step times and acceptance.

The rate of an arm is the tokens of a pass over the time of a step, learnt separately. Step
times do not depend on acceptance and can be measured beforehand. The probability that the
k-th drafted token is accepted, given those before it, is nearly the same at every live
batch, so every chunk of a chain informs all chains of its source; a tree's yield has to be
observed.
"""

import math

import numpy as np

from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_FEW = 16  # passes, below which an acceptance rate is too uncertain
_PATIENCE = 5.0  # chunks of time that may be lost before a former best arm is tried again
_LEARNT, _FORGOTTEN = 1 / 16, 0.2  # update rates of an arm's lead: per chunk, per try
# Chunks after which an arm that was never good is tried again: if its drafts may be
# accepted by now; and if only the step times of the bucket may have changed.
_SOON, _SELDOM = 8, 64
# Initial allowance of the budgets, in chunks. Arms that were never good have none: a
# drafter that begins at random would have spent it before it has learnt.
_DOUBTED, _AGAIN = 3.0, 9.0


class Predictive(selector.Arms):
  """Chooses the arm of the best predicted rate.

  An arm of unknown step time or acceptance is tried until both are known. Another arm is
  tried for one chunk, between two of the best so that their times can be compared, when it
  may have become better:

  - Steps have become so much slower since it was compared that it would be the best if
    the best arm and not the machine were the cause.
  - It was the best not long ago: the better it was, the sooner.
  - It has not run for long, and the policy or the drafter has changed since.

  Trials are limited to a share of all time, those of the last kind for each source of
  drafts: what a bad drafter wastes does not keep n-grams from being tried.
  """

  wants_step_seconds = True
  learnt = tuple("_shown _last _before _idle _was _again _chunks _spent _paid".split())

  def __init__(self, steps, window: int = 16, regret: float = 0.0075, margin: float = 0.03):
    """`regret`: share of time for trials of a kind; `margin`: gain required to switch."""
    super().__init__(steps, window)
    self._regret, self._margin = regret, margin
    # By depth of a source, or by tree, for each recent chunk: tokens drawn there, passes
    # that could draw one, live requests, and the number of the chunk.
    self._shown: dict[str, list[list[int]]] = {}
    self._last: dict[str, str] = {}  # arm by step
    self._before: dict[str, str] = {}  # arm that ran last in a bucket
    self._idle: dict[str, int] = {}  # chunks of a bucket since an arm ran there
    self._was: dict[str, float] = {}  # by bucket and arm: its lead over all others
    self._again = -_SOON  # chunk of the last trial of a former best arm
    self._chunks = 0
    self._spent = 0.0  # total seconds
    self._paid: dict[str, float] = {}  # seconds of trials, by budget
    # The trial of this chunk: arm, budget, and the rate of the best arm.
    self._trial: tuple[selector.Arm, str, float] | None = None

  def choose(self, live: int, step_s: selector.StepSeconds) -> selector.Arm:
    self._trial = None
    arms = self.ready(live, step_s)
    new = [a for a in arms if not (step_s(a) and self.tokens_per_pass(a))]
    if new:
      return new[0]
    rate = {arm: self.tokens_per_pass(arm) / step_s(arm) for arm in arms}
    best, step = max(arms, key=rate.get), str(self.step(live)[0])
    last = next((a for a in arms if strategy_lib.name(a) == self._last.get(step)), best)
    if rate[best] < (1 + self._margin) * rate[last]:
      best = last  # switching is not free
    self._last[step] = strategy_lib.name(best)
    others = sorted((a for a in arms if a != best), key=rate.get, reverse=True)
    loss = {arm: max(rate[best] / rate[arm] - 1, 0.0) for arm in others}  # in chunks
    if not loss:
      return best
    self._remember(step_s.bucket, best, loss)
    return self._or_try(step_s, best, loss)

  def _remember(self, bucket, best: selector.Arm, loss: dict) -> None:
    key, now = _in_bucket(bucket, best), min([1.0, *loss.values()])
    self._was[key] = (1 - _LEARNT) * self._was.get(key, 0.0) + _LEARNT * now

  def _or_try(
    self, step_s: selector.StepSeconds, best: selector.Arm, loss: dict
  ) -> selector.Arm:
    self._trial = None
    if self._before.get(str(step_s.bucket)) != strategy_lib.name(best):
      return best
    rate = self.tokens_per_pass(best) / step_s(best)
    for arm in loss:
      why = self._why(arm, loss[arm], step_s, rate)
      if why is not None:
        self._trial = arm, why, rate
        return arm
    return best

  def _why(self, arm, loss: float, step_s: selector.StepSeconds, rate: float) -> str | None:
    """The budget for a trial of the arm now, which costs `loss` chunks; None: no trial."""
    key = _in_bucket(step_s.bucket, arm)
    idle = self._idle.get(key, 0)
    # Drafting only adds to a step.
    plain_s = 0.0 if arm is None else step_s(None)
    least_s = max(step_s(arm) * math.exp(-step_s.doubt(arm)), plain_s)
    fastest = self.tokens_per_pass(arm) / least_s
    if fastest > rate and self._can_pay("doubted", _DOUBTED):
      return "doubted"
    was = self._was.get(key, 0.0)
    rested = self._chunks - self._again > _SOON  # there may be many buckets
    if idle * was > _PATIENCE and rested and self._can_pay("again", _AGAIN):
      self._was[key], self._again = (1 - _FORGOTTEN) * was, self._chunks
      return "again"
    hope = self.tokens_per_pass(arm, patience=_SOON) / step_s(arm)
    long_ago = idle > _SELDOM * (1 + loss) or hope > (1 + self._margin) * rate
    return _what(arm) if long_ago and self._can_pay(_what(arm)) else None

  def _can_pay(self, budget: str, most: float = 0.0) -> bool:
    mean_s = self._spent / max(self._chunks, 1)
    return self._paid.get(budget, 0.0) <= self._regret * self._spent + most * mean_s

  def gain(self, live: int, arm: selector.Arm, step_s: selector.StepSeconds) -> float:
    tokens, arm_s, plain_s = self.tokens_per_pass(arm), step_s(arm), step_s(None)
    return tokens * plain_s / arm_s if tokens and arm_s and plain_s else 1.0

  def tokens_per_pass(self, arm: selector.Arm, patience: float = math.inf) -> float | None:
    """The expected yield of an arm; None if unknown.

    Drafts not observed for more than `patience` chunks count as always accepted.
    """
    if arm is None:
      return 1.0
    if arm.width > 1:
      drawn = self._share(_what(arm))
      return drawn if self._age(_what(arm)) <= patience else arm.depth + 1.0
    rates = []
    for k in range(arm.depth):
      known = self._share(_at(arm, k))
      if known is None and not rates:
        return None
      if self._age(_at(arm, k)) > patience:
        known = 1.0
      # Deeper drafts than any observed often enough are accepted like the deepest of these.
      rates.append(rates[-1] if known is None else known)
    return 1.0 + float(np.sum(np.cumprod(rates)))

  def _share(self, what: str) -> float | None:
    """Tokens per pass that could yield one there; None: too few passes.

    Observations of half a window ago count half. A step counts the same with few live
    requests as with many, since it takes as long.
    """
    shown = np.array(self._shown.get(what) or [[0, 0, 1, 0]])
    drawn, passes, live, chunk = shown.T
    if passes.sum() < _FEW:
      return None
    weights = 0.5 ** (2 * (chunk[-1] - chunk) / self._window) / live
    return float(weights @ drawn / (weights @ passes))

  def observe(self, seen: selector.Observation) -> None:
    if not seen.passes or not seen.steps or seen.seconds <= 0:
      return
    self._chunks, self._spent = self._chunks + 1, self._spent + seen.seconds
    self._pay(seen)
    arm, what = seen.strategy, _what(seen.strategy)
    self._before[str(seen.bucket)] = strategy_lib.name(arm)
    for other in self.arms(seen.live):
      key = _in_bucket(seen.bucket, other)
      self._idle[key] = 0 if other == arm else self._idle.get(key, 0) + 1
    if arm is None:
      return
    if arm.width > 1:
      self._learn(what, seen.tokens, seen.passes, seen.live)
      return
    for k in range(min(arm.depth, len(seen.accepted) - 1)):
      self._learn(_at(arm, k), seen.accepted[k + 1], seen.accepted[k], seen.live)

  def _pay(self, seen: selector.Observation) -> None:
    arm, budget, rate = self._trial or (None, "", 0.0)
    self._trial = None
    if rate and arm == seen.strategy:
      lost = seen.seconds - seen.tokens / (seen.passes / seen.steps) / rate
      self._paid[budget] = self._paid.get(budget, 0.0) + max(lost, 0.0)

  def _learn(self, what: str, drawn: int, passes: int, live: int) -> None:
    if passes:
      known = self._shown.get(what, [])
      late = [seen for seen in known if self._chunks - seen[-1] < self._window]
      kept = late if sum(seen[1] for seen in late) + passes >= _FEW else known
      self._shown[what] = [*kept, [int(drawn), int(passes), live, self._chunks]]

  def _age(self, what: str) -> int:
    known = self._shown.get(what)
    return self._chunks - known[-1][-1] if known else 0


def _what(arm: selector.Arm) -> str:
  """What acceptance is learnt for: chains share their source's, a tree has its own."""
  return strategy_lib.name(arm) if arm is None or arm.width > 1 else arm.source


def _at(arm: strategy_lib.Strategy, k: int) -> str:
  return f"{arm.source} {k}"


def _in_bucket(bucket, arm: selector.Arm) -> str:
  return f"{bucket} {strategy_lib.name(arm)}"


make = Predictive
