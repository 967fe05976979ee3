"""Getting a rollout ready: programs are compiled, tried once, and their steps timed."""

import contextlib
import dataclasses
import logging
import time

import jax
import numpy as np

from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.rollout import chunks as chunks_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import parts as parts_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib


class Ready:
  """Compiles the programs of a rollout, and measures what they take."""

  def __init__(self, parts: parts_lib.Parts):
    """Takes the parts of a rollout."""
    self._parts, self._shapes = parts, parts.shapes
    self._programs, self._chunks = parts.programs, parts.chunks
    self._drafting, self._spot = parts.drafting, parts.spot

  def compile(
    self, weights: chunk_lib.Weights, stops: int, options: options_lib.Options
  ) -> options_lib.Options:
    """Compiles every program that a rollout of these options can need.

    Args:
      weights: of target and drafter, or their shapes and shardings
      stops: stop tokens per request
    Returns:
      the options with the buckets that are ready: those for which the budget is too
      small are left out, larger ones serve. Programs that speculate in the others are
      beyond it.
    """
    self._compile_shared(weights, stops)
    ready = []
    # The largest first: it can replace every other.
    for bucket in sorted(options.buckets, reverse=True):
      if ready and not self._programs.pool.has_room(1):
        logging.warning("no room for the programs of %d slots", bucket)
        continue
      ready.append(bucket)
      self._compile_chunk(None, bucket, stops, weights)
    options = dataclasses.replace(options, buckets=tuple(ready))
    for bucket in options.buckets:
      for arm in sorted(self._drafting.in_bucket(nothing_queued(options), bucket)):
        self._compile_chunk(arm, bucket, stops, weights)
    return options

  def _compile_shared(self, weights, stops: int) -> None:
    """The programs that serve every bucket."""
    compile, shapes, spot = self._programs.compile, self._shapes, self._spot
    o = shapes.options
    pools, features, *prompts = shapes.prompts()
    compile("prefill", (), weights.target, pools, features, *prompts)
    compile("copy", (), pools, features, shapes.rows(o.slots), shapes.rows(o.slots))
    if spot is not None:
      compile("train", (), weights.target, spot.training(most=1))
      compile("exchange", (), spot.training(most=0).states, shapes.rows(1))
      most = spot.most_pieces(o.slots, o.max_length)
      pieces = shapes.rows(most, 4 + shapes.pages.most)
      compile("store", (), spot.features, features, pieces, shapes.rows(1))

  def _compile_chunk(self, arm, bucket, stops: int, weights) -> None:
    """The chunk of a strategy in a bucket; where slices train in it, it is tried too."""
    key, slots = (bucket, stops), self._shapes.slots(bucket, stops)
    mode = self._drafting.mode(arm, weights)
    one, state = np.int32(1), None
    limits = chunk_lib.Limits(one)
    if mode.source is not None:
      state = mode.source.ready(mode.weights, slots)
      limits = chunk_lib.Limits(one, one, one)
    training = None
    if self._parts.trains(bucket):
      training = self._spot.training(most=1, expected_steps=1)
    self._chunks.program(key, mode, slots, state, limits, training)
    exist = isinstance(jax.tree.leaves(weights.target)[0], jax.Array)
    if training is not None and exist:
      # The first time that a slice trains takes 0.2 s longer on XLA's CPU, per program;
      # the slices that decode would wait. On nothing it changes nothing.
      with _unless_out_of_memory(bucket):
        slots, state = slices.zeros((slots, state))
        nothing = self._spot.on_nothing()
        trial = self._chunks.program(key, mode, slots, state, limits, nothing)
        jax.block_until_ready(trial())

  def measure(
    self, weights: chunk_lib.Weights, stops: int, options: options_lib.Options
  ) -> None:
    """Tells the clock what steps take, if the selector wants to know.

    A short chunk for each strategy and bucket; what is drawn meanwhile means nothing.

    Args:
      weights: of target and drafter
      stops: stop tokens per request
      options: whose buckets are measured
    """
    selector = self._drafting.selector
    if selector is None or not selector.wants_step_seconds:
      return
    for bucket in options.buckets:
      arms = sorted(self._drafting.in_bucket(nothing_queued(options), bucket))
      for arm in (None, *arms) if arms else ():
        with _unless_out_of_memory(bucket):
          # The first time is slower, and so is one that something else disturbs.
          times = [self.time_step(weights, bucket, arm, stops) for _ in range(3)]
          self._parts.clock.measured(bucket, arm, min(times))

  def time_step(
    self,
    weights: chunk_lib.Weights,
    bucket: int,
    arm: clock_lib.Arm,
    stops: int,
    slices: int | None = None,
    length: int | None = None,
  ) -> float:
    """Seconds of a step, over a chunk with all slots of a bucket live, none ending.

    Args:
      weights: of target and drafter
      arm: how the chunk decodes
      stops: stop tokens per request
      slices: how many decode, while the others have nothing to do; None: all
      length: tokens of each request; None: a quarter of the longest, as far as there
        are pages
    """
    batch, schedule, mode = self._full(weights, bucket, arm, stops, slices, length)
    progress = batch.running.progress(samples_lib.empty(batch.running.requests))
    state = mode.source and mode.source.prepare(mode.weights, batch.slots, progress)
    limits, _ = chunks_lib.limits(schedule, arm, exact_steps=False)
    training = None
    if self._parts.trains(bucket):
      training = self._spot.training(most=0, expected_steps=1)
    result = self._chunks.run(batch, mode, state, limits, training)
    if mode.source is not None:
      mode.source.reset()
    return result.seconds / max(result.steps, 1)

  def time_switch(
    self, weights: chunk_lib.Weights, bucket: int, arm: clock_lib.Arm, stops: int
  ) -> float:
    """Seconds per token of a slice to switch a strategy on, in the same situation."""
    batch, _, mode = self._full(weights, bucket, arm, stops)
    progress = batch.running.progress(samples_lib.empty(batch.running.requests))

    def switch():
      jax.block_until_ready(mode.source.prepare(mode.weights, batch.slots, progress))
      mode.source.reset()

    switch()  # compiling is not timed
    began = time.perf_counter()
    switch()
    tokens = sum(len(request.tokens) for request in progress[0] if request)
    return (time.perf_counter() - began) / tokens

  def _full(self, weights, bucket, arm, stops, slices=None, length=None):
    """A batch with all slots of a bucket live, on all slices or some; see `time_step`."""
    options, pages = self._shapes.options, self._shapes.pages
    most = pages.pages // bucket * pages.page - self._shapes.room.behind
    most = min(most, options.max_length - 1)
    length = min(length or max(options.max_length // 4, options.chunk + 1), most)
    B = bucket * self._shapes.slices
    requests = requests_lib.make_requests(
      [[1]] * B,
      max_tokens=options.max_length - 1,
      stop_tokens=np.full((B, stops), -1, np.int32),
    )
    batch = self._parts.batch(requests)
    schedule = _schedule(options, batch.running)
    batch.running.drawn[:] = max(length - options.chunk, 0)
    batch.seat_all(bucket, schedule.tokens, slices)
    return batch, schedule, self._drafting.mode(arm, weights)


def _schedule(options, running) -> schedule_lib.Schedule:
  """A schedule that no clock decides."""
  return schedule_lib.Schedule(
    options, running, clock_lib.Clock(), clock_lib.Decisions()
  )


def nothing_queued(options: options_lib.Options) -> schedule_lib.Schedule:
  """A schedule to be asked which buckets serve what."""
  nothing = requests_lib.make_requests([], max_tokens=1)
  none = pages_lib.Pages(1, options.page_sizes(beyond=0))
  return _schedule(options, running_lib.Running(nothing, none, slices=1))


@contextlib.contextmanager
def _unless_out_of_memory(bucket: int):
  """Leaves out what does not fit; a rollout continues with smaller buckets then."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if not pool_lib.is_out_of_memory(e) or processes.count() > 1:
      raise
    logging.warning("no memory to try %d slots a slice", bucket)
