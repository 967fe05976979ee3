"""Compares simulated rollouts with measured ones, on this machine.

    python -m experiments.figures.simulated --config=experiments/configs/tail.py:8
    python -m experiments.launch --processes=2 -- experiments.figures.simulated ...

Real rollouts of each side run in turn; between them the steps of their programs are timed,
with all slots live. The simulator gets these times, the lengths of the responses, the
acceptance rates, and the host's time between two chunks of plain rollouts, no more.
The last line is JSON.

Several slices should be processes with a core each, as in the second command: CPU devices
of one process share threads, so an idle device would speed up the others.
"""

from collections.abc import Sequence
import itertools
import json
import pathlib

from absl import flags
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import sides as sides_lib
from experiments import tables
from experiments import trees
from tlt_jax import axes
from tlt_jax import processes
from tlt_jax.rl import sample
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import rollout as simulated_lib
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_STEPS = flags.DEFINE_integer("steps", 10, "Rollouts of each side.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 1, "Rollouts before, unmeasured.", lower_bound=1)
_TRACE = flags.DEFINE_bool(
  "trace", False, "Lengths of responses are drawn, log-normal, and not the policy's own."
)
_SLICES = flags.DEFINE_integer("slices", 1, "Devices on a CPU.", lower_bound=1)

FIXED = "3_1_4", "8_1_9"
SIDES = ("plain", "frozen", *FIXED)
LENGTHS = 64, 256, 1024  # tokens of requests whose steps are timed
DEEPEST = FIXED[-1]  # gives the acceptance rate of every position
_TIMED = 2  # turns per timing of steps


def samplers(
  config: config_lib.RunConfig, models: from_config.Models
) -> dict[str, sample.Sampler]:
  """A sampler for each side, its programs compiled and its steps timed."""
  made = {}
  for side in SIDES:
    own = sides_lib.settings(side, config)
    chosen = from_config.make_selector(own)
    drafts = chosen is not None
    made[side] = from_config.make_sampler(
      own, models.model, models.mesh, models.drafter if drafts else None, chosen
    )
    made[side].compile(models.params)
  return made


def measure(
  config: config_lib.RunConfig, models: from_config.Models, repeats: int, warm_up: int
) -> tuple[dict[str, list[sample.Scored]], costs_lib.Measured]:
  """Rolls out the same prompts on every side, and times steps in between.

  Returns:
    side -> samples of each turn; and the costs
  """
  P, R = config.batch.prompts, config.batch.responses
  records = from_config.load_prompts(
    config.prompts | {"size": 1000}, from_config.prompt_rules(config)
  ).records
  made = samplers(config, models)

  def lengths(turn: int) -> np.ndarray | None:
    if not _TRACE.value:
      return None
    most = config.sampling.max_tokens
    what = {"log_normal": {"median": most / 6, "sigma": 1.0}}
    return scenario_lib.draw_lengths(what, P * R, most, turn)

  def call(side: str, sampler: sample.Sampler):
    return lambda turn: sampler(
      models.params,
      [records[turn * P + i] for i in range(P)],
      R,
      seed=config.seed,
      first_request=turn * P * R,
      lengths=lengths(turn),
    )

  plain = Plain(made["plain"])
  calls = {side: call(side, sampler) for side, sampler in (made | {"plain": plain}).items()}
  calls["times"] = lambda turn: {} if turn % _TIMED else times(made, models)
  found = interleave.results(list(interleave.turns(calls, repeats, warm_up)))
  steps, host_s = table(found.pop("times")), float(np.median(plain.host_s))
  return found, costs_lib.Measured(steps, host_s=host_s)


def times(
  made: dict[str, sample.Sampler], models: from_config.Models
) -> dict[tuple[str, str, int, int], float]:
  """Seconds of a step of each strategy by bucket and length.

  With several slices also "alone": while no other slice decodes.
  """
  several, engines, found = models.mesh.shape[axes.DATA] > 1, {}, {}
  for side in ("plain", *FIXED, "frozen"):
    engine = made[side].rollout
    for arm in engine.selector.strategies if engine.selector else (None,):
      engines.setdefault(arm, engine)
  for arm, engine in engines.items():
    for bucket, length in itertools.product(engine.options.buckets, LENGTHS):
      name, args = strategy_lib.name(arm), (models.params, bucket, arm)
      for _ in range(2):  # the first time is slower
        found["step", name, bucket, length] = engine.time_step(*args, length=length)
      if several:
        alone = engine.time_step(*args, slices=1, length=length)
        found["alone", name, bucket, length] = alone
  return found


def table(measured: Sequence[dict]) -> dict:
  """Medians of `times`, in the format of `benchmarks.rollout`."""
  measured, steps = list(filter(None, measured)), {}
  for key in measured[0]:
    what, name, bucket, length = key
    of = steps.setdefault(str(bucket), {}).setdefault(f"{what}_ms", {})
    median = float(np.median([times[key] for times in measured]))
    of.setdefault(name, {})[str(length)] = 1e3 * median
  return {"steps": steps}


class Plain:
  """Plain rollouts, and the host's time between their chunks."""

  def __init__(self, sampler: sample.Sampler):
    self.host_s: list[float] = []  # per chunk, of each rollout
    self._sampler, self._chunks_s = sampler, 0.0
    backend = sampler.rollout.backend
    self._run, backend.run = backend.run, self._watched

  def __call__(self, *args, **options) -> sample.Scored:
    self._chunks_s = 0.0
    scored = self._sampler(*args, **options)
    ran = scored.samples.chunks
    self.host_s.append((ran[-1].end_s - self._chunks_s) / len(ran))
    return scored

  def _watched(self, *args) -> backend_lib.ChunkResult:
    ran = self._run(*args)
    self._chunks_s += ran.seconds
    return ran


def simulate(
  config: config_lib.RunConfig, model, side: str, scored: sample.Scored, machine, rates
) -> samples_lib.Samples:
  """Simulates the rollout of a side with the lengths of a real one."""
  own = sides_lib.settings(side, config)
  selector = from_config.make_selector(own)
  return simulated_lib.simulate(
    machine,
    model,
    from_config.rollout_options(own),
    scored.requests,
    scored.samples.length,
    selector=selector,
    acceptance=rates if selector else None,
    rollouts=2,
  )


def summary(seconds: Sequence[float], again: Sequence[samples_lib.Samples], real) -> dict:
  """Measured and simulated seconds and counts of a side."""

  def passes(samples: Sequence[samples_lib.Samples]) -> float:
    return float(np.mean([sum(max(c.steps) for c in s.chunks) for s in samples]))

  simulated = [s.chunks[-1].end_s for s in again]
  return {
    "measured_s": float(np.median(seconds)),
    "simulated_s": float(np.median(simulated)),
    "each": [[float(a), float(b)] for a, b in zip(seconds, simulated, strict=True)],
    "chunks": [float(np.mean([len(s.chunks) for s in x])) for x in (real, again)],
    "passes": [passes(real), passes(again)],
  }


def deviation(side: dict) -> float:
  """The median of simulated over measured seconds, less 1."""
  measured, again = np.array(side["each"]).T
  return interleave.median_ratio(again, measured)["speedup"] - 1


def compare(
  config: config_lib.RunConfig,
  models: from_config.Models,
  found: dict[str, list[sample.Scored]],
  costs: costs_lib.Measured,
) -> dict:
  """Simulates the measured rollouts at these costs; returns both."""
  accepted = sum(s.samples.accepted for s in found[DEEPEST])
  rates = acceptance_lib.conditional((accepted[1:] / accepted[0]).tolist())
  slices = models.mesh.shape[axes.DATA]
  machine = simulated_lib.Machine(slices, costs)
  sides = {}
  for side, scored in found.items():
    acceptance = acceptance_lib.Rates(rates)
    again = [simulate(config, models.model, side, s, machine, acceptance) for s in scored]
    real = [s.samples for s in scored]
    sides[side] = summary([s.chunks[-1].end_s for s in real], again, real)
  return {"host_s": costs.host_s, "rates": rates, "sides": sides} | costs.table


def main(config: config_lib.RunConfig):
  launch.start(_SLICES.value)
  config, _ = from_config.complete(config)
  models = from_config.load_models(config)
  found, costs = measure(config, models, _STEPS.value, _WARM_UP.value)
  slices = models.mesh.shape[axes.DATA]
  result = processes.on_first(lambda: compare(config, models, found, costs))
  if not processes.is_first():
    return
  tables.show(
    f"Seconds of a rollout, slices: {slices}",
    ["side", "measured", "simulated", "deviation"],
    [
      [
        side,
        f"{r['measured_s']:.2f}",
        f"{r['simulated_s']:.2f}",
        f"{deviation(r):+.0%}",
      ]
      for side, r in result["sides"].items()
    ],
  )
  case = {
    "slices": slices,
    "processes": processes.count(),
    "slots": config.rollout.slots,
    "policy": pathlib.Path(config.policy).name,
    "trace": _TRACE.value,
    "turns": _STEPS.value,
  }
  print(json.dumps(case | result))


if __name__ == "__main__":
  read = trees.from_flags("tail", config_lib.RunConfig)
  launch.run(main, joins_jobs=True, config=read)
