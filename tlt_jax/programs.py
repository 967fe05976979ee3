"""Compiled programs, one per bucket of shapes; several threads may ask for them."""

import collections
from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from typing import Any

import jax

from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax import stopwatch

THREADS = "compile"  # prefix of the names of threads that compile
_NICENESS = 10  # of these, in a rollout


@dataclasses.dataclass(frozen=True)
class Program:
  run: Callable
  seconds: float  # to trace and compile, or to load from the persistent cache
  temp_bytes: int  # scratch memory per device while it runs


class Pool:
  def __init__(self):
    self._asked: dict[tuple, futures.Future[Program]] = {}
    self._lock = threading.Lock()

  @property
  def _programs(self) -> dict[tuple, Program]:
    """Those that are compiled."""
    with self._lock:
      return {key: made.result() for key, made in self._asked.items() if made.done()}

  def run(self, name: str, bucket: tuple, jitted: Callable, *args, **static):
    return self.get(name, bucket, jitted, *args, **static)(*args)

  def get(self, name: str, bucket: tuple, jitted: Callable, *args, **static) -> Callable:
    """The program of a bucket, compiled for `args` (or shapes) if (name, bucket) is new.

    Waits while another thread compiles it.
    """
    key = (name, *bucket)
    with self._lock:
      is_new = key not in self._asked
      asked = self._asked.setdefault(key, futures.Future())
    if is_new:
      try:
        asked.set_result(_compile(key, jitted, args, static))
      except BaseException as error:
        with self._lock:
          del self._asked[key]  # the next call tries again
        asked.set_exception(error)
        raise
    elif not asked.done():
      with _shown(f"waiting for {name}"), stopwatch.waiting():
        futures.wait([asked])
    return asked.result().run

  def __len__(self) -> int:
    return len(self._programs)

  def __contains__(self, key: tuple) -> bool:
    return key in self._asked

  @property
  def seconds(self) -> float:
    return sum(p.seconds for p in self._programs.values())

  @property
  def temp_bytes(self) -> int:
    return max((p.temp_bytes for p in self._programs.values()), default=0)

  def report(self) -> str:
    counts = collections.Counter(key[0] for key in self._programs)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return (
      f"{len(self)} programs ({kinds}) ready in {self.seconds:.1f} s; "
      f"scratch memory up to {self.temp_bytes / 2**20:.1f} MiB"
    )


def _compile(key: tuple, jitted: Callable, args, static) -> Program:
  began = time.perf_counter()
  with _shown(f"compiling {key[0]}"):
    compiled = jitted.lower(*args, **static).compile()
  seconds = time.perf_counter() - began
  analysis = compiled.memory_analysis()
  temp = analysis.temp_size_in_bytes if analysis is not None else 0
  logging.debug("compiled %s in %.1f s", key, seconds)
  return Program(compiled, seconds, temp)


def _shown(text: str):
  """Of what the main thread does; that of others delays nothing."""
  is_main = threading.current_thread() is threading.main_thread()
  return progress.shown(text) if is_main else contextlib.nullcontext()


def shapes(tree: Any) -> Any:
  """A tree with shapes and shardings for its arrays, whose memory it does not hold."""

  def abstract(x):
    if not isinstance(x, jax.Array):
      return x
    return jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type
    )

  return jax.tree.map(abstract, tree)


def are_compiling() -> bool:
  """Whether threads compile, for which the process waits at its end."""
  return bool(_compiling())


def give_way() -> None:
  """Lowers the priority of the threads that compile, where the system has one per thread.

  On two cores SmolLM2's first tokens come after two thirds of the time. It cannot be raised
  again without privileges.
  """
  if sys.platform == "linux":
    for thread in _compiling():
      with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, thread.native_id, _NICENESS)


def _compiling() -> list[threading.Thread]:
  return [x for x in threading.enumerate() if x.name.startswith(THREADS)]


def live_bytes() -> int:
  # Not from their shards: reading these creates arrays, which are then alive too.
  held = memory.bytes_by_device(jax.live_arrays())
  return held.get(jax.local_devices()[0], 0)


def is_out_of_memory(error: BaseException) -> bool:
  return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(
    error
  )


def loss(error: BaseException | None) -> BaseException | None:
  """The error in a chain of causes that shows the loss of a process or device."""
  if processes.count() == 1:
    return None
  chain = []
  while error is not None and error not in chain:
    chain.append(error)
    error = error.__cause__ or error.__context__
  if any(map(is_out_of_memory, chain)):
    return None
  for cause in reversed(chain):
    # Collectives between CPUs raise a ValueError.
    if isinstance(cause, jax.errors.JaxRuntimeError) or "Gloo" in str(cause):
      return cause
  return None
