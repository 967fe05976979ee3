"""Policies that learn which strategy is fastest, chunk by chunk.

Both know several arms for every live batch, plain decoding among them if it may be
chosen, and see after a chunk how many tokens it drew in what time.

`EpsilonGreedy` is the rule of TLT (https://arxiv.org/abs/2511.16665, section 4.2): each
live batch is a bandit of its own, whose arms are tried.

`Predictive` tries little. The rate of an arm is the tokens that a pass draws over the
time of a step, and both are known apart: a step takes as long whatever is accepted, so
that its time can be measured beforehand; and the chance that the k-th drafted token
stands, given those before it, is nearly the same at every live batch, so that every
chunk that speculates teaches all arms.
"""

from collections.abc import Callable, Sequence
import copy
import logging
import random

import numpy as np

from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Arm = strategy_lib.Strategy | None

_ENOUGH = 3  # chunks of a tree, before what it draws is believed


class ByLive:
  """The arms of each live batch; what both rules share.

  Args:
    steps: (most live requests, arms) each; above the last only plain decoding
    window: chunks that an arm remembers
  """

  def __init__(self, steps: Sequence[tuple[int, Sequence[Arm]]], window: int = 16):
    self._steps = tuple((most, tuple(arms)) for most, arms in steps)
    self._steps = tuple(sorted(self._steps, key=lambda step: step[0]))
    self._window = window
    self._step_s: dict[str, list[float]] = {}  # by bucket and arm
    if any(not arms for _, arms in self._steps):
      raise ValueError("every live batch needs an arm, were it 'off'")
    if len({most for most, _ in self._steps}) < len(self._steps):
      raise ValueError(f"the arms of a live batch are named twice: {self._steps}")

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    arms = (arm for _, arms in self._steps for arm in arms)
    return tuple(dict.fromkeys(arm for arm in arms if arm is not None))

  def arms(self, live: int) -> tuple[Arm, ...]:
    return self._step(live)[1]

  def step_s(self, bucket, arm: Arm) -> float | None:
    """Seconds of a step, None if unknown."""
    times = self._step_s.get(self._where(bucket, arm))
    return float(np.median(times)) if times else None

  def _book_step(self, seen: strategy_lib.Observation) -> None:
    times = self._step_s.setdefault(self._where(seen.bucket, seen.strategy), [])
    times.append(seen.seconds / seen.steps)
    del times[: -self._window]

  def _where(self, bucket, arm: Arm) -> str:
    return f"{'x'.join(map(str, bucket))} {strategy_lib.name(arm)}"

  def _key(self, live: int, arm: Arm) -> str:
    """Of an arm, the same for all live batches that share their arms."""
    return f"{self._step(live)[0]} {strategy_lib.name(arm)}"

  def _step(self, live: int) -> tuple[int, tuple[Arm, ...]]:
    return next((step for step in self._steps if live <= step[0]), (0, (None,)))

  def state(self) -> dict:
    """What a run goes on from; JSON can hold it."""
    learnt = {name: getattr(self, name) for name in self._LEARNT}
    return copy.deepcopy({"rule": type(self).__name__, **learnt})

  def restore(self, state: dict | None) -> None:
    """Goes on from what `state` gave; of another rule, or None: starts anew."""
    if state is None or state["rule"] != type(self).__name__:
      logging.info("what strategies are worth is learnt anew")
      return
    for name in self._LEARNT:
      setattr(self, name, copy.deepcopy(state[name]))


class EpsilonGreedy(ByLive):
  """A bandit per live batch: the best median rate of late, or sometimes any arm.

  Args:
    epsilon: chance to try an arm at random
  """

  _LEARNT = ("_count", "_rates", "_step_s")

  def __init__(self, steps, window: int = 16, epsilon: float = 0.1, seed: int = 0):
    super().__init__(steps, window)
    self._epsilon, self._seed, self._count = epsilon, seed, 0
    self._rates: dict[str, list[float]] = {}

  def choose(self, live: int, bucket=None) -> Arm:
    arms = self.arms(live)
    self._count += 1
    dice = random.Random(f"{self._seed} {self._count}")
    seen = {arm: self._rates.get(self._key(live, arm)) for arm in arms}
    new = [arm for arm, rates in seen.items() if not rates]
    if new:
      return new[0]
    if dice.random() < self._epsilon:
      return dice.choice(arms)
    return max(arms, key=lambda arm: float(np.median(seen[arm])))

  def gain(self, live: int, bucket, arm: Arm) -> float:
    """The median rate over that of plain decoding; 1 where nothing is known."""
    rates, plain = (self._rates.get(self._key(live, a)) for a in (arm, None))
    return float(np.median(rates) / np.median(plain)) if rates and plain else 1.0

  def observe(self, seen: strategy_lib.Observation) -> None:
    if seen.passes and seen.steps and seen.seconds > 0:
      self._book_step(seen)
      key = self._key(seen.live, seen.strategy)
      rates = self._rates.setdefault(key, [])
      # Per live request: the batch shrinks while an arm is remembered.
      rates.append(seen.tokens / (seen.passes / seen.steps) / seen.seconds)
      del rates[: -self._window]


class Predictive(ByLive):
  """The arm of the best predicted rate, by measured step times and acceptance.

  An arm whose step time or acceptance is unknown is tried until it is known. One that is
  out of use is predicted from what others teach; it may be tried for what it loses
  against the best, as far as that stays within a share of all time.

  Args:
    regret: share of the time that trying may cost
    margin: by how much another arm must be better than the last one
  """

  _LEARNT = (
    *("_step_s", "_stands", "_per_pass", "_last", "_unused", "_seen"),
    *("_chunks", "_spent", "_lost"),
  )

  def __init__(self, steps, window: int = 16, regret: float = 0.01, margin: float = 0.03):
    super().__init__(steps, window)
    self._regret, self._margin = regret, margin
    self._stands: dict[str, list[list[float]]] = {}  # by source: of drafts, per depth
    self._per_pass: dict[str, list[float]] = {}  # by tree
    self._last: dict[str, str] = {}  # arm by level
    self._unused: dict[str, int] = {}  # chunks since an arm was chosen
    self._seen: dict[str, int] = {}  # the last chunk of a source or tree
    self._chunks = 0
    self._spent, self._lost = 0.0, 0.0  # seconds in all, and by trying

  def choose(self, live: int, bucket) -> Arm:
    arms = self.arms(live)
    new = [a for a in arms if not (self.step_s(bucket, a) and self.tokens_per_pass(a))]
    if new:
      return new[0]
    rate = {arm: self.tokens_per_pass(arm) / self.step_s(bucket, arm) for arm in arms}
    best, level = max(arms, key=rate.get), str(self._step(live)[0])
    last = next((a for a in arms if strategy_lib.name(a) == self._last.get(level)), best)
    if rate[best] < (1 + self._margin) * rate[last]:
      best = last  # to switch is not free either
    self._last[level] = strategy_lib.name(best)
    return self._or_try(live, best, rate)

  def _or_try(self, live: int, best: Arm, rate: dict[Arm, float]) -> Arm:
    """The best, or an arm whose turn it is, if it costs little enough to try."""
    for arm in self.arms(live):
      key = self._key(live, arm)
      self._unused[key] = 0 if arm == best else self._unused.get(key, 0) + 1
      loss = max(rate[best] / rate[arm] - 1, 0.0)  # in chunks: it takes longer to draw
      if arm != best and self._unused[key] > 4 * self._window * min(1 + loss, 10):
        lost = loss * self._spent / max(self._chunks, 1)
        if self._lost + lost <= self._regret * self._spent:
          self._lost += lost
          self._unused[key] = 0
          return arm
    return best

  def gain(self, live: int, bucket, arm: Arm) -> float:
    """The predicted rate over that of plain decoding; 1 where nothing is known."""
    step_s, plain_s = self.step_s(bucket, arm), self.step_s(bucket, None)
    tokens = self.tokens_per_pass(arm)
    return tokens * plain_s / step_s if tokens and step_s and plain_s else 1.0

  def tokens_per_pass(self, arm: Arm) -> float | None:
    """What an arm is expected to draw; None if unknown.

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

  def measured(self, bucket, arm: Arm, seconds: float) -> None:
    """A step of an arm takes that long in a bucket, on the machine at hand."""
    self._step_s[self._where(bucket, arm)] = [seconds]

  def observe(self, seen: strategy_lib.Observation) -> None:
    if not seen.passes or not seen.steps or seen.seconds <= 0:
      return
    self._book_step(seen)
    self._chunks, self._spent = self._chunks + 1, self._spent + seen.seconds
    arm = seen.strategy
    if arm is None:
      return
    what = str(arm) if arm.width > 1 else arm.source
    if self._chunks - self._seen.get(what, self._chunks) > 2 * self._window:
      # What was learnt so long ago is of another policy, or another drafter.
      (self._per_pass if arm.width > 1 else self._stands).pop(what, None)
    self._seen[what] = self._chunks
    if arm.width > 1:
      of = self._per_pass.setdefault(what, [])
      of.append(seen.tokens / seen.passes)
      del of[: -self._window]
      return
    stands = self._stands.setdefault(arm.source, [])
    for k in range(min(arm.depth, len(seen.accepted) - 1)):
      if len(stands) <= k:
        stands.append([])
      if seen.accepted[k]:
        stands[k].append(seen.accepted[k + 1] / seen.accepted[k])
        del stands[k][: -self._window]


RULES: dict[str, Callable] = {"predictive": Predictive, "epsilon_greedy": EpsilonGreedy}
