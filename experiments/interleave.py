"""Times what is to be compared in turn, in one process.

A machine is slower at one time than at another: sides that take turns share that. Every
turn begins with another side, so that none always runs after the same one.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import time
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tlt_jax import metrics

Side = TypeVar("Side", bound=Hashable)


class Timed(NamedTuple):
  """A call's time, and what it returned."""

  seconds: float
  result: Any


def timed(call: Callable[..., Any], *args: Any) -> Timed:
  """Calls, and says how long that took."""
  began = time.perf_counter()
  result = call(*args)
  return Timed(time.perf_counter() - began, result)


def in_turn(sides: Sequence[Side], turn: int) -> list[Side]:
  """The sides, beginning with another one at every turn."""
  first = turn % len(sides)
  return [*sides[first:], *sides[:first]]


def turns(
  sides: Mapping[Side, Callable[[int], Any]], repeats: int, warm_up: int = 1
) -> Iterator[dict[Side, Timed]]:
  """Calls every side once a turn; yields each turn but those of the warm-up.

  Args:
    sides: called with the number of the turn, from 0 on, the warm-up included
    repeats: turns that are yielded
    warm_up: turns before, in which everything is compiled
  """
  for turn in range(warm_up + repeats):
    found = {side: timed(sides[side], turn) for side in in_turn(list(sides), turn)}
    if turn >= warm_up:
      yield found


def seconds(measured: Sequence[Mapping[Side, Timed]]) -> dict[Side, np.ndarray]:
  """The seconds of each side, f64[turns]."""
  return {side: np.array([m[side].seconds for m in measured]) for side in measured[0]}


def results(measured: Sequence[Mapping[Side, Timed]]) -> dict[Side, list]:
  """Returns what each side returned, turn by turn."""
  return {side: [m[side].result for m in measured] for side in measured[0]}


def median_ratio(above: np.ndarray, below: np.ndarray) -> dict:
  """Median of ratios, and their range; f64[turns] each, as `seconds` gives them."""
  each = above / below
  return {
    "speedup": float(np.median(each)),
    "speedup_range": [float(each.min()), float(each.max())],
  }


def ratio_of_totals(above: Sequence[float], below: Sequence[float]) -> dict:
  """The ratio of two sums over the same turns, and its 95% interval.

  The interval is that of a ratio estimator: Student's t over the turns' differences from
  the ratio, above - ratio * below, relative to the sum (Cochran, Sampling Techniques,
  1977, section 6.3).

  Args:
    above, below: of each turn
  """
  above, below = np.array(above), np.array(below)
  found, half = float(above.sum() / below.sum()), 0.0
  if len(above) > 1:
    _, half = metrics.interval(above - found * below)
    half /= above.mean()
  return {"mean": found, "interval": [found * np.exp(-half), found * np.exp(half)]}
