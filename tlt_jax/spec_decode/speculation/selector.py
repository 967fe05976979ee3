"""Selectors choose the speculation strategy of each chunk. No choice changes a token."""

from collections.abc import Callable, Sequence
import copy
import dataclasses
import logging
from typing import ClassVar

from tlt_jax import named
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Arm = strategy_lib.Strategy | None  # None: plain decoding


@dataclasses.dataclass(frozen=True)
class StepSeconds:
  """Seconds of a step in a bucket, by arm; 0: unknown."""

  bucket: int  # slots
  of: Callable[[Arm], float]
  doubt: Callable[[Arm], float] = lambda arm: 0.0  # see `Clock.doubt`
  arms: tuple[Arm, ...] | None = None  # whose programs exist; None: all

  def __call__(self, arm: Arm) -> float:
    return self.of(arm)


@dataclasses.dataclass(frozen=True)
class Observation:
  live: int  # requests of the fullest slice, at its start
  bucket: int  # slots
  strategy: Arm
  steps: int  # iterations of the busiest slice
  tokens: int  # drawn, over all slices
  passes: int  # of the target over a live request
  accepted: Sequence[int]  # passes that drew more than 0, 1, ... tokens; () if plain
  seconds: float  # that decoding took


class Selector:
  """Chooses strategies, through `Decisions`, as choices may depend on clock and chance."""

  wants_step_seconds = False  # whether it needs step times measured beforehand

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    """All that it may choose; their programs are compiled."""
    raise NotImplementedError

  def arms(self, live: int) -> tuple[Arm, ...]:
    return (None, *self.strategies)

  def choose(self, live: int, step_s: StepSeconds) -> Arm:
    """The strategy of the next chunk; `live` requests of the fullest slice."""
    raise NotImplementedError

  def observe(self, seen: Observation) -> None:
    """Learns from a chunk."""

  def gain(self, live: int, arm: Arm, step_s: StepSeconds) -> float | None:
    """The expected speed-up over plain decoding; None: unknown."""
    return None

  def state(self) -> dict:
    return {}

  def restore(self, state: dict | None) -> None:
    """Resumes from a `state`; None: starts over."""


@dataclasses.dataclass(frozen=True)
class ByLiveBatch(Selector):
  """The strategy of the first (most live requests, strategy) pair that covers a batch."""

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
  return ByLiveBatch(((10**9, strategy),))


class Arms(Selector):
  """Chooses among several arms per range of live requests; plain decoding above the last.

  `steps` are (most live requests, arms) pairs; an arm remembers `window` chunks.
  """

  learnt: ClassVar[tuple[str, ...]] = ()  # attributes that a checkpoint keeps

  def __init__(self, steps: Sequence[tuple[int, Sequence[Arm]]], window: int = 16):
    self._steps = tuple((most, tuple(arms)) for most, arms in steps)
    self._steps = tuple(sorted(self._steps, key=lambda step: step[0]))
    self._window = window
    if any(not arms for _, arms in self._steps):
      raise ValueError("every live batch needs an arm, at least 'off'")
    if len({most for most, _ in self._steps}) < len(self._steps):
      raise ValueError(f"the arms of a live batch are named twice: {self._steps}")

  @property
  def strategies(self) -> tuple[strategy_lib.Strategy, ...]:
    arms = (arm for _, arms in self._steps for arm in arms)
    return tuple(dict.fromkeys(arm for arm in arms if arm is not None))

  def arms(self, live: int) -> tuple[Arm, ...]:
    return self.step(live)[1]

  def ready(self, live: int, step_s: StepSeconds | None) -> list[Arm]:
    """Its arms whose programs exist."""
    exist = None if step_s is None else step_s.arms
    return [arm for arm in self.arms(live) if exist is None or arm in exist]

  def step(self, live: int) -> tuple[int, tuple[Arm, ...]]:
    return next((step for step in self._steps if live <= step[0]), (0, (None,)))

  def key(self, live: int, arm: Arm) -> str:
    """The name of an arm, the same for all live batches that share their arms."""
    return f"{self.step(live)[0]} {strategy_lib.name(arm)}"

  def state(self) -> dict:
    learnt = {name: getattr(self, name) for name in self.learnt}
    return copy.deepcopy({"rule": type(self).__name__, **learnt})

  def restore(self, state: dict | None) -> None:
    if not state or state["rule"] != type(self).__name__:
      logging.info("the strategy rule starts without saved statistics")
      return
    for name in self.learnt:
      setattr(self, name, copy.deepcopy(state[name]))


def make(strategies: str, rule: str, has_drafter: bool) -> Selector | None:
  """The selector that a config describes; None if only plain decoding is left.

  A rule is only used where some level has several arms.
  """

  def can_run(arm):
    return has_drafter or not strategy_lib.uses_drafter(arm)

  steps = [
    (most, tuple(filter(can_run, arms)) or (None,))
    for most, arms in levels.parse(strategies)
  ]
  if all(arm is None for _, arms in steps for arm in arms):
    return None
  if all(len(arms) == 1 for _, arms in steps):
    return ByLiveBatch(tuple((most, arm) for most, (arm,) in steps))
  return find_rule(rule)(steps)


def find_rule(name: str) -> Callable[..., Selector]:
  """A rule's selector: the name of a module of `rules/`, or a dotted name with a `make`."""
  try:
    return named.module(name, f"{__package__}.rules", "make").make
  except named.NameNotFound as e:
    raise ValueError(f"no strategy rule {name!r}: {e}") from e
