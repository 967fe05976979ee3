"""What `dev.aot_memory` and `dev.aot_seconds` compile and add up, on a CPU as several."""

import dataclasses
import json

import jax
import pytest

from dev import aot_machines
from dev import aot_memory
from dev import aot_programs
from dev import aot_run
from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import memory_plan
from tests import commands
from tests import tiny
from tlt_jax import axes
from tlt_jax.models import hf

MACHINE = memory_phases.Machine.parse("4x80")
NAMES = {"prefill", "update", "score", "to_rollout", "train", "exchange", "store"}


@pytest.fixture(params=["eagle2"])
def config(tmp_path, request) -> config_lib.RunConfig:
  """Of a run that speculates, trains a drafter and scores, with a policy of two layers."""
  (tmp_path / "config.json").write_text(json.dumps(hf.unparse_config(tiny.CONFIG)))
  changes = {
    "spot.rows": 4,
    "spot.max_batch": 2,
    "rollout.slots": 4,
    "rollout.buckets": (4, 2),
    "rollout.kernels": "ref",
    "learner.updates": 2,
    "learner.only": "",
    "learner.remat": True,
    "policy": str(tmp_path),
    "tensor_parallel": 2,
    "drafter": request.param,
    "strategies": "up to 9 live: 2_1_3",
    "algorithm": {"name": "grpo", "kl_coef": 1e-3},
  }
  return commands.read_run("countdown.py:smoke", changes)


def run_of(config: config_lib.RunConfig, layers: int) -> memory_plan.Run:
  """A run of a policy of so many layers, on four devices of this machine."""
  selector = from_config.make_selector(config)
  run = memory_plan.described(config, selector, stops=1, machine=MACHINE)
  model = dataclasses.replace(run.model, num_layers=layers)
  mesh = axes.make_mesh(config.tensor_parallel, jax.devices()[:4])
  return dataclasses.replace(run, model=model, mesh=mesh)


def compiled(program: aot_programs.Program) -> aot_memory.Bytes:
  return aot_memory.Bytes(**aot_machines.memory_of(program.lower().compile()))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["eagle2", "block"], indirect=True)
def test_what_compilers_say_of_arguments_is_what_the_plan_adds_up(config):
  """Of the programs of the run; where slices train, they do in chunks of their own."""
  found = aot_run.programs(run_of(config, 2))
  assert set(found) >= NAMES | {"chunk 4", "chunk+training 2"}
  plan = memory_plan.of_run(config, MACHINE)
  exact = {p.name: p.size for parts in plan.phases.values() for p in parts}
  chunk, update = found["chunk 4"], found["update"]
  for program in (chunk, update):
    by_shapes = aot_programs.argument_bytes(program.args)
    assert compiled(program).argument == by_shapes
  state, *batch = update.args
  held = aot_programs.argument_bytes(state) - 4  # but for the step's number
  assert held == exact["policy in training"] + exact["moments"]
  weights, slots, *_ = chunk.args
  assert aot_programs.argument_bytes(weights) == exact["policy in rollouts"]
  kept = exact["KV cache"] + exact["kept features"]
  assert aot_programs.argument_bytes(slots) <= kept


def test_each_program_is_timed(config):
  """Those that are chosen, by the CPU's time of each part."""
  programs = aot_run.programs(run_of(config, 2))
  found = dict(aot_run.timed(programs, "copy|store"))
  assert set(found) == {"copy", "store"}
  assert all(s.compile > 0 and s.lower > 0 and s.triton == 0 for s in found.values())
