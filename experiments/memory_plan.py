"""The memory of a run, added up before any of it is allocated.

    memory_plan.check(memory_plan.of_run(config), dry_run=_DRY_RUN.value)

A plan follows from the config and from the policy's `config.json`: no weights are read.
The sizes of arrays are exact: the code that makes them is asked for their shapes. Marked
with ~ is what is estimated: scratch memory (`scratch_memory`), copies on the host, and
the process itself.

The devices of a CPU share the machine's memory: what all of them hold is added up. A GPU
or a TPU has its own: the fullest one counts, and copies on the host do not.
"""

from collections.abc import Mapping
import dataclasses
import sys
from typing import Any, NamedTuple

import jax
import psutil

from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import scratch_memory
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax.models import config as model_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.models import few_rows
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.rollout import chunks
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import drafting as drafting_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import ready
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

DRY_RUN = "Print the memory that this takes, and stop before anything is allocated."
DRY_RUN_ON = (
  "DEVICESxGIGABYTES, such as 64x80: --dry_run for these accelerators, of so much memory "
  "each, which need not be there. Nine tenths are taken for free: on GPUs that takes "
  "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 in the environment, where JAX uses three quarters."
)
_SMALLER_POLICY = memory_phases.SMALLER_POLICY


def check(plan: memory_phases.Plan, dry_run: bool = False) -> None:
  """Refuses what does not fit; with `dry_run` prints the plan, and ends the process.

  Raises:
    MemoryError: a phase needs more than there is; names it, and the entry of the config
      that helps most
    SystemExit: with `dry_run`, of a plan that fits
  """
  if dry_run:
    memory_phases.show(plan)
  phase = plan.fullest
  if plan.needed(phase) > plan.room.free:
    parts = plan.phases[phase]
    raise MemoryError(
      f"the phase '{phase}' needs {memory.text(plan.needed(phase))} of memory, with "
      f"{plan.room}; {memory_phases.remedy(parts, plan.room.free)}"
    )
  if dry_run:
    sys.exit(0)


class _NoPool(pool_lib.Pool):
  """Compiles nothing: a source of drafts is asked for the shape of its state only."""

  def get(self, *args, **static):
    return None


_Spot = tuple[trainer_lib.Trainer, spot_lib.Options] | None  # see `make_draft_trainer`


class _Rollouts(NamedTuple):
  """What the programs of rollouts are made for."""

  shapes: programs_lib.Shapes
  ways: Mapping[options_lib.Bucket, list[chunks.Way]]  # to speculate, by bucket


@dataclasses.dataclass(frozen=True)
class Run:
  """What a config describes, as shapes; the parts of its memory."""

  config: config_lib.RunConfig
  mesh: jax.sharding.Mesh
  model: model_lib.ModelConfig
  selector: selector_lib.Selector | None  # of strategies; None: plain decoding
  stops: int  # stop tokens of a request
  room: memory.Room  # of the machine, or of each device
  shared: bool  # whether the devices share the machine's memory

  def size(self, arrays: Any) -> int:
    """Bytes of arrays, given as shapes and shardings."""
    held = memory.bytes_by_device(arrays).values()
    return sum(held) if self.shared else max(held, default=0)

  def part(self, name: str, arrays: Any, option: str) -> memory_phases.Part:
    """A part of arrays, given as shapes and shardings."""
    return memory_phases.Part(name, self.size(arrays), option)

  def scratch(self, name: str, size: float, option: str) -> memory_phases.Part:
    """An estimated part of so many bytes on every device."""
    size = int(size * (len(self.mesh.local_devices) if self.shared else 1))
    return memory_phases.Part(name, size, option, True)

  def on_host(self, name: str, arrays: Any, option: str) -> list[memory_phases.Part]:
    """Copies on the host; nothing where the devices' own memory is planned."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return [memory_phases.Part(name, size, option, True)] if self.shared else []

  def files_written(self, params: Any) -> list[memory_phases.Part]:
    """A file of the exported policy: its arrays, and the same once more as bytes."""
    whole = self.on_host("files being written", params, _SMALLER_POLICY)
    return [p._replace(size=2 * min(p.size, convert.MAX_FILE_BYTES)) for p in whole]

  def of_process(self, name: str, size: int) -> list[memory_phases.Part]:
    """Memory of the process, on the host like `on_host`."""
    part = memory_phases.Part(name, size, _SMALLER_POLICY, True)
    return [part] if self.shared else []

  def verifiers(self) -> list[memory_phases.Part]:
    """The processes that verifiers run in, on the host; none without a reward."""
    count = self.config.verifier.processes if self.config.reward else 0
    size, option = count * scratch_memory.VERIFIER, "verifier.processes"
    return [memory_phases.Part("verifiers", size, option, True)] if self.shared else []

  def weights(self, dtype: str) -> Any:
    """The policy in the layout of rollouts."""
    abstract = target.abstract_params(self.model)
    made = axes.with_shardings(self.mesh, axes.ROLLOUT, abstract)
    return jax.tree.map(lambda x: x.update(dtype=dtype), made)

  def transposed_weights(self) -> Any:
    """What lies beside the policy for passes over few rows, if anything does."""
    weights = self.weights(self.model.dtype)
    turned = few_rows.transposed(self.model, self.mesh, weights)
    shared = {id(x) for x in jax.tree.leaves(weights)}
    return [x for x in jax.tree.leaves(turned) if id(x) not in shared]

  def drafter(self) -> drafter_lib.DrafterConfig | None:
    """The config's drafter."""
    name = self.config.drafter
    if not name or drafters.is_kind(name):
      return drafter_lib.of_target(self.model, name) if name else None
    return drafter_files.load_shape(name, self.model)

  def draft_params(self, drafter: drafter_lib.DrafterConfig | None) -> Any:
    """The drafter's parameters; None of none."""
    if drafter is None:
      return None
    abstract = drafter_lib.abstract_params(drafter)
    return axes.with_shardings(self.mesh, axes.ROLLOUT, abstract)

  def spot_arrays(self, spot: _Spot) -> Any:
    """The arrays of the drafter's training that a checkpoint holds; () of none."""
    if spot is None:
      return ()
    trainer, options = spot
    published = trainer.abstract.params if options.held_out_rows else ()
    return trainer.abstract, published, spot_lib.abstract_features(trainer, options)

  def drafter_parts(
    self, drafter: drafter_lib.DrafterConfig | None, spot: _Spot
  ) -> list[memory_phases.Part]:
    """The drafter, and its training if there is any."""
    if drafter is None:
      return []
    if spot is None:
      return [self.part("drafter", self.draft_params(drafter), "drafter")]
    _, _, features = self.spot_arrays(spot)
    held = (spot[0].abstract_states(), self.draft_params(drafter))
    return [
      self.part("drafter in training", held, "spot.train"),
      self.part("drafter's training rows", features, "spot.rows"),
    ]

  def rollouts(self, drafter: drafter_lib.DrafterConfig | None, spot: _Spot) -> _Rollouts:
    """The shapes of the rollout, and by bucket the ways to speculate there."""
    config, selector = self.config, self.selector
    options = from_config.rollout_options(config)
    strategies = selector.strategies if selector else ()
    shapes = programs_lib.Shapes.of(
      self.model, self.mesh, options, drafter, strategies, train=spot is not None
    )
    sources = drafting_lib.make_sources(
      selector, shapes, _NoPool(), config.verification, drafter
    )
    drafting = drafting_lib.Drafting(selector, sources, clock_lib.Clock())
    weights = chunk_lib.Weights(self.weights(self.model.dtype), self.draft_params(drafter))
    schedule = ready.nothing_queued(options)
    allowed = list(filter(options.allows, options.buckets)) or options.buckets[:1]
    arms = {bucket: drafting.in_bucket(schedule, bucket) for bucket in allowed}
    way = lambda arm: drafting.way(arm, weights)
    ways = {bucket: list(map(way, arms[bucket])) for bucket in allowed}
    return _Rollouts(shapes, ways)

  def process(self, rollouts: _Rollouts) -> list[memory_phases.Part]:
    """The process itself and the compiled programs of its rollouts."""
    passes = 1 + sum(1 + len(x) for x in rollouts.ways.values())  # of prefill as well
    size = scratch_memory.process(self.model, passes)
    return self.of_process("process and programs", size)

  def rollout_parts(self, rollouts: _Rollouts, spot: _Spot) -> list[memory_phases.Part]:
    """The arrays of the bucket that needs the most, and scratch."""
    shapes, by_bucket = rollouts

    def arrays(bucket):
      slots = shapes.slots(bucket, self.stops)
      states = [w.source.ready((), w.weights, slots) for w in by_bucket[bucket]]
      return slots, max(states, key=self.size, default=())

    slots, state = max(map(arrays, by_bucket), key=self.size)
    most = max(bucket.batch for bucket in by_bucket)
    strategies = self.selector.strategies if self.selector else ()
    smaller_kv = "rollout.slots" if shapes.kv_pages is None else "rollout.cache_tokens"
    parts = [
      self.part("policy, transposed", self.transposed_weights(), _SMALLER_POLICY),
      self.part("KV cache", slots.replace(features=None), smaller_kv),
      self.part("kept features", slots.features, "rollout.cache_tokens"),
      self.part("state of drafts", state, "strategies"),
      self.part("prompt store", shapes.store(), "rollout.prompt_rows"),
      self.scratch(
        "chunk's scratch",
        scratch_memory.decoding(shapes, most, strategies),
        "rollout.slots",
      ),
    ]
    if spot is not None:
      trainer, spot_options = spot
      row = spot_lib.row_tokens(trainer, spot_options)
      size = scratch_memory.draft_micro_batch(trainer, row)
      after = trainer.abstract_states()
      parts += [
        self.part("drafter after an update", after, "spot.train"),
        self.scratch("drafter's micro-batch", size, "spot.row_tokens"),
      ]
    return parts

  def plan(self, phases: Mapping[str, list[memory_phases.Part]]) -> memory_phases.Plan:
    """The plan of these phases; parts that are empty are left out."""
    room, where = self.room, f"each of {self.mesh.size} devices (the fullest)"
    if self.shared:
      own = psutil.Process().memory_info().rss  # is part of the plan
      n = processes.on_this_host()  # of which each has as much to allocate
      room = memory.Room(min(room.free // n + own, room.total // n), room.total // n)
      where = f"the machine's memory ({len(self.mesh.local_devices)} CPU devices share it)"
      where += f", of which each of {n} processes has its share" if n > 1 else ""
    phases = {k: tuple(p for p in v if p.size) for k, v in phases.items()}
    return memory_phases.Plan(phases, room, where)


def of_run(
  config: config_lib.RunConfig, machine: memory_phases.Machine | None = None, stops: int = 1
) -> memory_phases.Plan:
  """The memory of `experiments.train`.

  Args:
    config: of the run
    machine: that it is planned for; None: this one
    stops: stop tokens of a request
  """
  run = described(config, from_config.make_selector(config), stops, machine)
  algorithm = algorithm_lib.make(**config.algorithm)
  learner = from_config.make_learner(
    config.learner, config.optimizer, run.model, algorithm, run.mesh
  )
  state, drafter = learner.abstract_state(), run.drafter()
  policy = [
    run.part("policy in training", state.params, _SMALLER_POLICY),
    run.part("moments", state.opt_state, "learner.only"),
  ]
  reference = state.params if algorithm.uses_reference else ()
  spot = from_config.make_draft_trainer(
    config.spot,
    config.sampling.temperature,
    config.max_length,
    run.model,
    run.mesh,
    drafter,
  )
  trained, rollouts = run.spot_arrays(spot), run.rollouts(drafter, spot)
  critic_trainer = critic_lib.make_trainer(algorithm.critic, learner)
  critic = critic_trainer.abstract_state() if critic_trainer else ()
  waiting = [
    run.part("reference policy", reference, "algorithm.kl_coef"),
    run.part("critic in training", critic, "algorithm.name"),
  ]
  beside = [*run.process(rollouts), *run.drafter_parts(drafter, spot)]
  parked = learner.offload and not run.shared  # a CPU's memory is the host's
  always = [*beside, *waiting, *policy]
  at_rest = beside if parked else always
  # Of what was parked, reference, critic and policy take their turns.
  updating = [*beside, *policy] if parked else always
  verifiers = run.verifiers()
  weights = run.part("policy in rollouts", run.weights(run.model.dtype), _SMALLER_POLICY)
  tensor = max(jax.tree.leaves(state.params), key=lambda x: x.size)
  saved = (state, trained, critic)
  checkpoint = run.on_host("checkpoint being written", saved, "learner.only")
  restored = run.part("state of the checkpoint", saved, "learner.only")
  files = run.files_written(state.params)
  return run.plan(
    {
      "load": [*always, *run.on_host("largest tensor", tensor, _SMALLER_POLICY)],
      # What is restored takes the place of the first policy.
      "resume": [*beside, *waiting, restored],
      "rollout": [
        *at_rest,
        *verifiers,
        weights,
        *checkpoint,
        *run.rollout_parts(rollouts, spot),
      ],
      "update": [
        *updating,
        *verifiers,
        *run.of_process("compiling the update", scratch_memory.compiling_update(learner)),
        run.scratch("update's scratch", scratch_memory.update(learner), "learner.buckets"),
      ],
      "sync": [*updating, weights],  # what each of several runs in one process holds
      "export": [*at_rest, *verifiers, weights, *files],
    }
  )


def of_rollout(
  config: config_lib.RunConfig,
  selector: selector_lib.Selector | None = None,
  stops: int = 1,
) -> memory_phases.Plan:
  """The memory of a command that only asks a policy, such as `experiments.generate`.

  Args:
    config: of a run, with the sizes of its rollout
    selector: of the strategies that it may run; None: plain decoding
    stops: stop tokens of a request
  """
  run = described(config, selector, stops)
  drafter = run.drafter()
  rollouts = run.rollouts(drafter, None)
  weights = run.part("policy", run.weights(run.model.dtype), _SMALLER_POLICY)
  always = [
    *run.process(rollouts),
    weights,
    *run.drafter_parts(drafter, None),
  ]
  decoding = run.rollout_parts(rollouts, None)
  asked = [*always, *run.verifiers(), *decoding]
  return run.plan({"load": always, "rollout": asked})


def described(
  config: config_lib.RunConfig,
  selector: selector_lib.Selector | None,
  stops: int,
  machine: memory_phases.Machine | None = None,
) -> Run:
  if machine and config.rollout.kernels is None:
    # Those of this machine, which may be a CPU. All others keep caches in one shape.
    options = dataclasses.replace(config.rollout, kernels="ref")
    config = dataclasses.replace(config, rollout=options)
  mesh = from_config.make_mesh(
    config.tensor_parallel, config.policy, machine and machine.devices
  )
  room = (machine.room, False) if machine else memory.room(mesh.local_devices)
  model = convert.load_config(config.policy)
  return Run(config, mesh, model, selector, stops, *room)
