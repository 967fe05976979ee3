"""The summary of a scenario's runs: ratios of time, and acceptance."""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import run_record
from experiments import interleave
from experiments import sides as sides_lib
from experiments import tables
from tlt_jax import metrics

_SECONDS = ("rollout_s", "training_s", "step_s", *run_record.PARTS.values())
_SUMS = ("idle_s", "harvested_s", "updates")

Runs = Mapping[int, Sequence[Mapping[str, float]]]  # seed -> records of metrics.jsonl


def summarize(scenario: str, sides: Sequence[str], runs: Runs) -> dict:
  """Statistics of the runs.

  Ratios of rollouts and of whole steps are geometric means over steps; `total` is the
  ratio of the sums of whole steps, training after rollouts included. Intervals, 95% by
  Student's t, take the steps of all seeds as independent.

  Args:
    runs: seed -> records of metrics.jsonl; the last one of a run may have probes only
  Returns:
    by side: seconds (means per step), sums, acceptance, and `over`: the speed-up over each
    other side
  """
  steps = [r for records in runs.values() for r in records if f"{sides[0]}/step_s" in r]

  def of(side: str, key: str) -> np.ndarray:
    return np.array([r[f"{side}/{key}"] for r in steps])

  def total(key: str) -> int:
    return int(sum(of(side, key).sum() for side in sides))

  probed = {side: probes(side, runs) for side in sides}
  found = {}
  for side in sides:
    found[side] = {
      "seconds": {key: float(of(side, key).mean()) for key in _SECONDS},
      **{key: float(of(side, key).sum()) for key in _SUMS},
      "tokens_per_pass": float(of(side, "tokens").sum() / of(side, "passes").sum()),
      "probes": probed[side],
      "over": {
        other: {
          "rollout": metrics.ratio(of(other, "rollout_s"), of(side, "rollout_s")),
          "step": metrics.ratio(of(other, "step_s"), of(side, "step_s")),
          "total": interleave.ratio_of_totals(of(other, "step_s"), of(side, "step_s")),
        }
        for other in sides
        if other != side
      },
    }
    if sides_lib.trains(side):
      found[side]["learning"] = {seed: learning(side, r) for seed, r in runs.items()}
      if "frozen" in sides:
        found[side]["above_frozen_from"] = stays_above(probed[side], probed["frozen"])
  return {
    "scenario": scenario,
    "seeds": list(runs),
    "steps": len(steps),
    "reward": reward_by_step(runs),
    "near_ties": total("near_ties"),
    "differing_tokens": total("differing_tokens"),
    "logp_apart": float(max(of(side, "logp_apart").max() for side in sides)),
    "updates_equal": all(r["updates_equal"] for r in steps if "updates_equal" in r),
    "sides": found,
  }


def probes(side: str, runs: Runs) -> list[tuple[int, float]]:
  """(step, tokens per pass on held-out prompts), means over the seeds with that step."""
  return _by_step(f"{side}/probe", runs)


def reward_by_step(runs: Runs) -> list[tuple[int, float]]:
  """(step, mean reward), means over the seeds with that step."""
  return _by_step("reward/mean", runs)


def _by_step(key: str, runs: Runs) -> list[tuple[int, float]]:
  by_step = {}
  for records in runs.values():
    for r in records:
      if key in r:
        by_step.setdefault(r["step"], []).append(r[key])
  return [(step, float(np.mean(values))) for step, values in sorted(by_step.items())]


def learning(
  side: str, records: Sequence[Mapping[str, float]]
) -> list[tuple[float, float, float]]:
  """The learning curve of a drafter, a point per probe.

  Returns:
    (idle seconds of slices with training, seconds of training after rollouts, tokens per
    pass on held-out prompts) each
  """
  points, idle_s, after_s = [], 0.0, 0.0
  for r in records:
    if f"{side}/probe" in r:
      points.append((idle_s, after_s, r[f"{side}/probe"]))
    idle_s += r.get(f"{side}/harvested_s", 0.0)
    after_s += r.get(f"{side}/training_s", 0.0)
  return points


def stays_above(
  trained: Sequence[tuple[int, float]], frozen: Sequence[tuple[int, float]]
) -> int | None:
  """The first step from which the trained drafter stays above the frozen one, if any."""
  first = None
  for (step, a), (_, b) in zip(trained, frozen, strict=True):
    if a <= b:
      first = None
    elif first is None:
      first = step
  return first


def report(found: Mapping) -> None:
  """Prints tables of the sides and of their speed-ups."""
  first, *others = sides = list(found["sides"])
  rows = []
  for side, s in found["sides"].items():
    taken = [f"{s['seconds'][key]:.2f}" for key in ("rollout_s", "training_s", "step_s")]
    share = f"{s['harvested_s'] / s['idle_s']:.0%}" if s["idle_s"] else ""
    probed = [f"{tokens:.2f}" for _, tokens in (s["probes"][:1] + s["probes"][-1:])]
    rows.append([side, *taken, f"{s['tokens_per_pass']:.2f}", share, " to ".join(probed)])
  seeds = ", ".join(map(str, found["seeds"]))
  columns = ["side", "rollout, s", "training after, s", "step, s", "tokens per pass"]
  columns += ["harvested of idle", "held-out tokens per pass"]
  title = f"{found['scenario']}: means over {found['steps']} steps, seeds {seeds}"
  tables.show(title, columns, rows)
  fixed = [side for side in others if not sides_lib.trains(side)]
  trained = [side for side in sides if sides_lib.trains(side)]
  pairs = [(side, first) for side in fixed]
  for i, side in enumerate(trained):
    pairs += [(side, other) for other in (first, *fixed, *trained[:i])]
  rows = [
    [f"{a} over {b}", *map(_shown, found["sides"][a]["over"][b].values())] for a, b in pairs
  ]
  tables.show("How many times as fast (95%)", ["", "rollouts", "steps", "total"], rows)
  equal = "equal" if found["updates_equal"] else "NOT equal"
  print(
    f"tokens that differ: {found['differing_tokens']}, near-ties: {found['near_ties']}; "
    f"log-probabilities at most {found['logp_apart']:.1e} apart; updates {equal}"
  )


def _shown(ratio: Mapping) -> str:
  """A ratio and its interval."""
  low, high = ratio["interval"]
  return f"{ratio['mean']:.2f}x ({low:.2f}-{high:.2f})"
