"""Measures rollouts: speculation against plain decoding, and steps.

    python -m benchmarks.rollout
    python -m benchmarks.rollout --only=steps --slices=1

Tables, by default the first: "speculation", every strategy against plain decoding (in its
fastest padding) by live batch; "steps", seconds per decoding step, plain and of
--strategies, by live batch and by length. Without a drafter strategies are n-grams. Sides
take turns in one process; ratios are medians over the repetitions, with their range. The
last line is JSON.
"""

import dataclasses
import itertools
import json
import pathlib

from absl import flags
import jax
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import interleave
from experiments import launch
from experiments import sizes
from experiments import tables
from experiments import trees
from experiments import workdirs
from tlt_jax import axes
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_WORKDIR = flags.DEFINE_string("workdir", "runs/bench_rollout", "For config.json.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each measurement.", lower_bound=1)
_SLICES = flags.DEFINE_integer("slices", 2, "Devices on a CPU.", lower_bound=1)
_ONLY = flags.DEFINE_list("only", ["speculation"], "Tables, see above.")
_DRAFTER = flags.DEFINE_string("drafter", "", "Folder or kind; default: the config's.")
_STRATEGIES = flags.DEFINE_list(
  "strategies",
  [],
  "To compare; default: 3_1_4, 5_1_6, 8_1_9 and 4_2_8, or n-grams without a drafter. "
  "For steps, default: none.",
)
_LIVE = flags.DEFINE_list(
  "live", ["1", "2", "4", "8", "16", "32"], "Live requests per slice."
)
_LENGTHS = flags.DEFINE_list(
  "lengths", ["160", "512", "1024", "4096"], "Of the cache, for steps."
)
_TOKENS = flags.DEFINE_integer(
  "tokens", 192, "Per request, for speculation.", lower_bound=1
)

WITH_DRAFTER = ("3_1_4", "5_1_6", "8_1_9", "4_2_8")
WITHOUT = ("ngram_3", "ngram_5")
_COUNTED = ("total_tokens", "differing_tokens", "near_ties")


def numbers(flag: flags.FlagHolder) -> list[int]:
  try:
    return [int(text) for text in flag.value]
  except ValueError as e:
    raise ValueError(f"--{flag.name} takes numbers: {e}") from e


def strategies(models: from_config.Models) -> list[str]:
  """The strategies to compare: those of the flag, or the defaults."""
  return _STRATEGIES.value or list(WITHOUT if models.drafter is None else WITH_DRAFTER)


def make_engine(
  models: from_config.Models,
  options: rollout.Options,
  arm: strategy_lib.Strategy | None = None,
) -> rollout.Engine:
  """A rollout that always uses one strategy; None: plain decoding."""
  drafting = () if arm is None else (models.drafter, selector_lib.always(arm))
  return rollout.make(models.model, models.mesh, options, *drafting)


def held_out(config: config_lib.RunConfig, size: int) -> from_config.Prompts:
  rules = from_config.prompt_rules(config)
  return from_config.load_prompts(
    config.held_out | {"size": size}, rules, section="held_out"
  )


def measure_speculation(config: config_lib.RunConfig, models: from_config.Models) -> dict:
  """Measures plain decoding against every strategy, by live batch per slice.

  The requests are those of a first rollout whose responses have `--tokens` tokens, so that
  all are live until the end.
  """
  n, slices, lives = _TOKENS.value, models.mesh.shape[axes.DATA], numbers(_LIVE)
  prompts = min(4 * max(lives) * slices, 128)  # some end before
  tokenizer = from_config.load_tokenizer(config.policy, config.chat.date)
  requests = requests_lib.make_requests(
    sample.encode(
      tokenizer,
      held_out(config, prompts).records,
      chat=config.chat.apply,
      system=config.chat.system,
    ),
    responses=4,
    seed=3,
    max_tokens=n,
    stop_tokens=tokenizer.stop_tokens,
  )
  changes = {"buckets": (), "chunk": 64}
  changes["max_length"] = config.rollout.max_prompt + n

  def engine(slots: int | None = None, arm: strategy_lib.Strategy | None = None):
    own = changes | ({"slots": slots} if slots else {})
    options = rollout.Options(**config.rollout.sizes | own)
    return make_engine(models, options, arm)

  first = engine()(models.params, requests)
  long = np.flatnonzero(first.length == n)
  result = {}
  for live in (b for b in lives if b * slices <= len(long)):
    chosen = requests.subset(long[: live * slices])
    # The fastest differs by machine: products of one row use other kernels.
    paddings = sorted({live, max(2 * live, 2)})
    sides = {f"off, {slots} slots": engine(slots) for slots in paddings}
    plain = list(sides)
    sides |= {name: engine(live, strategy_lib.parse(name)) for name in strategies(models)}
    result[live] = compare_sides(models, chosen, sides, plain)
  if not result:
    raise ValueError(
      f"only {len(long)} of {len(requests)} responses have {n} tokens: give fewer --tokens"
    )
  return result


def compare_sides(
  models: from_config.Models,
  requests: requests_lib.Requests,
  sides: dict[str, rollout.Engine],
  plain: list[str],
) -> dict:
  """Rolls out the same requests on every side.

  Args:
    plain: sides of plain decoding; the fastest is the baseline of speed and tokens
  """

  def run(engine: rollout.Engine):
    began = engine.state()

    def call(_):
      engine.restore(began)  # n-grams have learnt from the turn before
      return engine(models.params, requests)

    return call

  calls = {name: run(engine) for name, engine in sides.items()}
  measured = list(interleave.turns(calls, _REPEATS.value))
  seconds, samples = interleave.seconds(measured), interleave.results(measured)
  off = min(plain, key=lambda name: np.median(seconds[name]))
  arms = {}
  for name in sides:
    if name not in plain:
      drawn = samples[name][-1]
      compared = compare.compare(
        models.model, models.params, requests, samples[off][-1], drawn
      )
      arms[name] = {
        **interleave.median_ratio(seconds[off], seconds[name]),
        "mean_acceptance_length": drawn.mean_acceptance_length,
        **{name: getattr(compared, name) for name in _COUNTED},
      }
  return {"off": off, "off_s": float(np.median(seconds[off])), "arms": arms}


def speculation(config: config_lib.RunConfig, models: from_config.Models) -> dict:
  """Prints the table of speculation; returns its part of the JSON."""
  result = measure_speculation(config, models)
  names = strategies(models)

  def cell(arm: dict) -> str:
    return f"{arm['speedup']:.2f}x {arm['mean_acceptance_length']:.2f}"

  tables.show(
    "Speed-up over plain decoding and tokens per pass, by live requests per slice",
    ["live", "plain, s", *names],
    [
      [str(b), f"{r['off_s']:.2f}", *(cell(r["arms"][name]) for name in names)]
      for b, r in result.items()
    ],
  )
  best = {
    b: max(r["arms"].items(), key=lambda item: item[1]["speedup"])
    for b, r in result.items()
  }
  return {
    "break_even_live_batch": max(
      (b for b, (_, arm) in best.items() if arm["speedup"] > 1), default=0
    ),
    "by_live_batch": {
      str(b): {"strategy": name, **arm, "arms": result[b]["arms"]}
      for b, (name, arm) in best.items()
    },
    **{
      name: sum(arm[name] for r in result.values() for arm in r["arms"].values())
      for name in _COUNTED
    },
  }


def steps(config: config_lib.RunConfig, models: from_config.Models) -> dict:
  """Prints the table of step times; returns its part of the JSON."""
  lengths, batches = numbers(_LENGTHS), numbers(_LIVE)
  # As in a rollout: calling a program costs as much as several steps of a small model.
  chunk = config.rollout.chunk
  arms = {"off": None} | {name: strategy_lib.parse(name) for name in _STRATEGIES.value}

  def side(name: str, batch: int, length: int):
    sizes = dict(max_length=length + chunk, max_prompt=length, slots=batch, chunk=chunk)
    engine = make_engine(models, rollout.Options(**sizes), arms[name])
    return lambda _: engine.time_step(models.params, batch, arms[name], length=length)

  names = [*arms]
  cells = itertools.product(names, batches, lengths)
  measured = interleave.turns({cell: side(*cell) for cell in cells}, _REPEATS.value)
  seconds = interleave.results(list(measured))
  slices = models.mesh.shape[axes.DATA]
  tables.show(
    f"Milliseconds per decoding step, median (range), {slices} slices",
    ["live per slice", "strategy", *(f"cache {length}" for length in lengths)],
    [
      [str(b), name, *(tables.spread(seconds[name, b, length], 1e3) for length in lengths)]
      for b in batches
      for name in names
    ],
  )
  median = {cell: float(np.median(s)) for cell, s in seconds.items()}

  def step_ms(name: str, b: int) -> dict[str, float]:
    return {str(length): 1e3 * median[name, b, length] for length in lengths}

  return {
    "steps": {
      str(b): {
        "step_ms": {name: step_ms(name, b) for name in arms},
        "tokens_per_s": b * slices / median["off", b, lengths[0]],
      }
      for b in batches
    }
  }


TABLES = {
  "speculation": speculation,
  "steps": steps,
}


def main(config: config_lib.RunConfig):
  if unknown := set(_ONLY.value) - set(TABLES):
    raise ValueError(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
  launch.start(_SLICES.value)
  workdirs.record(pathlib.Path(_WORKDIR.value), config)
  config = dataclasses.replace(config, drafter=_DRAFTER.value or config.drafter)
  records, longest = held_out(config, 128)
  config = sizes.fill_rollout(config, sizes.Asked(longest, len(records), 4))
  models = from_config.load_models(config, records=records)
  found = {
    "device": jax.devices()[0].device_kind,
    "slices": models.mesh.shape[axes.DATA],
  }
  for name in _ONLY.value:
    found |= TABLES[name](config, models)
  print(json.dumps(found))


if __name__ == "__main__":
  read = trees.from_flags("countdown", config_lib.RunConfig)
  launch.run(main, config=read)
