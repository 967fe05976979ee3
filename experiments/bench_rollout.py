"""Speed of the rollout: what a step costs, and what the schedule makes of it.

    python -m experiments.bench_rollout [--workdir=DIR]

Three tables: seconds per decoding step by live batch and by real length; useful
tokens per second of whole rollouts, scheduled against a static batch, on lengths
drawn beforehand; the pool of compiled programs. Sides are interleaved in one
process; ratios are medians over the repetitions, with their range. The last line
is JSON.
"""

import dataclasses
import json
import pathlib
import time

from absl import flags
import jax
import numpy as np
import rich.console
import rich.table

from experiments import setup
from tlt_jax import axes
from tlt_jax.models import convert
from tlt_jax.spec_decode import compare
from tlt_jax.spec_decode import requests as requests_lib
from tlt_jax.spec_decode import rollout

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_WORKDIR = flags.DEFINE_string("workdir", "runs/bench_rollout", "For config.json.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each measurement.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 128, "In a length trace.", lower_bound=1)

_LIVE = (1, 2, 4, 8, 16, 32, 64)
_LENGTHS = (160, 512, 1024, 4096)  # of the cache that a step attends over


def lengths(name: str, count: int) -> np.ndarray:
  """Response lengths i32[count] of a synthetic trace."""
  rng = np.random.default_rng(0)
  if name == "log-normal":  # median 100, cap 2,000
    drawn = rng.lognormal(np.log(100), 1.0, count)
    return np.clip(drawn, 1, 2000).astype(np.int32)
  drawn = rng.geometric(1 / 64, count)  # mean 64, cap 512
  return np.minimum(drawn, 512).astype(np.int32)


def step_seconds(model, params, mesh) -> dict[tuple[int, int], list[float]]:
  """Seconds of one decoding step by (live batch per slice, cache length)."""
  n = 32
  cells = {}
  for batch in _LIVE:
    for length in _LENGTHS:
      options = rollout.Options(max_length=length, max_prompt=length, slots=batch, chunk=n)
      cells[batch, length] = rollout.make(model, mesh, options), []
  for _ in range(_REPEATS.value + 1):
    for (batch, length), (engine, seconds) in cells.items():
      seconds.append(engine.time_chunk(params, (batch, length)) / n)
  return {cell: seconds[1:] for cell, (_, seconds) in cells.items()}


def traces(model, params, mesh, config) -> dict:
  """Whole rollouts of fixed lengths: scheduled, against a static batch."""
  result = {}
  for name in ("geometric", "log-normal"):
    tokens = lengths(name, _REQUESTS.value)
    cap = int(tokens.max())
    requests = requests_lib.make_requests(
      [np.arange(1, 17)] * len(tokens), max_tokens=tokens, seed=1
    )
    options = rollout.Options(
      **{
        **config["rollout"],
        "max_length": config["rollout"]["max_prompt"] + cap,
        "slots": min(config["rollout"]["slots"], 32),
      }
    )
    whole = dataclasses.replace(options, buckets=())
    sides = {
      "scheduled": rollout.make(model, mesh, options),
      "static": rollout.make(model, mesh, whole),
    }
    seconds = {side: [] for side in sides}
    shares, kept = {}, {}
    for repeat in range(_REPEATS.value + 1):
      for side, engine in sides.items():
        began = time.perf_counter()
        if side == "static":
          samples = in_groups(engine, params, requests, options.slots * mesh.shape["data"])
        else:
          samples = engine(params, requests)
        if repeat:
          seconds[side].append(time.perf_counter() - began)
        shares[side], kept[side] = samples.useful_share, samples
    compared = compare.compare(model, params, requests, kept["scheduled"], kept["static"])
    ratio = np.array(seconds["static"]) / np.array(seconds["scheduled"])
    total = int(tokens.sum())
    result[name] = {
      "requests": len(tokens),
      "total_tokens": total,
      "differing_tokens": compared.differing_tokens,
      "near_ties": compared.near_ties,
      "speedup": float(np.median(ratio)),
      "speedup_range": [float(ratio.min()), float(ratio.max())],
      "tokens_per_s": {s: total / float(np.median(t)) for s, t in seconds.items()},
      "useful_share": shares,
      "programs": len(sides["scheduled"].pool),
      "compile_s": sides["scheduled"].pool.seconds,
    }
  return result


def in_groups(engine, params, requests, size: int) -> requests_lib.Samples:
  """What a static batch does: `size` requests at a time, until the last one ends."""
  parts = []
  for start in range(0, len(requests), size):
    part = {
      f.name: getattr(requests, f.name)[start : start + size]
      for f in dataclasses.fields(requests)
      if f.name != "prompts"
    }
    parts.append(engine(params, dataclasses.replace(requests, **part)))
  T = max(p.tokens.shape[1] for p in parts)
  widen = lambda x: np.pad(x, ((0, 0), (0, T - x.shape[1])))
  return dataclasses.replace(
    parts[0],
    tokens=np.concatenate([widen(p.tokens) for p in parts]),
    length=np.concatenate([p.length for p in parts]),
    computed_tokens=sum(p.computed_tokens for p in parts),
  )


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
  drawn = rich.table.Table(*columns, title=title, title_justify="left")
  for row in rows:
    drawn.add_row(*row)
  rich.console.Console(width=100).print(drawn)


def main():
  config = setup.start(pathlib.Path(_WORKDIR.value), _CONFIG.value)
  mesh = axes.make_mesh(config["tensor_parallel"])
  model, params = convert.load_hf(config["policy"], mesh, axes.ROLLOUT)

  steps = step_seconds(model, params, mesh)
  median = {cell: float(np.median(s)) for cell, s in steps.items()}
  spread = lambda s: f"{1e3 * np.median(s):.2f} ({1e3 * min(s):.2f}-{1e3 * max(s):.2f})"
  table(
    f"Milliseconds per decoding step, median (range), {mesh.shape['data']} slices",
    ["live per slice", *(f"cache {S}" for S in _LENGTHS)],
    [[str(b), *(spread(steps[b, S]) for S in _LENGTHS)] for b in _LIVE],
  )
  result = traces(model, params, mesh, config)
  table(
    "Rollouts of fixed lengths",
    ["trace", "useful tokens/s", "static", "speedup (range)", "useful share", "static"],
    [
      [
        name,
        *(f"{r['tokens_per_s'][s]:.0f}" for s in ("scheduled", "static")),
        f"{r['speedup']:.2f} ({r['speedup_range'][0]:.2f}-{r['speedup_range'][1]:.2f})",
        *(f"{r['useful_share'][s]:.2f}" for s in ("scheduled", "static")),
      ]
      for name, r in result.items()
    ],
  )
  for name, r in result.items():
    print(f"{name}: {r['programs']} programs, {r['compile_s']:.1f} s to make them ready")
  print(
    json.dumps(
      {
        "device": jax.devices()[0].device_kind,
        "slices": mesh.shape["data"],
        "total_tokens": sum(r["total_tokens"] for r in result.values()),
        "differing_tokens": sum(r["differing_tokens"] for r in result.values()),
        "near_ties": sum(r["near_ties"] for r in result.values()),
        "by_live_batch": {
          str(b): {
            "strategy": "off",
            "step_ms": {str(S): 1e3 * median[b, S] for S in _LENGTHS},
            "tokens_per_s": b * mesh.shape["data"] / median[b, _LENGTHS[0]],
          }
          for b in _LIVE
        },
        "traces": result,
      }
    )
  )


if __name__ == "__main__":
  setup.run(main)
