"""What a run's programs take to compile: seconds of the CPU, by program.

    .venv-aot/bin/python -m dev.aot_seconds --config=experiments/configs/one_gpu.py \\
        --config.policy=/models/SmolLM2-135M --devices=1x150 [--programs=chunk]

Compiles every program of the run's rollouts and learner with the config's sizes and all
layers, one after the other, for H200s that need not be there, from the policy's
`config.json` alone. Nothing is read from a cache, and Triton's is empty. XLA chooses no
kernels by timing them, as it does where there is a GPU.
"""

import os
import tempfile

from absl import flags

from dev import aot_run
from experiments import config as config_lib
from experiments import launch
from experiments import memory_phases
from experiments import memory_plan
from experiments import tables
from experiments import trees

_DEVICES = flags.DEFINE_string("devices", "1x150", memory_plan.DRY_RUN_ON)
_PROGRAMS = flags.DEFINE_string("programs", ".", "Regular expression of program names.")


def main(config: config_lib.RunConfig) -> None:
  machine = memory_phases.Machine.parse(_DEVICES.value)
  with tempfile.TemporaryDirectory() as folder:
    os.environ["TRITON_CACHE_DIR"] = folder
    run, _ = aot_run.described(config, machine, "h200")
    found = []
    for name, seconds in aot_run.timed(aot_run.programs(run), _PROGRAMS.value):
      found.append((name, seconds))
      print(name, *(f"{x:.1f}" for x in seconds), flush=True)
  if not found:
    raise ValueError(f"--programs={_PROGRAMS.value} is in no program's name")
  sums = aot_run.Seconds(*map(sum, zip(*(s for _, s in found), strict=True)))
  found.append((f"all {len(found)}", sums))
  rows = [[name, *(f"{x:.1f}" for x in (*s, sum(s)))] for name, s in found]
  tables.show("CPU seconds", ["program", *aot_run.Seconds._fields, "sum"], rows)


if __name__ == "__main__":
  read = trees.from_flags("one_gpu", config_lib.RunConfig)
  launch.run(main, config=read)
