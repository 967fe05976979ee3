"""Measures what spot training brings and costs: idle time harvested, busy time lost.

    python -m experiments.bench.spot [--drafter=eagle2]

Pairs of rollouts of the same requests, interleaved, one of which trains the drafter in
idle slices; the drafter starts from the same weights in each. Then, each alone: the
time that checkpoints of the drafter take from a step, and packed rows against padded
ones. Seconds are wall time, intervals 95% over pairs. The last line is JSON.
"""

from collections.abc import Sequence
import functools
import json
import tempfile
import time

from absl import flags
import jax
import numpy as np

from experiments import from_config
from experiments import keys
from experiments import launch
from experiments.bench import interleave
from tlt_jax import checkpoint
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax.rl import sample
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import spot as spot_lib

_DRAFTER = flags.DEFINE_string("drafter", "", "Folder or kind; default: the config's.")
_PAIRS = flags.DEFINE_integer("pairs", 20, "Pairs of rollouts.", lower_bound=2)

_WARM_UP = 4  # pairs: every program runs once, the buffer fills


def thirds(samples: samples_lib.Samples) -> list[float]:
  """Tokens per pass of speculative chunks, by third of the rollout's time they start in."""
  tokens, passes = np.zeros(3), np.zeros(3)
  for chunk in samples.chunks:
    if chunk.strategy != "off":
      third = min(int(3 * chunk.start_s / samples.chunks[-1].end_s), 2)
      tokens[third] += chunk.tokens
      passes[third] += chunk.passes
  return [t / n if n else np.nan for t, n in zip(tokens, passes, strict=True)]


def harvest(
  config: dict,
  problems: Sequence[dict],
  sampler: sample.Sampler,
  params,
  spot: spot_lib.Spot,
) -> dict:
  """Runs pairs of rollouts of the same requests, with training and without.

  Args:
    config: of a run, for its batch
    problems: whose first ones are asked
    sampler: whose rollouts train the drafter
    params: the policy's
    spot: the drafter's training; starts from the same state in every rollout
  """
  saved = spot.state
  P, R = config["batch"]["prompts"], config["batch"]["responses"]

  def rollout(turn: int, train: bool) -> sample.Scored:
    spot.restart(saved)
    return sampler(
      params,
      [problems[i % len(problems)] for i in range(turn * P, (turn + 1) * P)],
      R,
      seed=0,
      first_request=turn * P * R,
      train=train,
    )

  sides = {
    "off": functools.partial(rollout, train=False),
    "train": functools.partial(rollout, train=True),
  }
  pairs = []
  for found in interleave.turns(sides, _PAIRS.value, _WARM_UP):
    pairs.append({side: timed.result for side, timed in found.items()})
    off, trained = pairs[-1]["off"], pairs[-1]["train"]
    print(
      f"pair {len(pairs)}: {off.rollout_s:.2f} s without, {trained.rollout_s:.2f} s with "
      f"training; idle {trained.samples.idle_s:.2f} s, harvested "
      f"{trained.samples.harvested_s:.2f} s in {trained.samples.updates} updates",
      flush=True,
    )
  return summary(pairs, slices=len(spot.buffer.rows))


def summary(pairs: list[dict], slices: int) -> dict:
  """Prints and returns what the pairs tell.

  Args:
    pairs: what was scored, by "off" and "train"
    slices: that a rollout runs on
  """
  scored = {side: [pair[side] for pair in pairs] for side in ("off", "train")}
  off, train = (np.array([s.rollout_s for s in scored[side]]) for side in scored)
  # [pairs 3] each
  drawn = {side: np.array([thirds(s.samples) for s in scored[side]]) for side in scored}
  trained = [s.samples for s in scored["train"]]
  idle, harvested = sum(s.idle_s for s in trained), sum(s.harvested_s for s in trained)
  mean, half = metrics.interval(train / off - 1)
  after = np.array([s.training_s for s in trained])
  to_last, half_to_last = metrics.interval((train - after) / off - 1)
  gains = drawn["train"] - drawn["off"]
  found = {
    "pairs": len(pairs),
    "idle_share": float(idle / (np.sum(train) * slices)),
    "harvested_share": float(harvested / idle) if idle else 0.0,
    "busy_overhead": mean,
    "busy_overhead_half_width": half,
    "busy_overhead_to_last_token": to_last,
    "busy_overhead_to_last_token_half_width": half_to_last,
    "updates": float(np.mean([s.updates for s in trained])),
  }
  print(
    f"idle {found['idle_share']:.1%} of slice time, {found['harvested_share']:.1%} of "
    f"that harvested; rollouts {100 * mean:+.1f}% +- {100 * half:.1f} longer, until the "
    f"last token, and so without the last exchange of drafters, {100 * to_last:+.1f}% +- "
    f"{100 * half_to_last:.1f}"
  )
  for name, third in (("first", 0), ("last", 2)):
    if gain := _gain(gains[:, third]):
      means = {side: float(np.nanmean(drawn[side][:, third])) for side in drawn}
      found[f"{name}_third"] = means | gain
      print(
        f"tokens per pass in the {name} third: {means['off']:.2f} with the drafter of the "
        f"start, {means['train']:.2f} trained meanwhile; {_with_interval(gain)}"
      )
  if gain := _gain(gains[:, 2] - gains[:, 0]):
    found["last_over_first_third"] = gain
    print(f"so the last third gains {_with_interval(gain)} more than the first")
  return found


def _gain(by_pair: np.ndarray) -> dict[str, float]:
  """The mean of gains, with its interval; {} of fewer than two that are known, not NaN."""
  known = by_pair[np.isfinite(by_pair)]
  if len(known) < 2:
    return {}
  gain, half = metrics.interval(known)
  return {"gain": gain, "gain_half_width": half}


def _with_interval(gain: dict[str, float]) -> str:
  """What `_gain` found, to be printed."""
  return f"{gain['gain']:+.2f} +- {gain['gain_half_width']:.2f}"


def checkpoints(spot: spot_lib.Spot, params) -> dict:
  """Measures the seconds that a step loses to checkpoints of the drafter.

  Of its own arrays, written behind the step ("selective"); or of these and the target's,
  that it drafts with, also behind the step ("behind"), or while it waits ("full").
  """
  whole = {"drafter": spot.arrays(), "target": params}
  with tempfile.TemporaryDirectory() as folder:
    with (
      checkpoint.Checkpoints(f"{folder}/a") as ours,
      checkpoint.Checkpoints(f"{folder}/b") as theirs,
      checkpoint.Checkpoints(f"{folder}/c") as late,
    ):

      def behind(into, arrays, turn: int) -> float:
        saved = interleave.timed(into.save, turn + 1, arrays, spot.data())
        into.wait()
        return saved.seconds

      def full(turn: int) -> float:
        began = time.perf_counter()
        theirs.save(turn + 1, whole, spot.data())
        theirs.wait()
        return time.perf_counter() - began

      sides = {
        "selective": lambda turn: behind(ours, spot.arrays(), turn),
        "behind": lambda turn: behind(late, whole, turn),
        "full": full,
      }
      seconds = interleave.results(list(interleave.turns(sides, repeats=6)))
  found = {f"{side}_s": float(np.median(taken)) for side, taken in seconds.items()}
  ms = {side: f"{1e3 * taken:.0f} ms" for side, taken in found.items()}
  print(
    f"checkpoint: {ms['selective_s']} of a step; with the target {ms['behind_s']}, "
    f"{ms['full_s']} if it waits"
  )
  return found | {"ratio": found["full_s"] / found["selective_s"]}


def always(strategies: str) -> str:
  """Leaves each level one arm, so that the sides differ in nothing but training.

  The last one but n-grams, which would find the other side's responses.
  """
  known = []
  for level in levels.parse(strategies):
    arms = [arm for arm in level.arms if arm is None or strategy.uses_drafter(arm)]
    known.append(level._replace(arms=tuple(arms[-1:]) or (None,)))
  return levels.write(known)


def micro_batch_s(spot: spot_lib.Spot, params) -> float:
  """Measures a micro-batch of each slice at once: three, less one, over two."""
  train = spot.trainer.make_train()

  def run(most: int) -> None:
    jax.block_until_ready(train(params, spot.training(most)))

  sides = {most: lambda _, most=most: run(most) for most in (1, 3)}
  seconds = interleave.seconds(list(interleave.turns(sides, repeats=7)))
  return float(np.median(seconds[3] - seconds[1])) / 2


def packing(spot: spot_lib.Spot, padded: spot_lib.Spot, params) -> dict:
  """Measures sequences per second, packed, and one to a row as long as the longest."""
  rows = [row for rows in spot.buffer.rows for row in rows if row.sizes]
  _, positions, segments, _ = np.moveaxis(spot.buffer.table, 2, 0)
  count = np.sum((segments > 0) & (positions == 0))
  whole = np.zeros(1, np.int32), np.ones(padded.row_tokens, np.int32)
  for s in range(len(padded.buffer.rows)):
    padded.buffer.add(s, *whole)
    padded.buffer.add(s, *whole)  # of one alone XLA would compute the gradient only once
  packed_s, padded_s = micro_batch_s(spot, params), micro_batch_s(padded, params)
  packed = count / max(len(rows), 1) / packed_s
  print(
    f"packing: {packed:.1f} sequences per second and slice, padded {1 / padded_s:.1f}; "
    f"a row of {spot.row_tokens} takes {packed_s:.3f} s, of "
    f"{padded.row_tokens} {padded_s:.3f} s"
  )
  return {"packed": packed, "padded": 1 / padded_s, "ratio": packed * padded_s}


def main(config):
  launch.start()
  config["drafter"] = _DRAFTER.value or config["drafter"]
  if not config["drafter"]:
    raise ValueError("there is no drafter to train: give --drafter")
  config["spot"].update(train=True, after_rollout_share=0.0)
  config["strategies"] = always(config["strategies"])
  config = from_config.complete(config)
  problems = from_config.prompts(config, config["prompts"])
  models = from_config.load_models(config)
  make = functools.partial(
    from_config.spot_training,
    model=models.model,
    mesh=models.mesh,
    drafter=models.drafter,
    draft_params=models.draft_params,
  )
  spot = make(config)
  sampler = from_config.sampler(
    config,
    models.model,
    models.mesh,
    drafter=models.drafter,
    selector=from_config.selector(config),
    spot=spot,
  )
  sampler.compile(models.params)
  found = harvest(config, problems, sampler, models.params, spot)
  if processes.count() == 1:
    found["checkpoint"] = checkpoints(spot, models.params)
    longest = spot.trainer.longest
    whole = {
      "row_tokens": longest,
      "context_tokens": min(config["spot"]["context_tokens"], longest // 2),
      "rows": 2,
      "carried_rows": 1,
    }
    padded = make(config | {"spot": config["spot"] | whole})
    found["packing"] = packing(spot, padded, models.params)
  found |= {"batch": dict(config["batch"]), "drafter": config["drafter"]}
  found["processes"] = processes.count()
  print(json.dumps(found))


if __name__ == "__main__":
  launch.run(main, joins_jobs=True, config=("tail", keys.RUN))
