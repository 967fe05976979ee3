"""Checks on a GPU that bits do not depend on other rows; times passes of few rows.

    python -m benchmarks.passes --model=qwen3-0.6b

  bits     see `few_rows`
  passes   seconds by live requests and nodes, compared with reading weights and cache at
           the measured bandwidth, and with a plain pass: verifying four nodes should take
           1.1 at most
  kernels  bytes per second of each, in these passes, from a profile

It fails if a bit differs. The last line is JSON. `--dry_run` runs the operations in
jax.numpy, in tiny sizes, on any machine; there bits may differ.
"""

import collections
from collections.abc import Mapping, Sequence
from concurrent import futures
import functools
import json
import re
import sys
import time

from absl import flags
import jax
import jax.numpy as jnp

from benchmarks import device_time
from benchmarks import few_rows
from benchmarks import kernels
from benchmarks import program_counts
from benchmarks import shapes
from experiments import launch
from experiments import tables
from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib

PASSES = (
  *map(few_rows.Case, (1, 4, 16, 64)),
  *(few_rows.Case(live, few_rows.CHAIN) for live in (1, 4, 16)),
  *(few_rows.Case(live, few_rows.LONG, is_tree=True) for live in (1, 4)),
)
AIM = 1.1  # plain passes that the verification of a chain may take
_BITS_LENGTH, _LENGTH = 512, 2048  # tokens of a cache
_CALLS = 50  # passes that are timed at a time
_COMPILED_AT_ONCE = 8


class Timed:
  """A pass in a loop, in its own cache."""

  def __init__(self, config, impl: str, params: dict, case, length: int, calls: int):
    self.case, self.calls = case, calls
    self._params, self._impl = params, impl
    self._config, self._length = config, length
    self._tree = case.tokens(config)

  def compile(self) -> None:
    deepest = few_rows.deepest_of(self._tree)
    start = jnp.full(self.case.live, self._length - self.case.nodes, jnp.int32)

    def one(_, carry):
      params, kv, tokens = carry
      tree = self._tree.replace(tokens=tokens)
      made = few_rows.step(self._config, self._impl, params, kv, tree, start, deepest)
      # The same tokens, which depend on the result.
      tokens += jnp.isnan(made.logits[0, 0, 0]).astype(jnp.int32)
      return params, made.kv, tokens

    @functools.partial(jax.jit, donate_argnums=1)
    def program(params, kv, tokens):
      return jax.lax.fori_loop(0, self.calls, one, (params, kv, tokens))[1:]

    shape = jax.eval_shape(self._cache)
    self._program = program.lower(self._params, shape, self._tree.tokens).compile()

  def _cache(self) -> cache_lib.KVCache:
    args = self._config, self.case.live, self._length
    return cache_lib.init(*args, page=few_rows.PAGE, kernels="ref")

  def hold(self) -> None:
    self._kv = self._cache()

  def __call__(self) -> None:
    made = self._program(self._params, self._kv, self._tree.tokens)
    self._kv, _ = jax.block_until_ready(made)


def kernel_bytes(config: config_lib.ModelConfig, live: int, length: int) -> dict[str, int]:
  """Bytes of weights, keys and values that kernels read in a pass, of all layers."""
  D, F, H, L = config.width, config.mlp_width, config.head_dim, config.num_layers
  N, K = config.num_heads, config.num_kv_heads
  return {
    "qkv": 2 * L * D * H * (N + 2 * K),
    "attend": live * length * 2 * 2 * L * K * H,
    "project": 2 * L * D * (N * H + F),
    "gate_up": 2 * L * 2 * D * F,
    "head": 2 * config.vocab_size * D,
  }


def by_kernel(timed: Timed, moved: Mapping[str, int], bytes_per_s: float) -> dict:
  """`kernels`: seconds of each per pass, from a profile, and its share of the bandwidth."""
  device_s = collections.Counter()

  def trace():
    for name, s in program_counts.of_trace(timed).device_s.items():
      device_s[re.match(r"\w*", name)[0]] += s / timed.calls

  if error := device_time.error_of(trace):  # profilers may need permission
    return {"trace_error": error}
  found = {n: {"s": device_s[n]} for n in ("enter", *moved) if device_s[n]}
  for name in found.keys() & moved.keys():
    found[name]["bytes_per_s"] = moved[name] / found[name]["s"]
    found[name]["share"] = found[name]["bytes_per_s"] / bytes_per_s
  if others := sum(device_s.values()) - sum(x["s"] for x in found.values()):
    found["others"] = {"s": others}
  return {"kernels": found}


def measured(
  config: config_lib.ModelConfig,
  impl: str,
  length: int,
  timing: device_time.Timing,
  bytes_per_s: float,
) -> list[dict]:
  """Times `PASSES`, each in its own cache, in turn."""
  mesh = axes.make_mesh(1, jax.devices()[:1])
  placed = shapes.random_params(config, mesh)
  # Without the mesh, for which kernels need a `shard_map`.
  params = jax.tree.map(lambda x: x.addressable_data(0), placed)
  calls = min(_CALLS, timing.most_calls)
  every = [Timed(config, impl, params, case, length, calls) for case in PASSES]
  with futures.ThreadPoolExecutor(_COMPILED_AT_ONCE) as pool:
    failed = list(pool.map(lambda x: device_time.error_of(x.compile), every))
  cells = {x.case: {"live": x.case.live, "pass": str(x.case)} for x in every}
  for one, error in zip(every, failed, strict=True):
    if error:
      cells[one.case]["error"] = error
  runs = {x.case: x for x in every if "error" not in cells[x.case]}
  for one in runs.values():
    one.hold()
  for case, side in timing.timed(runs, calls).items():
    cells[case] |= side
  for case, one in runs.items():
    cell, moved = cells[case], kernel_bytes(config, case.live, length)
    plain = cells.get(few_rows.Case(case.live), {})
    if "error" in cell:
      continue
    cell["limit_share"] = sum(moved.values()) / bytes_per_s / cell["median_s"]
    if case.nodes > 1 and "median_s" in plain:
      cell["over_plain"] = cell["median_s"] / plain["median_s"]
    cell |= by_kernel(one, moved, bytes_per_s)
  return list(cells.values())


def report(model: str, cells: Sequence[dict]) -> None:
  def ratio(cell) -> str:
    x = cell.get("over_plain")
    return f"{x:.2f}" if x else ""

  tables.show(
    f"{model}: a pass, live requests x nodes; verifying {few_rows.CHAIN} nodes should take "
    f"{AIM} plain passes at most",
    ["pass", "microseconds", "of the memory limit", "plain passes"],
    [
      [c["pass"], device_time.micros(c), f"{c.get('limit_share', 0):.0%}", ratio(c)]
      for c in cells
    ],
  )
  names = list(dict.fromkeys(name for c in cells for name in c.get("kernels", ())))

  def of(cell, name) -> str:
    x = cell["kernels"].get(name)
    if x is None:
      return ""
    speed = f", {1e-9 * x['bytes_per_s']:.0f} ({x['share']:.0%})" if "share" in x else ""
    return f"{1e6 * x['s']:.0f}{speed}"

  if names:
    tables.show(
      f"{model}: microseconds of all layers, GB/s (of the bandwidth)",
      ["pass", *names],
      [[c["pass"], *(of(c, n) for n in names)] for c in cells if "kernels" in c],
    )


def main(model: str, repeats: int, minutes: float, dry: bool):
  ends = time.monotonic() + 60 * minutes
  launch.start(1)
  kernels.check_device(dry)
  config = shapes.MODELS[model]
  impl = "ref" if dry else "triton"
  lengths = (96, 96) if dry else (_BITS_LENGTH, _LENGTH)
  config = few_rows.tiny(config) if dry else config
  timing = device_time.Timing(repeats, most_calls=2 if dry else 2000)
  found, errors = {"model": model}, []
  found["bits"] = few_rows.compared(config, impl, lengths[0])
  differing = sum(x["differing"] for x in found["bits"]["passes"].values())
  differing += sum(sum(x.values()) for x in found["bits"]["differing_by_kernel"].values())
  if differing and not dry:
    errors.append(f"bits: {differing} numbers differ")
  if time.monotonic() < ends:
    speed = found["bandwidth"] = kernels.bandwidth(timing, dry)
    args = config, impl, lengths[1], timing, speed["bytes_per_s"]
    cells = found["passes"] = measured(*args)
    report(model, cells)
    errors += [f"{c['pass']}: {c['error']}" for c in cells if "error" in c]
  for line in errors:
    print(f"failed: {line}")
  print(json.dumps(device_time.rounded(found)))
  sys.exit(1 if errors else 0)


if __name__ == "__main__":
  model = flags.DEFINE_enum("model", "qwen3-0.6b", list(shapes.DENSE), "Widths.")
  repeats = flags.DEFINE_integer("repeats", 5, "Of each timing.", lower_bound=2)
  minutes = flags.DEFINE_float(
    "minutes", 60.0, "After which passes are not timed.", lower_bound=0.0
  )
  dry_run = flags.DEFINE_bool("dry_run", False, "Tiny sizes, on any machine.")
  launch.run(lambda: main(model.value, repeats.value, minutes.value, dry_run.value))
