"""The pool of compiled programs: few, ahead of time, and accounted for."""

from collections.abc import Callable
import dataclasses
import logging
import time

import jax

from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import ranges


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program and what it cost."""

  run: Callable
  seconds: float  # to trace and compile, or to load from the persistent cache
  temp_bytes: int  # scratch memory per device while it runs


@ranges.options
class Budget:
  """Limits of what is compiled ahead of time; None is no limit."""

  programs: ranges.Count | None = ranges.field(
    None, "most programs that are compiled ahead; None: no limit"
  )
  compile_s: ranges.NotNegative | None = ranges.field(
    None, "most seconds spent on compiling ahead; None: no limit"
  )


class Pool:
  """Compiled programs by (name, bucket)."""

  def __init__(self, budget: Budget | None = None):
    """Starts empty; `budget` is for `has_room`."""
    self.budget = budget or Budget()
    self._programs: dict[tuple, Program] = {}

  def has_room(self, count: int) -> bool:
    """Whether `count` programs more are within the budget, as far as one can tell.

    The first process of a job decides for all, by its own seconds; all ask at once.
    """
    within = lambda used, limit: limit is None or used <= limit
    average = self.seconds / max(len(self), 1)
    has_room = (
      within(len(self) + count, self.budget.programs)
      and within(self.seconds + count * average, self.budget.compile_s)
    )
    return bool(processes.of_first(has_room))

  def run(self, name: str, bucket: tuple, jitted: Callable, *args, **static):
    """Runs the program of that name and bucket on `args`; see `get`."""
    return self.get(name, bucket, jitted, *args, **static)(*args)

  def get(
    self, name: str, bucket: tuple, jitted: Callable, *args, **static
  ) -> Callable:
    """The program of a bucket, compiled for `args` if it is new.

    Args:
      name, bucket: of the program; with them, `jitted` and all shapes must be given
      jitted: what is compiled
      args: arrays, or their shapes and shardings
      static: further arguments, which the program does not take any more
    """
    key = (name, *bucket)
    if key not in self._programs:
      began = time.perf_counter()
      compiled = jitted.lower(*args, **static).compile()
      seconds = time.perf_counter() - began
      found = compiled.memory_analysis()
      temp = found.temp_size_in_bytes if found is not None else 0
      self._programs[key] = Program(compiled, seconds, temp)
      logging.debug("compiled %s in %.1f s", key, seconds)
    return self._programs[key].run

  def __len__(self) -> int:
    return len(self._programs)

  def __contains__(self, key: tuple) -> bool:
    """Whether the program (name, *bucket) is compiled."""
    return key in self._programs

  @property
  def seconds(self) -> float:
    """Seconds that it took to make them ready."""
    return sum(p.seconds for p in self._programs.values())

  @property
  def temp_bytes(self) -> int:
    """Scratch memory of the hungriest program."""
    return max((p.temp_bytes for p in self._programs.values()), default=0)

  def report(self) -> str:
    """One line for the log."""
    names = sorted({key[0] for key in self._programs})
    count = lambda name: sum(key[0] == name for key in self._programs)
    kinds = ", ".join(f"{count(name)} {name}" for name in names)
    return (
      f"{len(self)} programs ({kinds}) ready in {self.seconds:.1f} s; "
      f"scratch memory up to {self.temp_bytes / 2**20:.1f} MiB"
    )


def live_bytes() -> int:
  """Bytes of all arrays alive on this process's first device."""
  # Not from their shards: whoever asks for these makes arrays, which are then alive too.
  held = memory.bytes_by_device(jax.live_arrays())
  return held.get(jax.local_devices()[0], 0)


def is_out_of_memory(error: BaseException) -> bool:
  """Whether a program failed because the device has no memory left."""
  return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(
    error
  )


def loss(error: BaseException | None) -> BaseException | None:
  """The error by which a process noticed that another one is gone; None: it is another.

  It may be hidden by what came of it. A device of this process that fails looks the same.
  """
  if processes.count() == 1:
    return None
  chain = []
  while error is not None and error not in chain:
    chain.append(error)
    error = error.__cause__ or error.__context__
  if any(map(is_out_of_memory, chain)):
    return None
  # What jax raises of collectives between CPUs is a ValueError.
  of_runtime = lambda e: isinstance(e, jax.errors.JaxRuntimeError) or "Gloo" in str(e)
  return next(filter(of_runtime, reversed(chain)), None)
