"""Measures whole RL steps: what speculation and spot training bring to plain decoding.

    python -m benchmarks.step
    python -m benchmarks.step --sides=plain,frozen,tlt

The sides (see `experiments.sides`) take turns at every step: they train the same policy on
the same prompts with the same seeds. They may differ in time only: tokens and the policy's
parameters are compared at every step.

With `--lengths=log-normal` the lengths of responses are those of a trace. Ratios to plain
decoding are geometric means over the steps, with the 95% interval. The last line is JSON:
the results of each side and, at the top level, those of "tlt" (or else of the second side).
"""

import collections
from collections.abc import Sequence
import json
import pathlib

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import memory_plan
from experiments import sides as sides_lib
from experiments import tables
from experiments import trees
from experiments import workdirs
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import metrics
from tlt_jax.simulate import scenario
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare

_WORKDIR = flags.DEFINE_string("workdir", "runs/bench_step", "For config.json.")
_STEPS = flags.DEFINE_integer("steps", 10, "Measured, after the warm-up.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 3, "Steps before.", lower_bound=1)
_SIDES = flags.DEFINE_list("sides", list(sides_lib.SIDES), "To compare; plain first.")
_LENGTHS = flags.DEFINE_enum(
  "lengths", "own", ["own", "log-normal"], "Of responses; the trace has a median of 100."
)
_SLICES = flags.DEFINE_integer(
  "slices",
  2,
  "On a CPU; of more than it has cores only counts mean anything.",
  lower_bound=1,
)


def trace_lengths(config: config_lib.RunConfig, step: int) -> np.ndarray | None:
  """Lengths of a step's responses, i32[requests]; None: those of the policy."""
  if _LENGTHS.value == "own":
    return None
  count = config.batch.prompts * config.batch.responses
  what = {"log_normal": {"median": 100, "sigma": 1.0}}
  most = config.sampling.max_tokens
  return scenario.draw_lengths(what, count, most, [config.seed, step])


def measure(
  config: config_lib.RunConfig, mesh: jax.sharding.Mesh, asked: Sequence[dict]
) -> dict:
  prompts = data.prompt_iterator(asked, config.batch.prompts, config.seed)
  sides = sides_lib.make_training_sides(_SIDES.value, config, mesh, asked)
  first = _SIDES.value[0]
  plain = sides[first]
  model = plain.learner.config
  seconds = {name: [] for name in sides}
  samples = {name: [] for name in sides}
  same, ties, differing = True, 0, 0
  for step in range(_WARM_UP.value + _STEPS.value):
    records, before = next(prompts), jax.device_get(plain.policy)
    hashes, drawn, lengths = {}, {}, trace_lengths(config, step)
    for name in interleave.in_turn(list(sides), step):
      took, drawn[name], hashes[name] = sides[name].step(step, records, lengths)
      if step >= _WARM_UP.value:
        seconds[name].append(took)
        samples[name].append(drawn[name].samples)
    if len(set(hashes.values())) > 1:
      same, expected = False, drawn[first]
      for name, side in sides.items():
        result = compare.compare(
          model, before, expected.requests, expected.samples, drawn[name].samples
        )
        ties, differing = ties + result.near_ties, differing + result.differing_tokens
        if side is not plain:
          side.go_on_from(jax.tree.map(jnp.copy, plain.state))
    if step >= _WARM_UP.value:
      line = "  ".join(f"{n} {s[-1]['rollout']:.2f} s" for n, s in seconds.items())
      print(f"step {step + 1 - _WARM_UP.value}: rollout {line}", flush=True)
  return summary(seconds, samples) | {
    "identical": same,
    "near_ties": ties,
    "differing_tokens": differing,
  }


def summary(seconds: dict[str, list[dict[str, float]]], samples: dict[str, list]) -> dict:
  """Statistics of the sides; the arguments are by side and step."""

  def of(side: str, part: str) -> np.ndarray:
    return np.array([s[part] for s in seconds[side]])

  plain = "plain"
  share = float(of(plain, "rollout").sum() / of(plain, "step").sum())
  sides = {}
  for side in seconds:
    rollout = metrics.ratio(of(plain, "rollout"), of(side, "rollout"))
    whole = metrics.ratio(of(plain, "step"), of(side, "step"))
    sides[side] = {
      "speedup_rollout": rollout["mean"],
      "speedup_rollout_interval": rollout["interval"],
      "speedup_rollout_range": rollout["range"],
      "speedup_step": whole["mean"],
      "speedup_step_range": whole["range"],
      "of_amdahl": whole["mean"] * ((1 - share) + share / rollout["mean"]),
      **work(samples[side]),
    }
    if side == "tlt" and "frozen" in seconds:
      lost = metrics.ratio(of(side, "rollout"), of("frozen", "rollout"))
      sides[side]["busy_overhead"] = lost["mean"] - 1
  trained = [side for side in seconds if side == "tlt"]
  shown = (trained or [*seconds][1:] or [plain])[0]
  found = {
    "steps": len(seconds[plain]),
    "seconds": {
      side: {part: float(np.mean(of(side, part))) for part in parts[0]}
      for side, parts in seconds.items()
    },
    "sides": sides,
    "rollout_share_plain": share,
    "plain": plain,
    "shown": shown,
    **sides[shown],
  }
  fixed = [side for side in seconds if side == "plain" or side not in sides_lib.SIDES]
  if len(fixed) > 1 and "frozen" in seconds:
    by_side = [seconds_by_bucket(samples[side]) for side in fixed]
    buckets = set().union(*by_side)
    best = sum(min(s[b] for s in by_side if b in s) for b in buckets)
    rule = sum(seconds_by_bucket(samples["frozen"]).values())
    found["over_hindsight"] = rule / best
  return found


def work(samples: Sequence[samples_lib.Samples]) -> dict:
  """Counts of a side's rollouts; `busy_overhead` needs another side: see `summary`."""
  idle, harvested = sum(s.idle_s for s in samples), sum(s.harvested_s for s in samples)
  drawn = sum(int(s.length.sum()) for s in samples)
  by_bucket = sorted(seconds_by_bucket(samples).items(), reverse=True)
  return {
    "mean_acceptance_length": drawn / sum(s.passes for s in samples),
    # Of a rollout: chunks, and steps of the busiest slices, which all others wait for.
    "chunks": float(np.mean([len(s.chunks) for s in samples])),
    "target_passes": float(np.mean([sum(max(c.steps) for c in s.chunks) for s in samples])),
    "idle_s": idle,
    "harvested_s": harvested,
    "harvested_share": harvested / idle if idle else 0.0,
    "busy_overhead": None,
    "seconds_by_bucket": {str(slots): s / len(samples) for slots, s in by_bucket},
  }


def seconds_by_bucket(
  samples: Sequence[samples_lib.Samples],
) -> dict[int, float]:
  """Sums of the chunks' seconds by bucket."""
  seconds = collections.Counter()
  for s in samples:
    for chunk in s.chunks:
      seconds[chunk.batch] += chunk.end_s - chunk.start_s
  return seconds


def report(found: dict) -> None:
  rows = []
  for side, s in found["seconds"].items():
    r = found["sides"][side]
    low, high = r["speedup_rollout_interval"]
    rows.append(
      [
        side,
        *(f"{s[part]:.2f}" for part in ("rollout", "update", "step")),
        f"{r['speedup_rollout']:.2f}x ({low:.2f}-{high:.2f})",
        f"{r['speedup_step']:.2f}x",
        f"{r['mean_acceptance_length']:.2f}",
      ]
    )
  tables.show(
    f"Plain spends {found['rollout_share_plain']:.0%} in rollouts",
    ["side", "rollout, s", "update, s", "step, s", "rollout", "step", "tokens per pass"],
    rows,
  )


def workload(config: config_lib.RunConfig) -> dict:
  """The settings that the result depends on."""
  whole = trees.to_dict(config)
  return {
    "policy": config.policy,
    "seeds": [config.seed, config.prompts.get("seed")],
    **{key: whole[key] for key in ("batch", "sampling", "strategies", "strategy_rule")},
    "rollout": whole["rollout"],
    "learner_buckets": config.learner.buckets,
    "lengths": _LENGTHS.value,
  }


def main(config: config_lib.RunConfig):
  sides_lib.check(_SIDES.value, config)
  launch.start(_SLICES.value)
  config, asked = from_config.complete(config)
  config = memory_plan.choose_remat(config)
  workdirs.record(pathlib.Path(_WORKDIR.value), config)
  mesh = axes.make_mesh(config.tensor_parallel)
  found = measure(config, mesh, asked.train.records)
  report(found)
  print(json.dumps({"workload": workload(config)} | found))


if __name__ == "__main__":
  read = trees.from_flags("tail", config_lib.RunConfig)
  launch.run(main, config=read)
