"""Whole RL steps: what speculation and spot training bring, against plain decoding.

    python -m experiments.bench.step
    python -m experiments.bench.widen --config=experiments/configs/tail.py \\
        --workdir=runs/wide
    python -m experiments.bench.step --wide=runs/wide

The sides train the same policy on the same prompts with the same seeds, step by step in
turn: "tlt" speculates, and trains its drafter in idle slices; "frozen" keeps the drafter
as it is; "ngram" looks drafts up; "plain" decodes; and a strategy such as "3_1_4" drafts
so wherever the config would choose. With "+rebalance" live requests move to slices that
have fewer. A side may only differ in time: tokens and the policy's parameters are
compared at every step. With `--wide` a second target, the policy embedded in a larger
one by `experiments.bench.widen`. `--lengths=log-normal` follows a trace instead of the
policy's own stops. Ratios are geometric means over the steps, with the 95% interval,
against the fastest plain side. The last line is JSON.
"""

import collections
import gc
import hashlib
import json
import pathlib
import tempfile
import time

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from experiments import setup
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import metrics
from tlt_jax.models import convert
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import strategy

_CONFIG = setup.config_flag("experiments/configs/tail.py")
_STEPS = flags.DEFINE_integer("steps", 10, "Measured, after the warm-up.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 3, "Steps before.", lower_bound=1)
_WIDE = flags.DEFINE_string("wide", "", "Folder of `widen`; default: no second target.")
_LENGTHS = flags.DEFINE_enum(
  "lengths", "own", ["own", "log-normal"], "Of responses; the trace has a median of 100."
)
_SLICES = flags.DEFINE_integer(
  *("slices", 2, "On a CPU; of more than it has cores only counts mean anything."),
  lower_bound=1,
)
SIDES = ("plain", "tlt", "frozen", "ngram")
_REBALANCE = "+rebalance"
_SIDES = flags.DEFINE_list("sides", list(SIDES), "To compare; plain first.")


def settings(side: str, config: dict) -> dict:
  """The config of a side."""
  if side.endswith(_REBALANCE):
    config = config | {"rollout": config["rollout"] | {"rebalance": True}}
    side = side.removesuffix(_REBALANCE)
  if side == "plain":
    return config | {"drafter": "", "strategies": ()}
  if side == "ngram":
    steps = tuple((most, ("off", "ngram_3", "ngram_5")) for most, _ in config["strategies"])
    return config | {"drafter": "", "strategies": steps}
  if side not in SIDES:
    most = max(most for most, _ in config["strategies"])
    config = config | {"strategies": ((most, side),)}
  every = 1 if side == "tlt" else 0
  return config | {"spot": config["spot"] | {"every": every}}


class Side:
  """One way to roll out, and the policy that it trains."""

  def __init__(self, name, config, model, mesh, learner, params):
    own = settings(name, config)
    self.name, self.learner = name, learner
    self.state = learner.init(jax.tree.map(jnp.copy, params))
    self.policy = learner.to_rollout(self.state.params)
    drafter, strategies, draft_params = setup.load_drafter(own, model, mesh)
    self.draft_params = draft_params
    self.spot = setup.spot_training(own, model, mesh, drafter, draft_params)
    self.sampler = setup.sampler(own, model, mesh, drafter, strategies, self.spot)
    self.sampler.compile(self.policy, draft_params)

  def step(self, algorithm, records, config, step):
    """(seconds by part, what was sampled, hash of tokens and of the policy)."""
    P, R = config["batch"]["prompts"], config["batch"]["responses"]
    lengths = None
    if _LENGTHS.value == "log-normal":
      drawn = np.random.default_rng([config["seed"], step]).lognormal(np.log(100), 1, P * R)
      lengths = np.clip(drawn, 1, config["sampling"]["max_tokens"]).astype(np.int32)
    gc.collect()  # or it takes half a second of some side's step
    began = time.perf_counter()
    scored = self.sampler(
      *(self.policy, records, R, config["seed"], step * P * R, self.draft_params),
      lengths=lengths,
      train=self.spot is not None,
    )
    sampled = time.perf_counter()
    advantage = algorithm.advantages(*scored.by_prompt(R))
    self.state, _ = self.learner.train(self.state, scored.batch(advantage))
    updated = time.perf_counter()
    self.policy = jax.block_until_ready(self.learner.to_rollout(self.state.params))
    done = time.perf_counter()
    seconds = {
      "rollout": scored.rollout_s,
      "reward": sampled - began - scored.rollout_s,
      "update": updated - sampled,
      "sync": done - updated,
      "step": done - began,
    }
    return seconds, scored, digest([scored.samples.tokens, self.state.params])


def digest(tree) -> str:
  found = hashlib.sha256()
  for x in jax.tree.leaves(jax.device_get(tree)):
    found.update(np.ascontiguousarray(x))
  return found.hexdigest()


def ratio(above, below) -> dict:
  """Geometric mean of ratios, its 95% interval, and their range."""
  each = np.array(above) / np.array(below)
  middle, half = metrics.interval(np.log(each)) if len(each) > 1 else (np.log(each[0]), 0.0)
  return {
    "mean": float(np.exp(middle)),
    "interval": [float(np.exp(middle - half)), float(np.exp(middle + half))],
    "range": [float(each.min()), float(each.max())],
  }


def measure(config: dict, mesh) -> dict:
  """All sides on one target."""
  model, params = convert.load_hf(config["policy"], mesh, axes.TRAIN, dtype="float32")
  algorithm = algorithm_lib.make(**config["algorithm"])
  learner = learner_lib.make(
    *(model, algorithm, optimizer.make(**config["optimizer"]), mesh), **config["learner"]
  )
  sides = [Side(name, config, model, mesh, learner, params) for name in _SIDES.value]
  prompts = data.prompt_iterator(
    setup.build(config["prompts"]), config["batch"]["prompts"], config["seed"]
  )
  seconds = {side.name: [] for side in sides}
  samples = {side.name: [] for side in sides}
  same, ties, differing = True, 0, 0
  for step in range(_WARM_UP.value + _STEPS.value):
    records = next(prompts)
    first = step % len(sides)
    before = jax.device_get(sides[0].policy)
    hashes, drawn = {}, {}
    for side in sides[first:] + sides[:first]:
      took, scored, hashes[side.name] = side.step(algorithm, records, config, step)
      drawn[side.name] = scored
      if step >= _WARM_UP.value:
        seconds[side.name].append(took)
        samples[side.name].append(scored.samples)
    if len(set(hashes.values())) > 1:
      same = False
      reference = drawn[sides[0].name]
      for side in sides[1:]:
        result = compare.compare(
          *(model, before, reference.requests),
          *(reference.samples, drawn[side.name].samples),
        )
        ties, differing = ties + result.near_ties, differing + result.differing_tokens
        side.state = jax.tree.map(jnp.copy, sides[0].state)  # go on alike
        side.policy = side.learner.to_rollout(side.state.params)
    if step >= _WARM_UP.value:
      line = "  ".join(f"{n} {s[-1]['rollout']:.2f} s" for n, s in seconds.items())
      print(f"step {step + 1 - _WARM_UP.value}: rollout {line}", flush=True)
  return summary(seconds, samples) | {
    "identical": same,
    "near_ties": ties,
    "differing_tokens": differing,
  }


def summary(seconds, samples) -> dict:
  """What is reported of a target, from the seconds and samples of each side's steps."""
  of = lambda side, part: np.array([s[part] for s in seconds[side]])
  found = {
    "steps": _STEPS.value,
    "seconds": {
      side: {part: float(np.mean(of(side, part))) for part in parts[0]}
      for side, parts in seconds.items()
    },
    "sides": {},
  }
  is_plain = lambda side: side.removesuffix(_REBALANCE) == "plain"
  plain = min(filter(is_plain, seconds), key=lambda side: of(side, "rollout").sum())
  share = float(of(plain, "rollout").sum() / of(plain, "step").sum())
  found |= {"rollout_share_plain": share, "plain": plain}
  for side in seconds:
    rollout = ratio(of(plain, "rollout"), of(side, "rollout"))
    whole = ratio(of(plain, "step"), of(side, "step"))
    drawn = sum(int(s.length.sum()) for s in samples[side])
    found["sides"][side] = {
      "speedup_rollout": rollout["mean"],
      "speedup_rollout_interval": rollout["interval"],
      "speedup_rollout_range": rollout["range"],
      "speedup_step": whole["mean"],
      "speedup_step_range": whole["range"],
      "of_amdahl": whole["mean"] * ((1 - share) + share / rollout["mean"]),
      "mean_acceptance_length": drawn / sum(s.passes for s in samples[side]),
      # Of a rollout: chunks, and steps of the busiest slices, which all others wait for.
      "chunks": float(np.mean([len(s.chunks) for s in samples[side]])),
      "target_passes": float(
        np.mean([sum(max(c.steps) for c in s.chunks) for s in samples[side]])
      ),
      "seconds_by_bucket": {
        f"{batch}x{length}": s / _STEPS.value
        for (batch, length), s in sorted(by_bucket(samples[side]).items(), reverse=True)
      },
    }
  if "tlt" in seconds:
    found |= found["sides"]["tlt"]
    found["idle_s"] = idle = sum(s.idle_s for s in samples["tlt"])
    found["harvested_s"] = sum(s.harvested_s for s in samples["tlt"])
    found["harvested_share"] = found["harvested_s"] / idle if idle else 0.0
  is_fixed = lambda side: side not in SIDES[1:] and not side.endswith(_REBALANCE)
  fixed = [by_bucket(samples[side]) for side in filter(is_fixed, seconds)]
  if len(fixed) > 1 and "frozen" in seconds:
    rule = by_bucket(samples["frozen"])
    best = sum(min(f[b] for f in fixed if b in f) for b in set().union(*fixed))
    found["over_hindsight"] = sum(rule.values()) / best
  if {"tlt", "frozen"} <= set(seconds):
    lost = ratio(of("tlt", "rollout"), of("frozen", "rollout"))
    found["busy_overhead"] = lost["mean"] - 1
  return found


def by_bucket(samples) -> dict[tuple[int, int], float]:
  """Seconds of chunks, by bucket: the best side in each would be the best in hindsight."""
  seconds = collections.Counter()
  for s in samples:
    for chunk in s.chunks:
      seconds[chunk.batch, chunk.length] += chunk.end_s - chunk.start_s
  return seconds


def report(name: str, found: dict) -> None:
  drawn = rich.table.Table(
    *("side", "rollout, s", "update, s", "step, s", "rollout", "step", "tokens per pass"),
    title=f"{name} target: plain spends {found['rollout_share_plain']:.0%} in rollouts",
    title_justify="left",
  )
  for side, s in found["seconds"].items():
    r = found["sides"][side]
    low, high = r["speedup_rollout_interval"]
    drawn.add_row(
      *(side, *(f"{s[part]:.2f}" for part in ("rollout", "update", "step"))),
      f"{r['speedup_rollout']:.2f}x ({low:.2f}-{high:.2f})",
      f"{r['speedup_step']:.2f}x",
      f"{r['mean_acceptance_length']:.2f}",
    )
  rich.console.Console(width=100).print(drawn)


def workload(config: dict) -> dict:
  """What was pinned."""
  weights = hashlib.sha256()
  for file in sorted(pathlib.Path(config["policy"]).glob("*.safetensors")):
    weights.update(file.read_bytes())
  return {
    "policy": weights.hexdigest(),
    "seeds": [config["seed"], config["prompts"].get("seed")],
    **{key: config[key] for key in ("batch", "sampling", "strategies", "strategy_rule")},
    "rollout": config["rollout"],
    "learner_buckets": config["learner"]["buckets"],
    "lengths": _LENGTHS.value,
  }


def main():
  if _SIDES.value[:1] != ["plain"]:
    raise ValueError(f"--sides starts with plain, not {_SIDES.value[:1]}")
  for side in {side.removesuffix(_REBALANCE) for side in _SIDES.value} - set(SIDES):
    strategy.parse(side)
  workdir = pathlib.Path(tempfile.mkdtemp())
  config = setup.start(workdir, _CONFIG.value, cpu_slices=_SLICES.value)
  pinned = workload(config)
  mesh = axes.make_mesh(config["tensor_parallel"])
  targets = {"default": config}
  if _WIDE.value:
    folder = pathlib.Path(_WIDE.value)
    own = {"policy": str(folder / "policy"), "drafter": str(folder / "drafter")}
    targets["wide"] = config | own
  found = {}
  for name, of in targets.items():
    found[name] = measure(of, mesh)
    report(name, found[name])
  print(json.dumps({"workload": pinned, "targets": found}))


if __name__ == "__main__":
  setup.run(main)
