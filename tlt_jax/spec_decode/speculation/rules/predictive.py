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

_ENOUGH = 3  # chunks of a source or tree, before what it draws is believed
_FEW = 16  # passes that say too little of how often a draft stands
_OLD = 2  # windows after which what is known is believed no longer


class Predictive(arms_lib.Arms):
  """Chooses the arm of the best predicted rate.

  An arm whose step time or acceptance is unknown is tried until it is known. Later it may
  be tried for what it loses against the best, as far as that stays within a share of all
  time: where it has been out of use in a bucket, as its time there may be wrong; and where
  what is known of its acceptance is old. That is of another policy or another drafter, and
  is forgotten once the arm runs again. Plain decoding is tried sooner, where it has hardly
  run: so no strategy is preferred to it for long because of a single bad measurement.
  """

  wants_step_seconds = True
  learnt = (
    *("_drawn", "_last", "_unused", "_plain", "_tried", "_seen"),
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
    # By depth of a source, or by tree, of late chunks: tokens that were drawn there, and
    # the passes that could draw one.
    self._drawn: dict[str, list[list[int]]] = {}
    self._last: dict[str, str] = {}  # arm by step
    self._unused: dict[str, int] = {}  # chunks of a bucket since an arm was chosen there
    self._plain: dict[str, int] = {}  # chunks of a bucket that were decoded plainly
    self._tried: dict[str, int] = {}  # chunks of a source or tree, from the start
    self._seen: dict[str, int] = {}  # the last chunk of a depth of a source, or of a tree
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
      patience = self._window * min(1 + loss, 10)
      is_old = arm is not None and self._age(_deepest(arm)) > _OLD * patience
      if arm != best and (is_old or self._unused[key] > windows * patience):
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

    A draft deeper than any that was seen often stands as often as the deepest of them. The
    first chunks say little: n-grams have nothing to look up in them.
    """
    if arm is None:
      return 1.0
    if self._tried.get(_what(arm), 0) < _ENOUGH:
      return None
    if arm.width > 1:
      return self._share(_what(arm))
    stands = []
    for k in range(arm.depth):
      known = self._share(_at(arm, k))
      if known is None and not stands:
        return None
      stands.append(stands[-1] if known is None else known)
    return 1.0 + float(np.sum(np.cumprod(stands)))

  def _share(self, what: str) -> float | None:
    """Tokens per pass that could draw one there; None: these were few."""
    drawn, passes = np.sum(self._drawn.get(what) or [[0, 0]], axis=0)
    return float(drawn / passes) if passes >= _FEW else None

  def observe(self, seen: selector.Observation) -> None:
    if not seen.passes or not seen.steps or seen.seconds <= 0:
      return
    self._chunks, self._spent = self._chunks + 1, self._spent + seen.seconds
    arm = seen.strategy
    if arm is None:
      key = _in_bucket(seen.bucket, arm)
      self._plain[key] = self._plain.get(key, 0) + 1
      return
    what = _what(arm)
    self._tried[what] = min(self._tried.get(what, 0) + 1, _ENOUGH)
    if arm.width > 1:
      self._learn(what, seen.tokens, seen.passes)
      return
    for k in range(min(arm.depth, len(seen.accepted) - 1)):
      self._learn(_at(arm, k), seen.accepted[k + 1], seen.accepted[k])

  def _learn(self, what: str, drawn: int, passes: int) -> None:
    """Adds what a chunk showed to what is known; what is old is forgotten."""
    known = self._drawn.setdefault(what, [])
    if self._age(what) > _OLD * self._window:
      known.clear()
    self._seen[what] = self._chunks
    if passes:
      known.append([int(drawn), int(passes)])
      del known[: -self._window]

  def _age(self, what: str) -> int:
    """Chunks since something was last seen; 0 if it never was."""
    return self._chunks - self._seen.get(what, self._chunks)


def _what(arm: strategy_lib.Strategy) -> str:
  """What an arm's acceptance is learnt of: chains are their source's, a tree is its own."""
  return str(arm) if arm.width > 1 else arm.source


def _at(arm: strategy_lib.Strategy, k: int) -> str:
  """What the acceptance of a chain's draft at a depth is learnt of: its source, there."""
  return f"{arm.source} {k}"


def _deepest(arm: strategy_lib.Strategy) -> str:
  """What is known least of an arm: how often its deepest draft stands, or a tree's."""
  return _what(arm) if arm.width > 1 else _at(arm, arm.depth - 1)


def _in_bucket(bucket, arm: selector.Arm) -> str:
  """A name of an arm in a bucket."""
  return f"{bucket} {strategy_lib.name(arm)}"


make = Predictive
