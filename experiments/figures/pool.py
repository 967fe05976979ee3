"""Measures time and memory of compiled programs: one strategy, buckets, and all.

    python -m experiments.figures.pool --config=experiments/configs/tail.py

Each case runs in a separate process without a compilation cache: number of programs,
seconds to compile them, largest scratch memory, growth of the resident set (MiB). "one
strategy" is plain decoding and one chain in the largest bucket; "buckets" is the config,
with strategies by live batch; "naive" compiles every strategy for every bucket. In the
paper: captured CUDA graphs (arXiv 2511.16665). The last line is JSON.
"""

import dataclasses
import json
import subprocess
import sys

from absl import flags
import jax
import psutil

from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from experiments import trees
from tlt_jax.spec_decode.speculation import levels

_CASE = flags.DEFINE_string("case", "", "To measure here; default: each in a process.")

CASES = ("one strategy", "buckets", "naive")


def settings(config: config_lib.RunConfig, case: str) -> config_lib.RunConfig:
  """The config of a case."""
  known, slots = levels.parse(config.strategies), config.rollout.slots
  arms = dict.fromkeys(arm for level in known for arm in level.arms)
  if case == "one strategy":
    chain = next(arm for arm in arms if arm is not None)
    chosen = [levels.Level(slots, (None, chain))]
    config = trees.change(config, {"rollout.buckets": ()})  # leaves the largest
  elif case == "naive":
    chosen = [levels.Level(slots, tuple(arms))]
  else:
    chosen = known
  return dataclasses.replace(config, strategies=levels.write(chosen))


def resident_mib() -> float:
  return psutil.Process().memory_info().rss / 2**20


def measure(config: config_lib.RunConfig) -> dict:
  """Compiles all programs of the config's rollouts."""
  models = from_config.load_models(config)
  selector = from_config.make_selector(config)
  made = from_config.make_sampler(
    config, models.model, models.mesh, models.drafter, selector
  )
  before = resident_mib()
  stops = len(made.tokenizer.stop_tokens) + 1
  made.rollout.compile(models.params, stops)
  pool = made.rollout.pool
  return {
    "programs": len(pool),
    "compile_s": pool.seconds,
    "scratch_mib": pool.temp_bytes / 2**20,
    "resident_mib": resident_mib() - before,
  }


def main(config: config_lib.RunConfig):
  if _CASE.value:
    launch.start()
    jax.config.update("jax_enable_compilation_cache", False)
    config, _ = from_config.complete(config)
    print(json.dumps(measure(settings(config, _CASE.value))))
    return
  found = {}
  for case in CASES:
    command = [sys.executable, "-m", "experiments.figures.pool", f"--case={case}"]
    ran = subprocess.run([*command, *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
    if ran.returncode:
      raise ValueError(f"{case} could not be measured: its error is above")
    found[case] = json.loads(ran.stdout.splitlines()[-1])
    print(case, found[case], flush=True)
  print(json.dumps(found))


if __name__ == "__main__":
  read = trees.from_flags("tail", config_lib.RunConfig)
  launch.run(main, config=read)
