"""Which strategy the next chunk decodes with, and what that gained."""

import dataclasses
import functools

import numpy as np

from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import joining
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Strategy = strategy_lib.Strategy


def in_bucket(
  selector: selector_lib.Selector | None, options: options_lib.Options, bucket: int
) -> list[Strategy]:
  """The strategies that may run in a bucket: those for live batches that just fit it."""
  if selector is None:
    return []
  live = (n for n in range(1, bucket + 1) if options.bucket(n) == bucket)
  return sorted({arm for n in live for arm in selector.arms(n)} - {None})


def most_rows(selector: selector_lib.Selector | None, options: options_lib.Options) -> int:
  """Rows of the largest pass that draws tokens: slots times nodes."""

  def nodes(bucket: int) -> int:
    return max((s.verify for s in in_bucket(selector, options, bucket)), default=1)

  return max(bucket * nodes(bucket) for bucket in options.buckets)


class Chooser:
  """Chooses strategies by a selector; without one, always plain decoding."""

  def __init__(self, selector: selector_lib.Selector | None, clock: clock_lib.Clock):
    self.selector, self.clock = selector, clock

  def step_s(self, bucket: int) -> selector_lib.StepSeconds:
    """Seconds of a step in a bucket by strategy, for selectors."""
    return selector_lib.StepSeconds(
      bucket,
      functools.partial(self.clock.step_s, bucket),
      functools.partial(self.clock.doubt, bucket),
    )

  def in_bucket(self, options: options_lib.Options, bucket: int) -> list[Strategy]:
    return in_bucket(self.selector, options, bucket)

  def programs(self, options: options_lib.Options) -> list[joining.Key]:
    """The chunks of rollouts, as these need them: live requests become fewer."""
    return [
      (bucket, arm)
      for bucket in reversed(options.buckets)
      for arm in (None, *self.in_bucket(options, bucket))
    ]

  def choose(self, schedule: schedule_lib.Schedule) -> Strategy | None:
    """How the next chunk decodes.

    Plainly where no program of the bucket speculates: it is not compiled yet, or few
    requests were just admitted into many slots, and the next chunk has a smaller bucket.
    """
    if self.selector is None:
      return None
    live, bucket = int(max(schedule.running.live)), schedule.running.bucket
    arms = [arm for arm in self.selector.arms(live) if schedule.can_run(bucket, arm)]
    # What is learnt by the clock is a decision of the clock; its name tells the arms.
    named = "strategy of " + ", ".join(map(strategy_lib.name, arms))
    step_s = dataclasses.replace(self.step_s(bucket), arms=tuple(arms))

    def index() -> int:
      chosen = self.selector.choose(live, step_s)
      return arms.index(chosen) if chosen in arms else 0

    if len(arms) > 1:
      return arms[schedule.decide(named, index)]
    return arms[0] if arms else None

  def gain(self, strategy: Strategy | None, live: int, bucket: int) -> float | None:
    """The speed-up that the selector expects of a strategy; None: it has no idea."""
    if strategy is None:
      return None
    return self.selector.gain(live, strategy, self.step_s(bucket))

  def gains(
    self, predicted: list[float | None], samples: samples_lib.Samples
  ) -> dict[str, float]:
    """The gains of speculation, predicted and realised; see `Samples.gain`."""
    if self.selector is None:
      return {}
    found = self._lost(samples)
    predicted = [gain for gain in predicted if gain is not None]
    if predicted:
      found |= {"predicted_gain": float(np.mean(predicted)), **self._realised(samples)}
    return found

  def _lost(self, samples: samples_lib.Samples) -> dict[str, float]:
    """The seconds that always the best arm of each live batch would have saved.

    By what is known at the end, and as fast as the machine was in each chunk.
    """
    lost: dict[int, float] = {}
    for c in samples.chunks:
      live, step_s = max(c.live), self.step_s(c.batch)
      arm, arms = strategy_lib.parse(c.strategy), self.selector.arms(live)
      gains = [1.0 if a is None else self.selector.gain(live, a, step_s) for a in arms]
      known = c.passes and step_s(arm) and step_s(None)
      if len(arms) > 1 and known and None not in gains:
        gain = c.tokens / c.passes * step_s(None) / step_s(arm)
        chunk_s = (c.end_s - c.start_s) * (1 - gain / max(gains))
        lost[live] = lost.get(live, 0.0) + chunk_s
    return {"lost_s": sum(max(s, 0.0) for s in lost.values())} if lost else {}

  def _realised(self, samples: samples_lib.Samples) -> dict[str, float]:
    """The gain of the chunks that speculated, by a plain step's time."""
    plain_s = chunk_s = 0.0
    for c in samples.chunks:
      step_s = self.clock.step_s(c.batch, None)
      if c.strategy != "off" and c.passes and step_s:
        plain_s += c.tokens / (c.passes / max(c.steps)) * step_s
        chunk_s += c.end_s - c.start_s
    if not chunk_s:
      return {}
    return {"realised_gain": plain_s / chunk_s, "saved_s": plain_s - chunk_s}
