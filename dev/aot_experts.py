"""How many experts' weights a decoding pass reads, as compiled.

    .venv-aot/bin/python -m dev.aot_experts [--rows=1,8,64]

Compiles chunks of plain decoding with the widths of Qwen3-30B-A3B, 128 experts of which a
token takes 8, for an H200 and for this machine's CPU, and counts what products and gathers
read, by the programs' text. `make aot` installs the compilers.
"""

import dataclasses
import math
import os

from absl import flags
import jax
import jax.numpy as jnp

from benchmarks import shapes
from dev import aot_machines
from dev import aot_programs
from dev import hlo_counts
from experiments import launch
from experiments import tables
from tlt_jax import axes
from tlt_jax.models import config as config_lib

_ROWS = flags.DEFINE_list("rows", ["1", "8", "64"], "Requests, each with one token.")
_LAYERS = 2
_MODEL = dataclasses.replace(shapes.MODELS["qwen3-30b-a3b"], num_layers=_LAYERS)


def _mesh(name: str) -> jax.sharding.Mesh:
  if name == "cpu":
    return axes.make_mesh(devices=jax.devices()[:1])
  return aot_machines.mesh_of(aot_machines.TARGETS[name])


def read(config: config_lib.ModelConfig, text: str) -> str:
  """How many experts each layer of a program reads: their three matrices.

  In a pass; or, where a layer's loop goes over the chosen experts, in an iteration.
  """
  shape = config.experts.count, config.experts.width, config.width
  found = hlo_counts.Counter(text, {}, 1.0).reads(math.prod(shape))
  each = 3 * math.prod(shape[1:]) * jnp.dtype(config.dtype).itemsize
  counts = {size / each for size in found.values()}
  if len(found) == 1:  # the loop over passes
    return f"{counts.pop() / config.num_layers:g} in each pass"
  if len(found) == config.num_layers and len(counts) == 1:
    return f"{counts.pop():g} for each that is chosen"
  return ", ".join(f"{size / each:g} in {name}" for name, size in found.items())


def main():
  os.environ.update(aot_machines.environment("cuda"))
  jax.config.update("jax_platforms", "cpu")  # jax has read the environment already
  k, E = _MODEL.experts.per_token, _MODEL.experts.count
  rows = []
  for name in ("h200", "cpu"):
    for count in map(int, _ROWS.value):
      lowered = aot_programs.lower("plain", _mesh(name), "ref", _MODEL, rows=count)
      found = read(_MODEL, lowered.compile().as_text())
      most, usual = min(k * count, E), E * (1 - (1 - k / E) ** count)
      rows.append([name, str(count), str(most), f"{usual:.1f}", found])
  names = ["compiled for", "rows", "chosen: most", "expected", "read by a layer"]
  tables.show(f"of {E} experts", names, rows)


if __name__ == "__main__":
  launch.run(main)
