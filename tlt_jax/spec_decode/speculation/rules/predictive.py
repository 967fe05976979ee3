"""A rule that tries little: rates are predicted from step times and acceptance.

The rate of an arm is the tokens that a pass draws over the time of a step, and both are
known apart: a step takes as long whatever is accepted, so that its time can be measured
beforehand; and the chance that the k-th drafted token stands, given those before it, is
nearly the same at every live batch, so that every chunk of a chain teaches all chains of
its source. What a tree draws it has to show itself. (TLT tries every arm of every live
batch instead, see `epsilon_greedy`.)
"""

import numpy as np

from tlt_jax.spec_decode.speculation import arms as arms_lib
from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_ENOUGH = 3  # chunks of a tree, before what it draws is believed


class Predictive(arms_lib.Arms):
  """Chooses the arm of the best predicted rate.

  Whatever was learnt long ago, of a source, a depth or a tree, is forgotten once it is seen
  again: it is of another policy, or another drafter.

  An arm whose step time or acceptance is unknown is tried until it is known. One that is
  out of use in a bucket is predicted from what others teach, and from its time there, which
  may be wrong: it may be tried for what it loses against the best, as far as that stays
  within a share of all time. Plain decoding is tried sooner, where it has hardly run: so
  no strategy is preferred to it for long because of a single bad measurement.
  """

  wants_step_seconds = True
  learnt = (
    *("_stands", "_per_pass", "_last", "_unused", "_plain", "_seen"),
    *("_chunks", "_spent", "_lost"),
  )

  def __init__(self, steps, window: int = 16, regret: float = 0.01, margin: float = 0.03):
    """Knows nothing of the arms.

    Args:
      steps, window: see `arms.Arms`
      regret: share of the time that trying may cost
      margin: by how much another arm must be better than the last one
    """
    super().__init__(steps, window)
    self._regret, self._margin = regret, margin
    self._stands: dict[str, list[list[float]]] = {}  # by source: of drafts, per depth
    self._per_pass: dict[str, list[float]] = {}  # by tree
    self._last: dict[str, str] = {}  # arm by step
    self._unused: dict[str, int] = {}  # chunks of a bucket since an arm was chosen there
    self._plain: dict[str, int] = {}  # chunks of a bucket that were decoded plainly
    self._seen: dict[str, int] = {}  # the last chunk of a source, a depth of it, or a tree
    self._chunks = 0
    self._spent, self._lost = 0.0, 0.0  # seconds in all, and by trying

  def choose(self, live: int, step_s: selector.StepSeconds) -> selector.Arm:
    arms = self.arms(live)
    new = [a for a in arms if not (step_s(a) and self.tokens_per_pass(a))]
    if new:
      return new[0]
    rate = {arm: self.tokens_per_pass(arm) / step_s(arm) for arm in arms}
    best, step = max(arms, key=rate.get), str(self.step(live)[0])
    last = next((a for a in arms if strategy_lib.name(a) == self._last.get(step)), best)
    if rate[best] < (1 + self._margin) * rate[last]:
      best = last  # to switch is not free either
    self._last[step] = strategy_lib.name(best)
    return self._or_try(step_s.bucket, best, rate)

  def _or_try(self, bucket, best, rate: dict) -> selector.Arm:
    """The best, or an arm whose turn it is, if it costs little enough to try."""
    for arm in rate:
      key = _in_bucket(bucket, arm)
      self._unused[key] = 0 if arm == best else self._unused.get(key, 0) + 1
      loss = max(rate[best] / rate[arm] - 1, 0.0)  # in chunks: it takes longer to draw
      windows = 4 if arm is not None else min(1 + self._plain.get(key, 0), 4)
      if arm != best and self._unused[key] > windows * self._window * min(1 + loss, 10):
        lost = loss * self._spent / max(self._chunks, 1)
        if self._lost + lost <= self._regret * self._spent:
          self._lost += lost
          self._unused[key] = 0
          return arm
    return best

  def gain(self, live: int, arm: selector.Arm, step_s: selector.StepSeconds) -> float:
    """The predicted rate over that of plain decoding; 1 where nothing is known."""
    tokens, arm_s, plain_s = self.tokens_per_pass(arm), step_s(arm), step_s(None)
    return tokens * plain_s / arm_s if tokens and arm_s and plain_s else 1.0

  def tokens_per_pass(self, arm: selector.Arm) -> float | None:
    """The tokens that an arm is expected to draw; None if unknown.

    A draft deeper than any that was seen stands as often as the deepest of them.
    """
    if arm is None:
      return 1.0
    if arm.width > 1:
      own = self._per_pass.get(str(arm))
      return float(np.mean(own)) if own and len(own) >= _ENOUGH else None
    stands = [np.mean(x) for x in self._stands.get(arm.source, []) if x]
    if not stands:
      return None
    stands = (stands + [stands[-1]] * arm.depth)[: arm.depth]
    return 1.0 + float(np.sum(np.cumprod(stands)))

  def observe(self, seen: selector.Observation) -> None:
    if not seen.passes or not seen.steps or seen.seconds <= 0:
      return
    self._chunks, self._spent = self._chunks + 1, self._spent + seen.seconds
    arm = seen.strategy
    if arm is None:
      key = _in_bucket(seen.bucket, arm)
      self._plain[key] = self._plain.get(key, 0) + 1
      return
    what = str(arm) if arm.width > 1 else arm.source
    if self._was_long_ago(what):
      (self._per_pass if arm.width > 1 else self._stands).pop(what, None)
    if arm.width > 1:
      drawn = self._per_pass.setdefault(what, [])
      drawn.append(seen.tokens / seen.passes)
      del drawn[: -self._window]
      return
    stands = self._stands.setdefault(arm.source, [])
    for k in range(min(arm.depth, len(seen.accepted) - 1)):
      if len(stands) <= k:
        stands.append([])
      if seen.accepted[k]:
        if self._was_long_ago(f"{arm.source} {k}"):
          stands[k].clear()
        stands[k].append(seen.accepted[k + 1] / seen.accepted[k])
        del stands[k][: -self._window]

  def _was_long_ago(self, what: str) -> bool:
    """Whether something was last seen long ago; from now on, it was seen now."""
    last = self._seen.get(what, self._chunks)
    self._seen[what] = self._chunks
    return self._chunks - last > 2 * self._window


def _in_bucket(bucket, arm: selector.Arm) -> str:
  """A name of an arm in a bucket."""
  return f"{bucket} {strategy_lib.name(arm)}"


make = Predictive
