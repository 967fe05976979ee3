"""Measures the kernels on a GPU or a TPU, and the operations of jax for comparison.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --only=attention --minutes=5

Parts: "bandwidth", of copying, and the peak of matrix products; "attention" of draft
nodes to a cache, at the widths of Qwen2.5-7B and Qwen3-0.6B, in bfloat16; "packed",
attention of a learner's rows, with and without gradients; "sample", which draws tokens from
logits; "cut", which finds what top-p keeps; "write", of new keys to a
cache. Each reports the error against float64, the time, and the share of the measured
bandwidth and peak. Errors are printed; those of our kernels fail the command. The last line
is JSON. `--dry_run` takes tiny sizes, on any machine.
"""

from collections.abc import Callable, Sequence
import functools
import json
import operator
import sys
import time

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention
from benchmarks import device_time
from benchmarks import drawing
from benchmarks import machine
from benchmarks import packed_rows
from experiments import launch
from experiments import tables
from tlt_jax.pallas_kernels import cache_write
from tlt_jax.pallas_kernels import implementations

_KERNELS = {"gpu": "triton", "tpu": "pallas"}  # of the backend
_ROWS = (8, 128, 384)  # of logits: B * J
_VOCABULARIES = (151_936, 49_152, 32_000)


def check_device(dry_run: bool) -> None:
  """Raises ValueError without a GPU or a TPU."""
  if jax.default_backend() not in _KERNELS and not dry_run:
    raise ValueError("this measures GPUs and TPUs, and jax finds none; or give --dry_run")


def kernels_here(dry_run: bool) -> tuple[str, ...]:
  """Our implementations: the reference, and the kernels of this machine.

  Raises:
    ValueError: these kernels cannot run
  """
  if dry_run:
    return ("ref", "interpret")
  return ("ref", implementations.choose(_KERNELS[jax.default_backend()]))


def bandwidth(timing: device_time.Timing, dry_run: bool) -> dict:
  """Measures the copy bandwidth, and the peak of matrix products in bfloat16."""
  size = 2**16 if dry_run else min(2**30, machine.free_bytes() // 8)
  width = 64 if dry_run else 8192
  x = jnp.zeros(size // 4, jnp.float32)
  square = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
  square = square * width**-0.5  # so that powers of it stay finite

  def feed(result, first):
    return result

  sides = {
    "copy": device_time.Side(lambda x: x + 1, (x,), feed),
    "product": device_time.Side(operator.matmul, (square, square), feed),
  }
  found = timing.measure(sides, expected_s=1e-3)
  if errors := device_time.errors([{"sides": found}]):
    raise ValueError(f"this device cannot be measured: {errors[0]}")
  return {
    "bytes_per_s": 2 * x.nbytes / found["copy"]["median_s"],
    "flops_per_s": 2 * width**3 / found["product"]["median_s"],
    "copy": found["copy"] | {"bytes": 2 * x.nbytes},
    "product": found["product"] | {"width": width},
  }


def write(
  num_new: int,
  length: int,
  kernels: Sequence[str],
  bytes_per_s: float,
  timing: device_time.Timing,
) -> dict:
  """Measures writes of new keys to a cache, in place, at the widths of Qwen2.5-7B."""
  rows, K, H = attention.ROWS, 4, 128
  new = jax.random.normal(jax.random.key(0), (rows, K, num_new, H), jnp.bfloat16)
  start = jnp.arange(rows, dtype=jnp.int32) * 5 % (length - num_new)
  moved = 2 * new.nbytes
  calls, pages = timing.calls(10e-6), attention.table(rows, length)
  want = np.zeros((rows, K, length, H), np.float32)
  for b in range(rows):
    want[b, :, int(start[b]) : int(start[b]) + num_new] = np.asarray(new[b], np.float32)

  def in_place(impl: str) -> Callable[[], jax.Array]:
    """A function that continues with the cache that it returned the last time."""

    def put(_, cache):
      return cache_write.cache_write(cache, new, start, pages, impl=impl)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(cache):
      return jax.lax.fori_loop(0, calls, put, cache)

    held = [attention.in_pages(jnp.zeros((rows, K, length, H), jnp.bfloat16))]

    def run():
      held[0] = jax.block_until_ready(program(held[0]))
      return held[0]

    return run

  runs = {impl: in_place(impl) for impl in kernels}
  found = timing.timed(runs, calls)
  for impl, side in found.items():
    if "error" not in side:
      got = np.asarray(runs[impl](), np.float32)[pages].swapaxes(1, 2).reshape(want.shape)
      side["max_error"] = float(np.abs(got - want).max())
      side["bandwidth_share"] = moved / side["median_s"] / bytes_per_s
  return {"nodes": num_new, "cache": length, "sides": found}


def report_writes(cells: Sequence[dict]) -> None:
  tables.show(
    f"Writing to a cache, {attention.ROWS} rows: microseconds",
    ["J", "cache", *cells[0]["sides"]],
    [
      [str(c["nodes"]), str(c["cache"]), *map(device_time.micros, c["sides"].values())]
      for c in cells
    ],
  )


class Run:
  """The cells of a run, within its time limit."""

  def __init__(self, minutes: float, dry_run: bool, repeats: int):
    """Measures bandwidth and peak, of which all else is reported in shares."""
    self.dry_run = dry_run
    self.timing = device_time.Timing(repeats, most_calls=2 if dry_run else 2000)
    self.kernels = kernels_here(dry_run)
    self._ends = time.monotonic() + 60 * minutes
    self.machine = bandwidth(self.timing, dry_run)

  def cells(self, every: Sequence, measure: Callable) -> dict:
    """Measures cells in order; counts those left out for lack of time."""
    found, left_out = [], 0
    for i, cell in enumerate(every):
      if time.monotonic() > self._ends:
        left_out = len(every) - i
        break
      made = measure(*cell)
      found += made if isinstance(made, list) else [made]
    return {"cells": found, "left_out": left_out}

  def attention(self) -> dict:
    """All shapes, with half full and full caches."""
    every = attention.tiny_shapes() if self.dry_run else attention.all_shapes()
    fits = [shape for shape in every if self._fits(*shape)]
    found = self.cells(
      fits,
      lambda *shape: attention.measure(*shape, self.kernels, self.machine, self.timing),
    )
    return found | {"too_large": len(every) - len(fits)}

  def packed(self) -> dict:
    every = packed_rows.tiny_shapes() if self.dry_run else packed_rows.all_shapes()
    return self.cells(
      every,
      lambda *shape: packed_rows.measure(*shape, self.kernels, self.machine, self.timing),
    )

  def _fits(self, name, config, num_nodes, length) -> bool:
    """Whether three layouts of the cache and the reference's scores fit into memory."""
    slots = attention.ROWS * length
    cache = 2 * 2 * slots * config.num_kv_heads * config.head_dim
    scores = 2 * 4 * slots * config.num_heads * num_nodes
    return 3 * cache + 2 * scores < machine.free_bytes()

  def _drawing(self, operation: str) -> dict:
    sizes = [(count, V) for V in _VOCABULARIES for count in _ROWS]
    return self.cells(
      [(5, 300)] if self.dry_run else sizes,
      lambda count, V: drawing.measure(
        operation, count, V, self.kernels, self.machine, self.timing
      ),
    )

  def sample(self) -> dict:
    return self._drawing("sample")

  def cut(self) -> dict:
    return self._drawing("cut")

  def write(self) -> dict:
    sizes = [(1, 64)] if self.dry_run else [(1, 8192), (16, 8192), (48, 8192)]
    return self.cells(
      sizes,
      lambda new, length: write(
        new, length, self.kernels, self.machine["bytes_per_s"], self.timing
      ),
    )


REPORTS = {
  "attention": attention.report,
  "packed": packed_rows.report,
  "sample": drawing.report,
  "cut": drawing.report,
  "write": report_writes,
}
PARTS = ("bandwidth", *REPORTS)


def failures(found: dict, kernels: Sequence[str]) -> list[str]:
  """The errors of our kernels."""
  ours = {*kernels, "find_cut"}
  errors = [e for part in found.values() for e in device_time.errors(part.get("cells", []))]
  return [e for e in errors if e.split(":")[0] in ours]


def main(only: Sequence[str], dry_run: bool, repeats: int, minutes: float):
  if unknown := set(only) - set(PARTS):
    raise ValueError(f"no part {min(unknown)!r}; there are {', '.join(PARTS)}")
  launch.start(1)
  check_device(dry_run)
  run = Run(minutes, dry_run, repeats)
  copies, multiplies = (1e-12 * run.machine[f"{x}_per_s"] for x in ("bytes", "flops"))
  print(
    f"{jax.devices()[0].device_kind}: copies {copies:.2f} TB/s, {multiplies:.0f} TFLOP/s"
  )
  found = {}
  for name in only:
    if name == "bandwidth":
      continue
    found[name] = getattr(run, name)()
    if found[name]["cells"]:
      REPORTS[name](found[name]["cells"])
    for error in device_time.errors(found[name]["cells"]):
      print(f"failed: {error}")
    if found[name]["left_out"]:
      print(f"{name}: no time left for {found[name]['left_out']} shapes")
  print(json.dumps({"bandwidth": run.machine, "kernels": run.kernels} | found))
  sys.exit(1 if failures(found, run.kernels) else 0)


if __name__ == "__main__":
  only = flags.DEFINE_list("only", list(PARTS), "Parts, see above.")
  dry_run = flags.DEFINE_bool("dry_run", False, "Tiny sizes, kernels interpreted.")
  repeats = flags.DEFINE_integer("repeats", 7, "Of each measurement.", lower_bound=2)
  minutes = flags.DEFINE_float(
    "minutes", 60.0, "After which no new shape is begun.", lower_bound=0.0
  )
  launch.run(lambda: main(only.value, dry_run.value, repeats.value, minutes.value))
