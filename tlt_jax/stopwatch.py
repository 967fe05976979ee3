"""Wall time of the parts of a step, less the time in which it waited for its programs.

What other threads compile meanwhile counts only while the main thread waits for it.
"""

from collections.abc import Iterator
import contextlib
import functools
import threading
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
  """Seconds that the main thread has compiled, which its events report as they end."""

  def __init__(self):
    self.seconds = 0.0
    self._events: list[tuple[float, float]] = []  # (start, seconds), by their end

  def add(self, event: str, seconds: float, **_) -> None:
    """Counts an event that ends now; those within it have been counted, and it has them."""
    is_main = threading.current_thread() is threading.main_thread()
    if not event.startswith(_COMPILE) or not is_main:
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


@contextlib.contextmanager
def waiting() -> Iterator[None]:
  """Counts the `with` block, which waits for programs of other threads."""
  began = time.perf_counter()
  try:
    yield
  finally:
    if threading.current_thread() is threading.main_thread():
      _compiling().seconds += time.perf_counter() - began


def compiled_s() -> float:
  """Seconds that the main thread compiled or waited for it, from the first call on."""
  return _compiling().seconds
