"""Compares simulated rollouts with measured ones, on this machine.

    python -m experiments.bench.rollout --config=experiments/configs/tail.py \\
      --only=steps --lengths=256,512,1056 --strategies=3_1_4,8_1_9 | tail -1 > T
    python -m experiments.figures.simulated --config=experiments/configs/tail.py:8 --table=T

Real rollouts of each side, in turn; then the simulator is given their lengths, the step
times of the table, and what was accepted. What the host takes between two chunks is
taken from the plain rollouts: nothing else is. The last line is JSON.
"""

from collections.abc import Sequence
import json
import pathlib

from absl import flags
import numpy as np

from experiments import from_config
from experiments import keys
from experiments import launch
from experiments import sizes
from experiments import tables
from experiments.bench import interleave
from experiments.bench import sides as sides_lib
from tlt_jax.rl import sample
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import rollout as simulated_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import samples as samples_lib

_TABLE = flags.DEFINE_string("table", None, "Last line of bench.rollout.", required=True)
_STEPS = flags.DEFINE_integer("steps", 10, "Rollouts of each side.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 1, "Rollouts before, unmeasured.", lower_bound=1)
_SLICES = flags.DEFINE_integer("slices", 2, "Devices on a CPU.", lower_bound=1)

SIDES = ("plain", "frozen", "3_1_4", "8_1_9")
DEEPEST = "8_1_9"  # tells what is accepted at every position


def samplers(config: dict, models: from_config.Models) -> dict[str, sample.Sampler]:
  """A sampler for each side, its programs compiled and its steps timed."""
  made = {}
  for side in SIDES:
    own = sides_lib.settings(side, config)
    chosen = from_config.selector(own)
    drafts = chosen is not None
    made[side] = from_config.sampler(
      own, models.model, models.mesh, models.drafter if drafts else None, chosen
    )
    made[side].compile(models.params, models.draft_params if drafts else None)
  return made


def measure(
  config: dict, models: from_config.Models, repeats: int, warm_up: int
) -> dict[str, list[sample.Scored]]:
  """Rolls out the same prompts on every side: side -> what each turn gave."""
  P, R = config["batch"]["prompts"], config["batch"]["responses"]
  records = from_config.prompts(config, config["prompts"] | {"size": 1000})

  def call(side: str, sampler: sample.Sampler):
    return lambda turn: sampler(
      models.params,
      [records[turn * P + i] for i in range(P)],
      R,
      seed=config["seed"],
      first_request=turn * P * R,
      draft_params=None if side == "plain" else models.draft_params,
    )

  calls = {side: call(side, made) for side, made in samplers(config, models).items()}
  return interleave.results(list(interleave.turns(calls, repeats, warm_up)))


def outside_s(samples: samples_lib.Samples) -> float:
  """Seconds of a rollout that no chunk takes."""
  chunks = sum(c.end_s - c.start_s for c in samples.chunks)
  return samples.chunks[-1].end_s - chunks


def simulate(
  config: dict, model, side: str, scored: sample.Scored, machine, rates
) -> samples_lib.Samples:
  """The rollout of a side, simulated with the lengths that a real one had."""
  own = sides_lib.settings(side, config)
  selector = from_config.selector(own)
  return simulated_lib.simulate(
    machine,
    model,
    rollout.Options(max_length=sizes.max_length(own), **own["rollout"]),
    scored.requests,
    scored.samples.length,
    selector=selector,
    acceptance=rates if selector else None,
    rollouts=2,
  )


def summary(seconds: Sequence[float], again: Sequence[samples_lib.Samples], real) -> dict:
  """Measured and simulated seconds of a side, and what was counted."""
  simulated = [s.chunks[-1].end_s for s in again]
  passes = lambda samples: float(
    np.mean([sum(max(c.steps) for c in s.chunks) for s in samples])
  )
  return {
    "measured_s": float(np.mean(seconds)),
    "simulated_s": float(np.mean(simulated)),
    "each": [[float(a), float(b)] for a, b in zip(seconds, simulated, strict=True)],
    "chunks": [float(np.mean([len(s.chunks) for s in x])) for x in (real, again)],
    "passes": [passes(real), passes(again)],
  }


def compare(
  config: dict, model, slices: int, found: dict[str, list[sample.Scored]]
) -> dict:
  """Simulates what was measured; returns both."""
  accepted = sum(s.samples.accepted for s in found[DEEPEST])
  rates = acceptance_lib.conditional((accepted[1:] / accepted[0]).tolist())
  plain = [s.samples for s in found["plain"]]
  host_s = float(np.median([outside_s(s) / len(s.chunks) for s in plain]))
  table = json.loads(pathlib.Path(_TABLE.value).read_text().splitlines()[-1])
  machine = simulated_lib.Machine(slices, costs_lib.Measured(table, host_s=host_s))
  sides = {}
  for side, scored in found.items():
    stands = acceptance_lib.Rates(rates)
    again = [simulate(config, model, side, s, machine, stands) for s in scored]
    real = [s.samples for s in scored]
    sides[side] = summary([s.chunks[-1].end_s for s in real], again, real)
  return {"host_s": host_s, "rates": rates, "sides": sides}


def main(config):
  launch.start(_SLICES.value)
  config = from_config.complete(config)
  models = from_config.load_models(config)
  found = measure(config, models, _STEPS.value, _WARM_UP.value)
  result = compare(config, models.model, _SLICES.value, found)
  tables.show(
    f"Seconds of a rollout, {_SLICES.value} slices",
    ["side", "measured", "simulated", "deviation"],
    [
      [side, f"{r['measured_s']:.2f}", f"{r['simulated_s']:.2f}"]
      + [f"{r['simulated_s'] / r['measured_s'] - 1:+.0%}"]
      for side, r in result["sides"].items()
    ],
  )
  case = {"slices": _SLICES.value, "slots": config["rollout"]["slots"]}
  print(json.dumps(case | {"turns": _STEPS.value} | result))


if __name__ == "__main__":
  launch.run(main, config=("tail", keys.RUN))
