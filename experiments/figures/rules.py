"""Simulates the choice of strategies: the rules of this project, and fixed strategies.

    python -m experiments.figures.rules --scenario=qwen2_5_7b --slices=8

Runs a scenario of `experiments.simulate` with each rule; the rule learns in all rollouts,
and the last one counts. The last line is JSON: seconds of a rollout by rule or strategy,
and with the best fixed strategy of each bucket ("hindsight").
"""

import collections
import dataclasses
import json
import pathlib

from absl import flags

from experiments import launch
from experiments import tables
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import levels

_SCENARIO = flags.DEFINE_string("scenario", "qwen2_5_7b", "A bundled name.")
_SLICES = flags.DEFINE_integer("slices", 8, "Number of slices.", lower_bound=1)
_ROLLOUTS = flags.DEFINE_integer("rollouts", 6, "To learn from.", lower_bound=1)

_FOLDER = pathlib.Path(__file__).parents[1] / "scenarios"
RULES = ("predictive", "epsilon_greedy")


def by_bucket(samples: samples_lib.Samples) -> dict[str, float]:
  """Seconds of a rollout's chunks by bucket."""
  seconds = collections.Counter()
  for chunk in samples.chunks:
    seconds[str(chunk.batch)] += chunk.end_s - chunk.start_s
  return seconds


def main():
  scenario = scenario_lib.read(_FOLDER / f"{_SCENARIO.value}.json")
  scenario = dataclasses.replace(scenario, rollouts=_ROLLOUTS.value)
  known = levels.parse(scenario.strategies)
  most = scenario.options(_SLICES.value).slots
  fixed = sorted({str(arm) for level in known for arm in level.arms if arm is not None})
  runs = {rule: scenario.strategies for rule in RULES}
  runs |= {name: f"up to {most} live: {name}" for name in fixed}
  rollouts = {"plain": scenario.run("plain", _SLICES.value)}
  for name, strategies in runs.items():
    rule = name if name in RULES else scenario.rule
    changed = dataclasses.replace(scenario, strategies=strategies, rule=rule)
    rollouts[name] = changed.run("frozen", _SLICES.value)
  seconds = {name: samples.timeline[-1][0] for name, samples in rollouts.items()}
  fixed = [by_bucket(s) for name, s in rollouts.items() if name not in RULES]
  buckets = set().union(*fixed)
  seconds["hindsight"] = sum(min(s[b] for s in fixed if b in s) for b in buckets)
  tables.show(
    "Simulated seconds of a rollout",
    ["by", "seconds"],
    [[name, f"{s:.1f}"] for name, s in seconds.items()],
  )
  print(json.dumps(seconds))


if __name__ == "__main__":
  launch.run(main)
