"""The memory of a run: its arrays, and those that compilers add for its programs.

    .venv-aot/bin/python -m dev.aot_memory \\
        --config=experiments/configs/long_reasoning.py:qwen2_5_32b \\
        --config.policy=/models/Qwen2.5-32B --devices=32x80 --target=h200

Compiles all programs of the run's rollouts and learner with the config's sizes, for devices
that need not exist, from the policy's `config.json` alone. The policy is compiled with a
few layers only, at two depths; memory with all layers is extrapolated linearly. Writes
POLICY_DEVICES_TARGET.json and .md. Compiled programs are kept in --workdir. `make aot`
installs the compilers.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import time
from typing import NamedTuple

from absl import flags
import jax

from dev import aot_machines
from dev import aot_programs
from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from experiments import memory_phases
from experiments import memory_plan
from experiments import trees
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

_DEVICES = flags.DEFINE_string("devices", "8x80", memory_plan.DRY_RUN_ON)
_TARGET = flags.DEFINE_enum("target", "h200", ["h200", "v6e"], "Kind of the devices.")
_LAYERS = flags.DEFINE_list("layers", ["2", "4"], "Depths that are compiled: two.")
_PROGRAMS = flags.DEFINE_string(
  "programs", ".", "Regular expression of program names in the report."
)
_WORKDIR = flags.DEFINE_string("workdir", "runs/aot/memory", "Of compiled programs.")
_OUTPUT = flags.DEFINE_string("output", "experiments/results/aot/memory", "The report.")

_KERNELS = {"h200": "triton", "v6e": "pallas"}
_UPDATE = ("update", "score", "to_rollout")  # the learner's programs
# Programs whose results the plan lists among the arrays.
_PLANNED_RESULTS = ("fill", "to_rollout")
_GIB = 2**30


class Bytes(NamedTuple):
  """Bytes of a program on a device."""

  argument: float
  output: float
  alias: float  # the part of the output that reuses arguments
  temp: float

  @property
  def beside(self) -> float:
    """Without its arguments, while it runs."""
    return self.temp + self.output - self.alias

  def at(self, layers: int, other: "Bytes", others: int, all_layers: int) -> "Bytes":
    """Linear extrapolation from this, of `layers`, and `other`, of `others`."""
    factor = (all_layers - layers) / (others - layers)
    return Bytes(*(a + (b - a) * factor for a, b in zip(self, other, strict=True)))


class Compiled(NamedTuple):
  """A program: bytes by its shapes, and by the compiler."""

  name: str
  shapes: int  # bytes of the arguments with all layers
  all_layers: Bytes
  by_layers: Mapping[int, Bytes]  # as compiled

  @property
  def adds(self) -> float:
    """Bytes that it adds to the arrays of its phase."""
    padded = max(self.all_layers.argument - self.shapes, 0)
    planned = self.name.split()[0] in _PLANNED_RESULTS
    return padded + (self.all_layers.temp if planned else self.all_layers.beside)


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
  spot = from_config.make_draft_trainer(
    config.spot,
    config.sampling.temperature,
    config.max_length,
    run.model,
    run.mesh,
    drafter,
  )
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
  learner = from_config.make_learner(
    config.learner, config.optimizer, run.model, algorithm, run.mesh
  )
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


def compiled(program: aot_programs.Program, versions: dict, workdir) -> Bytes:
  """The compiler's memory analysis, from the folder if it is there already."""
  lowered = program.lower()
  devices = jax.tree.leaves(program.args)[0].sharding.mesh.devices
  about = f"{devices.shape} {devices.flat[0].device_kind} {versions} {lowered.as_text()}"
  file = workdir / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
  if not file.exists():
    found = aot_machines.memory_of(lowered.compile())
    workdir.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
  return Bytes(**json.loads(file.read_text()))


def compile_all(
  run: memory_plan.Run, chosen: str, layers: tuple[int, int], versions: dict, workdir
) -> list[Compiled]:
  """Compiles the programs of a run at two depths.

  Args:
    run: the devices of its mesh need not exist
    chosen: regular expression of the programs' names
    layers: the depths
    versions: of the compilers
    workdir: of compiled programs
  """

  def programs_at(depth: int) -> dict[str, aot_programs.Program]:
    model = dataclasses.replace(run.model, num_layers=depth)
    return programs(dataclasses.replace(run, model=model))

  shallow, deep = layers
  whole, cut = programs(run), {depth: programs_at(depth) for depth in layers}
  found = []
  for name, program in whole.items():
    if not re.search(chosen, name):
      continue
    began = time.perf_counter()
    by_layers = {n: compiled(cut[n][name], versions, workdir) for n in layers}
    full = by_layers[shallow].at(shallow, by_layers[deep], deep, run.model.num_layers)
    shapes = aot_programs.argument_bytes(program.args)
    found.append(Compiled(name, shapes, full, by_layers))
    print(
      f"{name}: {full.argument / _GIB:.2f} GiB of arguments ({shapes / _GIB:.2f} by "
      f"shapes), {full.beside / _GIB:.2f} beside ({time.perf_counter() - began:.0f} s)",
      flush=True,
    )
  return found


def phases(plan: memory_phases.Plan, found: Sequence[Compiled]) -> dict[str, dict]:
  """By phase: bytes of the arrays, the largest program, and the bytes that it adds."""
  totals = {}
  for phase in plan.phases:
    of_phase = [c for c in found if (c.name in _UPDATE) == (phase == "update")]
    if of_phase:  # else none was chosen
      most = max(of_phase, key=lambda c: c.adds)
      arrays = plan.needed(phase)
      totals[phase] = {
        "arrays": arrays,
        "program": most.name,
        "beside": most.adds,
        "total": arrays + most.adds,
        "free": plan.room.free,
      }
  return totals


def _gib(size: float) -> str:
  return f"{size / _GIB:.2f}"


def report(title: str, plan: memory_phases.Plan, found: Sequence[Compiled]) -> str:
  """The tables, as Markdown, in GiB of each device."""
  rows = []
  for phase, total in phases(plan, found).items():
    sizes = (_gib(total[name]) for name in ("arrays", "beside", "total", "free"))
    fits = "yes" if total["total"] <= total["free"] else "NO"
    rows.append([phase, *sizes, total["program"], fits])
  header = ("phase", "arrays", "beside", "total", "free", "hungriest program", "fits")
  lines = [f"# {title}", "", *_table(header, rows), ""]
  of_phase = {
    phase: {part.name: _gib(part.size) for part in parts}
    for phase, parts in plan.phases.items()
  }
  names = dict.fromkeys(name for parts in of_phase.values() for name in parts)
  rows = [[n, *(parts.get(n, "") for parts in of_phase.values())] for n in names]
  lines += [*_table(("arrays", *of_phase), rows), ""]
  rows = []
  for c in found:
    full = c.all_layers
    sizes = (c.shapes, full.argument, full.output - full.alias, full.temp)
    cut = [f"{_gib(b.temp)} ({layers})" for layers, b in c.by_layers.items()]
    rows.append([c.name, *map(_gib, sizes), ", ".join(cut)])
  header = ("program", "arguments by shapes", "arguments, compiled", "new results", "temp")
  lines += _table((*header, "temp (layers compiled)"), rows)
  return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  lines = [header, ["---"] * len(header), *rows]
  return [f"| {' | '.join(line)} |" for line in lines]


def main(config: config_lib.RunConfig) -> None:
  machine = memory_phases.Machine.parse(_DEVICES.value)
  if machine is None:
    raise ValueError("--devices is empty; it reads DEVICESxGIGABYTES, such as 64x80")
  if re.search(r"\d", config.learner.only):
    raise ValueError(
      f"learner.only={config.learner.only!r} names layers by number, which a policy "
      "cut to a few layers does not have; --config.learner.only='' compares all of them"
    )
  if len(_LAYERS.value) != 2 or len({*_LAYERS.value}) != 2:
    raise ValueError("--layers takes two depths, such as 2,4: a line needs two points")
  layers = tuple(map(int, _LAYERS.value))
  name, tensor = _TARGET.value, config.tensor_parallel
  target = target_of(machine.devices, tensor, name)
  os.environ.update(aot_machines.environment(target.platform))
  jax.config.update("jax_platforms", "cpu")
  config, _ = from_config.complete(config, machine)
  config = memory_plan.choose_remat(config, machine)
  plan = memory_plan.of_run(config, machine)
  mesh = aot_machines.mesh_of(target)
  kernels = config.rollout.kernels or _KERNELS[name]
  config = trees.change(config, {"rollout.kernels": kernels})
  selector = from_config.make_selector(config)
  run = memory_plan.described(config, selector, stops=1, machine=machine)
  run = dataclasses.replace(run, mesh=mesh)
  versions = aot_machines.versions(target.platform)
  found = compile_all(run, _PROGRAMS.value, layers, versions, pathlib.Path(_WORKDIR.value))
  output = pathlib.Path(_OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  policy = pathlib.Path(config.policy).name
  title = f"{policy}_{_DEVICES.value}_{name}"
  text = report(f"{policy} on {_DEVICES.value} GB, {name}", plan, found)
  (output / f"{title}.md").write_text(text)
  summary = {
    "devices": _DEVICES.value,
    "target": target._asdict(),
    "num_layers": run.model.num_layers,
    "versions": versions,
    "phases": phases(plan, found),
    "plan": {
      phase: {part.name: part.size for part in parts}
      for phase, parts in plan.phases.items()
    },
    "programs": [
      {
        "name": c.name,
        "arguments_by_shapes": c.shapes,
        "all_layers": c.all_layers._asdict(),
        "by_layers": {depth: b._asdict() for depth, b in c.by_layers.items()},
      }
      for c in found
    ],
  }
  (output / f"{title}.json").write_text(json.dumps(summary, indent=1) + "\n")
  print(text)


if __name__ == "__main__":
  read = trees.from_flags("long_reasoning", config_lib.RunConfig)
  launch.run(main, config=read)
