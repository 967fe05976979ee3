"""Drafting in a rollout: which source drafts in a chunk, and from what state."""

from collections.abc import Mapping

import numpy as np

from tlt_jax import programs as pool_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import chunks
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Strategy = strategy_lib.Strategy


def make_sources(
  selector: selector_lib.Selector | None,
  shapes: programs_lib.Shapes,
  pool: pool_lib.Pool,
  drafter: drafter_lib.DrafterConfig | None,
) -> dict[str, source_lib.Source]:
  """The sources of all strategies of a selector, by name.

  Args:
    shapes, pool: of the rollout, for programs of their own
    drafter: for sources that need one
  """
  strategies = selector.strategies if selector else ()
  sources = {}
  for name in dict.fromkeys(s.source for s in strategies):
    setting = source_lib.Setting(
      config=shapes.config,
      mesh=shapes.mesh,
      pool=pool,
      room=shapes.room,
      strategies=tuple(s for s in strategies if s.source == name),
      drafter=drafter,
      layout=shapes.layout,
      memory_tokens=shapes.options.memory_tokens,
      memory_rows=shapes.options.memory_rows,
      kernels=shapes.options.kernels,
      fill_rows=shapes.options.prefill_rows,
      fill_block=shapes.prefill_block,
    )
    sources[name] = source_lib.make(name, setting)
  return sources


class Drafting:
  """Who drafts: the selector and its sources."""

  def __init__(
    self,
    selector: selector_lib.Selector | None,
    sources: Mapping[str, source_lib.Source],
    clock: clock_lib.Clock,
  ):
    """Drafts as the selector says; None: never."""
    self.selector, self.sources, self.clock = selector, sources, clock

  def mode(self, strategy: Strategy | None, weights: chunk_lib.Weights) -> chunks.ChunkMode:
    """How a chunk of that strategy decodes.

    Args:
      weights: of the target, and of the drafter if there is one
    """
    source = None if strategy is None else self.sources[strategy.source]
    if source is None or not source.reads_drafter:
      weights = weights.replace(draft=None)
    return chunks.ChunkMode(strategy, source, weights)

  def step_s(self, bucket: int) -> selector_lib.StepSeconds:
    """Seconds of a step in a bucket by strategy, for selectors."""
    of = lambda strategy: self.clock.step_s(bucket, strategy)
    doubt = lambda strategy: self.clock.doubt(bucket, strategy)
    return selector_lib.StepSeconds(bucket, of, doubt)

  def in_bucket(
    self, schedule: schedule_lib.Schedule, bucket: int
  ) -> set[Strategy]:
    """The strategies that may run in a bucket: those for live batches that just fit it."""
    if self.selector is None:
      return set()
    live = (n for n in range(1, bucket + 1) if schedule.choose(n) == bucket)
    return {arm for n in live for arm in self.selector.arms(n)} - {None}

  def choose(self, schedule: schedule_lib.Schedule) -> Strategy | None:
    """How the next chunk decodes.

    Plainly where few requests have just been admitted into many slots, whose programs
    may not speculate: the next chunk has a smaller bucket.
    """
    if self.selector is None:
      return None
    live, bucket = int(max(schedule.running.live)), schedule.running.bucket
    arms, fits = self.selector.arms(live), schedule.choose(live) == bucket
    # What is learnt by the clock is a decision of the clock; its name tells the arms.
    index = lambda: arms.index(self.selector.choose(live, self.step_s(bucket)))
    named = "strategy of " + ", ".join(map(strategy_lib.name, arms))
    chosen = arms[schedule.decide(named, index) if len(arms) > 1 else 0]
    return chosen if fits or chosen in self.in_bucket(schedule, bucket) else None

  def gain(
    self, strategy: Strategy | None, live: int, bucket: int
  ) -> float | None:
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
