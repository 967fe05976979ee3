"""Seconds of device programs: many calls in one program, sides in turn, medians.

A kernel of some microseconds is over before the host has started the next. So its calls
run in a loop on the device, each on what the one before gave, and the host waits for the
last. Were their arguments the same, the compiler would move the call out of the loop.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import interleave
from tlt_jax import metrics


class Side(NamedTuple):
  """One way to compute something."""

  operation: Callable[..., Any]
  args: Sequence[Any]
  # (result, first argument) -> the first argument of the next call, which must depend on
  # all that the operation computes. Best something that needs no kernel of its own.
  feed: Callable[[Any, Any], Any]


def looped(side: Side, calls: int) -> Callable[..., Any]:
  """The jitted program of so many calls, one after the other, on the side's arguments."""

  @jax.jit
  def program(first, *rest):
    call = lambda _, first: side.feed(side.operation(first, *rest), first)
    return jax.lax.fori_loop(0, calls, call, first)

  return program


@dataclasses.dataclass(frozen=True)
class Timing:
  """How often things are run to be timed."""

  repeats: int  # of each side, in turn with the others
  most_calls: int = 2000  # in one program
  seconds: float = 0.02  # that a program should take, as far as `most_calls` goes

  def calls(self, expected_s: float) -> int:
    """The calls of a program, of which one takes about `expected_s`."""
    return int(np.clip(self.seconds / max(expected_s, 1e-9), 2, self.most_calls))

  def measure(self, sides: Mapping[str, Side], expected_s: float) -> dict[str, dict]:
    """Times a call of every side: `summary` of it, or the `error` with which it fails.

    Args:
      sides: by name
      expected_s: about what a call takes
    """
    calls = self.calls(expected_s)
    wait = lambda program, args: lambda: jax.block_until_ready(program(*args))
    runs = {name: wait(looped(side, calls), side.args) for name, side in sides.items()}
    return self.timed(runs, calls)

  def timed(self, runs: Mapping[str, Callable[[], Any]], calls: int = 1) -> dict[str, dict]:
    """Is `measure`, of functions that make `calls` calls and wait for their end."""
    took = lambda measured: {n: s / calls for n, s in interleave.seconds(measured).items()}
    return in_turn(runs, self.repeats, took)


def in_turn(
  runs: Mapping[Any, Callable[[], Any]],
  repeats: int,
  took: Callable[[list], Mapping[Any, np.ndarray]],
) -> dict[Any, dict]:
  """Runs each in turn, after a trial: `summary` of it, or the `error` of the trial.

  Args:
    runs: by any key
    repeats: of each
    took: seconds by key, of what `interleave.turns` gave
  """
  failed = {name: error for name, run in runs.items() if (error := error_of(run))}
  found = {name: {"error": error} for name, error in failed.items()}
  work = lambda run: lambda turn: run()
  sides = {name: work(run) for name, run in runs.items() if name not in failed}
  if sides:
    measured = list(interleave.turns(sides, repeats))
    found |= {name: summary(seconds) for name, seconds in took(measured).items()}
  return {name: found[name] for name in runs}


def summary(seconds: np.ndarray) -> dict:
  """Median of f64[repeats], and the mean with half its 95% interval by Student's t."""
  middle, half = metrics.interval(seconds)
  return {"median_s": float(np.median(seconds)), "mean_s": middle, "half_s": half}


def error_of(run: Callable[[], Any]) -> str | None:
  """The error with which a function fails, in one line; None: it does not."""
  try:
    run()
  except Exception as e:  # whatever a library does on hardware that it was not made for
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
  return None


def micros(found: Mapping[str, Any]) -> str:
  """A side's time for a table."""
  if "error" in found:
    return "failed"
  return f"{1e6 * found['median_s']:.1f} ± {1e6 * found['half_s']:.1f}"


def errors(cells: Sequence[Mapping[str, Any]]) -> list[str]:
  """The different errors of the sides of all cells, each behind the side's name."""
  told = (
    f"{name}: {side['error']}"
    for cell in cells
    for name, side in cell["sides"].items()
    if "error" in side
  )
  return list(dict.fromkeys(told))
