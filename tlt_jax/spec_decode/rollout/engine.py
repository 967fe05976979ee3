"""The engine of rollouts: compiles and measures programs, and answers requests."""

from collections.abc import Iterator, Mapping
import contextlib
import functools
import logging
import time
from typing import Any, NoReturn

import jax
import numpy as np
import psutil

from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import programs as pool_lib
from tlt_jax import progress
from tlt_jax import stopwatch
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import chooser as chooser_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import devices as devices_lib
from tlt_jax.spec_decode.rollout import harvest as harvest_lib
from tlt_jax.spec_decode.rollout import joining
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

Drafter = spot_lib.Frozen | spot_lib.Spot


class Engine:
  """Draws the responses to requests; `make` puts one together.

  Call `compile` or `begin_compiling`, then `measure`, before the first rollout; else
  programs are compiled when a bucket is first used, and strategies are learnt from nothing.
  """

  def __init__(
    self,
    backend: backend_lib.Backend,
    selector: selector_lib.Selector | None,
    drafter: Drafter | None,
    clock: clock_lib.Clock,
  ):
    """Takes what outlives a rollout; see `make`."""
    self.backend, self.drafter, self.clock = backend, drafter, clock
    self.spot = None if drafter is None else drafter.spot
    self.chooser = chooser_lib.Chooser(selector, clock)
    self.options: options_lib.Options = backend.shapes.options
    self.programs = joining.Programs(self.chooser.programs(self.options))
    self._is_measured = False
    self._tried: set[joining.Key] = set()  # programs in which slices have trained once

  def __call__(
    self,
    params: Any,
    requests: requests_lib.Requests,
    train: bool = False,
    decide: clock_lib.Decisions | None = None,
    ask: samples_lib.Ask | None = None,
    watch: samples_lib.Watch | None = None,
    score: samples_lib.Score | None = None,
    until: samples_lib.Until | None = None,
  ) -> samples_lib.Samples:
    """Runs all requests to their end, or `until` they pause.

    A bucket whose program runs out of memory is not used again by this rollout;
    its requests start over in smaller ones, and draw the same tokens.

    Args:
      params: the target's, laid out by `axes.ROLLOUT`
      train: whether idle slices train the drafter (see `spot`)
      decide: to replay the `Samples.decisions` of an earlier rollout, whose drafter was
        trained the same
      ask: says at the start and after every chunk how many of the prompts, from the
        first on, are asked by now; None: all. Responses to the others stay empty
      watch: called after every chunk with the samples so far, and the requests that ended
        in it; where memory ran out, a response may be shorter than it was
      score: called with the samples once all is drawn; begins to score them, and returns
        what says whether that continues: the drafter trains meanwhile
      until: called at the start and after every chunk; says at how many response tokens
        each request pauses. Some may have more by then: part of a chunk
    Raises:
      RequestError: a request does not fit the options
      MemoryError: not even the smallest bucket fits
      processes.Stopped: the job was asked to stop
      ValueError: the decisions to replay are of another rollout; or nothing can train
    """
    if train and not isinstance(self.drafter, spot_lib.Spot):
      raise ValueError("this engine has no drafter that trains; see `rollout.make`")
    _check(self.options, requests)
    decide = decide or clock_lib.Decisions()
    try:
      hooks = ask, watch, score, until
      return _Loop(self, params, requests, train, decide, *hooks).run()
    finally:
      self.backend.free()

  def compile(self, params: Any, stop_tokens: int) -> None:
    """Compiles every program that a rollout can need; see `begin_compiling`."""
    self.begin_compiling(params, stop_tokens)
    self.programs.wait()

  def begin_compiling(
    self, params: Any, stop_tokens: int, others: Mapping[str, joining.Compile] = {}
  ) -> None:
    """Compiles what a rollout needs to begin; other threads continue with the rest.

    Smaller buckets and strategies join rollouts when their programs are there; no token
    depends on it. Only for real devices.

    Args:
      params: the target's, or their shapes and shardings
      stop_tokens: per request (the second dimension of `Requests.stop_tokens`)
      others: compile what is needed after a rollout, by name; see `joining.Programs`
    """
    weights = self.weights(params)
    devices: devices_lib.Devices = self.backend
    devices.announce(stop_tokens)
    memory.announce_programs(
      f"the rollout's programs (buckets: {len(self.options.buckets)})", inputs=weights
    )
    weights = pool_lib.shapes(weights)  # an update may need the memory meanwhile
    training = {n: pool_lib.shapes(self.no_training(n)) for n in self.options.buckets}
    chunks = {
      (bucket, arm): functools.partial(
        devices.compile_chunk, weights, bucket, arm, stop_tokens, training[bucket]
      )
      for bucket, arm in self.programs.keys
    }
    first, later = devices.shared_programs(weights, self.spot)
    self.programs.compile(first, chunks, later, others)

  def measure(self, params: Any, stop_tokens: int) -> bool:
    """Times the steps of strategies, if the selector wants to know, once all are compiled.

    A short chunk for each strategy and bucket. Returns whether it did: not before, nor a
    second time.
    """
    if self._is_measured or not self.programs.complete:
      return False
    self._is_measured = True
    joined = self.programs.joined(len(self.programs.keys))
    self.try_training(params, stop_tokens)
    selector = self.selector
    if selector is None or not selector.wants_step_seconds:
      return True
    drafting = {bucket for bucket, arm in joined if arm is not None}
    steps = [key for key in self.programs.keys if key in joined and key[0] in drafting]
    with progress.counted("timing strategy", steps) as each:
      for bucket, arm in each:
        with _unless_out_of_memory(bucket):
          # The first time is slower, and so is one that something else disturbs.
          times = [self.time_step(params, bucket, arm, stop_tokens) for _ in range(3)]
          self.clock.measured(bucket, arm, min(times))
    return True

  def try_training(self, params: Any, stop_tokens: int) -> None:
    """Runs once the programs in which slices train, of those compiled since the last call.

    The first time takes 0.2 s longer on XLA's CPU, per program; the slices that decode
    would wait. On nothing it changes nothing. Not within a rollout: it needs the memory.
    """
    if not self.programs.are_compiled:
      return
    joined = self.programs.joined(self.programs.count) - self._tried
    keys = [key for key in self.programs.keys if key in joined and self.trains_in(key[0])]
    self._tried |= joined
    weights = self.weights(params)
    with progress.counted("trying to train", keys) as each, stopwatch.waiting():
      for bucket, arm in each:
        run = self.backend.compile_chunk(
          weights, bucket, arm, stop_tokens, self.no_training(bucket)
        )
        with _unless_out_of_memory(bucket):
          run(self.spot.on_nothing())

  def has_tried(self, bucket: int, arm: clock_lib.Arm) -> bool:
    """Whether slices may train in a program; see `try_training`."""
    return not self.programs.are_compiled or (bucket, arm) in self._tried

  def time_step(
    self,
    params: Any,
    bucket: int,
    strategy: strategy_lib.Strategy | None = None,
    stop_tokens: int = 1,
    slices: int | None = None,
    length: int | None = None,
  ) -> float:
    """Seconds of a step with all slots of a bucket live; see `Backend.time_step`.

    Args:
      strategy: None: plain decoding
    """
    weights, training = self.weights(params), self.no_training(bucket)
    return self.backend.time_step(
      weights, bucket, strategy, stop_tokens, training, slices, length
    )

  def weights(self, params: Any) -> chunk_lib.Weights:
    """All that a chunk reads of the models."""
    return self.backend.weights(params, self.drafter and self.drafter.params)

  def trains_in(self, bucket: int) -> bool:
    """Whether the programs of a bucket train the drafter in idle slices."""
    return self.spot is not None and bucket > 0 and self.spot.trains_in(bucket)

  def no_training(self, bucket: int) -> trainer_lib.Training | None:
    """The input of a bucket's programs by which no slice trains."""
    if not self.trains_in(bucket):
      return None
    return self.spot.training(most=0, expected_steps=1)

  @property
  def config(self) -> config_lib.ModelConfig:
    """The target's shape."""
    return self.backend.shapes.config

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self.backend.shapes.mesh

  @property
  def exact(self) -> bool:
    """Whether it draws the bits of every other exact engine; see `Shapes.exact`."""
    return self.backend.shapes.exact

  @property
  def pool(self) -> pool_lib.Pool:
    """The compiled programs."""
    return self.backend.pool

  @property
  def selector(self) -> selector_lib.Selector | None:
    return self.chooser.selector

  def state(self) -> dict:
    """Its knowledge of strategies and machine, for a checkpoint; JSON can hold it."""
    return {
      "selector": self.selector.state() if self.selector else {},
      "sources": self.backend.state(),
      "micro_batch_s": self.clock.micro_batch_s,
      "exchange_s": self.clock.exchange_s,
    }

  def restore(self, state: dict | None, same_drafter: bool = True) -> None:
    """Continues from a `state`; None, of a run that kept none: learns again.

    Args:
      same_drafter: whether it knows this drafter; of another, what strategies are worth
        and what a micro-batch takes are learnt again
    """
    if state is None:
      return
    if self.selector:
      self.selector.restore(state["selector"] if same_drafter else None)
    self.backend.restore(state["sources"])
    self.clock.micro_batch_s = state["micro_batch_s"] if same_drafter else 0.0
    self.clock.exchange_s = state["exchange_s"]


@functools.cache
def _log_first_tokens() -> None:
  """Says, once a process, how long the first tokens took: imports, loading, compiling."""
  seconds = time.time() - psutil.Process().create_time()
  if processes.is_first():
    logging.info("the first tokens came %.1f s after the start", seconds)


class _Loop:
  """One rollout: requests in, responses out, through slots that are kept busy.

  The host looks only between chunks. What it decides follows from replicated values and
  from `clock.Decisions`. Everything on the devices but the parameters is freed at the end.
  """

  def __init__(
    self,
    engine: Engine,
    params: Any,
    requests: requests_lib.Requests,
    train: bool,
    decide: clock_lib.Decisions,
    ask: samples_lib.Ask | None,
    watch: samples_lib.Watch | None,
    score: samples_lib.Score | None,
    until: samples_lib.Until | None,
  ):
    """Queues all requests, or those that are asked first; see `Engine.__call__`."""
    self._began = engine.clock.now()
    self.engine, self.backend, self.params = engine, engine.backend, params
    self.chooser, self.clock = engine.chooser, engine.clock
    self._ask, self._watch, self._score, self._until = ask, watch, score, until
    self.clock.begin_rollout()
    free, self.samples = self.backend.shapes.free_pages(), self.backend.samples(requests)
    self.running = running_lib.Running(requests, free, self.samples)
    self.backend.begin(self.running)
    self.schedule = schedule_lib.Schedule(
      engine.options, self.running, self.clock, decide, grows=ask is not None
    )
    self.harvest: harvest_lib.Harvest | None = None
    if train:
      self.harvest = harvest_lib.Harvest(engine.spot, self.backend, self.schedule)
    self.gains: list[float | None] = []  # that the selector expected, per chunk
    self._ended = 0  # requests

  @property
  def elapsed_s(self) -> float:
    return self.clock.now() - self._began

  def run(self) -> samples_lib.Samples:
    """Draws the responses, and trains what is left to train."""
    with progress.shown(self._drawing):
      self._draw()
    self._finish()
    return self.samples

  def _drawing(self) -> str:
    left = int(self.running.live.sum()) + sum(map(len, self.schedule.queues))
    tokens = self.samples.drawn_tokens
    return (
      f"drawing responses, {self._ended:,} of {self._ended + left:,} ended, "
      f"{tokens:,} tokens"
    )

  def _draw(self) -> None:
    self._ask_more([])
    first_live = [min(len(q), self.engine.options.slots) for q in self.schedule.queues]
    self.samples.timeline.append((0.0, first_live))
    while not self.schedule.done:
      self._join()
      self.schedule.begin_chunk(self.backend.shapes.room.longest, *self._longer())
      try:
        self._seat()
        arm = self._choose()
        start_s, bucket, live = self.elapsed_s, self.running.bucket, self.running.live
        result = self._run_chunk(arm)
      except jax.errors.JaxRuntimeError as error:
        self._retry_with_less(error)
        continue
      self._book(arm, result)
      _log_first_tokens()
      ended = self.running.advance(result.emitted)
      self._ended += len(ended)
      self._keep(ended)
      record = _record(bucket, arm, live, result, start_s, self.elapsed_s)
      self.samples.note(record, self.running.live)
      if result.stop:
        self._abandon()
      if self._watch is not None:
        self._watch(self.samples, [e.request for e in ended])
      self._ask_more([e.request for e in ended])

  def _join(self) -> None:
    """Lets the schedule use the programs that are compiled by now."""
    programs = self.engine.programs
    count = self.schedule.decide("programs", lambda: programs.count)
    programs.wait(count)  # of a rollout to replay
    self.schedule.programs = programs.joined(count)

  def _ask_more(self, ended: list[int]) -> None:
    """Queues prompts, and pauses requests, now that these requests have ended."""
    if self._ask is not None:
      idle = self.schedule.done
      self.schedule.ask(self._ask(self.samples, ended, idle))
    if self._until is not None:
      bound = self._until(self.samples, ended)
      if bound is not None:
        self.schedule.pause(bound)

  @property
  def _harvests(self) -> bool:
    """Whether slices may train in the bucket that runs."""
    return self.harvest is not None and self.engine.trains_in(self.running.bucket)

  def _longer(self) -> tuple[int, float]:
    """Tokens and seconds of a longer chunk, where slices can train in it."""
    return self.harvest.long_chunk() if self._harvests else (0, 0.0)

  def _seat(self) -> None:
    """Seats requests until no more can be, in the smallest bucket that holds them.

    Several times where prompts have fewer rows than there are: each round computes some.
    """
    bucket, any_seated, more = self.running.bucket, False, True
    while more:
      work, more = self.schedule.seat()
      if more:
        self.backend.compute(self.engine.weights(self.params), work)
        any_seated = True
    self.running.take_pages(self.schedule.tokens)
    moved = any_seated or self.running.vacated or self.running.bucket != bucket
    self.backend.place(moved)
    self.running.vacated = False
    if moved:
      held = self.backend.peak_bytes()
      self.samples.peak_bytes = max(self.samples.peak_bytes, held)

  def _choose(self) -> clock_lib.Arm:
    """How the next chunk decodes."""
    if self.harvest is not None:
      self.harvest.exchange_if_due()
    return self.chooser.choose(self.schedule)

  def _run_chunk(self, arm: clock_lib.Arm) -> backend_lib.ChunkResult:
    trains = self._harvests and self.harvest.ready
    limits, steps = self.schedule.limits(arm, exact_steps=trains)
    if self._harvests:
      tried = self.engine.has_tried(self.running.bucket, arm)
      training = self.harvest.training(arm, steps, tried)
    else:
      training = self.engine.no_training(self.running.bucket)
    weights = self.engine.weights(self.params)
    result = self.backend.run(weights, arm, limits, training)
    self.samples.kv_tokens.append(self.running.kv_tokens)
    return result

  def _book(self, arm: clock_lib.Arm, result: backend_lib.ChunkResult) -> None:
    """Books a chunk with the clock, the trainer and the selector."""
    bucket, seconds = self.running.bucket, result.seconds
    live = int(max(self.running.live))
    self.gains.append(self.chooser.gain(arm, live, bucket))
    if self.harvest is not None and result.trained is not None:
      seconds = self.harvest.book(result)
    self.clock.book(
      bucket,
      arm,
      steps=result.steps,
      tokens=result.tokens,
      longest=int(result.emitted.count.max()),
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
    if self.engine.selector is not None:
      self.engine.selector.observe(seen)
    if self.harvest is not None:
      self.harvest.observe(seen, self.chooser)

  def _keep(self, ended: list[running_lib.Ended]) -> None:
    """Passes ended requests to the features, the sources of drafts and the trainer."""
    requests, samples = self.running.requests, self.samples
    for e in ended:
      if samples.features is not None:
        samples.features[e.request] = self.backend.features_of(e.request)
      self.backend.finished(requests.prompt(e.request), samples.response(e.request))
    if self.harvest is not None:
      self.harvest.store(ended)

  def _retry_with_less(self, error: Exception) -> None:
    """Sends what runs back to the queues, for smaller buckets; raises other errors.

    Other processes of the job would wait for this one: there, it is an error as well.
    """
    if not pool_lib.is_out_of_memory(error) or processes.count() > 1:
      raise error
    self._drop()
    self.engine.programs.wait()
    bucket = self.schedule.out_of_memory()
    logging.warning(
      "out of memory with %d slots a slice; going on with less, no request is lost", bucket
    )

  def _abandon(self) -> NoReturn:
    """Ends the rollout, because the job is to stop; the drafter keeps what it learnt."""
    self._drop()
    if self.harvest is not None:
      self.harvest.abandon()
    raise processes.Stopped

  def _drop(self) -> None:
    """Frees what the requests have on the devices."""
    self.running.pages.clear()
    self.backend.free()

  def _finish(self) -> None:
    """Frees the devices, trains what is left to train, and sums up."""
    self._drop()  # what trains now needs the room
    rollout_s = self.elapsed_s
    scoring = None if self._score is None else self._score(self.samples)
    stops = self.running.requests.stop_tokens.shape[1]
    self.engine.try_training(self.params, stops)
    if self.harvest is not None:
      self.engine.programs.wait_for_later()
      with progress.shown("training the drafter after a rollout"):
        self.harvest.finish(self.params, rollout_s, scoring)
    self.schedule.decide.finish()
    self.samples.decisions = self.schedule.decide.log
    self.samples.gain = self.chooser.gains(self.gains, self.samples)


def _record(
  bucket: int,
  arm: clock_lib.Arm,
  live: np.ndarray,
  result: backend_lib.ChunkResult,
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


def _check(options: options_lib.Options, requests: requests_lib.Requests) -> None:
  """Raises `RequestError` for what cannot be run."""
  for i, prompt in enumerate(requests.prompts):
    if len(prompt) > options.max_prompt:
      raise requests_lib.RequestError(
        f"prompt {i} has {len(prompt)} tokens, the rollout takes at most "
        f"{options.max_prompt}; raise max_prompt or drop the prompt"
      )
  filtered = (requests.top_k > 0) | (requests.top_p < 1) | (requests.min_p > 0)
  if filtered.any() and not options.filters:
    raise requests_lib.RequestError(
      "some requests have top_k, top_p or min_p, which the option filters=False excludes"
    )
  over = np.flatnonzero(requests.total_length > options.max_length)
  if len(over):
    i = int(over[0])
    raise requests_lib.RequestError(
      f"prompt {requests.prompt_idx[i]} and its response need "
      f"{requests.total_length[i]} tokens, the KV cache holds {options.max_length}; "
      "raise max_length or lower the response limit"
    )


@contextlib.contextmanager
def _unless_out_of_memory(bucket: int) -> Iterator[None]:
  """Leaves out what does not fit; a rollout continues with smaller buckets then."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if not pool_lib.is_out_of_memory(e) or processes.count() > 1:
      raise
    logging.warning("no memory to try %d slots a slice", bucket)
