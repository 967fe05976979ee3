"""What a run's programs take to compile: seconds of the CPU, by program.

    .venv-aot/bin/python -m dev.aot_seconds --config=experiments/configs/one_gpu.py \\
        --config.policy=/models/SmolLM2-135M --devices=1x150 [--programs=chunk]

Compiles every program of the run's rollouts and learner with the config's sizes and all
layers, one after the other, for H200s that need not be there, from the policy's
`config.json` alone. Nothing is read from a cache, and Triton's is empty. XLA chooses no
kernels by timing them, as it does where there is a GPU.
"""

from collections.abc import Iterator
import os
import re
import resource
import tempfile
from typing import NamedTuple
from unittest import mock

from absl import flags

from dev import aot_run
from experiments import config as config_lib
from experiments import launch
from experiments import memory_phases
from experiments import memory_plan
from experiments import tables
from experiments import trees
from tlt_jax.pallas_kernels import triton_call

_DEVICES = flags.DEFINE_string("devices", "1x150", memory_plan.DRY_RUN_ON)
_PROGRAMS = flags.DEFINE_string("programs", ".", "Regular expression of program names.")


class Seconds(NamedTuple):
  """CPU time of a program."""

  lower: float  # tracing and lowering, without Triton
  triton: float
  compile: float


def _cpu_s() -> float:
  """Of this process's threads, and of programs that have ended, such as ptxas."""
  kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
  return sum(x.ru_utime + x.ru_stime for x in map(resource.getrusage, kinds))


def measured(programs: dict, chosen: str) -> Iterator[tuple[str, Seconds]]:
  """Compiles programs, with names that match a regular expression, and times each."""
  triton_s = 0.0
  compile_kernel = triton_call.compile_kernel

  def timed(*args):
    nonlocal triton_s
    began = _cpu_s()
    try:
      return compile_kernel(*args)
    finally:
      triton_s += _cpu_s() - began

  with mock.patch.object(triton_call, "compile_kernel", timed):
    for name, program in programs.items():
      if re.search(chosen, name):
        before, began = triton_s, _cpu_s()
        lowered = program.lower()
        middle = _cpu_s()
        lowered.compile()
        triton = triton_s - before
        yield name, Seconds(middle - began - triton, triton, _cpu_s() - middle)


def main(config: config_lib.RunConfig) -> None:
  machine = memory_phases.Machine.parse(_DEVICES.value)
  with tempfile.TemporaryDirectory() as folder:
    os.environ["TRITON_CACHE_DIR"] = folder
    run, _ = aot_run.described(config, machine, "h200")
    found = []
    for name, seconds in measured(aot_run.programs(run), _PROGRAMS.value):
      found.append((name, seconds))
      print(name, *(f"{x:.1f}" for x in seconds), flush=True)
  sums = Seconds(*map(sum, zip(*(s for _, s in found), strict=True)))
  found.append((f"all {len(found)}", sums))
  rows = [[name, *(f"{x:.1f}" for x in (*s, sum(s)))] for name, s in found]
  tables.show("CPU seconds", ["program", *Seconds._fields, "sum"], rows)


if __name__ == "__main__":
  read = trees.from_flags("one_gpu", config_lib.RunConfig)
  launch.run(main, config=read)
