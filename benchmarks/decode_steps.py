"""Measures whole decoding steps of public models' shapes: plain ones and speculation.

    python -m benchmarks.decode_steps --model=qwen3-0.6b
    python -m benchmarks.decode_steps --model=qwen2.5-7b --strategies=off,3_1_4

Weights are random, made on the device: the target's in bfloat16, the drafter's (EAGLE-3,
a vocabulary of 32,000 tokens) in float32. Steps are those of rollouts, in the programs
that rollouts run, over chunks with all slots live and full caches, by live requests and
strategy; times do not depend on which drafts are accepted. They are compared with the time
to read the target's weights and caches once, at the measured copy bandwidth, and with the
aims of this project for an H200. What a strategy takes without drafting follows from its
program's steps at two depths: a step less the drafts, a verifying pass. For the first of
`--live` kernels and calls of CUDA's driver per step are counted. Then the computing of a
drafter's KV, per token, and an update of its training are timed: one of a run, on a
micro-batch of `spot.Options`, compared with the plain step of the fewest live requests.
Sides take turns; those that do not fit into memory, or into `--minutes`, are named. The
last line is JSON, an input of `experiments.simulate --table`. `--dry_run` takes tiny sizes,
on any machine.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
import json
import logging
import sys
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from benchmarks import device_time
from benchmarks import kernels as kernels_lib
from benchmarks import machine
from benchmarks import program_counts
from benchmarks import shapes
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import tables
from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

AIMS = {  # milliseconds of plain steps of so many live requests, on an H200
  "qwen3-0.6b": {1: 1.1, 4: 1.3},
  "qwen2.5-1.5b": {1: 1.5, 4: 1.5},
  "qwen2.5-7b": {1: 4.6, 4: 4.6},
}
VERIFY_AIM = 1.1  # plain steps that a pass may take which verifies `3_1_4`
UPDATE_AIM = 3.0  # plain steps that an update of the drafter may take
_CHUNK = 64  # steps that are timed at a time
_DRAFT_VOCABULARY = 32_000  # of EAGLE-3's published drafters
_UPDATES = 4  # of the drafter, that are timed at a time
_COMPILED_AT_ONCE = 8
_LIVES_AT_ONCE = 3  # live batches whose programs are compiled together
_FILL = "fill"  # a key next to the strategies
_COUNTS = ("kernels", "triton", "host_reads")  # of `program_counts.of_text`
_KERNELS = 8  # the longest, whose time on the device is reported


def random_models(config: config_lib.ModelConfig) -> from_config.Models:
  mesh = axes.make_mesh(1, jax.devices()[:1])
  vocab = tuple(range(min(_DRAFT_VOCABULARY, config.vocab_size)))
  drafter = drafter_lib.of_target(config, "eagle3", vocab=vocab)
  params = shapes.random_params(config, mesh)
  draft_params = shapes.random_like(drafter_lib.abstract_params(drafter), mesh)
  frozen = spot_lib.Frozen(drafter, draft_params)
  models = from_config.Models(mesh, config, params, frozen)
  jax.block_until_ready((params, draft_params))
  return models


class Step:
  """A step of a rollout, to be timed."""

  def __init__(
    self,
    models: from_config.Models,
    kernels: str,
    live: int,
    strategy: strategy_lib.Strategy | None,
    length: int,
  ):
    self.chunk = min(_CHUNK, length // 2)
    self.bucket, self.length = live, length - 1
    self.strategy = strategy
    self.drafts = strategy_lib.uses_drafter(strategy)
    self._params = models.params
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
      filters=False,  # as in RL
    )
    drafter = models.drafter if self.drafts else None
    selector = strategy and selector_lib.always(strategy)
    self.engine = rollout.make(models.model, models.mesh, options, drafter, selector)
    self.text = ""  # of the compiled chunk
    get = self.engine.pool.get

    def get_and_read(name, *args, **static):
      program = get(name, *args, **static)
      if not self.text and (name == "chunk" or name.startswith("speculate")):
        self.text = program.as_text()
      return program

    self.engine.pool.get = get_and_read

  def seconds(self, depth: int | None = None) -> float:
    """Of a step, over a chunk; `depth`: of drafting, None: the strategy's."""
    strategy = self.strategy
    if depth is not None:
      strategy = dataclasses.replace(strategy, depth=depth)
    return self.engine.time_step(self._params, self.bucket, strategy, length=self.length)

  def fill_seconds(self) -> float:
    """Of the computing of the drafter's KV, per token."""
    weights = self.engine.weights(self._params)
    return self.engine.backend.time_fill(weights, self.bucket, self.strategy)


def timed(runs: dict[Any, Callable[[], float]], repeats: int) -> dict[Any, dict]:
  """`device_time.in_turn` of functions that return the seconds."""

  def seconds(measured) -> dict[Any, np.ndarray]:
    return {key: np.array(s) for key, s in interleave.results(measured).items()}

  return device_time.in_turn(runs, repeats, seconds)


def counts(step: Step) -> dict:
  """Counts of a step, see `program_counts`.

  Calls of the driver, and microseconds on the device by kernel, are those of a chunk with
  its setup, divided by its steps.
  """
  traced: list[program_counts.Trace] = []

  def trace():
    traced.append(program_counts.of_trace(step.seconds))

  error = device_time.error_of(trace)  # profilers may need permission
  calls, device_s = traced[0] if traced else ({}, {})
  longest = sorted(device_s, key=device_s.get, reverse=True)[:_KERNELS]
  found = {
    "program": program_counts.of_text(step.text),
    "driver_calls": {name: n / step.chunk for name, n in calls.items()},
    "device_us": 1e6 * sum(device_s.values()) / step.chunk,
    "device_us_by_kernel": {n: 1e6 * device_s[n] / step.chunk for n in longest},
  }
  return found | ({"trace_error": error} if error else {})


def training(models: from_config.Models, length: int, repeats: int) -> dict:
  """Times an update of the drafter on a micro-batch; returns as `device_time.in_turn`."""
  trainer, options = shapes.drafter_trainer(
    models.model, models.drafter.config, models.mesh, longest=length
  )
  program = trainer.make_train()

  def update() -> float:
    spot = spot_lib.Spot(trainer, options, models.drafter.params)
    sequence = np.arange(length, dtype=np.int32) % models.model.vocab_size
    spot.buffer.add(0, sequence[:1], sequence[1:])
    data = spot.training(_UPDATES)
    jax.block_until_ready(data)
    began = time.perf_counter()
    jax.block_until_ready(program(models.params, data).totals)
    return (time.perf_counter() - began) / _UPDATES

  return timed({"update": update}, repeats)["update"]


def needed_bytes(
  models: from_config.Models, live: int, strategy: strategy_lib.Strategy | None, length: int
) -> int:
  """An estimate of a step's memory without the weights.

  Caches, logits, the reference's scores, and the features that a drafter reads.
  """
  config, num_nodes = models.model, strategy.verify if strategy else 1
  K, H, N = config.num_kv_heads, config.head_dim, config.num_heads
  cache = 2 * 2 * live * length * K * H * config.num_layers
  scores = 2 * 4 * live * num_nodes * N * length
  logits = 6 * 4 * live * num_nodes * config.vocab_size
  has_features = strategy_lib.uses_drafter(strategy)
  per_token = 2 * models.drafter.config.feature_width if has_features else 0
  features = live * length * per_token
  return cache + scores + logits + features


def runs_of(steps: dict[tuple[str, str], Step], trains: bool) -> dict[tuple, Callable]:
  """What is timed of these steps: each, at depth one, too, and a drafter's fill."""
  runs = {key: step.seconds for key, step in steps.items()}
  drafting = {key: step for key, step in steps.items() if step.drafts}
  for key, step in drafting.items():
    if step.strategy.depth > 1:
      runs[*key, 1] = functools.partial(step.seconds, depth=1)
  if drafting and trains:
    runs[_FILL] = list(drafting.values())[-1].fill_seconds
  return runs


def measure_all(
  config: config_lib.ModelConfig,
  lives: Sequence[int],
  arms: Sequence[str],
  length: int,
  kernels: Sequence[str],
  repeats: int,
  has_time: Callable[[], bool],
  trains: bool,
) -> dict:
  """Measures every live batch, one after the other, and the drafter's training.

  Args:
    arms: names of strategies
    length: tokens of a cache
    kernels: implementations
    has_time: whether another live batch may begin
    trains: whether a drafter's fill and its training are measured
  """
  if (need := shapes.params_bytes(config) * 1.05) > machine.free_bytes():
    skipped = f"the weights need {need / 1e9:.1f} GB of memory"
    return {"cells": [], "fill": {}, "update": None, "skipped": skipped}
  models = random_models(config)
  strategies = {name: strategy_lib.parse(name) for name in arms}
  cells, fills, skipped = [], {}, []
  for i in range(0, len(lives), _LIVES_AT_ONCE):
    some = lives[i : i + _LIVES_AT_ONCE]
    if not has_time():
      skipped.append(f"{', '.join(map(str, some))} live: no time left")
      continue
    free = machine.free_bytes()
    steps: dict[int, dict[tuple[str, str], Step]] = {}
    for live in some:
      fits = [a for a in arms if needed_bytes(models, live, strategies[a], length) < free]
      skipped += [f"{live} live, {name}: does not fit" for name in arms if name not in fits]
      keys = [(kind, name) for kind in kernels for name in fits]
      steps[live] = {(k, a): Step(models, k, live, strategies[a], length) for k, a in keys}
    # A step that fails here, as memory does not hold several, is tried again alone.
    with futures.ThreadPoolExecutor(_COMPILED_AT_ONCE) as pool:
      every = [step for of_live in steps.values() for step in of_live.values()]
      list(pool.map(lambda step: device_time.error_of(step.seconds), every))
    for live, of_live in steps.items():
      if cells and not has_time():
        skipped.append(f"{live} live: no time left")
        continue
      found = timed(runs_of(of_live, trains), repeats)
      fills[live] = found.pop(_FILL, None)
      for (kind, name), step in of_live.items():
        cell, once = found[kind, name], found.get((kind, name, 1), {})
        took = cell.get("error") or f"{1e3 * cell['median_s']:.2f} ms"
        logging.info("%d live, %s by %s: %s", live, name, kind, took)
        cell["compile_s"] = step.engine.pool.seconds
        if "median_s" in cell and "median_s" in once:
          drafts = (cell["median_s"] - once["median_s"]) / (step.strategy.depth - 1)
          cell["verify_s"] = once["median_s"] - drafts
        if live == lives[0] and "error" not in cell:
          cell |= counts(step)
        cells.append({"live": live, "kernels": kind, "strategy": name} | cell)
  update = training(models, length, repeats) if trains else None
  skip = {"skipped": "; ".join(skipped)} if skipped else {}
  return {"cells": cells, "fill": fills, "update": update} | skip


def table(found: dict, kernels: str, length: int) -> dict:
  """The table of `simulate.costs.Measured`, with these kernels."""
  steps: dict[str, dict] = {}
  for cell in found["cells"]:
    if cell["kernels"] == kernels and "error" not in cell:
      row = steps.setdefault(str(cell["live"]), {"step_ms": {}})
      row["step_ms"][cell["strategy"]] = {str(length): 1e3 * cell["median_s"]}
  fills = [f["median_s"] for f in found["fill"].values() if f and "error" not in f]
  filled = {"fill_token_s": fills[-1]} if fills else {}
  update = found["update"] or {}
  trained = {"micro_batch": update["median_s"]} if "median_s" in update else {}
  return {"steps": steps} | filled | trained


def limit_seconds(
  config: config_lib.ModelConfig, live: int, length: int, bytes_per_s: float
) -> float:
  """Seconds to read the target's weights, and the keys and values of all requests."""
  per_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
  return (shapes.step_bytes(config, live) + live * length * per_token) / bytes_per_s


def report(name: str, found: dict, limit_s: Callable[[int], float]) -> None:
  """Prints the tables; adds shares of the limit, and ratios to the plain step, to cells.

  Args:
    limit_s: of a number of live requests
  """
  plain = {
    (c["live"], c["kernels"]): c["median_s"]
    for c in found["cells"]
    if c["strategy"] == "off" and "error" not in c
  }
  rows = []
  for cell in found["cells"]:
    row = [str(cell["live"]), cell["kernels"], cell["strategy"]]
    if "error" in cell:
      rows.append([*row, "failed"])
      print(f"failed: {' '.join(row)}: {cell['error']}")
      continue
    cell["limit_share"] = limit_s(cell["live"]) / cell["median_s"]
    ms, aim = AIMS.get(name, {}).get(cell["live"]), ""
    if cell["strategy"] == "off" and ms:
      aim = f"{ms} ms"
    ratios = {"of_plain": cell["median_s"], "verify_of_plain": cell.get("verify_s")}
    if plain_s := plain.get((cell["live"], cell["kernels"])):
      cell |= {key: s / plain_s for key, s in ratios.items() if s}
    if "verify_of_plain" in cell and cell["strategy"] == "3_1_4":
      aim = f"verify {VERIFY_AIM}"
    program = cell.get("program", {})
    rows.append(
      [
        *row,
        f"{1e3 * cell['median_s']:.2f} ± {1e3 * cell['half_s']:.2f}",
        aim,
        f"{cell['limit_share']:.0%}",
        *(f"{cell[key]:.2f}" if key in cell else "" for key in ratios),
        ", ".join(str(program[n]) for n in _COUNTS) if program else "",
        f"{cell['compile_s']:.0f}",
      ]
    )
  tables.show(
    f"{name}: milliseconds per step; the limit is to read weights and caches",
    ["live", "by", "strategy", "step", "aim", "of limit", "of plain", "verify"]
    + ["kernels, Triton, host reads", "compiled, s"],
    rows,
  )
  micros = {f"fill at {live} live": fill for live, fill in found.get("fill", {}).items()}
  for what, cell in (micros | {"update": found.get("update")}).items():
    if cell:
      print(f"drafter's {what}, microseconds: {device_time.micros(cell)}")
      if "error" in cell:
        print(f"failed: {what}: {cell['error']}")
  update = found.get("update") or {}
  if plain and "median_s" in update:
    live, plain_s = min((live, plain_s) for (live, _), plain_s in plain.items())
    update["of_plain"] = update["median_s"] / plain_s
    ratio, aim = update["of_plain"], f"aim: at most {UPDATE_AIM:.0f}"
    print(f"drafter's update: {ratio:.2f} plain steps of {live} live ({aim})")
  for cell in found["cells"]:
    if calls := cell.get("driver_calls"):
      often = ", ".join(f"{name} {n:.1f}" for name, n in sorted(calls.items()) if n >= 0.5)
      print(f"per step of {cell['kernels']}, {cell['strategy']}: {often}")
    if kernels := cell.get("device_us_by_kernel"):
      most = ", ".join(f"{name} {us:.0f}" for name, us in list(kernels.items())[:6])
      total = f"{cell['device_us']:.0f} microseconds on the device"
      print(f"per step of {cell['kernels']}, {cell['strategy']}: {total}, of which {most}")
  if "skipped" in found:
    print(f"left out: {found['skipped']}")


def main(
  model: str,
  lives: Sequence[int],
  arms: Sequence[str],
  length: int,
  repeats: int,
  minutes: float,
  dry_run: bool,
  kernels: Sequence[str],
  trains: bool,
):
  ends = time.monotonic() + 60 * minutes
  launch.start(1)
  kernels_lib.check_device(dry_run)
  config = shapes.MODELS[model]
  if dry_run:
    config, lives, length = shapes.tiny(config), (1,), 64
  timing = device_time.Timing(repeats, most_calls=2 if dry_run else 2000)
  measured = kernels_lib.bandwidth(timing, dry_run)
  limit_s = functools.partial(
    limit_seconds, config, length=length, bytes_per_s=measured["bytes_per_s"]
  )
  here = kernels_lib.kernels_here(dry_run)
  kernels = [name for name in here if name in kernels] or here
  found = measure_all(
    config,
    lives,
    arms,
    length,
    kernels,
    repeats,
    has_time=lambda: time.monotonic() < ends,
    trains=trains,
  )
  report(model, found, limit_s)
  sizes = {"model": model, "cache": length, "limit_s": {n: limit_s(n) for n in lives}}
  timed_all = [*found["cells"], *found["fill"].values(), found["update"]]
  whole = sizes | {"bandwidth": measured} | found | table(found, kernels[-1], length)
  print(json.dumps(device_time.rounded(whole)))
  sys.exit(1 if any(cell and "error" in cell for cell in timed_all) else 0)


if __name__ == "__main__":
  model = flags.DEFINE_enum("model", "qwen3-0.6b", list(shapes.MODELS), "Its shape.")
  lives = flags.DEFINE_list("live", ["1", "8", "64", "4", "32", "2", "16"], "Requests.")
  arms = flags.DEFINE_list(
    "strategies", ["off", "ngram_3", "ngram_15", "3_1_4", "6_1_7", "6_4_16"], "To compare."
  )
  length = flags.DEFINE_integer("length", 4096, "Tokens of a cache.", lower_bound=64)
  repeats = flags.DEFINE_integer("repeats", 5, "Of each measurement.", lower_bound=2)
  minutes = flags.DEFINE_float(
    "minutes", 60.0, "After which no live batch is begun.", lower_bound=0.0
  )
  dry_run = flags.DEFINE_bool("dry_run", False, "Tiny sizes, kernels interpreted.")
  kernels = flags.DEFINE_list("kernels", [], "Implementations; default: all there are.")
  trains = flags.DEFINE_bool("training", True, "Whether fill and update are timed.")
  launch.run(
    lambda: main(
      model.value,
      [int(live) for live in lives.value],
      arms.value,
      length.value,
      repeats.value,
      minutes.value,
      dry_run.value,
      kernels.value,
      trains.value,
    )
  )
