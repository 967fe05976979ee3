import collections
from collections.abc import Callable
import dataclasses
import logging
import time

import jax

from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import progress


@dataclasses.dataclass(frozen=True)
class Program:
  run: Callable
  seconds: float  # to trace and compile, or to load from the persistent cache
  temp_bytes: int  # scratch memory per device while it runs


class Pool:
  def __init__(self):
    self._programs: dict[tuple, Program] = {}

  def run(self, name: str, bucket: tuple, jitted: Callable, *args, **static):
    return self.get(name, bucket, jitted, *args, **static)(*args)

  def get(self, name: str, bucket: tuple, jitted: Callable, *args, **static) -> Callable:
    """The program of a bucket, compiled for `args` (or shapes) if (name, bucket) is new."""
    key = (name, *bucket)
    if key not in self._programs:
      began = time.perf_counter()
      with progress.shown(f"compiling {name}"):
        compiled = jitted.lower(*args, **static).compile()
      seconds = time.perf_counter() - began
      analysis = compiled.memory_analysis()
      temp = analysis.temp_size_in_bytes if analysis is not None else 0
      self._programs[key] = Program(compiled, seconds, temp)
      logging.debug("compiled %s in %.1f s", key, seconds)
    return self._programs[key].run

  def __len__(self) -> int:
    return len(self._programs)

  def __contains__(self, key: tuple) -> bool:
    return key in self._programs

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
