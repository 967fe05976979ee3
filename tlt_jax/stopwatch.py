"""Wall time of the parts of a step, less the time in which their programs compiled."""

import functools
import time

import jax

_COMPILE = "/jax/core/compile/"  # JAX's events: tracing, lowering, XLA or its cache


class Stopwatch:
  """Runs from its creation on."""

  def __init__(self):
    self._compiling = _compiling()
    self._began, self._compiled = time.perf_counter(), self._compiling.seconds

  def lap(self) -> float:
    """Seconds since its creation or the last lap, less those of compiling."""
    began, compiled = self._began, self._compiled
    self._began, self._compiled = time.perf_counter(), self._compiling.seconds
    return max(0.0, self._began - began - (self._compiled - compiled))


class Compiling:
  """Seconds that this process has compiled, which its events report as they end."""

  def __init__(self):
    self.seconds = 0.0
    self._events: list[tuple[float, float]] = []  # (start, seconds), by their end

  def add(self, event: str, seconds: float, **_) -> None:
    """Counts an event that ends now; those within it have been counted, and it has them."""
    if not event.startswith(_COMPILE):
      return
    start, known = time.perf_counter() - seconds, self._events
    while known and known[-1][0] >= start:
      self.seconds -= known.pop()[1]
    known.append((start, seconds))
    self.seconds += seconds


@functools.cache
def _compiling() -> Compiling:
  made = Compiling()
  jax.monitoring.register_event_duration_secs_listener(made.add)
  return made


def compiled_s() -> float:
  """Seconds that this process has compiled since this was called first."""
  return _compiling().seconds
