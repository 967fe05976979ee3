"""Speed of the rollout: what a step costs, and what the schedule makes of it.

    python -m experiments.bench.rollout [--slices=1]
    python -m experiments.bench.rollout --only=speculation --drafter=DIR

Tables: seconds per decoding step by live batch and by real length; useful tokens per
second of whole rollouts, scheduled against a static batch, on lengths drawn beforehand;
every speculation strategy against plain decoding by live batch, where plain is the
fastest of its own paddings; tokens per pass of the target by strategy and way of
verification; what switching speculation on costs. Sides are interleaved in one process;
ratios are medians over the repetitions, with their range. The last line is JSON.
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

from experiments import acceptance
from experiments import setup
from tlt_jax import axes
from tlt_jax import data
from tlt_jax.models import convert
from tlt_jax.models import drafter_files
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

TABLES = ("steps", "traces", "speculation", "acceptance", "switch")

_CONFIG = setup.config_flag("experiments/configs/countdown.py")
_WORKDIR = flags.DEFINE_string("workdir", "runs/bench_rollout", "For config.json.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each measurement.", lower_bound=1)
_SLICES = flags.DEFINE_integer("slices", 2, "Devices that a CPU is shown as.")
_ONLY = flags.DEFINE_list("only", ["steps", "traces"], f"Of {', '.join(TABLES)}.")
_DRAFTER = flags.DEFINE_string("drafter", "", "Folder; default: the config's.")
_STRATEGIES = flags.DEFINE_list(
  "strategies", ["2_1_3", "3_1_4", "5_1_6", "7_1_8", "4_2_8", "6_2_16"], "To compare."
)
_LIVE = flags.DEFINE_list(
  "live", ["1", "2", "4", "8", "16", "32", "64"], "Live requests per slice."
)
_TOKENS = flags.DEFINE_integer("tokens", 192, "Per request, for speculation.")
_REQUESTS = flags.DEFINE_integer("requests", 128, "In a length trace.", lower_bound=1)

_LENGTHS = (160, 512, 1024, 4096)  # of the cache that a step attends over


def live_batches() -> list[int]:
  try:
    return [int(b) for b in _LIVE.value]
  except ValueError as e:
    raise ValueError(f"--live takes numbers: {e}") from e


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
  for batch in live_batches():
    for length in _LENGTHS:
      options = rollout.Options(max_length=length, max_prompt=length, slots=batch, chunk=n)
      cells[batch, length] = rollout.make(model, mesh, options), []
  for _ in range(_REPEATS.value + 1):
    for (batch, length), (engine, seconds) in cells.items():
      seconds.append(engine.time_step(params, (batch, length)))
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
    slots = min(config["rollout"]["slots"], 32)
    length = config["rollout"]["max_prompt"] + cap
    sizes = dict(
      slots=slots, max_length=length, buckets=rollout.ladder(slots, length), budget={}
    )
    options = rollout.Options(**config["rollout"] | sizes)
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
  groups = np.array_split(np.arange(len(requests)), range(size, len(requests), size))
  parts = [engine(params, requests.subset(group)) for group in groups]
  T = max(p.tokens.shape[1] for p in parts)
  widen = lambda x: np.pad(x, ((0, 0), (0, T - x.shape[1])))
  return dataclasses.replace(
    parts[0],
    tokens=np.concatenate([widen(p.tokens) for p in parts]),
    length=np.concatenate([p.length for p in parts]),
    computed_tokens=sum(p.computed_tokens for p in parts),
  )


def speculation(model, params, drafter, draft_params, mesh, config) -> dict:
  """Plain against every strategy, by live batch per slice.

  The requests are those of a first rollout whose responses got long enough, so that
  all of them run all the time.
  """
  n, slices = _TOKENS.value, mesh.shape[axes.DATA]
  tokenizer = data.Tokenizer.load(config["policy"])
  records = setup.build(config["held_out"] | {"size": 128})
  requests = requests_lib.make_requests(
    [tokenizer.encode(r["prompt"]) for r in records],
    responses=4,
    seed=3,
    max_tokens=n,
    stop_tokens=tokenizer.stop_tokens,
  )
  sizes = dict(config["rollout"], max_length=config["rollout"]["max_prompt"] + n)
  sizes |= dict(buckets=(), chunk=64, budget={})
  first = rollout.make(model, mesh, rollout.Options(**sizes))(params, requests)
  long = np.flatnonzero(first.length == n)
  result = {}
  for live in (b for b in live_batches() if b * slices <= len(long) and b <= 32):
    chosen = requests.subset(long[: live * slices])
    engine = lambda slots, *how: rollout.make(
      model, mesh, rollout.Options(**sizes | dict(slots=slots)), *how
    )
    # One row costs more than two where XLA has a slow matrix-vector product.
    plain = {slots: engine(slots) for slots in sorted({live, max(2 * live, 2)})}
    sides = {f"off, {slots} slots": (e, None) for slots, e in plain.items()}
    for name in _STRATEGIES.value:
      always = strategy_lib.always(strategy_lib.parse(name))
      sides[name] = engine(live, drafter, always), draft_params
    seconds, samples = {side: [] for side in sides}, {}
    for repeat in range(_REPEATS.value + 1):
      for side, (run, draft) in sides.items():
        began = time.perf_counter()
        samples[side] = run(params, chosen, draft)
        if repeat:
          seconds[side].append(time.perf_counter() - began)
    off = min(
      (s for s in sides if s.startswith("off")), key=lambda s: np.median(seconds[s])
    )
    cell = {}
    for name in _STRATEGIES.value:
      compared = compare.compare(model, params, chosen, samples[off], samples[name])
      ratio = np.array(seconds[off]) / np.array(seconds[name])
      cell[name] = {
        "speedup": float(np.median(ratio)),
        "speedup_range": [float(ratio.min()), float(ratio.max())],
        "mean_acceptance_length": samples[name].mean_acceptance_length,
        "total_tokens": compared.total_tokens,
        "differing_tokens": compared.differing_tokens,
        "near_ties": compared.near_ties,
      }
    result[live] = {"off": off, "off_s": float(np.median(seconds[off])), "arms": cell}
  return result


def switch(model, params, drafter, draft_params, mesh) -> dict:
  """What it takes to switch speculation on, in plain steps: 8 live, cache 512."""
  n, bucket = 32, (8, 512)
  options = rollout.Options(max_length=bucket[1], max_prompt=32, slots=bucket[0], chunk=n)
  always = strategy_lib.always(strategy_lib.Strategy(5, 1, 6))
  plain = rollout.make(model, mesh, options)
  engine = rollout.make(model, mesh, options, drafter, always)
  fill, step = [], []
  for _ in range(2 * _REPEATS.value + 1):
    step.append(plain.time_step(params, bucket))
    fill.append(engine.time_fill(params, draft_params, bucket))
  ratio = np.array(fill[1:]) / np.array(step[1:])
  return {
    "plain_steps": float(np.median(ratio)),
    "plain_steps_range": [float(ratio.min()), float(ratio.max())],
    "step_ms": 1e3 * float(np.median(step[1:])),
  }


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
  drawn = rich.table.Table(*columns, title=title, title_justify="left")
  for row in rows:
    drawn.add_row(*row)
  rich.console.Console(width=100).print(drawn)


def spread(values, unit: float = 1.0) -> str:
  low, middle, high = (unit * f(values) for f in (np.min, np.median, np.max))
  return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def report_steps(model, params, mesh) -> dict:
  seconds = step_seconds(model, params, mesh)
  table(
    f"Milliseconds per decoding step, median (range), {mesh.shape['data']} slices",
    ["live per slice", *(f"cache {S}" for S in _LENGTHS)],
    [[str(b), *(spread(seconds[b, S], 1e3) for S in _LENGTHS)] for b in live_batches()],
  )
  median = {cell: float(np.median(s)) for cell, s in seconds.items()}
  return {
    "steps": {
      str(b): {
        "step_ms": {str(S): 1e3 * median[b, S] for S in _LENGTHS},
        "tokens_per_s": b * mesh.shape["data"] / median[b, _LENGTHS[0]],
      }
      for b in live_batches()
    }
  }


def report_traces(model, params, mesh, config) -> dict:
  result = traces(model, params, mesh, config)
  both = ("scheduled", "static")
  table(
    "Rollouts of fixed lengths",
    ["trace", "useful tokens/s", "static", "speedup (range)", "useful share", "static"],
    [
      [
        name,
        *(f"{r['tokens_per_s'][s]:.0f}" for s in both),
        f"{r['speedup']:.2f} ({r['speedup_range'][0]:.2f}-{r['speedup_range'][1]:.2f})",
        *(f"{r['useful_share'][s]:.2f}" for s in both),
      ]
      for name, r in result.items()
    ],
  )
  for name, r in result.items():
    print(f"{name}: {r['programs']} programs, {r['compile_s']:.1f} s to make them ready")
  return {"traces": result} | totals(result.values())


def report_speculation(model, params, drafter, draft_params, mesh, config) -> dict:
  result = speculation(model, params, drafter, draft_params, mesh, config)
  arms = _STRATEGIES.value
  cell = lambda arm: f"{arm['speedup']:.2f}x {arm['mean_acceptance_length']:.2f}"
  table(
    "Speed-up over plain decoding and tokens per pass, by live requests per slice",
    ["live", "plain, s", *arms],
    [
      [str(b), f"{r['off_s']:.2f}", *(cell(r["arms"][a]) for a in arms)]
      for b, r in result.items()
    ],
  )
  fastest = lambda arms: max(arms.items(), key=lambda arm: arm[1]["speedup"])
  best = {b: fastest(r["arms"]) for b, r in result.items()}
  gains = [b for b, (_, arm) in best.items() if arm["speedup"] > 1]
  return {
    "break_even_live_batch": max(gains, default=0),
    "by_live_batch": {
      str(b): {"strategy": name, **arm, "arms": result[b]["arms"]}
      for b, (name, arm) in best.items()
    },
  } | totals(arm for r in result.values() for arm in r["arms"].values())


def report_acceptance(model, params, drafter, draft_params, mesh, config) -> dict:
  sizes = config["rollout"] | {"buckets": (), "slots": 24}
  found = acceptance.measure(
    config | {"rollout": sizes},
    *(model, params, drafter, draft_params, mesh),
    strategies=_STRATEGIES.value,
    verifications=speculate.VERIFICATIONS,
    prompts=24,
    samples=2,
    seed=3,
  )
  acceptance.report(found)
  return {"acceptance": found}


def report_switch(model, params, drafter, draft_params, mesh, config) -> dict:
  found = switch(model, params, drafter, draft_params, mesh)
  low, high = found["plain_steps_range"]
  print(
    f"Switching speculation on, 8 live, cache 512: {found['plain_steps']:.2f} plain steps "
    f"({low:.2f}-{high:.2f}) of {found['step_ms']:.2f} ms"
  )
  return {"switch": found}


def totals(compared) -> dict:
  """Sums of what comparisons found."""
  names = ("total_tokens", "differing_tokens", "near_ties")
  compared = list(compared)
  return {name: sum(c[name] for c in compared) for name in names}


def main():
  workdir, only = pathlib.Path(_WORKDIR.value), _ONLY.value
  if unknown := set(only) - set(TABLES):
    raise ValueError(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
  config = setup.start(workdir, _CONFIG.value, _SLICES.value)
  folder = _DRAFTER.value or config["drafter"]
  drafting = [name for name in only if name not in ("steps", "traces")]
  if drafting and not folder:
    raise ValueError(f"no drafter for {', '.join(drafting)}: give --drafter")
  mesh = axes.make_mesh(config["tensor_parallel"])
  model, params = convert.load_hf(config["policy"], mesh, axes.ROLLOUT)
  found = []
  if "steps" in only:
    found.append(report_steps(model, params, mesh))
  if "traces" in only:
    found.append(report_traces(model, params, mesh, config))
  if drafting:
    drafter, draft_params = drafter_files.load(folder, model, mesh)
  reports = {
    "speculation": report_speculation,
    "acceptance": report_acceptance,
    "switch": report_switch,
  }
  for name in drafting:
    found.append(reports[name](model, params, drafter, draft_params, mesh, config))
  merged = {"device": jax.devices()[0].device_kind, "slices": mesh.shape["data"]}
  for part in found:
    sums = {k: merged.get(k, 0) + v for k, v in part.items() if isinstance(v, int)}
    merged |= part | {k: v for k, v in sums.items() if not k.startswith("break_even")}
  print(json.dumps(merged))


if __name__ == "__main__":
  setup.run(main)
