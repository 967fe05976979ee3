"""Measures whole decoding steps of public models' shapes: plain ones and verification.

    python -m experiments.bench.decode_steps --model=qwen3-0.6b
    python -m experiments.bench.decode_steps --model=qwen2.5-7b --live=1,8 --nodes=1,16

Weights are random, made on the device, in bfloat16. Steps are those of rollouts, in the
programs that rollouts run, over chunks with all slots live and full caches, by live
requests and by J, the nodes of a pass: 1 is plain decoding; J > 1 looks J - 1 drafts up
(`ngram`), which costs little beside the pass. Beside each is the time that it takes to
read the weights once, by the measured copy bandwidth. For the first of `--live` it also
counts kernels, and calls of CUDA's driver, per step. Sides take turns; what does not fit
into memory, or into `--minutes`, is named. The last line is JSON. `--dry_run` takes tiny
sizes, on any machine.
"""

from collections.abc import Callable, Sequence
import json
import sys
import time

from absl import flags
import jax
import numpy as np

from experiments import launch
from experiments import tables
from experiments.bench import device_time
from experiments.bench import interleave
from experiments.bench import kernels as kernels_lib
from experiments.bench import machine
from experiments.bench import program_counts
from experiments.bench import shapes
from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_CHUNK = 32  # steps that are timed at a time


class Step:
  """The step of one kind of rollout, ready to be timed."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    mesh: jax.sharding.Mesh,
    kernels: str,
    live: int,
    num_nodes: int,
    length: int,
  ):
    """Compiles nothing yet.

    Args:
      config, mesh: of the model
      kernels: that it runs
      live: requests
      num_nodes: J of a pass
      length: tokens of each row's cache
    """
    self.bucket = (live, length)
    self.chunk = min(_CHUNK, length // 2)
    self.strategy = None
    if num_nodes > 1:
      self.strategy = strategy_lib.parse(f"ngram_{num_nodes - 1}")
    options = rollout.Options(
      max_length=length,
      max_prompt=min(32, length // 2),
      slots=live,
      chunk=self.chunk,
      prompt_rows=1,
      prefill_rows=1,
      memory_rows=1,
      memory_tokens=1024,
      kernels=kernels,
    )
    selector = self.strategy and selector_lib.always(self.strategy)
    self.engine = rollout.make(config, mesh, options, selector=selector)
    self.text = ""  # of the compiled chunk
    get = self.engine.pool.get

    def get_and_read(name, *args, **static):
      program = get(name, *args, **static)
      if not self.text and (name == "chunk" or name.startswith("speculate")):
        self.text = program.as_text()
      return program

    self.engine.pool.get = get_and_read

  def seconds(self, params) -> float:
    """Times a step, over a chunk."""
    return self.engine.time_step(params, self.bucket, strategy=self.strategy)


def measure(
  steps: dict[tuple[str, int], Step], params, repeats: int, count: bool
) -> dict[tuple[str, int], dict]:
  """Times steps in turn; see `device_time.summary`, or the `error` of a step.

  Args:
    steps: by kernels and J
    params: of the model
    repeats: of each
    count: whether to count what a step asks of the device
  """
  found = {}
  for key, step in steps.items():
    if error := device_time.error_of(lambda step=step: step.seconds(params)):
      found[key] = {"error": error}
  sides = {
    key: lambda turn, step=step: step.seconds(params)
    for key, step in steps.items()
    if key not in found
  }
  if sides:
    measured = list(interleave.turns(sides, repeats))
    for key, seconds in interleave.results(measured).items():
      found[key] = device_time.summary(np.array(seconds))
  for key in sides if count else ():
    found[key] |= counts(steps[key], params)
  return {key: found[key] for key in steps}


def counts(step: Step, params) -> dict:
  """What a step asks of the device; see `program_counts`.

  The driver's calls are those of a chunk, with what sets it up, over its steps.
  """
  traced: dict[str, int] = {}

  def trace():
    traced.update(program_counts.of_trace(lambda: step.seconds(params)))

  error = device_time.error_of(trace)  # profilers may need permission
  calls = {name: count / step.chunk for name, count in traced.items()}
  found = {"program": program_counts.of_text(step.text), "driver_calls": calls}
  return found | ({"trace_error": error} if error else {})


def needed_bytes(
  config: config_lib.ModelConfig, live: int, num_nodes: int, length: int
) -> int:
  """About what a step takes beside the weights: caches, logits, the reference's scores."""
  K, H, N = config.num_kv_heads, config.head_dim, config.num_heads
  cache = 2 * 2 * live * length * K * H * config.num_layers
  scores = 2 * 4 * live * num_nodes * N * length
  logits = 6 * 4 * live * num_nodes * config.vocab_size
  return cache + scores + logits


def measure_all(
  config: config_lib.ModelConfig,
  lives: Sequence[int],
  nodes: Sequence[int],
  length: int,
  kernels: Sequence[str],
  repeats: int,
  has_time: Callable[[], bool],
) -> dict:
  """Measures every live batch, one after the other.

  Args:
    config: of the model
    lives, nodes: that are measured, J = 1 first
    length: tokens of a cache
    kernels: implementations to compare
    repeats: of each
    has_time: whether another live batch may begin
  """
  mesh = axes.make_mesh(1, jax.devices()[:1])
  if (need := shapes.params_bytes(config) * 1.05) > machine.free_bytes():
    return {"cells": [], "skipped": f"the weights need {need / 1e9:.1f} GB of memory"}
  params = jax.block_until_ready(shapes.random_params(config, mesh))
  cells, skipped = [], []
  for live in lives:
    if not has_time():
      skipped.append(f"{live} live: no time left")
      continue
    fits = [
      J for J in nodes if needed_bytes(config, live, J, length) < machine.free_bytes()
    ]
    skipped += [f"{live} live, J={J}: does not fit" for J in nodes if J not in fits]
    keys = [(kind, J) for kind in kernels for J in fits]
    steps = {key: Step(config, mesh, key[0], live, key[1], length) for key in keys}
    found = measure(steps, params, repeats, count=live == lives[0])
    for (kind, J), cell in found.items():
      cells.append({"live": live, "kernels": kind, "nodes": J} | cell)
  return {"cells": cells, "skipped": "; ".join(skipped)}


def report(name: str, found: dict, limit_s: float) -> None:
  """Prints the table; adds to every cell its ratio to the plain step beside it."""
  plain = {
    (c["live"], c["kernels"]): c["median_s"]
    for c in found["cells"]
    if c["nodes"] == 1 and "error" not in c
  }
  rows = []
  for cell in found["cells"]:
    row = [str(cell["live"]), cell["kernels"], str(cell["nodes"])]
    if "error" in cell:
      rows.append([*row, "failed"])
      print(f"failed: {' '.join(row)}: {cell['error']}")
      continue
    cell["limit_share"] = limit_s / cell["median_s"]
    beside = plain.get((cell["live"], cell["kernels"]))
    if beside:
      cell["over_plain"] = cell["median_s"] / beside
    program = cell.get("program", {})
    rows.append(
      [
        *row,
        f"{1e3 * cell['median_s']:.2f} ± {1e3 * cell['half_s']:.2f}",
        f"{cell['limit_share']:.0%}",
        f"{cell['over_plain']:.2f}x" if beside else "",
        *(str(program.get(n, "")) for n in ("kernels", "triton", "host_reads")),
      ]
    )
  tables.show(
    f"{name}: milliseconds per step; reading the weights takes {1e3 * limit_s:.2f}",
    ["live", "run by", "J", "step", "limit", "of plain", "kernels", "Triton", "host reads"],
    rows,
  )
  for cell in found["cells"]:
    if calls := cell.get("driver_calls"):
      often = ", ".join(f"{name} {n:.1f}" for name, n in sorted(calls.items()) if n >= 0.5)
      print(f"per step of {cell['kernels']}, J={cell['nodes']}: {often}")
  if found["skipped"]:
    print(f"left out: {found['skipped']}")


def main(
  model: str,
  lives: Sequence[int],
  nodes: Sequence[int],
  length: int,
  repeats: int,
  minutes: float,
  dry_run: bool,
):
  ends = time.monotonic() + 60 * minutes
  launch.start(1)
  kernels_lib.check_device(dry_run)
  config = shapes.MODELS[model]
  if dry_run:
    config, lives, nodes, length = shapes.tiny(config), (1,), (1, 4), 64
  timing = device_time.Timing(repeats, most_calls=2 if dry_run else 2000)
  measured = kernels_lib.bandwidth(timing, dry_run)
  limit_s = shapes.step_bytes(config) / measured["bytes_per_s"]
  found = measure_all(
    config,
    lives,
    sorted(nodes),
    length,
    kernels_lib.kernels_here(dry_run),
    repeats,
    has_time=lambda: time.monotonic() < ends,
  )
  report(model, found, limit_s)
  sizes = {"model": model, "cache": length, "limit_s": limit_s, "bandwidth": measured}
  print(json.dumps(sizes | found))
  sys.exit(1 if any("error" in cell for cell in found["cells"]) else 0)


if __name__ == "__main__":
  model = flags.DEFINE_enum("model", "qwen3-0.6b", list(shapes.MODELS), "Its shape.")
  lives = flags.DEFINE_list("live", ["1", "8", "64", "4", "32", "2", "16"], "Requests.")
  nodes = flags.DEFINE_list("nodes", ["1", "4", "8", "16"], "J of a pass.")
  length = flags.DEFINE_integer("length", 4096, "Tokens of a cache.", lower_bound=64)
  repeats = flags.DEFINE_integer("repeats", 5, "Of each measurement.", lower_bound=2)
  minutes = flags.DEFINE_float(
    "minutes", 60.0, "After which no live batch is begun.", lower_bound=0.0
  )
  dry_run = flags.DEFINE_bool("dry_run", False, "Tiny sizes, kernels interpreted.")
  launch.run(
    lambda: main(
      model.value,
      [int(live) for live in lives.value],
      [int(num_nodes) for num_nodes in nodes.value],
      length.value,
      repeats.value,
      minutes.value,
      dry_run.value,
    )
  )
