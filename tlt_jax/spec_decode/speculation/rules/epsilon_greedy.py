"""TLT's rule (https://arxiv.org/abs/2511.16665, section 4.2): a bandit per live batch.

Departures from the paper: rates are per live request, as the batch shrinks while an arm
is remembered; every arm is tried once first; arms are those of the config, plain
decoding among them.
"""

import random

import numpy as np

from tlt_jax.spec_decode.speculation import selector


class EpsilonGreedy(selector.Arms):
  """The arm of the best recent median rate, or with chance `epsilon` a random one."""

  learnt = ("_count", "_rates")

  def __init__(self, steps, window: int = 16, epsilon: float = 0.1, seed: int = 0):
    super().__init__(steps, window)
    self._epsilon, self._seed, self._count = epsilon, seed, 0
    self._rates: dict[str, list[float]] = {}  # tokens per second, by arm

  def choose(self, live: int, step_s: selector.StepSeconds | None = None) -> selector.Arm:
    arms = self.ready(live, step_s)
    self._count += 1
    dice = random.Random(f"{self._seed} {self._count}")
    seen = {arm: self._rates.get(self.key(live, arm)) for arm in arms}
    new = [arm for arm, rates in seen.items() if not rates]
    if new:
      return new[0]
    if dice.random() < self._epsilon:
      return dice.choice(arms)
    return max(arms, key=lambda arm: float(np.median(seen[arm])))

  def gain(
    self, live: int, arm: selector.Arm, step_s: selector.StepSeconds | None = None
  ) -> float:
    rates, plain = (self._rates.get(self.key(live, a)) for a in (arm, None))
    return float(np.median(rates) / np.median(plain)) if rates and plain else 1.0

  def observe(self, seen: selector.Observation) -> None:
    if seen.passes and seen.steps and seen.seconds > 0:
      rates = self._rates.setdefault(self.key(seen.live, seen.strategy), [])
      rates.append(seen.tokens / (seen.passes / seen.steps) / seen.seconds)
      del rates[: -self._window]


make = EpsilonGreedy
