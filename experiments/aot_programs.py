"""A run's large programs for machines that are not there: shapes, lowering, compilation.

    python -m experiments.aot_programs MODEL TARGET PROGRAM KERNELS LAYERS FOLDER

Compiles one program and writes its text and what the compiler says of its memory;
`experiments.aot` runs this, in a process of its own for each. It needs what
requirements-aot.txt names. First the targets, then the programs, then the compilation.
"""

from collections.abc import Callable
import dataclasses
import gzip
import importlib.metadata
import json
import math
import pathlib
import sys
import time
from typing import NamedTuple

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import optax

from experiments.bench import shapes
from tlt_jax import axes
from tlt_jax import programs as pool_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import target as target_lib
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.rollout import chunks as chunks_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import loss as loss_lib
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_HERE = pathlib.Path(__file__).parent


class Target(NamedTuple):
  """Machines that programs are compiled for."""

  platform: str  # "tpu" or "cuda"
  topology: str  # as the platform's compiler names it
  devices: int
  model: int  # devices of a slice


TARGETS = {
  "v5e_2x2": Target("tpu", "v5e:2x2", devices=4, model=2),
  "v5p_2x2": Target("tpu", "v5p:2x2x1", devices=4, model=2),
  "v6e": Target("tpu", "v6e:2x2", devices=1, model=1),
  "v6e_2x2": Target("tpu", "v6e:2x2", devices=4, model=2),
  "h200": Target("cuda", "1x1x1", devices=1, model=1),
  "h200_2x2": Target("cuda", "1x1x4", devices=4, model=2),
}
_KERNELS = {"tpu": ("pallas", "ref"), "cuda": ("triton", "ref")}
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_triton")}
_CAPABILITY = 90  # of an H200

MODEL = shapes.MODELS["qwen2.5-7b"]  # but for the number of layers
# The same caches in a model that compiles in a tenth of the time: what is copied and
# gathered shows there, too.
NARROW = dataclasses.replace(MODEL, width=512, mlp_width=1024, vocab_size=4096)
MODELS = {"7b": MODEL, "narrow": NARROW}
CHAIN, TREE = map(strategy_lib.parse, ("15_1_16", "6_4_16"))  # J = 16 nodes each
NODES = CHAIN.verify
ROWS = 8  # requests of a slice
SLOTS = 8192  # of the cache, per request
PROMPT = 1024
CHUNKS = ("plain", "chain", "tree", "fused")
PROGRAMS = (*CHUNKS, "prefill", "fill", "update")
_TRAINS = ("fused",)  # takes two slices: a single one is never idle
_LEARNER_ROWS = ((2, 4096),)  # per bucket: rows of a micro-batch, tokens of a row


def runs(target: str, program: str) -> bool:
  """Whether a machine has any use for a program."""
  machine = TARGETS[target]
  return program not in _TRAINS or machine.devices > machine.model


def kernels_of(target: str, program: str) -> tuple[str, ...]:
  """What attends, writes and draws in a program: the platform's kernels, and XLA alone."""
  if program in ("fill", "update"):  # have none of these
    return ("ref",)
  return _KERNELS[TARGETS[target].platform]


class _Recorder(pool_lib.Pool):
  """A pool that compiles nothing, and remembers what it was asked for."""

  def __init__(self):
    super().__init__()
    self.asked: dict[str, tuple[Callable, tuple]] = {}

  def get(self, name, bucket, jitted, *args, **static):
    self.asked[name] = (jitted, args)
    return None


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
  jitted, args = made(program, mesh, kernels, model, slots=slots, rows=rows)
  traced = jitted.trace(*args)
  return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()


def made(
  program: str,
  mesh: jax.sharding.Mesh,
  kernels: str,
  model: config_lib.ModelConfig,
  *,
  slots: int = SLOTS,
  rows: int = ROWS,
) -> tuple[Callable, tuple]:
  """A jitted program and the shapes of its arguments; see `lower`."""
  if program == "update":
    return _update(mesh, model)
  return _of_rollout(program, mesh, kernels, model, slots, rows)


def argument_bytes(args) -> int:
  """Bytes of arguments on one device, without what layouts pad."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(args)
  )


def _of_rollout(program, mesh, kernels, model, slots: int, rows: int):
  """A program of a rollout that plans plain decoding, a chain and a tree; its arguments."""
  strategies = CHAIN, TREE
  drafter = drafter_lib.of_target(model)
  room = strategy_lib.Room.of(strategies)
  options = options_lib.Options(
    max_length=slots - room.target,
    max_prompt=min(PROMPT, slots // 2),
    slots=rows,
    kernels=kernels,
  )
  shapes = programs_lib.Shapes.of(model, mesh, options, drafter, strategies, train=True)
  weights = chunk_lib.Weights(
    _parameters(mesh, target_lib.abstract_params(model), model.dtype),
    _parameters(mesh, drafter_lib.abstract_params(drafter)),
  )
  pool = _Recorder()
  if program == "prefill":
    row = shapes.rows(options.prefill_rows)
    tokens = shapes.rows(options.prefill_rows, shapes.prefill_block)
    device_programs = programs_lib.Programs(shapes, pool, None)
    device_programs.compile("prefill", (), weights.target, shapes.store(), tokens, row, row)
    return pool.asked["prefill"]
  source = source_lib.make(
    "model",
    source_lib.Setting(
      *(model, mesh, pool, room, strategies),
      drafter=drafter,
      layout=shapes.layout,
      kernels=kernels,
    ),
  )
  bucket = options.buckets[-1]
  full = shapes.slots(bucket, stops=1)
  state = source.ready(bucket, weights, full)
  if program == "fill":
    return pool.asked["fill"]
  arm = {"plain": None, "chain": CHAIN, "tree": TREE, "fused": CHAIN}[program]
  whole = jax.ShapeDtypeStruct((), jnp.int32, sharding=axes.sharding(mesh))
  limits = chunk_lib.Limits(whole)
  if arm is None:
    state, source, weights = None, None, weights.replace(draft=None)
  else:
    limits = chunk_lib.Limits(whole, whole, whole)
  trainer, training = None, None
  if program in _TRAINS:
    trainer, training = _training(model, drafter, mesh, options.max_length)
    drafting = drafter_lib.abstract_params(drafter)
    weights = weights.replace(draft=axes.with_shardings(mesh, axes.ROLLOUT, drafting))
  chunks = chunks_lib.Chunks(shapes, pool, trainer, tokens=options.chunk)
  way = chunks_lib.Way(arm, source, weights)
  chunks.program(bucket, way, full, state, limits, training)
  return pool.asked[way.name + ("+training" if training else "")]


def _parameters(mesh, abstract, dtype: str = "float32"):
  """Shapes of parameters in the layout of rollouts."""
  placed = axes.with_shardings(mesh, axes.ROLLOUT, abstract)
  return jax.tree.map(lambda x: x.update(dtype=dtype), placed)


def _training(model, drafter, mesh, longest: int):
  """The drafter's trainer in rollouts, and what a fused chunk takes for it."""
  options = spot_lib.Options(
    row_tokens=min(2048, longest), context_tokens=16, rows=8, carried_rows=4
  )
  trainer = spot_lib.make_trainer(
    *(model, drafter, mesh),
    optimizer=optax.adamw(1e-4),
    longest=longest,
    loss=loss_lib.Loss(steps=3),
    options=options,
  )
  slices, m = mesh.shape[axes.DATA], options.rows
  over, whole = axes.sharding(mesh, axes.DATA), axes.sharding(mesh)
  integers = lambda shape, sharding: jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=sharding
  )
  features = spot_lib.abstract_features(trainer, options)
  table = integers((slices * m, 4, features.shape[1]), over)
  training = trainer_lib.Training(
    states=trainer.abstract_states(),
    rows=rows_lib.Rows(features, table, integers((slices * (1 + m),), over)),
    most=integers((), whole),
    later=integers((), whole),
    expected=integers((), whole),
  )
  return trainer, training


def _update(mesh, model):
  """The learner's update by GRPO, and what it takes."""
  learner = learner_lib.make(
    model, algorithm.make("grpo"), optax.adamw(1e-6), mesh, buckets=_LEARNER_ROWS
  )
  batch = batch_lib.abstract(mesh, learner.buckets, ROWS)
  return learner.update, (learner.abstract_state(), *batch)


def missing(platform: str) -> str | None:
  """One line that says how to install what compiles for a platform; None: it is there."""
  for package in _PACKAGES[platform]:
    try:
      importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
      return (
        f"compiling for {platform} needs the package {package}, which is not installed; "
        "`make aot` installs what requirements-aot.txt names, and runs this"
      )
  return None


def environment(target: str, dump: pathlib.Path) -> dict[str, str]:
  """Environment variables of the process that compiles for a target.

  Args:
    target: a name of `TARGETS`
    dump: folder in which XLA says what a GPU's host launches
  """
  env = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
  if TARGETS[target].platform == "cuda":
    env |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # there is no driver
    env |= {"XLA_FLAGS": f"--xla_dump_to={dump}"}
  else:
    # Asks nobody over the network what machine this is.
    env |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    env |= {"TPU_ACCELERATOR_TYPE": "v6e-4"}
  return env


def mesh_of(target: str) -> jax.sharding.Mesh:
  """The mesh of a target's devices.

  Raises:
    ValueError: what compiles for them is not installed
  """
  machine = TARGETS[target]
  if lacking := missing(machine.platform):
    raise ValueError(lacking)
  if machine.platform == "cuda":
    _lower_triton_for(_CAPABILITY)
    topology = topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      target_config=(_HERE / "h200.txtpb").read_text(),
      topology=machine.topology,
    )
  else:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=machine.topology)
  return axes.make_mesh(machine.model, topology.devices[: machine.devices])


def _lower_triton_for(capability: int) -> None:
  """Has jax_triton lower for a GPU that is not there."""
  import jax_triton

  library = jax_triton.triton_lib.triton_kernel_call_lib
  library.get_compute_capability = lambda device: capability


def compile_to(
  model: str, target: str, program: str, kernels: str, layers: int, folder: pathlib.Path
) -> None:
  """Compiles a program; writes text.hlo.gz and compiled.json into the folder."""
  mesh = mesh_of(target)
  whole = MODELS[model]
  part = dataclasses.replace(whole, num_layers=layers)
  began = time.perf_counter()
  lowered = lower(program, mesh, kernels, part)
  lowered_at = time.perf_counter()
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  names = ("argument", "output", "alias", "temp")
  told = {
    "lower_s": round(lowered_at - began, 1),
    "compile_s": round(time.perf_counter() - lowered_at, 1),
    "memory": {name: getattr(memory, f"{name}_size_in_bytes") for name in names},
    "all_layers_argument": argument_bytes(made(program, mesh, kernels, whole)[1]),
    "versions": versions(TARGETS[target].platform),
  }
  with gzip.open(folder / "text.hlo.gz", "wt") as file:
    file.write(compiled.as_text())
  (folder / "compiled.json").write_text(json.dumps(told))


def versions(platform: str) -> dict[str, str]:
  """Versions of what compiles."""
  names = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "jax-triton", "triton"),
  }
  return {
    name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *names[platform])
  }


def main(model, target, program, kernels, layers, folder) -> None:
  compile_to(model, target, program, kernels, int(layers), pathlib.Path(folder))


if __name__ == "__main__":
  main(*sys.argv[1:])
