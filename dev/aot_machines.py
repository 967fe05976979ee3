"""Machines to compile for: topologies, and the environment of their compilers.

Needs the packages of requirements-aot.txt.
"""

import importlib.metadata
import pathlib
from typing import NamedTuple

import jax
from jax.experimental import topologies

from tlt_jax import axes
from tlt_jax.pallas_kernels import triton_call

_HERE = pathlib.Path(__file__).parent


class Target(NamedTuple):
  """A machine to compile for."""

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
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "triton")}
_CAPABILITY = 90  # of an H200


def missing(platform: str) -> str | None:
  """A message on how to install the compiler of a platform; None if it is installed."""
  for package in _PACKAGES[platform]:
    try:
      importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
      return (
        f"compiling for {platform} needs the package {package}, which is not installed; "
        "`make aot` installs what requirements-aot.txt names, and runs this"
      )
  return None


def environment(platform: str, dump: pathlib.Path | None = None) -> dict[str, str]:
  """Environment variables of the process that compiles for a platform.

  Args:
    platform: "tpu" or "cuda"
    dump: folder for XLA's dump of the launches of a GPU's host; None: no dump
  """
  env = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
  env |= {"JAX_TRACEBACK_FILTERING": "off"}  # the last line is then the error
  if platform == "cuda":
    env |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # there is no driver
    env |= {"XLA_FLAGS": f"--xla_dump_to={dump}"} if dump else {}
  else:
    # No queries over the network about this machine.
    env |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    env |= {"TPU_ACCELERATOR_TYPE": "v6e-4"}
  return env


def mesh_of(machine: Target) -> jax.sharding.Mesh:
  """The mesh of a target; raises ValueError if its compiler is not installed."""
  if message := missing(machine.platform):
    raise ValueError(message)
  if machine.platform == "cuda":
    triton_call.compile_for(_CAPABILITY)
    topology = topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      target_config=(_HERE / "h200.txtpb").read_text(),
      topology=machine.topology,
    )
  else:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=machine.topology)
  return axes.make_mesh(machine.model, topology.devices[: machine.devices])


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
  """The compiler's memory analysis: bytes on each device, by kind."""
  memory = compiled.memory_analysis()
  kinds = ("argument", "output", "alias", "temp")
  return {kind: getattr(memory, f"{kind}_size_in_bytes") for kind in kinds}


def versions(platform: str) -> dict[str, str]:
  """Versions of the compilers."""
  names = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "triton"),
  }
  return {
    name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *names[platform])
  }
