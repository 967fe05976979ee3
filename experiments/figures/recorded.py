"""Simulates rollouts that were measured on another day, from what is on record of them.

    python -m experiments.figures.recorded

Measured: the sides of `configs/tail.py` without rebalancing in results/bench_step_cpu.jsonl
(10 steps after 3 of warm-up). Their lengths are those of results/figures/lengths.json,
which has the same seeds: responses depend on neither machine nor schedule. Step times and
acceptance are those of scenarios/tail.json, from the log. The last line is JSON, as that of
`experiments.figures.simulated`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib

import numpy as np

from experiments import launch
from experiments import tables
from experiments.figures import results
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib

_TAIL = pathlib.Path(__file__).parents[1] / "scenarios" / "tail.json"
SIDES = ("plain", "frozen", "3_1_4", "8_1_9")
WARM_UP = 3


def measured() -> Mapping:
  """The row that has a rule and fixed strategies side by side."""
  path = results.RESULTS / "bench_step_cpu.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  return next(r["result"] for r in rows if set(SIDES) <= set(_sides(r["result"])))


def _sides(result: Mapping) -> Mapping:
  return result["targets"]["default"]["sides"]


def scenario(row: Mapping) -> scenario_lib.Scenario:
  """The scenario of the tail config, in the sizes of the run."""
  names = ("slots", "chunk", "buckets", "max_prompt")
  sizes = {name: row["workload"]["rollout"][name] for name in names}
  longest = sizes["max_prompt"] + row["workload"]["sampling"]["max_tokens"]
  found = scenario_lib.read(_TAIL)
  return dataclasses.replace(found, rollout=sizes | {"max_length": longest})


def simulate(
  base: scenario_lib.Scenario, side: str, lengths: Sequence[int]
) -> samples_lib.Samples:
  """A rollout of these lengths on two slices."""
  changes = {"lengths": {"given": list(lengths)}}
  if side not in ("plain", "frozen"):
    changes["strategies"] = f"up to 16 live: {side}"
  changed = dataclasses.replace(base, **changes)
  return changed.run("plain" if side == "plain" else "frozen", 2)


def main():
  row = measured()
  target, base = row["targets"]["default"], scenario(row)
  lengths = np.reshape(results.load("lengths")["result"]["lengths"], (-1, 32))
  chosen = lengths[WARM_UP : WARM_UP + target["steps"]]
  sides = {}
  for side in SIDES:
    rollouts = [simulate(base, side, drawn) for drawn in chosen]
    real, mean = target["sides"][side], lambda values: float(np.mean(list(values)))
    seconds = mean(s.chunks[-1].end_s for s in rollouts)
    busiest = mean(sum(max(c.steps) for c in s.chunks) for s in rollouts)
    sides[side] = {
      "measured_s": target["seconds"][side]["rollout"],
      "simulated_s": seconds,
      "each": [[target["seconds"][side]["rollout"], seconds]],
      "chunks": [real["chunks"], mean(len(s.chunks) for s in rollouts)],
      "passes": [real["target_passes"], busiest],
    }
  tables.show(
    "Measured and simulated",
    ["side", "seconds", "", "chunks", "", "passes of the busiest slices", ""],
    [
      [side, f"{r['measured_s']:.2f}", f"{r['simulated_s']:.2f}"]
      + [f"{x:.1f}" for x in (*r["chunks"], *r["passes"])]
      for side, r in sides.items()
    ],
  )
  print(json.dumps({"slices": 2, "slots": 16, "turns": target["steps"], "sides": sides}))


if __name__ == "__main__":
  launch.run(main)
