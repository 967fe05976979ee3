"""Selectors: what chooses the speculation strategy of each chunk.

A selector that learns is in `rules/`. None of them changes a token.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from tlt_jax import named
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Arm = strategy_lib.Strategy | None  # None: plain decoding


@dataclasses.dataclass(frozen=True)
class StepSeconds:
  """The seconds of a step in the bucket at hand, by arm; 0: unknown."""

  bucket: Any  # `options.Bucket`
  of: Callable[[Arm], float]
  doubt: Callable[[Arm], float] = lambda arm: 0.0  # see `Clock.doubt`

  def __call__(self, arm: Arm) -> float:
    return self.of(arm)


@dataclasses.dataclass(frozen=True)
class Observation:
  """An account of a chunk, for selectors."""

  live: int  # requests of the fullest slice, at its start
  bucket: Any  # `options.Bucket`
  strategy: Arm
  steps: int  # iterations of the busiest slice
  tokens: int  # drawn, over all slices
  passes: int  # of the target over a live request
  accepted: Sequence[int]  # passes that drew more than 0, 1, ... tokens; () if plain
  seconds: float  # that decoding took


class Selector:
  """Chooses strategies; what a subclass need not override does nothing.

  Choices go through `Decisions`: they may depend on the clock and on chance.
  """

  wants_step_seconds = False  # whether step times are to be measured before it chooses

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    """All that it may ever choose; their programs are made."""
    raise NotImplementedError

  def arms(self, live: int) -> tuple[Arm, ...]:
    """All that `choose` may return for so many live requests."""
    return (None, *self.strategies)

  def choose(self, live: int, step_s: StepSeconds) -> Arm:
    """Chooses the strategy of the next chunk.

    Args:
      live: requests of the fullest slice
      step_s: seconds of a step by arm, as far as they are known
    """
    raise NotImplementedError

  def observe(self, seen: Observation) -> None:
    """Learns from a chunk; told of every one."""

  def gain(self, live: int, arm: Arm, step_s: StepSeconds) -> float | None:
    """The speed-up over plain decoding that it expects; None: it has no idea."""
    return None

  def state(self) -> dict:
    """Its knowledge, for a checkpoint; JSON can hold it."""
    return {}

  def restore(self, state: dict | None) -> None:
    """Goes on from what `state` gave; None: from nothing."""


@dataclasses.dataclass(frozen=True)
class ByLiveBatch(Selector):
  """Chooses the strategy of the first (most live requests, strategy) that covers a batch.

  Plain decoding above the last.
  """

  steps: Sequence[tuple[int, Arm]]

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    return tuple(dict.fromkeys(s for _, s in self.steps if s is not None))

  def arms(self, live: int) -> tuple[Arm]:
    ordered = sorted(self.steps, key=lambda step: step[0])
    return (next((strategy for most, strategy in ordered if live <= most), None),)

  def choose(self, live: int, step_s: StepSeconds | None = None) -> Arm:
    return self.arms(live)[0]


def always(strategy: strategy_lib.Strategy) -> ByLiveBatch:
  """A selector of the same strategy for every live batch."""
  return ByLiveBatch(((10**9, strategy),))


def make(steps: Sequence[tuple[int, Sequence[Arm]]], rule: str) -> Selector | None:
  """The selector of these arms; None if there is nothing to choose but plain decoding.

  Where each live batch has one arm the rule is not asked.

  Args:
    steps: (most live requests, arms) each; above the last only plain decoding
    rule: "predictive" or "epsilon_greedy", a module of `rules/`; or the dotted name of
      anybody's own, whose `make(steps)` gives a selector
  Raises:
    ValueError: no such rule
  """
  if all(arm is None for _, arms in steps for arm in arms):
    return None
  if all(len(arms) == 1 for _, arms in steps):
    return ByLiveBatch(tuple((most, arm) for most, (arm,) in steps))
  return find(rule)(steps)


def find(rule: str) -> Callable[..., Selector]:
  """The `make` of the rule of that name.

  Raises:
    ValueError: no such rule
  """
  try:
    return named.module(rule, f"{__package__}.rules", "make").make
  except named.NameNotFound as e:
    raise ValueError(f"no strategy rule {rule!r}: {e}") from e
