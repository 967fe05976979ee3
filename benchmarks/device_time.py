"""Seconds of device programs: many calls in one program, sides in turn, medians.

A kernel of some microseconds ends before the host has started the next. So calls run in a
loop on the device, and the host waits for the last. The arguments of a call depend on the
result of the one before, or else the compiler would move the call out of the loop.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import interleave
from tlt_jax import metrics


class Side(NamedTuple):
  """An implementation of an operation."""

  operation: Callable[..., Any]
  args: Sequence[Any]
  # (result, first argument) -> the first argument of the next call. It must depend on the
  # whole result, and should need no additional kernel.
  feed: Callable[[Any, Any], Any]


def looped(side: Side, calls: int) -> Callable[..., Any]:
  """A jitted program of so many calls, one after the other."""

  @jax.jit
  def program(first, *rest):
    def call(_, first):
      return side.feed(side.operation(first, *rest), first)

    return jax.lax.fori_loop(0, calls, call, first)

  return program


@dataclasses.dataclass(frozen=True)
class Timing:
  """How often sides run."""

  repeats: int  # of each side, in turn
  most_calls: int = 2000  # in a program
  seconds: float = 0.02  # of a program, if `most_calls` allows it

  def calls(self, expected_s: float) -> int:
    """The calls of a program, if one takes about `expected_s`."""
    return int(np.clip(self.seconds / max(expected_s, 1e-9), 2, self.most_calls))

  def measure(self, sides: Mapping[str, Side], expected_s: float) -> dict[str, dict]:
    """Times a call of every side: its `summary`, or the `error` with which it fails."""
    calls = self.calls(expected_s)
    runs = {}
    for name, side in sides.items():
      program = looped(side, calls)
      runs[name] = functools.partial(_run_and_wait, program, side.args)
    return self.timed(runs, calls)

  def timed(self, runs: Mapping[str, Callable[[], Any]], calls: int = 1) -> dict[str, dict]:
    """`measure` of functions that make `calls` calls and wait for their end."""

    def seconds(measured) -> dict[str, np.ndarray]:
      return {name: s / calls for name, s in interleave.seconds(measured).items()}

    return in_turn(runs, self.repeats, seconds)


def _run_and_wait(program: Callable[..., Any], args: Sequence[Any]) -> Any:
  return jax.block_until_ready(program(*args))


def in_turn(
  runs: Mapping[Any, Callable[[], Any]],
  repeats: int,
  seconds_of: Callable[[list], Mapping[Any, np.ndarray]],
) -> dict[Any, dict]:
  """Runs each in turn, after a trial: its `summary`, or the `error` of the trial.

  Args:
    seconds_of: gives seconds by key, from the list of `interleave.turns`
  """
  failed = {name: error for name, run in runs.items() if (error := error_of(run))}
  found = {name: {"error": error} for name, error in failed.items()}
  sides = {
    name: lambda turn, run=run: run() for name, run in runs.items() if name not in failed
  }
  if sides:
    measured = list(interleave.turns(sides, repeats))
    found |= {name: summary(seconds) for name, seconds in seconds_of(measured).items()}
  return {name: found[name] for name in runs}


def summary(seconds: np.ndarray) -> dict:
  """Median of f64[repeats], and the mean with half its 95% interval by Student's t."""
  middle, half = metrics.interval(seconds)
  return {"median_s": float(np.median(seconds)), "mean_s": middle, "half_s": half}


def error_of(run: Callable[[], Any]) -> str | None:
  """The error of a function in one line; None if it succeeds."""
  try:
    run()
  except Exception as e:  # libraries raise anything on hardware that they do not support
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
  return None


def micros(found: Mapping[str, Any]) -> str:
  """A side's time for a table, in microseconds."""
  if "error" in found:
    return "failed"
  return f"{1e6 * found['median_s']:.1f} ± {1e6 * found['half_s']:.1f}"


def rounded(found: Any) -> Any:
  """What was found, with numbers of four digits: results are kept in the repo."""
  if isinstance(found, float):
    return float(f"{found:.4g}")
  if isinstance(found, Mapping):
    return {name: rounded(x) for name, x in found.items()}
  return [rounded(x) for x in found] if isinstance(found, list | tuple) else found


def errors(cells: Sequence[Mapping[str, Any]]) -> list[str]:
  """The different errors of the sides of all cells, each with the side's name."""
  found = (
    f"{name}: {side['error']}"
    for cell in cells
    for name, side in cell["sides"].items()
    if "error" in side
  )
  return list(dict.fromkeys(found))
