"""The programs of a run, by its config, for devices that need not exist; their CPU time."""

from collections.abc import Iterator
import dataclasses
import os
import re
import resource
from typing import NamedTuple
from unittest import mock

import jax

from dev import aot_machines
from dev import aot_programs
from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import memory_plan
from experiments import trees
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

_KERNELS = {"h200": "triton", "v6e": "pallas"}


def described(
  config: config_lib.RunConfig, machine: memory_phases.Machine | None, name: str
) -> tuple[memory_plan.Run, memory_phases.Plan]:
  """A run on so many devices, from its policy's config.json alone, and its memory.

  Sets this process up to compile for them.

  Args:
    machine: number and memory of the devices
    name: their kind, "h200" or "v6e"
  Raises:
    ValueError: there is no such machine, or its compiler is not installed
  """
  if machine is None:
    raise ValueError("--devices is empty; it reads DEVICESxGIGABYTES, such as 64x80")
  target = target_of(machine.devices, config.tensor_parallel, name)
  os.environ.update(aot_machines.environment(target.platform))
  jax.config.update("jax_platforms", "cpu")  # jax has read the environment already
  jax.config.update("jax_enable_compilation_cache", False)
  config, _ = from_config.complete(config, machine)
  config = memory_plan.choose_remat(config, machine)
  plan = memory_plan.of_run(config, machine)
  mesh = aot_machines.mesh_of(target)
  kernels = config.rollout.kernels or _KERNELS[name]
  config = trees.change(config, {"rollout.kernels": kernels})
  selector = from_config.make_selector(config)
  run = memory_plan.described(config, selector, stops=1, machine=machine)
  return dataclasses.replace(run, mesh=mesh), plan


def target_of(devices: int, model: int, name: str) -> aot_machines.Target:
  """The target of so many devices, in slices of `model` devices.

  Args:
    name: "h200" or "v6e"
  Raises:
    ValueError: TPUs do not come in that number
  """
  if name == "h200":
    return aot_machines.Target("cuda", f"1x1x{devices}", devices, model)
  log = devices.bit_length() - 1
  if devices != 2**log or not 4 <= devices <= 256:
    raise ValueError(f"v6e come as 4, 8, 16, 32, 64, 128 or 256 devices, not {devices}")
  topology = f"v6e:{2 ** (log // 2)}x{2 ** (log - log // 2)}"
  return aot_machines.Target("tpu", topology, devices, model)


def programs(run: memory_plan.Run, stops: int = 1) -> dict[str, aot_programs.Program]:
  """The programs of a run's rollouts and learner, by name and bucket.

  Args:
    run: the devices of its mesh need not exist
    stops: stop tokens per request
  """
  config, drafter = run.config, run.drafter()
  options = from_config.rollout_options(config)
  spot = run.draft_trainer(drafter)
  drafting = None
  if spot is not None:
    drafting = aot_programs.abstract_spot(*spot)
  elif drafter is not None:
    drafting = spot_lib.Frozen(drafter, run.draft_params(drafter))
  engine = rollout_lib.make(run.model, run.mesh, options, drafting, run.selector)
  made = aot_programs.of_rollout(engine, run.weights(), stops)
  found = {" ".join(map(str, (name, *key[:1]))): made[name, *key] for name, *key in made}
  return found | _of_learner(run)


def _of_learner(run: memory_plan.Run) -> dict[str, aot_programs.Program]:
  config = run.config
  algorithm = algorithm_lib.make(**config.algorithm)
  learner = run.learner(algorithm)
  count = config.batch.prompts * config.batch.responses
  tables, scored = ["sampler_logp"], False
  if learner.updates > 1:
    tables, scored = [*tables, "old_logp"], True
  if algorithm.uses_reference:
    tables, scored = [*tables, "reference_logp"], True
  found = {"update": aot_programs.of_update(learner, count // learner.updates, tables)}
  if scored:
    found["score"] = aot_programs.of_score(learner, count)
  return found | {"to_rollout": aot_programs.of_sync(learner)}


class Seconds(NamedTuple):
  """CPU time of a program."""

  lower: float  # tracing and lowering, without Triton
  triton: float
  compile: float


def _cpu_s() -> float:
  """Of this process's threads, and of programs that have ended, such as ptxas."""
  kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
  return sum(x.ru_utime + x.ru_stime for x in map(resource.getrusage, kinds))


def timed(
  programs: dict[str, aot_programs.Program], chosen: str
) -> Iterator[tuple[str, Seconds]]:
  """Compiles programs, with names that match a regular expression, and times each."""
  triton_s = 0.0
  compile_kernel = triton_call.compile_kernel

  def timed_kernel(*args):
    nonlocal triton_s
    began = _cpu_s()
    try:
      return compile_kernel(*args)
    finally:
      triton_s += _cpu_s() - began

  with mock.patch.object(triton_call, "compile_kernel", timed_kernel):
    for name, program in programs.items():
      if re.search(chosen, name):
        before, began = triton_s, _cpu_s()
        lowered = program.lower()
        middle = _cpu_s()
        lowered.compile()
        triton = triton_s - before
        yield name, Seconds(middle - began - triton, triton, _cpu_s() - middle)
