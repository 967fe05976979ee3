"""The memory of a run is added up before it is allocated: exactly, and in time."""

import dataclasses
import json

import jax
import pytest

from experiments import config as config_lib
from experiments import from_config
from experiments import memory_phases
from experiments import memory_plan
from experiments import trees
from tests import commands
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.decoding import slices

home = commands.home
GIB = 2**30


@pytest.fixture(params=["eagle2"])
def config(home, request) -> config_lib.RunConfig:
  """Of a run with everything that takes memory: reference, drafter, held-out rows."""
  changes = {
    "spot.rows": 4,
    "rollout.slots": 4,
    "rollout.buckets": (4, 2),
    "policy": str(home / "policy"),
    "tensor_parallel": 2,
    "drafter": request.param,
    "strategies": "up to 9 live: 2_1_3",
    "algorithm": {"name": "grpo", "kl_coef": 1e-3},
  }
  return commands.read_run("countdown.py:smoke", changes)


def sizes(plan: memory_phases.Plan) -> dict[str, int]:
  """Bytes of each part."""
  return {part.name: part.size for parts in plan.phases.values() for part in parts}


def held(arrays) -> int:
  """Bytes of arrays that exist."""
  shards = [s for x in jax.tree.leaves(arrays) for s in x.addressable_shards]
  return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize(
  ("config", "vocab"),
  [("eagle2", ()), ("eagle2", (1, 2, 5, 7, 11, 13)), ("block", ())],
  indirect=["config"],
)
def test_the_parts_of_a_plan_are_the_arrays_that_come_to_be(config, vocab):
  """On all devices together: those of a CPU share its memory."""
  config = trees.change(config, {"drafter_vocab_size": len(vocab)})
  found = sizes(memory_plan.of_run(config))
  mesh = axes.make_mesh(config.tensor_parallel)
  model, params = hf.load(config.policy, mesh, axes.TRAIN, dtype="float32")
  algorithm = algorithm_lib.make(**config.algorithm)
  learner = learner_lib.make(
    model, algorithm, optimizer.make(**config.optimizer), mesh, **vars(config.learner)
  )
  reference, state = from_config.copy_reference(algorithm, params), learner.init(params)
  selector = from_config.make_selector(config)
  spot = from_config.make_drafter(config, model, mesh, vocab)
  sampler = from_config.make_sampler(config, model, mesh, spot, selector)
  policy = learner.to_rollout(state.params)
  weights, backend = sampler.rollout.weights(policy), sampler.rollout.backend

  expected = {
    "policy in training": held(state.params),
    "moments": held(state.opt_state),
    "reference policy": held(reference),
    "policy in rollouts": held(policy),
    "drafter in training": held((spot.training(0).states, spot.params)),
    "drafter's training rows": held(spot.features),
  }
  bucket = sampler.rollout.options.slots
  slots = slices.zeros(backend.shapes.slots(bucket, 1))
  source = backend.sources["model"]
  source.ready(weights, slots)
  drafts = source.prepare(weights, slots, [[None] * bucket] * backend.shapes.slices)
  expected["KV cache"] = held(slots.replace(features=None))
  expected["kept features"] = held(slots.features)
  expected["state of drafts"] = held(drafts)
  assert found == expected


def test_a_critic_is_planned_where_there_is_one(config):
  """In every phase."""
  assert "critic in training" not in sizes(memory_plan.of_run(config))
  plan = memory_plan.of_run(dataclasses.replace(config, algorithm={"name": "ppo"}))
  for parts in plan.phases.values():
    assert "critic in training" in {part.name for part in parts}


def test_what_waits_on_the_host_takes_no_device_memory_in_rollouts(config, monkeypatch):
  """Nor the reference in updates; on a CPU, whose memory is the host's, nothing changes."""
  offloaded = trees.change(config, {"learner.offload": True})
  assert memory_plan.of_run(offloaded).phases == memory_plan.of_run(config).phases
  monkeypatch.setattr(memory, "room", lambda _: (memory.Room(GIB, GIB), False))
  before, after = memory_plan.of_run(config), memory_plan.of_run(offloaded)
  waiting = {"policy in training", "moments", "reference policy"}

  def names(plan, phase):
    return {part.name for part in plan.phases[phase]}

  assert waiting < names(before, "rollout")
  assert names(after, "rollout") == names(before, "rollout") - waiting
  assert names(after, "update") == names(before, "update") - {"reference policy"}


def test_a_machine_that_is_planned_for_gives_all_shapes(config):
  """Open sizes follow from it; caches are those of accelerators, not of this CPU."""
  machine = memory_phases.Machine.parse("4x80")
  config = dataclasses.replace(config, drafter="", strategies="")
  plan = memory_plan.of_run(config, machine)
  named = trees.change(config, {"rollout.kernels": "interpret"})
  assert sizes(plan) == sizes(memory_plan.of_run(named, machine))

  changes = {"prompts.size": 8, "held_out.size": 8}
  changes |= {"batch.prompts": 100, "batch.responses": 8}
  changes |= dict.fromkeys(("rollout.slots", "rollout.buckets", "learner.buckets"))
  config = trees.change(config, changes)
  slots, buckets = [], []
  for text in ("4x80", "64x80", "4x0.001"):
    machine = memory_phases.Machine.parse(text)
    found, _ = from_config.complete(config, machine)
    slots.append(found.rollout.slots)
    buckets.append(found.learner.buckets)
  # 400 requests per slice of two devices, of which 256 run; 25; as the memory allows.
  assert slots[:2] == [256, 32] and slots[2] < 256
  assert buckets == [((32, 512),)] * 3


@pytest.mark.parametrize(
  "parts, remedy",
  [
    (dict(policy=9, slots=1), "9.0 GiB of it follow from the policy's size"),
    (dict(policy=2, slots=6), "less of slots"),
    (dict(slots=3, rows=4), "less of rows"),
  ],
)
def test_what_does_not_fit_is_refused_with_the_option_that_helps_most(parts, remedy):
  made = tuple(memory_phases.Part(k, n * GIB, k) for k, n in parts.items())
  phases = {"rollout": made[:1], "update": made}
  plan = memory_phases.Plan(phases, memory.Room(5 * GIB, 8 * GIB), "the machine's memory")
  with pytest.raises(MemoryError, match=remedy):
    memory_plan.check(plan)
  enough = dataclasses.replace(plan, room=memory.Room(10 * GIB, 10 * GIB))
  memory_plan.check(enough)


def test_a_policy_too_large_is_refused_by_its_config_json_alone(home, tmp_path):
  """In one line, before a weight is read: there are none."""
  model = dataclasses.replace(commands.COUNTDOWN, vocab_size=1 << 20, width=1 << 20)
  (tmp_path / "config.json").write_text(json.dumps(hf.unparse_config(model)))
  run = commands.tiny_run(home, ("policy", tmp_path))
  line = commands.error(commands.run(home, "train", *run, f"--workdir={tmp_path / 'w'}"))
  assert "smaller policy" in line
  assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("free, remat", [(GIB, False), (10**6, True)])
def test_layers_are_computed_again_if_an_update_does_not_fit_without(
  config, monkeypatch, caplog, free, remat
):
  """What is chosen is logged with its reason, and what is given stays."""
  assert config.learner.remat is None
  arrays = memory_plan.of_run(config).needed("update")
  room = memory.Room(arrays + free, 9 * GIB)
  monkeypatch.setattr(memory, "room", lambda _: (room, True))
  with caplog.at_level("INFO"):
    chosen = memory_plan.choose_remat(config)
  (line,) = [r.getMessage() for r in caplog.records if "remat" in r.getMessage()]
  assert line.startswith(f"learner.remat={remat}: an update takes ")
  assert chosen == trees.change(config, {"learner.remat": remat})
  monkeypatch.setattr(memory, "room", lambda _: (memory.Room(0, 9 * GIB), True))
  assert memory_plan.choose_remat(chosen) == chosen
