"""The programs of chunks, which join a rollout as they are compiled.

Several threads compile them. They join in a fixed order, so that one number says which have
joined: a decision of the clock, which a replayed rollout waits for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
import logging
import os
import threading

from tlt_jax import processes
from tlt_jax import programs
from tlt_jax import progress
from tlt_jax import stopwatch
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Key = tuple[int, clock_lib.Arm]  # bucket and strategy
Compile = Callable[[], object]

_MOST_THREADS = 8


class Programs:
  """Until `compile` is called all have joined: each is compiled when it is used first."""

  def __init__(self, keys: Sequence[Key]):
    """`keys`: of all chunks, in the order in which they join."""
    self.keys = tuple(keys)
    self._begun: dict[Key | str, _Begun] = {}
    self._later: tuple[str, ...] = ()
    self._failed: set[Key] = set()

  def compile(
    self,
    needed: Mapping[str, Compile],
    chunks: Mapping[Key, Compile],
    later: Mapping[str, Compile],
    others: Mapping[str, Compile],
  ) -> None:
    """Begins to compile all; returns once those `needed` and the first chunk are there.

    An error of these is raised. Another chunk that cannot be compiled is left out, with a
    line in the log; one of `later`, which the end of a rollout needs, or of `others`, of
    what follows it, is compiled again when it is used. A job of several processes, which
    waits for all, leaves `others` for then.
    """
    # Processes of a job compile the same programs in the same order.
    alone = processes.count() == 1
    cores = os.cpu_count() or 1
    threads = min(_MOST_THREADS, cores) if alone else 1
    pool = futures.ThreadPoolExecutor(threads, thread_name_prefix=programs.THREADS)
    first, *joining = self.keys
    queue = [*needed.items(), (first, chunks[first]), *later.items()]
    if alone:
      queue += others.items()
    queue += [(key, chunks[key]) for key in joining]
    self._later = tuple(later)
    self._begun = {key: _Begun(pool, make) for key, make in queue}
    pool.shutdown(wait=False)
    self._wait_for([*needed, first])
    for key in (*needed, first):
      self._begun[key].future.result()
    if not alone:
      self.wait()
    elif threads == cores:
      programs.give_way()

  @property
  def count(self) -> int:
    """How many chunks have joined."""
    pending = (i for i, key in enumerate(self.keys) if not self._is_done(key))
    return next(pending, len(self.keys))

  @property
  def are_compiled(self) -> bool:
    """Whether it was asked to compile them."""
    return bool(self._begun)

  @property
  def complete(self) -> bool:
    return all(map(self._is_done, self._begun))

  def wait(self, count: int | None = None) -> None:
    """Waits until so many chunks have joined; None: for all programs."""
    self._wait_for(self._begun if count is None else self.keys[:count])

  def wait_for_later(self) -> None:
    """Waits for what the end of a rollout needs."""
    self._wait_for(self._later)

  def joined(self, count: int) -> frozenset[Key]:
    """The first `count` chunks, without those that could not be compiled."""
    for key in self.keys[:count]:
      if key in self._begun and key not in self._failed:
        if (error := self._begun[key].future.exception()) is not None:
          self._failed.add(key)
          logging.warning("%s is left out: %s", _name(key), _first_line(error))
    return frozenset(self.keys[:count]) - self._failed

  def _is_done(self, key: Key | str) -> bool:
    return key not in self._begun or self._begun[key].future.done()

  def _wait_for(self, keys: Iterable[Key | str]) -> None:
    pending = [key for key in keys if not self._is_done(key)]
    if pending:
      with progress.shown(self._progress), stopwatch.waiting():
        futures.wait([self._begun[key].future for key in pending])

  def _progress(self) -> str:
    done = sum(map(self._is_done, self._begun))
    running = [_name(key) for key, x in self._begun.items() if x.future.running()]
    now = ", ".join(running)
    return f"compiling rollout programs, {done} of {len(self._begun)} done (now {now})"


class _Begun:
  def __init__(self, pool: futures.Executor, make: Compile):
    self._make = make
    self.future = pool.submit(self._run)

  def _run(self) -> None:
    # At its end the process waits for its threads.
    if threading.main_thread().is_alive():
      self._make()


def _name(key: Key | str) -> str:
  if isinstance(key, str):
    return key
  bucket, arm = key
  return f"{'plain' if arm is None else strategy_lib.name(arm)} with {bucket} slots"


def _first_line(error: BaseException) -> str:
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[0][:300]
