"""Measures whole RL runs: the wall time that a drafter that follows its policy saves.

    python -m benchmarks.run --scenario=cold --config=experiments/configs/tail.py:8

All sides (`experiments.sides`) share an RL run, since they draw the same tokens: at every
step each of them rolls out the same prompts from the same policy, in rotating order; then
follow one reward, one update and one weight sync. Each side has its drafter: TLT trains it
from step to step, "frozen" does not, n-grams learn from the side's responses. The time of a
side's run is that of its rollouts, of the training after them, and of the shared parts.

The equality of runs is checked. At every step the responses of every side are compared with
the first side's: tokens must be equal (near-ties: see `rollout.compare`), log-probabilities
equal up to rounding (`logp_apart`). At the first step of every process, each side's
responses update a copy of the policy, and the results must be equal bit for bit
(`updates_equal`), except for rounding in algorithms that read the sampler's
log-probabilities. At later steps only the first side's responses train the policy.

A scenario (`benchmarks.scenarios`) sets keys of any config: `cold`, `kinds`, `elsewhere`,
`drift`. Every `--probe_every` steps the drafters are measured on `--probe_prompts` held-out
prompts, with `--probe_strategy` for every request; no side's time includes that.

A run per seed, in WORKDIR/SCENARIO/seed_N: config.json, metrics.jsonl (per step:
`run_record.of_rollout` of each side; other keys are those of `train`, of the last side),
rollouts.jsonl of the last side, checkpoints. The same command resumes from the latest
checkpoint of policy, prompts, drafters and selectors; every process begins with an
unmeasured rollout per side, which changes no state. WORKDIR/SCENARIO gets summary.json and
summary.png, over all seeds. The last line is the summary's JSON.

On a CPU devices of one process share threads: a slice decodes faster while another one is
idle, in favour of sides that do not train. `experiments.launch` gives each slice a process
and a core:

    python -m experiments.launch --processes=2 -- benchmarks.run ...
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp

from benchmarks import run_figure
from benchmarks import run_record
from benchmarks import run_summary
from benchmarks import scenarios
from experiments import acceptance
from experiments import config as config_lib
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import memory_plan
from experiments import sides as sides_lib
from experiments import trees
from experiments import workdirs
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import metrics as metrics_lib
from tlt_jax import processes
from tlt_jax import ranges
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import sample
from tlt_jax.rl import trainer

_WORKDIR = flags.DEFINE_string(
  "workdir",
  "runs/bench_run",
  "Folder of all output.",
)
_SCENARIO = flags.DEFINE_string("scenario", "cold", "cold, kinds, elsewhere or drift.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "A run each.")
_SIDES = flags.DEFINE_list("sides", [], "Plain first; default: the scenario's.")
_PROBE_EVERY = flags.DEFINE_integer(
  "probe_every", 10, "Steps between measurements of the drafters.", lower_bound=1
)
_PROBE_PROMPTS = flags.DEFINE_integer(
  "probe_prompts", 32, "Held-out prompts of a measurement.", lower_bound=1
)
_PROBE_STRATEGY = flags.DEFINE_string("probe_strategy", "3_1_4", "Of a measurement.")
_PROBE_SEED = 1 << 29  # added to the seed: no noise is shared with a step


@ranges.options
class Bench:
  """The comparison."""

  sides: tuple[str, ...] = ranges.field(..., "names of the sides")
  probe_every: ranges.Count = ranges.field(..., "steps between measurements of drafters")


@ranges.options
class BenchConfig(config_lib.RunConfig):
  """A run, and its comparison."""

  bench: Bench = ranges.field(..., "the comparison")


class Shared:
  """The prompts, the policy and its training, shared by all sides."""

  def __init__(self, config: BenchConfig, mesh: jax.sharding.Mesh):
    self.records = from_config.load_prompts(
      config.prompts, from_config.prompt_rules(config)
    ).records
    self.prompts = data.prompt_iterator(self.records, config.batch.prompts, config.seed)
    model, params = hf.load(config.policy, mesh, axes.TRAIN, dtype="float32")
    algorithm = algorithm_lib.make(**config.algorithm)
    self.config = config
    self.learner = from_config.make_learner(config, model, algorithm, mesh)
    self.reference = from_config.copy_reference(algorithm, params)
    self.go_on_from(self.learner.init(params))

  def go_on_from(self, state: trainer.State) -> None:
    self.state = state
    self.policy = jax.block_until_ready(self.learner.to_rollout(state.params))

  def updated(self, scored: sample.Scored) -> tuple[trainer.State, dict[str, float]]:
    """The state after an update, which consumes the current one; and its metrics."""
    batch = scored.batch(self.config.batch.responses)
    return self.learner.train(self.state, batch, self.reference)

  def update(self, scored: sample.Scored) -> dict[str, float]:
    """Trains the policy; returns metrics, with the seconds of update and sync."""
    launch.release_freed_memory()
    began = time.perf_counter()
    state, metrics = self.updated(scored)
    synced = time.perf_counter()
    self.go_on_from(state)
    seconds = {
      "policy/seconds_s": synced - began,
      "weight_sync/seconds_s": time.perf_counter() - synced,
    }
    return metrics | seconds

  def updates_equal(self, by_side: Mapping[str, sample.Scored]) -> bool:
    """Whether updates by the responses of all sides are equal bit for bit."""
    kept, found = self.state, set()
    for scored in by_side.values():
      self.state = jax.tree.map(jnp.copy, kept)
      state, _ = self.updated(scored)
      found.add(sides_lib.digest(state.params))
    self.state = kept
    return len(found) == 1


class Probe:
  """Measures drafters on held-out prompts, with the current policy."""

  def __init__(self, config: BenchConfig, models: from_config.Models):
    source = config.held_out | {"size": _PROBE_PROMPTS.value}
    self._records = from_config.load_prompts(
      source, from_config.prompt_rules(config), whole=True
    ).records
    self._seed = config.seed + _PROBE_SEED
    self._sampler = acceptance.sampler(config, models, _PROBE_STRATEGY.value)

  def __call__(self, policy: Any, draft_params: Any) -> float:
    """Tokens per pass of the target."""
    self._sampler.rollout.drafter.params = draft_params
    scored = self._sampler(policy, self._records, 2, seed=self._seed)
    return scored.samples.mean_acceptance_length


class Run:
  """One seed's run of a scenario."""

  def __init__(self, config: BenchConfig, folder: pathlib.Path):
    opened = workdirs.open(str(folder), config)
    self.config, self.folder = config, folder
    self.checkpoints, mesh = opened.checkpoints, axes.make_mesh(config.tensor_parallel)
    self.shared = Shared(config, mesh)
    model = self.model = self.shared.learner.config
    names = config.bench.sides
    self.sides = {
      name: sides_lib.Side(name, config, model, mesh, self.shared.records) for name in names
    }
    self.step = 0
    if opened.start is not None:
      self._restore(opened.start)
    for side in self.sides.values():
      side.compile(self.shared.policy)
    self.probes = {
      name: Probe(config, from_config.Models(mesh, model, None, side.frozen()))
      for name, side in self.sides.items()
      if name == "frozen" or sides_lib.trains(name)
    }
    opened.begin(self.step)
    self._is_first = True  # step of this process

  def _restore(self, start) -> None:
    """Restores the latest checkpoint, which must have as many slices."""
    began_with = start.data()[1]["drafters"]
    for name, side in self._training():
      began, here = len(began_with[name]["buffer"]["rows"]), len(side.spot.buffer.rows)
      if began != here:
        raise ValueError(
          f"the run in {self.folder} began with {began} slices, not {here}: times would "
          "mix. Give it as many devices as before, or another --workdir"
        )
    like = {name: side.spot.arrays() for name, side in self._training()}
    like["policy"] = self.shared.learner.abstract_state()
    self.shared.state = self.shared.policy = None  # the checkpoint's have their memory
    self.step, restored, saved = start.restore(like)
    self.shared.go_on_from(restored.pop("policy"))
    self.shared.prompts.set_state(saved["prompts"])
    for name, side in self._training():
      side.spot.restore(restored[name], saved["drafters"][name])
    for name, side in self.sides.items():
      side.sampler.rollout.restore(saved["rollouts"][name])

  def _save(self) -> None:
    """Writes a checkpoint, if one is due."""
    state = {name: side.spot.arrays() for name, side in self._training()}
    saved = {
      "prompts": self.shared.prompts.get_state(),
      "drafters": {name: side.spot.data() for name, side in self._training()},
      "rollouts": {n: side.sampler.rollout.state() for n, side in self.sides.items()},
    }
    is_last = self.step == self.config.steps
    state["policy"] = self.shared.state
    self.checkpoints.save(self.step, state, saved, force=is_last)
    self.checkpoints.wait()  # else the next step's first side would share its cores

  def _training(self):
    """The (name, side) of those whose drafter trains."""
    return [(name, side) for name, side in self.sides.items() if side.spot is not None]

  def to_the_end(self) -> None:
    """Does the remaining steps."""
    config, writer = self.config, metrics_lib.Writer(self.folder, resume_step=self.step)
    with self.checkpoints:
      while True:
        metrics, is_last = {}, self.step == config.steps
        if is_last or self.step % config.bench.probe_every == 0:
          metrics = self._probed()
        if is_last:
          writer.write(self.step, metrics)
          break
        found, scored = self._do_step()
        writer.write(self.step, metrics | found)
        writer.write_rollout(self.step, scored.record())
        self._print(found)
        self.step += 1
        self._save()
    writer.close()

  def _probed(self) -> dict[str, float]:
    """Tokens per pass on held-out prompts."""
    found = {}
    for name, probe in self.probes.items():
      params = self.sides[name].drafter.params
      found[f"{name}/probe"] = probe(self.shared.policy, params)
    return found

  def _do_step(self) -> tuple[dict[str, float], sample.Scored]:
    """Does a step; returns its metrics, and the last side's samples."""
    shared, config, by_side = self.shared, self.config, {}
    records = next(shared.prompts)
    first = self.step * len(records) * config.batch.responses
    if self._is_first:
      for side in self.sides.values():
        side.warm_up(shared.policy, records, first)
    for name in interleave.in_turn(list(self.sides), self.step):
      side = self.sides[name]
      by_side[name] = side.rollout(shared.policy, records, first)
    names = list(self.sides)
    expected, last = by_side[names[0]], by_side[names[-1]]
    found = {
      name: run_record.of_rollout(scored)
      | run_record.differences(self.model, shared.policy, expected, scored)
      for name, scored in by_side.items()
    }
    metrics = last.metrics()
    if self._is_first:
      metrics["updates_equal"] = float(shared.updates_equal(by_side))
    metrics |= shared.update(expected)
    self._is_first = False
    common = ("reward/seconds_s", "policy/seconds_s", "weight_sync/seconds_s")
    common_s = sum(metrics[key] for key in common)
    for name, of_side in found.items():
      of_side["step_s"] = of_side["rollout_s"] + of_side["training_s"] + common_s
      metrics |= {f"{name}/{key}": value for key, value in of_side.items()}
    return metrics, last

  def _print(self, metrics: Mapping[str, float]) -> None:
    """Prints a line on the step that was done."""
    took = "  ".join(f"{n} {metrics[f'{n}/rollout_s']:.2f} s" for n in self.sides)
    seed, steps = self.config.seed, self.config.steps
    reward = f"reward {metrics['reward/mean']:.2f}"
    if processes.is_first():
      print(f"seed {seed}, step {self.step + 1}/{steps}: {took}  {reward}", flush=True)


def is_done(folder: pathlib.Path, config: BenchConfig) -> bool:
  """Whether the run in a folder has done all steps."""
  opened = workdirs.open(str(folder), config)
  if opened.start is None or opened.start.latest() < config.steps:
    return False
  return metrics_lib.read(folder / "metrics.jsonl")[-1]["step"] == config.steps


def numbers(flag: str, texts: list[str]) -> list[int]:
  """Parses the numbers of a flag."""
  if not texts or not all(text.isdecimal() for text in texts):
    raise ValueError(f"--{flag} takes numbers such as 0,1, not {','.join(texts)!r}")
  return list(map(int, texts))


def prepared(config: config_lib.RunConfig) -> BenchConfig:
  """The config of a scenario's runs, with the flags of this command."""
  _, given, _ = trees.split(sys.argv, "config")
  config = scenarios.apply(_SCENARIO.value, config, given)
  sides = _SIDES.value or list(scenarios.get(_SCENARIO.value).sides)
  sides_lib.check(sides, config)
  if config.batch.most_prompts:
    raise ValueError("bench.run replaces no prompt: give --config.batch.most_prompts=0")
  if config.rollout.carry.prompts:
    raise ValueError(
      "bench.run finishes all responses in their step: give "
      "--config.rollout.carry.prompts=0"
    )
  if algorithm_lib.make(**config.algorithm).critic is not None:
    raise ValueError("bench.run trains no critic: choose another --config.algorithm.name")
  numbers("seeds", _SEEDS.value)
  bench = Bench(sides=tuple(sides), probe_every=_PROBE_EVERY.value)
  return BenchConfig(**vars(config), bench=bench)


def main(config: config_lib.RunConfig):
  config, root = prepared(config), pathlib.Path(_WORKDIR.value)
  launch.start()
  folder = root / _SCENARIO.value
  for seed in numbers("seeds", _SEEDS.value):
    own, changes = folder / f"seed_{seed}", {"seed": seed}
    if "seed" in config.prompts:
      changes["prompts"] = config.prompts | {"seed": seed}
    of_seed = workdirs.keep_sizes(str(own), dataclasses.replace(config, **changes))
    of_seed, _ = from_config.complete(of_seed)
    of_seed = memory_plan.choose_remat(of_seed)
    if not is_done(own, of_seed):
      Run(of_seed, own).to_the_end()
      sides_lib.free_programs()
  if processes.is_first():
    sum_up(folder, config)


def sum_up(folder: pathlib.Path, config: BenchConfig) -> None:
  """Writes and prints the summary of the runs in a folder."""
  seeds = numbers("seeds", _SEEDS.value)
  runs = {s: metrics_lib.read(folder / f"seed_{s}" / "metrics.jsonl") for s in seeds}
  found = run_summary.summarize(_SCENARIO.value, config.bench.sides, runs)
  (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
  run_figure.draw(folder / "summary.png", found, runs)
  run_summary.report(found)
  print(json.dumps(found))


if __name__ == "__main__":
  read = trees.from_flags("tail", config_lib.RunConfig)
  launch.run(main, joins_jobs=True, config=read)
