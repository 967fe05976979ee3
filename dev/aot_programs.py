"""A run's large programs for other machines: shapes, lowering, compilation.

    python -m dev.aot_programs MODEL TARGET PROGRAM KERNELS LAYERS FOLDER

Compiles one program and writes its text and the compiler's memory analysis; `dev.aot` runs
this in a separate process for each program. Needs the packages of requirements-aot.txt.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import gzip
import json
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from benchmarks import shapes
from dev import aot_machines
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import programs as pool_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target as target_lib
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_KERNELS = {"tpu": ("pallas", "ref"), "cuda": ("triton", "ref")}

MODEL = shapes.MODELS["qwen2.5-7b"]  # the number of layers is replaced
# A model with the same caches, copies and collectives that compiles in a tenth of the time.
NARROW = dataclasses.replace(MODEL, width=512, mlp_width=1024, vocab_size=4096)
MODELS = {"7b": MODEL, "0.6b": shapes.MODELS["qwen3-0.6b"], "narrow": NARROW}
CHAIN, TREE = map(strategy_lib.parse, ("15_1_16", "6_4_16"))  # J = 16 nodes each
BLOCK_CHAIN, BLOCK_TREE = map(strategy_lib.parse, ("8_1_9", "8_3_16"))
NODES = CHAIN.verify
ROWS = 8  # requests of a slice
SLOTS = 8192  # of the cache, per request
PROMPT = 1024
# `one`: plain, with one request: products of one row.
# `block_*`: with a drafter that guesses a block in one pass.
_BLOCK = "block_"
_DRAFTING = ("chain", "tree", "fused")
CHUNKS = ("one", "plain", *_DRAFTING, *(_BLOCK + name for name in _DRAFTING))
PROGRAMS = (*CHUNKS, "prefill", "fill", "update")
_TRAINS = ("fused", "block_fused")  # need two slices: a single one is never idle
_LEARNER_ROWS = ((2, 4096),)  # per bucket: rows of a micro-batch, tokens of a row


def rows_of(program: str) -> int:
  """Requests of a slice."""
  return 1 if program == "one" else ROWS


def weight_bytes(model: config_lib.ModelConfig) -> int:
  """Of the weights that a step reads: all but an embedding that is not the head, too."""
  params = target_lib.abstract_params(model)
  if not model.tie_embeddings:
    params.pop("embedding")
  sizes = (math.prod(x.shape) for x in jax.tree.leaves(params))
  return sum(sizes) * jnp.dtype(model.dtype).itemsize


def runs(target: str, program: str) -> bool:
  """Whether a program can run on a machine."""
  machine = aot_machines.TARGETS[target]
  return program not in _TRAINS or machine.devices > machine.model


def kernels_of(target: str, program: str) -> tuple[str, ...]:
  """Implementations of a program's kernels: the platform's, and XLA alone."""
  platform = aot_machines.TARGETS[target].platform
  if program == "fill" or (program, platform) == ("update", "tpu"):  # have no kernels
    return ("ref",)
  return _KERNELS[platform]


class Program(NamedTuple):
  """A program that can be compiled."""

  jitted: Callable
  args: tuple  # shapes with shardings, and numbers
  static: Mapping = {}

  def lower(self, platform: str | None = None) -> jax.stages.Lowered:
    """Lowers it for a platform; None: that of its arguments' devices."""
    traced = self.jitted.trace(*self.args, **self.static)
    return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()


def _not_compiled(*args):
  raise ValueError("this program is only described")


class _Recorder(pool_lib.Pool):
  """A pool that records the programs, and compiles nothing."""

  def __init__(self):
    super().__init__()
    self.asked: dict[tuple, Program] = {}

  def get(self, name, bucket, jitted, *args, **static):
    self.asked[name, *bucket] = Program(jitted, args, static)
    return _not_compiled


@dataclasses.dataclass(frozen=True)
class AbstractTrainer(trainer_lib.Trainer):
  """A drafter's trainer whose arrays are shapes."""

  def init_states(self, params):
    return self.abstract_states(), params

  def init_features(self, abstract):
    return abstract

  def place(self, x):
    return slices.abstract(self.mesh, x.shape[1], x.dtype, *x.shape[2:])


def abstract_spot(trainer: trainer_lib.Trainer, options: spot_lib.Options) -> spot_lib.Spot:
  """A drafter in training, without arrays; see `spot.make_trainer`."""
  fields = {f.name: getattr(trainer, f.name) for f in dataclasses.fields(trainer)}
  trainer = AbstractTrainer(**fields)
  return spot_lib.Spot(trainer, options, abstract_drafter(trainer.drafter, trainer.mesh))


def abstract_drafter(drafter: drafter_lib.DrafterConfig, mesh):
  """The shapes of a drafter's parameters."""
  return axes.with_shardings(mesh, axes.ROLLOUT, drafter_lib.abstract_params(drafter))


def of_rollout(engine: rollout.Engine, params: Any, stops: int = 1) -> dict[tuple, Program]:
  """The programs of an engine, by name, bucket and stop tokens.

  Args:
    engine: for devices that need not exist; unusable afterwards
    params: of the target, as shapes and shardings
    stops: stop tokens per request
  """
  recorder = _Recorder()
  engine.pool.get = recorder.get
  with (
    mock.patch.object(memory, "announce"),
    mock.patch.object(memory, "announce_programs"),
  ):  # they need devices
    engine.compile(params, stops)
  return recorder.asked


def of_update(
  learner: learner_lib.Learner, count: int, tables: Sequence[str] = ()
) -> Program:
  """The learner's update.

  Args:
    learner: for devices that need not exist
    count: responses of an update
    tables: optional fields of `batch.Sequences` that it reads
  """
  packed, known = batch_lib.abstract(learner.mesh, learner.buckets, count)
  whole = axes.sharding(learner.mesh)
  shape = count, learner.buckets[-1].length
  of_token = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
  known = known.replace(**dict.fromkeys(tables, of_token))
  return Program(learner.update, (learner.abstract_state(), packed, known))


def of_score(learner: learner_lib.Learner, count: int) -> Program:
  """The learner's scoring of so many responses; see `of_update`."""
  packed, known = batch_lib.abstract(learner.mesh, learner.buckets, count)
  args = learner.abstract_state().params, packed, known.temperature
  return Program(learner.score, args)


def lower(
  program: str,
  mesh: jax.sharding.Mesh,
  kernels: str,
  model: config_lib.ModelConfig,
  *,
  slots: int = SLOTS,
  rows: int = ROWS,
  platform: str | None = None,
) -> jax.stages.Lowered:
  """Lowers a program for a mesh, from shapes alone.

  Args:
    program: one of `PROGRAMS`
    mesh: (data, model), of devices that need not exist
    kernels: a name of `implementations.NAMES`
    model: the target's configuration
    slots: of the cache, per request
    rows: requests of a slice
    platform: of the mesh; None: that of its devices
  """
  return made(program, mesh, kernels, model, slots=slots, rows=rows).lower(platform)


def made(
  program: str,
  mesh: jax.sharding.Mesh,
  kernels: str,
  model: config_lib.ModelConfig,
  *,
  slots: int = SLOTS,
  rows: int = ROWS,
) -> Program:
  """A program and the shapes of its arguments; see `lower`."""
  if program == "update":
    return _update(mesh, model, kernels)
  return _of_rollout(program, mesh, kernels, model, slots, rows)


def argument_bytes(args) -> int:
  """Bytes of arguments on one device, without padding of layouts."""

  def on_device(x) -> int:
    shape = x.sharding.shard_shape(x.shape) if hasattr(x, "sharding") else x.shape
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(on_device, jax.tree.leaves(args)))


def of_sync(learner: learner_lib.Learner) -> Program:
  with mock.patch.object(memory, "announce"):  # it needs devices
    return Program(learner.to_rollout, (learner.abstract_state().params,))


def _of_rollout(program, mesh, kernels, model, slots: int, rows: int) -> Program:
  """A program of a rollout with plain decoding, a chain and a tree."""
  rows = 1 if program == "one" else rows
  is_block = program.startswith(_BLOCK)
  chain, tree = (BLOCK_CHAIN, BLOCK_TREE) if is_block else (CHAIN, TREE)
  shape = drafter_lib.of_target(model, "block" if is_block else "eagle2")
  room = strategy_lib.Room.of((chain, tree), shape.block.size if is_block else 0)
  options = rollout.Options(
    max_length=slots - room.behind,
    max_prompt=min(PROMPT, slots // 2),
    slots=rows,
    kernels=kernels,
    filters=False,
  )
  strategies = f"up to {rows} live: off or {chain} or {tree}"
  selector = selector_lib.make(strategies, "predictive", has_drafter=True)
  if program in _TRAINS:
    drafter = abstract_spot(*shapes.drafter_trainer(model, shape, mesh, options.max_length))
  else:
    drafter = spot_lib.Frozen(shape, abstract_drafter(shape, mesh))
  engine = rollout.make(model, mesh, options, drafter, selector)
  params = _parameters(mesh, target_lib.abstract_params(model), model.dtype)
  names = {"one": "chunk", "plain": "chunk", "fused": f"{_name(chain)}+training"}
  names |= {"chain": _name(chain), "tree": _name(tree)}
  wanted = names.get(program.removeprefix(_BLOCK), program)
  return next(p for (name, *_), p in of_rollout(engine, params).items() if name == wanted)


def _name(strategy: strategy_lib.Strategy) -> str:
  return f"speculate_model_{strategy.width}_{strategy.verify}"


def _parameters(mesh, abstract, dtype: str = "float32"):
  """Shapes of parameters in the layout of rollouts."""
  placed = axes.with_shardings(mesh, axes.ROLLOUT, abstract)
  return jax.tree.map(lambda x: x.update(dtype=dtype), placed)


def _update(mesh, model, kernels):
  """The learner's update by GRPO, and its arguments."""
  learner = learner_lib.make(
    model,
    algorithm.make("grpo"),
    optax.adamw(1e-6),
    mesh,
    buckets=_LEARNER_ROWS,
    kernels=kernels,
  )
  return of_update(learner, ROWS)


def compile_to(
  model: str, target: str, program: str, kernels: str, layers: int, folder: pathlib.Path
) -> None:
  """Compiles a program; writes text.hlo.gz and compiled.json into the folder."""
  mesh = aot_machines.mesh_of(aot_machines.TARGETS[target])
  whole = MODELS[model]
  part = dataclasses.replace(whole, num_layers=layers)
  began = time.perf_counter()
  lowered = lower(program, mesh, kernels, part)
  lowered_at = time.perf_counter()
  compiled = lowered.compile()
  found = {
    "lower_s": round(lowered_at - began, 1),
    "compile_s": round(time.perf_counter() - lowered_at, 1),
    "memory": aot_machines.memory_of(compiled),
    "all_layers_argument": argument_bytes(made(program, mesh, kernels, whole).args),
    "versions": aot_machines.versions(aot_machines.TARGETS[target].platform),
  }
  with gzip.open(folder / "text.hlo.gz", "wt") as file:
    file.write(compiled.as_text())
  (folder / "compiled.json").write_text(json.dumps(found))


def main(model, target, program, kernels, layers, folder) -> None:
  compile_to(model, target, program, kernels, int(layers), pathlib.Path(folder))


if __name__ == "__main__":
  main(*sys.argv[1:])
