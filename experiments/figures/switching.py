"""Simulates a rollout that speculates once few requests are live.

    python -m experiments.figures.switching --requests=128 --at=32 --strategy=4_8_16

Model, device, lengths and acceptance are those of a scenario of `experiments.simulate`, on
one slice. The last line is JSON: live requests over time, plain and switched.
"""

import dataclasses
import json
import pathlib

from absl import flags

from experiments import launch
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib

_SCENARIO = flags.DEFINE_string("scenario", "qwen2_5_32b", "A bundled name.")
_REQUESTS = flags.DEFINE_integer("requests", 128, "In the rollout.", lower_bound=1)
_AT = flags.DEFINE_integer(
  "at", 32, "Live requests at which speculation begins.", lower_bound=1
)
_STRATEGY = flags.DEFINE_string("strategy", "4_8_16", "Of the speculation.")

_FOLDER = pathlib.Path(__file__).parents[1] / "scenarios"


def draining(samples: samples_lib.Samples) -> dict:
  """Live requests over time, and the strategy of each chunk."""
  return {
    "time_s": [chunk.start_s for chunk in samples.chunks] + [samples.chunks[-1].end_s],
    "live": [sum(chunk.live) for chunk in samples.chunks] + [0],
    "strategies": [chunk.strategy for chunk in samples.chunks],
  }


def main():
  scenario = scenario_lib.read(_FOLDER / f"{_SCENARIO.value}.json")
  scenario = dataclasses.replace(
    scenario,
    prompts=_REQUESTS.value,
    responses=1,
    strategies=f"up to {_AT.value} live: {_STRATEGY.value}",
    rollouts=1,
  )
  sides = {"plain": "plain", "switched": "frozen"}
  found = {name: draining(scenario.run(side, 1)) for name, side in sides.items()}
  for name, side in found.items():
    print(f"{name}: {side['time_s'][-1]:.0f} s")
  print(json.dumps(found))


if __name__ == "__main__":
  launch.run(main)
