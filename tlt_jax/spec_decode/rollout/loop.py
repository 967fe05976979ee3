"""The loop of a rollout: requests in, responses out, through slots that are kept busy.

The host looks only between chunks. It admits requests from each slice's queue into free
slots, fits the slots into the smallest compiled bucket that holds what runs, chooses how
the next chunk drafts, runs it, books what it drew, and harvests what ended for the
drafter's training. What it decides follows from replicated values and from
`clock.Decisions`.

A prompt is prefilled once, into a bounded store, and its KV copied to the slots of its
requests. Everything on the devices but the parameters is freed at the end.
"""

import logging

import jax
import numpy as np

from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import chunks as chunks_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import harvest as harvest_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import parts as parts_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


class Loop:
  """One rollout, from its first request to the last."""

  def __init__(
    self,
    parts: parts_lib.Parts,
    options: options_lib.Options,
    params,
    draft_params,
    requests: requests_lib.Requests,
    *,
    train: bool,
    decide: clock_lib.Decisions,
    ask: samples_lib.Ask | None = None,
    watch: samples_lib.Watch | None = None,
    score: samples_lib.Score | None = None,
  ):
    """Queues all requests, or those that are asked first; `run` does the rest.

    Args:
      parts, options: of the rollout
      params, draft_params: of the target, and of the drafter if nothing trains it
      requests: what is to be answered
      train: whether idle slices train the drafter
      decide: where decisions are made
      ask: says how many prompts are asked by now; None: all are from the start
      watch: looks on after every chunk
      score: begins to score the responses once all are drawn
    """
    self._began = parts.clock.now()
    self.parts, self.options = parts, options
    self.params, self.draft_params = params, draft_params
    parts.clock.begin_rollout()
    self.batch = parts.batch(requests)
    self.running = self.batch.running
    self.schedule = schedule_lib.Schedule(
      options, self.running, parts.clock, decide, grows=ask is not None
    )
    self.samples = self._empty(requests)
    self._ask, self._watch, self._score = ask, watch, score
    self.harvest: harvest_lib.Harvest | None = None
    if train:
      self.harvest = harvest_lib.Harvest(
        parts.spot, self.batch, self.schedule, self.samples
      )
    self.gains: list[float | None] = []  # that the selector expected, per chunk

  @property
  def elapsed_s(self) -> float:
    return self.parts.clock.now() - self._began

  def run(self) -> samples_lib.Samples:
    """Runs all requests to their end; see `Rollout.__call__`."""
    self._ask_more([])
    waiting = [min(len(q), self.options.slots) for q in self.schedule.queues]
    self.samples.timeline.append((0.0, waiting))
    while not self.schedule.done:
      self.schedule.begin_chunk(self.parts.shapes.room.longest, *self._longer())
      try:
        self._admit_and_fit()
        mode = self._choose()
        start_s, bucket, live = self.elapsed_s, self.running.bucket, self.running.live
        result = self._run_chunk(mode)
        self.samples.kv_tokens.append(self.running.kv_tokens)
      except jax.errors.JaxRuntimeError as error:
        self._retry_with_less(error)
        continue
      self._book(mode.arm, int(max(live)), result)
      ended = self.running.advance(result.emitted, self.samples)
      if mode.source is not None:
        mode.source.release(result.draft_state, self.running.progress(self.samples))
      self._keep(ended)
      record = _record(bucket, mode.arm, live, result, start_s, self.elapsed_s)
      self.samples.note(record, self.running.live)
      stop = result.stop
      result = mode = None  # nothing here holds on to the devices' memory
      if stop:
        self._abandon()
      if self._watch is not None:
        self._watch(self.samples, [e.request for e in ended])
      self._ask_more([e.request for e in ended])
    self._finish()
    return self.samples

  def _empty(self, requests: requests_lib.Requests) -> samples_lib.Samples:
    most = self.parts.shapes.room.longest if self.parts.drafting.selector else None
    return samples_lib.empty(requests, most=most, features=self.options.features)

  def _ask_more(self, ended: list[int]) -> None:
    """Queues the prompts that are asked now that these requests have ended."""
    if self._ask is not None:
      idle = self.schedule.done
      self.schedule.ask(self._ask(self.samples, ended, idle))

  @property
  def _harvests(self) -> bool:
    """Whether slices may train in the bucket that runs."""
    return self.harvest is not None and self.parts.trains(self.running.bucket)

  def _longer(self) -> tuple[int, float]:
    """Tokens and seconds of a longer chunk, where slices can train in it."""
    return self.harvest.long_chunk() if self._harvests else (0, 0.0)

  def _admit_and_fit(self) -> None:
    """Seats requests until no more can be, in the smallest bucket that holds them."""
    before, plan = self.batch.slots, None
    while plan is None or plan.admissions:
      plan = self.schedule.plan()
      self.batch.follow(plan, self.params, self.schedule.tokens)
    if self.batch.slots is before:  # new slots have their pages already
      self.batch.extend(self.schedule.tokens)
    else:
      held = pool_lib.live_bytes() + self.parts.programs.pool.temp_bytes
      self.samples.peak_bytes = max(self.samples.peak_bytes, held)

  def _choose(self) -> chunks_lib.ChunkMode:
    bucket, live = self.running.bucket, int(max(self.running.live))
    if self.harvest:
      self.harvest.exchange_if_due()
    arm = self.parts.drafting.choose(self.schedule)
    self.gains.append(self.parts.drafting.gain(arm, live, bucket))
    weights = self.parts.weights(self.params, self.draft_params)
    return self.parts.drafting.mode(arm, weights)

  def _run_chunk(self, mode: chunks_lib.ChunkMode) -> chunks_lib.ChunkResult:
    source, state = mode.source, None
    if source is not None:
      progress = self.running.progress(self.samples)
      state = source.prepare(mode.weights, self.batch.slots, progress)
    trains = self._harvests and self.harvest.ready
    limits, steps = chunks_lib.limits(self.schedule, mode.arm, exact_steps=trains)
    training = self._training(mode.arm, steps)
    return self.parts.chunks.run(self.batch, mode, state, limits, training)

  def _training(self, arm: clock_lib.Arm, steps: int) -> trainer_lib.Training | None:
    """The training that the next chunk may do; None: its program does not train."""
    if not self.parts.trains(self.running.bucket):
      return None
    if self.harvest is None:
      return self.parts.spot.training(most=0, expected_steps=1)
    return self.harvest.training(arm, steps)

  def _book(self, arm: clock_lib.Arm, live: int, result: chunks_lib.ChunkResult) -> None:
    """Books a chunk with the clock, the trainer and the selector.

    Args:
      live: requests of the fullest slice
    """
    bucket, clock, seconds = self.running.bucket, self.parts.clock, result.seconds
    if self.harvest and result.trained is not None:
      seconds = self.harvest.book(result)
    longest = int(result.emitted.count.max())
    clock.book(
      bucket,
      arm,
      steps=result.steps,
      tokens=result.tokens,
      longest=longest,
      seconds=seconds,
    )
    seen = selector_lib.Observation(
      live=live,
      bucket=bucket,
      strategy=arm,
      steps=result.steps,
      tokens=result.tokens,
      passes=result.passes,
      accepted=result.accepted,
      seconds=seconds,
    )
    if self.parts.drafting.selector is not None:
      self.parts.drafting.selector.observe(seen)
    if self.harvest:
      self.harvest.observe(seen, self.parts.drafting)

  def _keep(self, ended: list[running_lib.Ended]) -> None:
    """Passes ended requests to the features, the sources of drafts and the trainer."""
    requests, samples = self.running.requests, self.samples
    for e in ended:
      if samples.features is not None:
        samples.features[e.request] = self.batch.features_of(e.request)
      for source in self.parts.drafting.sources.values():
        source.finished(requests.prompt(e.request), samples.response(e.request))
    if self.harvest:
      self.harvest.store(ended)

  def _retry_with_less(self, error: Exception) -> None:
    """Sends what runs back to the queues, for smaller buckets; raises other errors.

    Other processes of the job would wait for this one: there, it is an error as well.
    """
    if not pool_lib.is_out_of_memory(error) or processes.count() > 1:
      raise error
    self._drop()
    logging.warning(
      "out of memory with %d slots a slice; going on with less, no request is lost",
      self.schedule.out_of_memory(),
    )

  def _abandon(self) -> None:
    """Ends the rollout, because the job is to stop; the drafter keeps what it learnt."""
    self._drop()
    if self.harvest:
      self.harvest.abandon()
    raise processes.Stopped

  def _drop(self) -> None:
    """Frees what the requests have on the devices."""
    self.batch.drop()
    for source in self.parts.drafting.sources.values():
      source.reset()

  def _finish(self) -> None:
    """Frees the devices, trains what is left to train, and sums up."""
    self._drop()  # what trains now needs the room
    rollout_s = self.elapsed_s
    scoring = None if self._score is None else self._score(self.samples)
    if self.harvest:
      self.harvest.finish(self.params, rollout_s, scoring)
    self.schedule.decide.finish()
    self.samples.decisions = self.schedule.decide.log
    self.samples.gain = self.parts.drafting.gains(self.gains, self.samples)


def _record(
  bucket: int,
  arm: clock_lib.Arm,
  live: np.ndarray,
  result: chunks_lib.ChunkResult,
  start_s: float,
  end_s: float,
) -> samples_lib.ChunkRecord:
  """The record of a chunk.

  Args:
    live: i32[slices]  requests at its start
    start_s, end_s: since the rollout's start
  """
  nothing = [0] * len(live)
  trained = nothing if result.trained is None else result.trained.micro_batches.tolist()
  return samples_lib.ChunkRecord(
    start_s=start_s,
    end_s=end_s,
    batch=bucket,
    strategy=strategy_lib.name(arm),
    live=live.tolist(),
    steps=result.emitted.steps.tolist(),
    trained=trained,
    tokens=result.tokens,
    passes=result.passes,
  )
