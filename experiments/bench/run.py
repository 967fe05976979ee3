"""Measures whole RL runs: what a drafter that follows its policy is worth in wall time.

    python -m experiments.bench.run --scenario=cold --config=experiments/configs/tail.py:8

One RL run serves all sides (`experiments.bench.sides`), since they draw the same tokens:
at every step each of them rolls out the same prompts from the same policy, in an order
that rotates; then follow one reward, one update and one weight sync. TLT's drafter, its
optimizer and its data go on from step to step, the frozen drafter stays as it is, n-grams
remember what their own side has drawn. So the time of a side's run is that of its
rollouts, of the training after them, and of what all sides have in common.

What makes this a comparison of runs is checked. At every step the responses of every side
are compared with the first side's: tokens must be equal (near-ties are told from bugs, see
`rollout.compare`), log-probabilities are equal up to rounding (`logp_apart`). At the first
step of every process each side's responses update a copy of the policy, and the results
must be equal bit for bit (`updates_equal`); an algorithm that reads the sampler's
log-probabilities may round there. At later steps only the first side's responses train:
that the others would train the same then follows from their tokens.

A scenario (`experiments.bench.scenarios`) sets keys of any config: `cold`, `elsewhere`,
`drift`. `--wide` embeds the policy in a larger one first. Every `--probe_every` steps the
drafters of the moment are measured on held-out prompts, all requests drafted for alike
(`--offline.evaluation`), which costs no side time. The policies of the steps
`--headroom` are kept; after the run a drafter is trained to its limit for each, as
`--offline` says, and compared with the frozen one and with TLT's of that step.

A run per seed, in WORKDIR/SCENARIO/seed_N: config.json, metrics.jsonl (per step: what
`run_record.of_rollout` says of each side; other keys are those of `train`, of the last
side), rollouts.jsonl of the last side, headroom.jsonl, checkpoints. Killed, the same
command goes on from the latest checkpoint, of policy, prompts, drafters and what selectors
know; every process begins with a rollout per side that is not measured and leaves
nothing. WORKDIR/SCENARIO gets summary.json and summary.png, over all seeds. The last line
is the summary's JSON.

Devices of one process share its threads on a CPU: a slice that decodes is faster while
another one has nothing to do, which flatters sides that train nothing. `experiments.launch`
gives each slice a process and a core of its own:

    python -m experiments.launch --processes=2 -- experiments.bench.run ...

It takes no --wide: give what `experiments.bench.widen` has made. The headroom is measured
when the same command runs in one process afterwards.
"""

from collections.abc import Mapping
import json
import pathlib
import time

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags

from experiments import declarations
from experiments import from_config
from experiments import keys
from experiments import launch
from experiments import workdirs
from experiments.bench import headroom
from experiments.bench import interleave
from experiments.bench import run_figure
from experiments.bench import run_record
from experiments.bench import run_summary
from experiments.bench import scenarios
from experiments.bench import sides as sides_lib
from experiments.bench import targets
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import metrics as metrics_lib
from tlt_jax import processes
from tlt_jax import tokenization
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import sample
from tlt_jax.rl import trainer

_WORKDIR = flags.DEFINE_string(
  "workdir",
  "runs/bench_run",
  "Where everything goes.",
  allow_override=True,  # `train_drafter`, whose parts `headroom` uses, has one too
)
_SCENARIO = flags.DEFINE_string("scenario", "cold", "cold, elsewhere or drift.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "A run each.")
_SIDES = flags.DEFINE_list("sides", [], "Plain first; default: the scenario's.")
_WIDE = flags.DEFINE_bool("wide", False, "Embeds the policy in a larger one.")
_PROBE_EVERY = flags.DEFINE_integer(
  "probe_every", 10, "Steps between measurements of the drafters.", lower_bound=1
)
_HEADROOM = flags.DEFINE_list(
  "headroom", ["0", "50", "100"], "Steps whose policies get a drafter of their own."
)


class Shared:
  """What all sides of a run have in common: prompts, policy and its training."""

  def __init__(self, config: dict, mesh: jax.sharding.Mesh):
    """Loads the policy of the run's config."""
    asked = from_config.prompts(config, config["prompts"])
    self.prompts = data.prompt_iterator(asked, config["batch"]["prompts"], config["seed"])
    model, params = hf.load(config["policy"], mesh, axes.TRAIN, dtype="float32")
    algorithm = algorithm_lib.make(**config["algorithm"])
    self.config = config
    self.learner = from_config.learner(config, model, algorithm, mesh)
    self.reference = from_config.reference(algorithm, params)
    self.go_on_from(self.learner.init(params))

  def go_on_from(self, state: trainer.State) -> None:
    """Takes over a policy and its optimizer."""
    self.state = state
    self.policy = jax.block_until_ready(self.learner.to_rollout(state.params))

  def updated(self, scored: sample.Scored) -> tuple[trainer.State, dict[str, float]]:
    """The state after an update, which takes over the one at hand; and its metrics."""
    batch = scored.batch(self.config["batch"]["responses"])
    return self.learner.train(self.state, batch, self.reference)

  def update(self, scored: sample.Scored) -> dict[str, float]:
    """Trains the policy; returns metrics, the seconds of update and sync among them."""
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
    """Whether the responses of all sides train the policy alike, bit for bit."""
    kept, found = self.state, set()
    for scored in by_side.values():
      self.state = jax.tree.map(jnp.copy, kept)
      state, _ = self.updated(scored)
      found.add(sides_lib.digest(state.params))
    self.state = kept
    return len(found) == 1


class Run:
  """One seed's run of a scenario."""

  def __init__(self, config: dict, offline: dict, folder: pathlib.Path):
    """Loads everything, from the latest checkpoint if there is one.

    Args:
      config: of the run, complete; `bench` among its keys
      offline: of a drafter's training, for the probes
      folder: of the run
    """
    opened = workdirs.open(str(folder), config, declared=keys.RUN)
    self.config, self.folder = config, folder
    self.checkpoints, mesh = opened.checkpoints, axes.make_mesh(config["tensor_parallel"])
    self.shared = Shared(config, mesh)
    model = self.model = self.shared.learner.config
    names = config["bench"]["sides"]
    self.sides = {name: sides_lib.Side(name, config, model, mesh) for name in names}
    self.step = 0
    if opened.start is not None:
      self._restore(opened.start)
    for side in self.sides.values():
      side.compile(self.shared.policy)
    self.probes = {
      name: headroom.Probe(
        config, offline, from_config.Models(mesh, model, None, side.drafter)
      )
      for name, side in self.sides.items()
      if sides_lib.bare(name) in ("tlt", "frozen")
    }
    opened.begin(self.step)
    self._is_first = True  # step of this process

  def _restore(self, start) -> None:
    """Goes on from the latest of some checkpoints, of as many slices."""
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
    is_last = self.step == self.config["steps"]
    state["policy"] = self.shared.state
    self.checkpoints.save(self.step, state, saved, force=is_last)
    self.checkpoints.wait()  # else the next step's first side would share its cores

  def _training(self):
    """The (name, side) of those whose drafter trains."""
    return [(name, side) for name, side in self.sides.items() if side.spot is not None]

  def to_the_end(self) -> None:
    """Does the steps that are left."""
    config, writer = self.config, metrics_lib.Writer(self.folder, resume_step=self.step)
    with self.checkpoints:
      while True:
        metrics, is_last = {}, self.step == config["steps"]
        kept = self.step in config["bench"]["headroom"]
        if kept:
          self._keep()
        if kept or is_last or self.step % config["bench"]["probe_every"] == 0:
          metrics = self._probed()
        if is_last:
          writer.write(self.step, metrics)
          break
        found, scored = self._do_step()
        writer.write(self.step, metrics | found)
        writer.write_rollout(self.step, scored.record())
        self._tell(found)
        self.step += 1
        self._save()
    writer.close()

  def _keep(self) -> None:
    """Writes the policy and the drafters of the moment, for the headroom."""
    folder = headroom.kept_at(self.folder, self.step)
    hf.save(folder / "policy", self.model, self.shared.state.params)
    tokenization.copy_files(self.config["policy"], folder / "policy")
    for name, side in self._training():
      drafter_files.save(folder / name, side.drafter, side.spot.params)

  def _probed(self) -> dict[str, float]:
    """Tokens per pass on held-out prompts, of the drafters as they are."""
    found = {}
    for name, probe in self.probes.items():
      side = self.sides[name]
      params = side.draft_params if side.spot is None else side.spot.params
      found[f"{name}/probe"] = probe(self.shared.policy, params)
    return found

  def _do_step(self) -> tuple[dict[str, float], sample.Scored]:
    """Does a step: its metrics, and what the last side drew."""
    shared, config, by_side = self.shared, self.config, {}
    records = next(shared.prompts)
    first = self.step * len(records) * config["batch"]["responses"]
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

  def _tell(self, metrics: Mapping[str, float]) -> None:
    """Prints a line on the step that was done."""
    took = "  ".join(f"{n} {metrics[f'{n}/rollout_s']:.2f} s" for n in self.sides)
    seed, steps = self.config["seed"], self.config["steps"]
    reward = f"reward {metrics['reward/mean']:.2f}"
    if processes.is_first():
      print(f"seed {seed}, step {self.step + 1}/{steps}: {took}  {reward}", flush=True)


def is_done(folder: pathlib.Path, config: dict) -> bool:
  """Whether the run in a folder has done its steps."""
  opened = workdirs.open(str(folder), config, declared=keys.RUN)
  if opened.start is None or opened.start.latest() < config["steps"]:
    return False
  return metrics_lib.read(folder / "metrics.jsonl")[-1]["step"] == config["steps"]


def numbers(flag: str, texts: list[str]) -> list[int]:
  """The numbers that a flag lists; raises ValueError for anything else."""
  if not texts or not all(text.isdecimal() for text in texts):
    raise ValueError(f"--{flag} takes numbers such as 0,50, not {','.join(texts)!r}")
  return list(map(int, texts))


def steps_of(config: dict) -> list[int]:
  """The steps of `--headroom` that the run gets to."""
  asked = numbers("headroom", _HEADROOM.value) if _HEADROOM.value else []
  return sorted(step for step in asked if step <= config["steps"])


def prepared(config: dict) -> dict:
  """The config of a scenario's runs, with what this command was asked for."""
  given = config_flags.get_override_values(flags.FLAGS["config"])
  config = scenarios.apply(_SCENARIO.value, config, given)
  declarations.check(keys.RUN, config)
  sides = _SIDES.value or list(scenarios.get(_SCENARIO.value).sides)
  sides_lib.check(sides, config)
  if config["batch"]["most_prompts"]:
    raise ValueError("bench.run replaces no prompt: give --config.batch.most_prompts=0")
  if algorithm_lib.make(**config["algorithm"]).critic is not None:
    raise ValueError("bench.run trains no critic: choose another --config.algorithm.name")
  numbers("seeds", _SEEDS.value)
  asked = {"sides": sides, "probe_every": _PROBE_EVERY.value}
  return config | {"bench": asked | {"headroom": steps_of(config)}}


def main(config, offline):
  config, root = prepared(config), pathlib.Path(_WORKDIR.value)
  launch.start()
  if _WIDE.value:
    if processes.count() > 1:
      raise ValueError(
        "--wide is made in one process: run experiments.bench.widen before, and give "
        "--config.policy=DIR/policy --config.drafter=DIR/drafter instead"
      )
    config = targets.wide(config, root)
  folder = root / _SCENARIO.value
  for seed in numbers("seeds", _SEEDS.value):
    own, of_seed = folder / f"seed_{seed}", config | {"seed": seed}
    if "seed" in config["prompts"]:
      of_seed["prompts"] = config["prompts"] | {"seed": seed}
    of_seed = from_config.complete(of_seed, str(own))
    training, _ = from_config.complete_training(offline, of_seed, str(own / "limit"))
    if not is_done(own, of_seed):
      Run(of_seed, training, own).to_the_end()
      sides_lib.let_go()
    if processes.count() == 1:
      headroom.measure_kept(of_seed, training, own)
  if processes.is_first():
    sum_up(folder, config)


def sum_up(folder: pathlib.Path, config: dict) -> None:
  """Writes and prints what the runs in a folder come to."""
  runs, gains = {}, {}
  for seed in numbers("seeds", _SEEDS.value):
    runs[seed] = metrics_lib.read(folder / f"seed_{seed}" / "metrics.jsonl")
    gains[seed] = headroom.read(folder / f"seed_{seed}" / "headroom.jsonl")
  found = run_summary.summarize(_SCENARIO.value, config["bench"]["sides"], runs, gains)
  (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
  run_figure.draw(folder / "summary.png", found, runs)
  run_summary.report(found)
  print(json.dumps(found))


if __name__ == "__main__":
  launch.run(
    main,
    joins_jobs=True,
    config=("tail", keys.RUN),
    offline=("drafter", keys.DRAFTER),
  )
