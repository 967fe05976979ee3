"""The arrays of a run, added up before any of them is allocated.

    memory_plan.check(memory_plan.of_run(config), dry_run=_DRY_RUN.value)

A plan follows from the config and from the policy's `config.json`: no weights are read.
Sizes are exact: the code that makes the arrays is asked for their shapes. Not among them is
what programs take beside their arrays, which compilers tell: a run logs it once its
programs are compiled, and `dev.aot_memory` asks them for devices that are not there.

The devices of a CPU share the machine's memory: what all of them hold is added up. A GPU
or a TPU has its own: the fullest one counts.
"""

import dataclasses
import logging
import sys
from typing import Any

import jax

from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import trees
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax.models import config as model_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import critic as critic_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import devices as devices_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

DRY_RUN = "Print the memory that arrays take, and stop before anything is allocated."
DRY_RUN_ON = (
  "DEVICESxGIGABYTES, such as 64x80: --dry_run for these accelerators, of so much memory "
  "each, which need not be there. Nine tenths are taken for free: on GPUs that takes "
  "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 in the environment, where JAX uses three quarters."
)
# Of what arrays leave free; a program needs its scratch memory in one piece.
_SCRATCH_SHARE = 0.9
_SMALLER_POLICY = memory_phases.SMALLER_POLICY
_Spot = tuple[trainer_lib.Trainer, spot_lib.Options] | None  # see `Run.draft_trainer`


def check(plan: memory_phases.Plan, dry_run: bool = False) -> None:
  """Refuses what does not fit; with `dry_run` prints the plan, and ends the process.

  Raises:
    MemoryError: the arrays of a phase need more than there is; names it, and the entry of
      the config that helps most
    SystemExit: with `dry_run`, of a plan that fits
  """
  if dry_run:
    memory_phases.show(plan)
  phase = plan.fullest
  if plan.needed(phase) > plan.room.free:
    raise MemoryError(
      f"the arrays of the {phase} need {memory.text(plan.needed(phase))} of memory, with "
      f"{plan.room}; {memory_phases.remedy(plan.phases[phase], plan.room.free)}"
    )
  if dry_run:
    sys.exit(0)


class _NoPool(pool_lib.Pool):
  """Compiles nothing: a source of drafts is asked for the shape of its state only."""

  def get(self, *args, **static):
    return None


@dataclasses.dataclass(frozen=True)
class Run:
  """What a config describes, as shapes."""

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

  def learner(self, algorithm: algorithm_lib.Algorithm) -> learner_lib.Learner:
    return from_config.make_learner(self.config, self.model, algorithm, self.mesh)

  def draft_trainer(self, drafter: drafter_lib.DrafterConfig | None) -> _Spot:
    c = self.config
    return from_config.make_draft_trainer(
      c.spot, c.sampling.temperature, c.max_length, self.model, self.mesh, drafter
    )

  def part(self, name: str, arrays: Any, option: str) -> memory_phases.Part:
    return memory_phases.Part(name, self.size(arrays), option)

  def weights(self) -> Any:
    """The policy in the layout of rollouts."""
    abstract = target.abstract_params(self.model)
    made = axes.with_shardings(self.mesh, axes.ROLLOUT, abstract)
    return jax.tree.map(lambda x: x.update(dtype=self.model.dtype), made)

  def drafter(self) -> drafter_lib.DrafterConfig | None:
    """The config's drafter; of a new one's vocabulary the size is right, not the ids."""
    return from_config.drafter_shape(self.config, self.model)

  def draft_params(self, drafter: drafter_lib.DrafterConfig | None) -> Any:
    """The drafter's parameters; None of none."""
    if drafter is None:
      return None
    abstract = drafter_lib.abstract_params(drafter)
    return axes.with_shardings(self.mesh, axes.ROLLOUT, abstract)

  def drafter_parts(
    self, drafter: drafter_lib.DrafterConfig | None, spot: _Spot
  ) -> list[memory_phases.Part]:
    """The drafter, and its training if there is any."""
    if spot is None:
      return [self.part("drafter", self.draft_params(drafter), "drafter")]
    held = (spot[0].abstract_states(), self.draft_params(drafter))
    features = spot_lib.abstract_features(*spot)
    return [
      self.part("drafter in training", held, "spot.train"),
      self.part("drafter's training rows", features, "spot.rows"),
    ]

  def rollout_parts(
    self, drafter: drafter_lib.DrafterConfig | None, spot: _Spot
  ) -> list[memory_phases.Part]:
    """The policy's weights, and the arrays of a rollout."""
    config, selector = self.config, self.selector
    options = from_config.rollout_options(config)
    shapes = backend_lib.Shapes.of(
      self.model, self.mesh, options, selector, drafter, spot[1].chunk_tokens if spot else 0
    )
    sources = devices_lib.make_sources(selector, shapes, _NoPool())
    policy = self.weights()
    weights = chunk_lib.Weights(policy, self.draft_params(drafter))
    slots = shapes.slots(options.slots, self.stops)
    states = [source.ready(weights, slots) for source in sources.values()]
    return [
      self.part("policy in rollouts", policy, _SMALLER_POLICY),
      self.part("KV cache", slots.replace(features=None), "rollout.cache_tokens"),
      self.part("kept features", slots.features, "rollout.cache_tokens"),
      self.part("state of drafts", max(states, key=self.size, default=()), "strategies"),
    ]

  def plan(self, **phases: list[memory_phases.Part]) -> memory_phases.Plan:
    """The plan of these phases; parts that are empty are left out."""
    room, where = self.room, f"each of {self.mesh.size} devices (the fullest)"
    if self.shared:
      n = processes.on_this_host()  # of which each has as much to allocate
      room = memory.Room(room.free // n, room.total // n)
      where = f"the machine's memory ({len(self.mesh.local_devices)} CPU devices share it)"
      where += f", of which each of {n} processes has its share" if n > 1 else ""
    drafter = self.drafter()
    if drafter is not None and drafter.vocab:
      tokens = f"{len(drafter.vocab):,} of {self.model.vocab_size:,} tokens"
      where += f"; the drafter predicts {tokens}"
    found = {name: tuple(p for p in ps if p.size) for name, ps in phases.items()}
    return memory_phases.Plan(found, room, where)


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
  learner = run.learner(algorithm)
  state, drafter = learner.abstract_state(), run.drafter()
  spot = run.draft_trainer(drafter)
  critic = critic_lib.make_trainer(algorithm.critic, learner)
  policy = [
    run.part("policy in training", state.params, _SMALLER_POLICY),
    run.part("moments", state.opt_state, "learner.only"),
  ]
  waiting = [
    run.part(
      "reference policy",
      state.params if algorithm.uses_reference else (),
      "algorithm.kl_coef",
    ),
    run.part(
      "critic in training", critic.abstract_state() if critic else (), "algorithm.name"
    ),
  ]
  drafting, rolling = run.drafter_parts(drafter, spot), run.rollout_parts(drafter, spot)
  weights = rolling[0]  # which the update ends with
  if learner.offloads and not run.shared:  # a CPU's memory is the host's
    # Of what waits on the host reference, critic and policy take their turns.
    return run.plan(rollout=drafting + rolling, update=[*drafting, *policy, weights])
  always = policy + waiting + drafting
  return run.plan(rollout=always + rolling, update=[*always, weights])


def choose_remat(
  config: config_lib.RunConfig, machine: memory_phases.Machine | None = None
) -> config_lib.RunConfig:
  """The config of a run with `learner.remat` chosen by memory, if that is open.

  See `of_run`.
  """
  if config.learner.remat is not None:
    return config
  plan = of_run(config, machine)
  run = described(config, None, 1, machine)
  learner = run.learner(algorithm_lib.make(**config.algorithm))
  free = plan.room.free - plan.needed("update")
  remat = needs_remat(learner, free, run.shared)
  return trees.change(config, {"learner.remat": remat})


def needs_remat(learner: learner_lib.Learner, free: int, shared: bool) -> bool:
  """Whether an update fits only if layers are computed again; logs why.

  Args:
    learner: of any `remat`
    free: bytes that arrays of an update leave, of each device, or of all if `shared`
  """
  devices = len(learner.mesh.local_devices) if shared else 1
  without, with_it = (devices * learner.update_bytes(x) for x in (False, True))
  room = int(_SCRATCH_SHARE * free)
  remat = bool(processes.of_first(without > room))
  logging.info(
    "learner.remat=%s: an update takes %s beside its arrays, %s if layers are computed "
    "again, of %s",
    remat,
    *map(memory.text, (without, with_it, max(room, 0))),
  )
  return remat


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
  parts = run.drafter_parts(drafter, None) + run.rollout_parts(drafter, None)
  return run.plan(rollout=parts)


def described(
  config: config_lib.RunConfig,
  selector: selector_lib.Selector | None,
  stops: int,
  machine: memory_phases.Machine | None = None,
) -> Run:
  """A config as shapes; see `of_run`."""
  if machine and config.rollout.kernels is None:
    # Those of this machine, which may be a CPU. All others keep caches in one shape.
    config = trees.change(config, {"rollout.kernels": "ref"})
  mesh = from_config.make_mesh(
    config.tensor_parallel, config.policy, machine and machine.devices
  )
  room = (machine.room, False) if machine else memory.room(mesh.local_devices)
  model = hf.load_config(config.policy)
  return Run(config, mesh, model, selector, stops, *room)
