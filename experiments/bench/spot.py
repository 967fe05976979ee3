"""What spot training brings and costs: idle time harvested, time that busy slices lose.

    python -m experiments.bench.spot [--drafter=eagle2]

Pairs of rollouts of the same requests, interleaved, one of which trains the drafter in
idle slices; the drafter starts from the same weights in each. Then, each alone: the
time that checkpoints of the drafter take from a step, and packed rows against padded
ones. Seconds are wall time, intervals 95% over pairs. The last line is JSON.
"""

import dataclasses
import functools
import json
import pathlib
import tempfile
import time

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import setup
from tlt_jax import axes
from tlt_jax import checkpoint
from tlt_jax import metrics
from tlt_jax.models import convert
from tlt_jax.spec_decode.spot import spot as spot_lib

_CONFIG = setup.config_flag("experiments/configs/tail.py")
_DRAFTER = flags.DEFINE_string("drafter", "", "Folder or kind; default: the config's.")
_PAIRS = flags.DEFINE_integer("pairs", 20, "Pairs of rollouts.", lower_bound=2)
_WARM_UP = 4  # pairs: every program runs once, the buffer fills
_STAMPS = flags.DEFINE_bool("stamps", False, "Let slices say themselves when they train.")


class Stamps:
  """When each slice begins and ends to train, as it says itself."""

  def __init__(self):
    self.seconds = 0.0  # of all slices together
    self._began = {}

  def __call__(self, which, s, mine, _):
    if int(mine) == 0:
      return
    if which == "began":
      self._began[int(s)] = time.perf_counter()
    else:
      self.seconds += time.perf_counter() - self._began.pop(int(s))

  def watch(self, trainer: spot_lib.Trainer) -> spot_lib.Trainer:
    """A trainer that tells; for that its loop waits for the host twice."""
    stamps = self

    class Watched(spot_lib.Trainer):
      def accumulate(self, target_params, params, rows, most, total):
        s = jax.lax.axis_index(axes.DATA)
        tell = lambda which, x: jax.debug.callback(
          functools.partial(stamps, which), s, most, x
        )
        tell("began", most)
        total = super().accumulate(target_params, params, rows, most, total)
        tell("ended", total[0][0])
        return total

    fields = dataclasses.fields(trainer)
    return Watched(**{field.name: getattr(trainer, field.name) for field in fields})


def last_third(samples) -> float:
  """Tokens per pass of the speculative chunks in the last third of the rollout's time."""
  late = [c for c in samples.chunks if c.start_s > samples.chunks[-1].end_s * 2 / 3]
  late = [c for c in late if c.strategy != "off"]
  passes = sum(c.passes for c in late)
  return sum(c.tokens for c in late) / passes if passes else np.nan


def harvest(sampler, params, spot, problems, batch, stamps) -> dict:
  """Pairs of rollouts, with training and without."""
  saved = jax.tree.map(jnp.copy, spot.state)
  sides = {"off": [], "train": []}
  late = {"off": [], "train": []}
  harvested, idle, stamped, updates = [], [], [], []
  for pair in range(1 - _WARM_UP, _PAIRS.value + 1):
    records = [next(problems) for _ in range(batch["prompts"])]
    for side in sorted(sides, reverse=pair % 2):
      spot.state = jax.tree.map(jnp.copy, saved)
      stamps.seconds = 0.0
      scored = sampler(
        *(params, records, batch["responses"], 0, (pair + _WARM_UP) * 10_000),
        train=side == "train",
      )
      if pair < 1:
        continue
      sides[side].append(scored.rollout_s)
      late[side].append(last_third(scored.samples))
      if side == "train":
        harvested.append(scored.samples.harvested_s)
        idle.append(scored.samples.idle_s)
        stamped.append(stamps.seconds)
        updates.append(len(scored.samples.training))
    if pair > 0:
      off, train = (sides[side][-1] for side in ("off", "train"))
      print(
        f"pair {pair}: {off:.2f} s without, {train:.2f} s with training; idle "
        f"{idle[-1]:.2f} s, harvested {harvested[-1]:.2f} s in {updates[-1]} updates",
        flush=True,
      )
  off, train = (np.array(sides[side]) for side in ("off", "train"))
  mean, half = metrics.interval(train / off - 1)
  found = {
    "pairs": _PAIRS.value,
    "idle_share": float(np.sum(idle) / (np.sum(train) * len(spot.buffer.rows))),
    "harvested_share": float(np.sum(harvested) / np.sum(idle)),
    "busy_overhead": mean,
    "busy_overhead_half_width": half,
    "updates": float(np.mean(updates)),
    "last_third": {side: float(np.nanmean(found)) for side, found in late.items()},
  }
  both = np.subtract(late["train"], late["off"])
  gain, gain_half = metrics.interval(both[np.isfinite(both)])
  found["last_third"] |= {"gain": gain, "gain_half_width": gain_half}
  if _STAMPS.value:
    found["stamped_over_harvested"] = float(np.sum(stamped) / np.sum(harvested))
  print(
    f"idle {found['idle_share']:.1%} of slice time, {found['harvested_share']:.1%} of "
    f"that harvested; rollouts {100 * mean:+.1f}% +- {100 * half:.1f} longer"
  )
  print(
    "tokens per pass in the last third: {off:.2f} with the drafter of the start, "
    "{train:.2f} trained meanwhile".format(**found["last_third"])
    + f"; {gain:+.2f} +- {gain_half:.2f}"
  )
  return found


def checkpoints(spot, params) -> dict:
  """Seconds that a step loses: the drafter's own arrays, written behind it; or these
  and the target's, that it drafts with, while the step waits."""
  whole = {"drafter": spot.arrays(), "target": params}
  seconds = {"selective": [], "full": []}
  with tempfile.TemporaryDirectory() as folder:
    with (
      checkpoint.Checkpoints(f"{folder}/a") as ours,
      checkpoint.Checkpoints(f"{folder}/b") as theirs,
    ):
      for step in range(1, 8):
        began = time.perf_counter()
        ours.save(step, spot.arrays(), spot.data())
        saved = time.perf_counter()
        ours.wait()
        again = time.perf_counter()
        theirs.save(step, whole, spot.data())
        theirs.wait()
        seconds["selective"].append(saved - began)
        seconds["full"].append(time.perf_counter() - again)
  ours, theirs = (float(np.median(seconds[name][1:])) for name in seconds)
  print(f"checkpoint: {1e3 * ours:.0f} ms of a step, {1e3 * theirs:.0f} ms if it waits")
  return {"selective_s": ours, "full_s": theirs, "ratio": theirs / ours}


def seconds_of(spot, params, times: int = 7) -> float:
  """Of a micro-batch of each slice at once, the median."""
  train, state, rows, taken = spot.trainer.make_train(), spot.state, spot.rows(), []
  for _ in range(times + 1):
    for most in (1, 3):
      began = time.perf_counter()
      state, _ = jax.block_until_ready(train(params, state, rows, np.int32(most)))
      taken.append(time.perf_counter() - began)
  return float(np.median(np.subtract(taken[3::2], taken[2::2]))) / 2


def packing(spot, padded, params) -> dict:
  """Sequences per second in packed rows, and one to a row as long as the longest."""
  rows = [row for rows in spot.buffer.rows for row in rows if row.sizes]
  _, positions, segments, _ = np.moveaxis(spot.buffer.table, 2, 0)
  count = np.sum((segments > 0) & (positions == 0))
  whole = np.zeros(1, np.int32), np.ones(padded.trainer.length, np.int32)
  for s in range(len(padded.buffer.rows)):
    padded.add(s, *whole)
    padded.add(s, *whole)  # of one alone XLA would compute the gradient only once
  packed_s, padded_s = seconds_of(spot, params), seconds_of(padded, params)
  packed = count / len(rows) / packed_s
  print(
    f"packing: {packed:.1f} sequences per second and slice, padded {1 / padded_s:.1f}; "
    f"a row of {spot.trainer.length} takes {packed_s:.3f} s, of "
    f"{padded.trainer.length} {padded_s:.3f} s"
  )
  return {"packed": packed, "padded": 1 / padded_s, "ratio": packed * padded_s}


def main():
  config = setup.start(pathlib.Path(tempfile.mkdtemp()), _CONFIG.value)
  config["drafter"] = _DRAFTER.value or config["drafter"]
  config["spot"]["every"] = 1
  # The last of several arms, and always: the sides are to differ in nothing else.
  steps = config["strategies"]
  config["strategies"] = tuple((most, setup.several(n)[-1]) for most, n in steps)
  mesh = axes.make_mesh(config["tensor_parallel"])
  model, params = convert.load_hf(config["policy"], mesh, axes.ROLLOUT)
  drafter, policy, draft_params = setup.load_drafter(config, model, mesh)
  spot = setup.spot_training(config, model, mesh, drafter, draft_params)
  stamps = Stamps()
  if _STAMPS.value:
    spot.trainer = stamps.watch(spot.trainer)
  sampler = setup.sampler(config, model, mesh, drafter, policy, spot)
  sampler.compile(params)
  problems = iter(setup.build(config["prompts"]))
  found = harvest(sampler, params, spot, problems, config["batch"], stamps)
  found["checkpoint"] = checkpoints(spot, params)
  whole = {**config["spot"], "length": spot.trainer.longest, "rows": 2, "carried": 1}
  padded = setup.spot_training(config | {"spot": whole}, model, mesh, drafter, draft_params)
  found["packing"] = packing(spot, padded, params)
  found |= {"batch": dict(config["batch"]), "drafter": config["drafter"]}
  print(json.dumps(found))


if __name__ == "__main__":
  setup.run(main)
