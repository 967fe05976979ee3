"""A rollout: requests in, responses out, through slots that are kept busy.

The host looks only between chunks: it fills free slots from each slice's queue,
picks the smallest compiled program that holds what runs, starts a chunk and reads
what the chunk emitted. What it decides (see `schedule`) follows from replicated
values, so that every process decides the same.

A prompt is prefilled once, into a bounded store, and its KV copied to the slots of
its requests. Everything on the devices but the parameters is freed at the end.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax import programs
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import pages as features_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.rollout import harvest as harvest_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import ngram
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

Options = schedule_lib.Options
grid = schedule_lib.grid
ladder = schedule_lib.ladder


class Rollout:
  """See `make`."""

  def __init__(self, config, mesh, options, drafter, policy, verification, spot):
    self.config: config_lib.ModelConfig = config
    self.mesh: jax.sharding.Mesh = mesh
    self.options: Options = options
    self.drafter: drafter_lib.DrafterConfig | None = drafter
    self.policy: strategy_lib.Policy | None = policy
    self.spot: spot_lib.Spot | None = spot
    self._program_of = functools.partial(speculate.name, verification=verification)
    self.pool = programs.Pool(options.budget)
    self._slices = mesh.shape[axes.DATA]
    self._stop_tokens = 1  # E, of the requests at hand
    self._step_s, self._step_tokens = {}, {}  # what `schedule.Costs` knows so far
    self._keep = decode.Keep(config.width) if options.features else None
    if drafter is not None:
      self._keep = speculate.keep(drafter, train=spot is not None)
    width = options.chunk if spot is None else max(options.chunk, spot.options.chunk)
    self._programs = decode.make_programs(
      config, mesh, width, self._keep, options.rebalance
    )
    # Slots for draft nodes behind the longest sequence; see `speculate`.
    self._scratch, self._longest = 0, 1
    self._memory = None  # of earlier responses, if n-grams are looked up in them
    self._unseen: strategy_lib.Observation | None = None
    if policy is not None:
      if any(s.source == strategy_lib.NGRAM for s in policy.strategies):
        self._memory = ngram.Memory(options.memory_tokens)
      room = speculate.Room.of(policy.strategies)
      self._scratch, self._longest = room.target, room.longest
      args = (width, policy.strategies, room, self._keep, verification)
      self._programs |= speculate.make_programs(config, drafter, mesh, *args)
      if spot is not None:
        fused = (spot.trainer, width, policy.strategies, room, verification)
        self._programs |= spot_lib.make_programs(*fused)

  def __call__(
    self,
    params,
    requests: requests_lib.Requests,
    draft_params=None,
    on_chunk: Callable[[float, list[int]], None] | None = None,
    train: bool = False,
    decide: schedule_lib.Decisions | None = None,
  ) -> requests_lib.Samples:
    """Runs all requests to their end.

    A bucket whose program runs out of memory is not used again by this rollout;
    its requests start over in smaller ones, and draw the same tokens.

    Args:
      params: the target's, laid out by `axes.ROLLOUT`
      draft_params: the drafter's, if there is one; with spot training they are its own
      on_chunk: told seconds since the start and live requests per slice
      train: whether idle slices train the drafter (see `spot`)
      decide: to follow the `Samples.decisions` of an earlier rollout, whose drafter was
        trained alike
    Raises:
      RequestError: a request does not fit the options
      MemoryError: not even the smallest bucket fits
      ValueError: the decisions to follow are of another rollout
    """
    self._check(requests)
    if train and self.spot is None:
      raise ValueError("this rollout has no spot training; see `make`")
    self._stop_tokens = requests.stop_tokens.shape[1]
    began = time.perf_counter()
    costs = schedule_lib.Costs(self._step_s, self._step_tokens)
    self._unseen = None  # the last chunk, until every process knows how long it took
    args = (self.options, requests, self._slices, costs, decide)
    schedule = schedule_lib.Schedule.start(*args)
    samples, harvest = self._empty_samples(schedule), None
    if train:
      args = (self.spot, schedule, samples, self._run, self._place)
      harvest = harvest_lib.Harvest(*args)
    slots, store, state, predicted = None, None, None, []
    while not schedule.done:
      if store is None:
        store = self._new_store()
      trains = harvest is not None and self._trains(schedule.bucket)
      schedule.begin_chunk(self._longest, *(harvest.long_chunk() if trains else ()))
      if schedule.bucket is None:
        slots = None
      admissions, changed = [], False
      try:
        while True:
          admissions, prefills = schedule.admit()
          bucket = schedule.fit(admissions)
          changed |= bucket != schedule.bucket or bool(admissions)
          slots = self._fit(schedule, slots, bucket)
          if not admissions:
            break
          store = self._prefill(params, store, prefills, requests)
          slots = self._admit(schedule, slots, store, admissions)
        if changed:
          state = None
          held = programs.live_bytes() + self.pool.temp_bytes
          samples.peak_bytes = max(samples.peak_bytes, held)
        else:  # new slots have them already
          slots = slots.replace(features=self._paged(schedule, slots.features))
        if harvest and self._trains(bucket):
          harvest.measure(params)
        if self.spot is not None:
          draft_params = self.spot.params
        strategy = self._strategy(schedule)
        if strategy is None:
          state = None
        elif strategy.source == strategy_lib.NGRAM:
          state = self._corpus(schedule, samples)
        elif not isinstance(state, draft_lib.DraftState):
          state = self._fill(params, draft_params, schedule, slots, samples)
        if strategy is not None and hasattr(self.policy, "gain"):
          predicted.append(self.policy.gain(int(max(schedule.live)), bucket, strategy))
        started, live = time.perf_counter() - began, schedule.live.tolist()
        args = (params, draft_params, schedule, slots, state, strategy, harvest)
        slots, state, emitted, trained = self._chunk(*args)
      except jax.errors.JaxRuntimeError as e:
        if not programs.is_out_of_memory(e):
          raise
        slots = store = state = None
        schedule.out_of_memory(bucket, admissions)
        logging.warning(
          "out of memory with %d slots of %d tokens a slice; going on with less, "
          "no request is lost",
          *bucket,
        )
        continue
      finished = self._book(schedule, samples, emitted, slots)
      if harvest:
        harvest.store(slots, finished)
      seconds = time.perf_counter() - began
      samples.chunks.append(
        requests_lib.Chunk(
          *(started, seconds, *bucket),
          strategy="off" if strategy is None else str(strategy),
          live=live,
          steps=emitted.steps.tolist(),
          trained=trained,
          tokens=self._unseen.tokens,
          passes=self._unseen.passes,
        )
      )
      samples.timeline.append((seconds, schedule.live.tolist()))
      if on_chunk:
        on_chunk(*samples.timeline[-1])
    slots = store = state = None  # what trains now needs the room
    if harvest:
      harvest.finish(params, time.perf_counter() - began)
    schedule.decide.finish()
    samples.decisions = schedule.decide.log
    if self.policy is not None and self._unseen is not None:  # the last chunk
      self.policy.observe(dataclasses.replace(self._unseen, seconds=costs.chunk_s))
    if predicted:
      samples.gain = {
        "predicted_gain": float(np.mean(predicted)),
        **self._realised(samples),
      }
    return samples

  def _realised(self, samples) -> dict[str, float]:
    """What the chunks that speculated gained, by a plain step's time; see `Samples`."""
    plain_s = chunk_s = 0.0
    for c in samples.chunks:
      step_s = self.policy.step_s(schedule_lib.Bucket(c.batch, c.length), None)
      if c.strategy != "off" and c.passes and step_s:
        plain_s += c.tokens / (c.passes / max(c.steps)) * step_s
        chunk_s += c.end_s - c.start_s
    if not chunk_s:
      return {}
    return {"realised_gain": plain_s / chunk_s, "saved_s": plain_s - chunk_s}

  def compile(self, params, stop_tokens: int, draft_params=None) -> None:
    """Compiles every program a rollout of these options can need, ahead of time.

    Buckets for which the budget is too small are left out; larger ones serve. Programs
    that speculate in the others are beyond it.

    Args:
      params: the target's, or their shapes and shardings; draft_params likewise
      stop_tokens: E, stop tokens per request (`Requests.stop_tokens`)
    """
    o, self._stop_tokens = self.options, stop_tokens
    store, row = self._abstract_store(), lambda b: self._abstract(b, np.int32)
    self._get("prefill", (), params, store, *self._abstract_prefill())
    features = self._abstract_slots(o.buckets[0]).features
    if features is not None and o.rebalance and self._slices > 1:
      of_one = np.zeros(o.features_sizes.most, np.int32)
      self._get("move_features", (), features.data, of_one, of_one)
    if self.spot is not None:
      draft_params, rows = self.spot.params, self.spot.rows()
      args = (params, self.spot.state, self.spot.pending, rows, np.int32(1))
      self._get("train", (), *args)
      if self.spot.trainer.shadow:
        self._get("judge", (), params, draft_params, self.spot.state.params, rows)
      pieces = row(self.spot.most_pieces(o.slots, o.max_length))
      pieces = pieces.update(shape=(*pieces.shape, 4 + o.features_sizes.most))
      self._get("store", (), self.spot.features, features.data, pieces, row(1))
    ready, whatever = [], len(self.pool)  # programs, whatever the bucket
    # The largest first: it can stand in for every other.
    for bucket in sorted(o.buckets, key=lambda b: (b.length, b.batch), reverse=True):
      chosen = dataclasses.replace(o, buckets=(*ready, bucket))
      admits = schedule_lib.Schedule.start(chosen, _NO_REQUESTS, 1).admitting
      total = whatever + len(chosen.buckets) + len(admits) + len(chosen.edges)
      if ready and not self.pool.has_room(total - len(self.pool)):
        logging.warning("no room for the programs of %d slots x %d tokens", *bucket)
        continue
      ready.append(bucket)
      slots = self._abstract_slots(bucket)
      one, seconds = np.int32(1), self._abstract(1, np.float32)
      self._compile_chunk(bucket, params, draft_params, None, (slots, one, seconds))
      if bucket in admits:
        args = (slots.kv, slots.features, store, row(bucket.batch))
        self._get("admit", bucket, *args)
    self.options = dataclasses.replace(o, buckets=tuple(ready))
    for bucket in self.options.buckets if self.policy is not None else ():
      self._compile_speculation(params, draft_params, bucket)
    for start, goal in self.options.edges:
      length = goal.length + self._scratch
      args = (self._abstract_slots(start).kv[0], row(goal.batch))
      self._get("resize", (*start, *goal), *args, length=length)

  def _compile_chunk(self, bucket, params, draft_params, strategy, args):
    name, args = self._chunk_program(strategy, bucket, params, draft_params, args)
    run = self._get(name, bucket, *args)
    exist = isinstance(jax.tree.leaves(params)[0], jax.Array)
    if self._trains(bucket) and exist and self.options.allows(bucket):
      with _unless_out_of_memory(bucket):
        self._warm_up(run, args)

  def _warm_up(self, run, args):
    """Runs a program that trains, on nothing: it changes nothing.

    The first time that a slice trains it takes 0.2 s longer on XLA's CPU, per program;
    the slices that decode would wait.
    """
    zeros = lambda x: (
      jnp.zeros(x.shape, x.dtype, device=x.sharding)
      if isinstance(x, jax.ShapeDtypeStruct)
      else x
    )
    *trained, _, _, _ = args[:7]
    rest = jax.tree.map(zeros, args[7:])
    one = np.int32(1)
    jax.block_until_ready(run(*trained, self.spot.one_row(), one, one, *rest))

  def _compile_speculation(self, params, draft_params, bucket):
    """The programs of every strategy that may run in a bucket."""
    schedule = schedule_lib.Schedule.start(self.options, _NO_REQUESTS, 1)
    chosen = self._strategies(schedule, bucket)
    slots = self._abstract_slots(bucket)
    one, seconds = np.int32(1), self._abstract(1, np.float32)
    by_ngram = {s for s in chosen if s.source == strategy_lib.NGRAM}
    if by_ngram:
      rows = self._abstract(bucket.batch + self.options.memory_rows, np.int32)
      length = bucket.length + self._scratch
      corpus = ngram.Corpus(rows.update(shape=(*rows.shape, length)), rows, rows)
    for s in sorted(by_ngram):
      args = (slots, corpus, one, one, one, seconds)
      self._compile_chunk(bucket, params, (), s, args)
    chosen -= by_ngram
    if chosen:
      position = slots.position
      following = position.update(shape=(*position.shape, slots.kv[0].length))
      args = (params, draft_params, slots.features, following, position)
      self._get("fill", bucket, *args)
      state = jax.eval_shape(self._programs["fill"], *args)
      shardings = speculate.state_shardings(self.mesh, self.drafter)
      state = jax.tree.map(lambda x, s: x.update(sharding=s), state, shardings)
      for s in sorted(chosen):
        args = (slots, state, one, one, one, seconds)
        self._compile_chunk(bucket, params, draft_params, s, args)

  def time_step(
    self, params, bucket: tuple[int, int], draft_params=None, strategy=None
  ) -> float:
    """Seconds of a step, over a chunk with all slots of a bucket live, none finishing.

    The caches are as full as a chunk leaves room for.
    """
    schedule, slots = self._full(bucket)
    state = None
    if strategy is not None and strategy.source == strategy_lib.NGRAM:
      state = self._corpus(schedule, self._empty_samples(schedule))
    elif strategy is not None:
      args = (schedule, slots, self._empty_samples(schedule))
      state = self._fill(params, draft_params, *args)
    args = (params, draft_params, schedule, slots, state, strategy, None)
    *_, emitted, _ = self._chunk(*args)
    return schedule.costs.chunk_s / max(int(emitted.steps.max()), 1)

  def measure(self, params, draft_params=None) -> None:
    """Tells a policy what the steps of its arms take, where it wants to know.

    A short chunk for each arm and bucket; what is drawn meanwhile means nothing.
    """
    if not hasattr(self.policy, "measured"):
      return
    if self.spot is not None:
      draft_params = self.spot.params
    empty = schedule_lib.Schedule.start(self.options, _NO_REQUESTS, 1)
    for bucket in filter(self.options.allows, self.options.buckets):
      chosen = self._strategies(empty, bucket)
      for strategy in (None, *sorted(chosen)) if chosen else ():
        with _unless_out_of_memory(bucket):
          for _ in range(2):  # the first time is slower
            seconds = self.time_step(params, bucket, draft_params, strategy)
          self.policy.measured(bucket, strategy, seconds)
    self._unseen = None

  def time_fill(self, params, draft_params, bucket: tuple[int, int]) -> float:
    """Seconds that it takes to switch speculation on, in the same situation."""
    schedule, slots = self._full(bucket)
    samples = self._empty_samples(schedule)
    fill = lambda: self._fill(params, draft_params, schedule, slots, samples)
    jax.block_until_ready(fill())  # compiling is not timed
    began = time.perf_counter()
    jax.block_until_ready(fill())
    return time.perf_counter() - began

  def _full(self, bucket):
    n, B = self.options.chunk, bucket[0] * self._slices
    requests = requests_lib.make_requests(
      [[1]] * B,
      max_tokens=bucket[1] - 1,
      stop_tokens=np.full((B, self._stop_tokens), -1, np.int32),
    )
    schedule = schedule_lib.Schedule.start(self.options, requests, self._slices)
    schedule.drawn[:] = bucket[1] - 1 - n
    slots = self._fit(schedule, None, schedule_lib.Bucket(*bucket))
    schedule.owner = np.arange(B, dtype=np.int32).reshape(schedule.owner.shape)
    return schedule, self._new_slots(schedule, slots.kv, slots.features)

  def _get(self, name: str, key: tuple, *args, **static):
    key = (*key, self._stop_tokens)
    return self.pool.get(name, key, self._programs[name], *args, **static)

  def _run(self, name: str, key: tuple, *args, **static):
    return self._get(name, key, *args, **static)(*args)

  def _trains(self, bucket: schedule_lib.Bucket | None) -> bool:
    """Whether slices that run dry in chunks of a bucket train."""
    if self.spot is None or self._slices == 1 or bucket is None:
      return False
    return bucket[0] <= (self.spot.options.slots or bucket[0])

  def _strategies(self, schedule, bucket) -> set[strategy_lib.Strategy]:
    """What may run in a bucket: what is chosen for live batches that just fit it."""
    fits = lambda live: schedule.choose(live, bucket.length) == bucket
    live = filter(fits, range(1, bucket.batch + 1))
    return {arm for n in live for arm in self.policy.arms(n)} - {None}

  def _strategy(self, schedule) -> strategy_lib.Strategy | None:
    """How the next chunk decodes.

    Plainly where few requests have just been admitted into many slots, whose programs
    may not speculate: the next chunk has a smaller bucket.
    """
    if self.policy is None:
      return None
    live, bucket = int(max(schedule.live)), schedule.bucket
    arms, fits = self.policy.arms(live), schedule.choose(live, bucket.length) == bucket
    # What is learnt by the clock is a decision of the clock; its name tells the arms.
    index = lambda: arms.index(self.policy.choose(live, bucket))
    named = "strategy of " + ", ".join(map(strategy_lib.name, arms))
    chosen = arms[schedule.decide(named, index) if len(arms) > 1 else 0]
    return chosen if fits or chosen in self._strategies(schedule, bucket) else None

  def _chunk_program(self, strategy, bucket, params, draft_params, args, quota=(0, 1)):
    """The program of a chunk in a bucket, and all its arguments.

    Args:
      args: of `decode.make_chunk` or `speculate.make_chunk`, without parameters
      quota: most and expected of a fused one (see `spot.Trainer.fuse`)
    """
    name = "chunk" if strategy is None else self._program_of(strategy)
    if self._trains(bucket):
      quota = map(np.int32, quota)
      trained = (self.spot.state, self.spot.pending, self.spot.rows(), *quota)
      return "train_" + name, (params, self.spot.params, *trained, *args)
    if strategy is None:
      return name, (params, *args)
    if strategy.source == strategy_lib.NGRAM:
      draft_params = ()
    return name, (params, draft_params, *args)

  def _chunk(self, params, draft_params, schedule, slots, state, strategy, harvest):
    """Runs a chunk, and books its time.

    Returns:
      the slots; the drafter's state; what was emitted, on the host; and the
      micro-batches that each slice trained
    """
    costs, bucket = schedule.costs, schedule.bucket
    steps, args = schedule.tokens, (slots,)
    if strategy is not None:
      within = lambda: schedule.steps_within(bucket, strategy)
      steps = schedule.decide("steps", within)
      args = (slots, state, np.int32(strategy.depth), np.int32(steps))
    seconds = self._place(np.full((self._slices, 1), costs.chunk_s, np.float32))
    args = (*args, np.int32(schedule.tokens), seconds)
    trains, quota = self._trains(bucket), (0, 1)
    if harvest and trains:
      quota = harvest.quota(bucket, strategy, steps)
    name, args = self._chunk_program(strategy, bucket, params, draft_params, args, quota)
    self._get(name, bucket, *args)  # compiling is not timed
    began = time.perf_counter()
    out = self._run(name, bucket, *args)
    new, trained, *out = (out[:2], *out[2:]) if trains else (None, None, *out)
    *carried, emitted = out
    emitted, trained = jax.device_get((emitted, trained))
    took = time.perf_counter() - began
    seconds = float(emitted.seconds.max())  # of the chunk before
    costs.book(seconds)
    if self.policy is not None and self._unseen is not None:
      self.policy.observe(dataclasses.replace(self._unseen, seconds=seconds))
    steps, tokens = int(emitted.steps.max()), int(emitted.count.sum())
    if trains:
      self.spot.state, self.spot.pending = new
    if harvest and trains:
      decoding_s = steps * costs.seconds_of_step(bucket, strategy)
      took = harvest.book(trained, steps, decoding_s, took)
    costs.done(bucket, strategy, steps, tokens, int(emitted.count.max()), took)
    # A pass over a live request gives a token, or more where one drafts.
    accepted = () if strategy is None else emitted.accepted.sum(0).tolist()
    passes = tokens if strategy is None else accepted[0]
    self._unseen = strategy_lib.Observation(
      *(int(max(schedule.live)), bucket, strategy, steps, tokens, passes, accepted)
    )
    slots, state = (*carried, None)[:2]
    trained = trained.micro_batches.tolist() if trains else [0] * self._slices
    return slots, state, emitted, trained

  def _fill(self, params, draft_params, schedule, slots, samples):
    """The drafter's state for all slots, from the features that were kept."""
    following = np.zeros((*schedule.owner.shape, slots.kv[0].length), np.int32)
    for s, slot in zip(*np.nonzero(schedule.owner >= 0), strict=True):
      i = schedule.owner[s, slot]
      known = np.concatenate([schedule.requests.prompt(i), samples.response(i)])
      following[s, slot, : len(known) - 1] = known[1:]
    args = (slots.features, self._place(following), slots.position)
    return self._run("fill", schedule.bucket, params, draft_params, *args)

  def _corpus(self, schedule, samples):
    """What n-grams are looked up in: the slots' own sequences, and earlier ones."""
    S = schedule.bucket.length + self._scratch
    slices = []
    for row in schedule.owner:
      prompts, own = {}, []
      for i in row:
        if i < 0:
          own.append((-1, np.zeros(0, np.int32)))
          continue
        group, prompt = int(schedule.requests.prompt_idx[i]), schedule.requests.prompt(i)
        prompts[group] = prompt
        own.append((group, np.concatenate([prompt, samples.response(i)])))
      others = self._memory.rows_for(prompts, self.options.memory_rows, S)
      mine = ngram.make_rows(own, len(own), S)
      slices.append(jax.tree.map(lambda a, b: np.concatenate([a, b]), mine, others))
    stacked = jax.tree.map(lambda *x: np.stack(x), *slices)
    return jax.tree.map(self._place, stacked)

  def _check(self, requests):
    o = self.options
    for i, prompt in enumerate(requests.prompts):
      if len(prompt) > o.max_prompt:
        raise requests_lib.RequestError(
          f"prompt {i} has {len(prompt)} tokens, the rollout takes at most "
          f"{o.max_prompt}; raise max_prompt or drop the prompt"
        )
    over = np.flatnonzero(requests.total_length > o.max_length)
    if len(over):
      i = int(over[0])
      raise requests_lib.RequestError(
        f"prompt {requests.prompt_idx[i]} and its response need "
        f"{requests.total_length[i]} tokens, the KV cache holds {o.max_length}; "
        "raise max_length or lower the response limit"
      )

  def _empty_samples(self, schedule) -> requests_lib.Samples:
    B = len(schedule.requests)
    T = int(max(schedule.requests.max_tokens, default=0))
    zeros = lambda dtype: np.zeros((B, T), dtype)
    return requests_lib.Samples(
      tokens=zeros(np.int32),
      length=schedule.drawn,
      logp=zeros(np.float32),
      logp_filtered=zeros(np.float32),
      finish_reason=np.zeros(B, np.int32),
      features=[None] * B if self.options.features else None,
      accepted=np.zeros(speculate.Room.of(self.policy.strategies).longest, np.int64)
      if self.policy
      else None,
      timeline=[(0.0, [min(len(q), self.options.slots) for q in schedule.queues])],
    )

  def _abstract_store(self) -> decode.Context:
    rows, length = self.options.prompt_rows, self.options.max_prompt
    return decode.abstract_store(self.mesh, self.config, rows, length, self._keep)

  def _new_store(self) -> decode.Context:
    return decode.zeros(self._abstract_store())

  def _abstract_slots(self, bucket) -> decode.Slots:
    return decode.abstract_slots(
      *(self.mesh, self.config, bucket.batch, bucket.length + self._scratch),
      *(self._stop_tokens, self._keep, self.options.features_sizes),
    )

  def _place(self, x: np.ndarray) -> jax.Array:
    return decode.place(self.mesh, x)

  def _abstract(self, size: int, dtype) -> jax.ShapeDtypeStruct:
    """Shape of a [slices * size] array over the slices."""
    over = axes.sharding(self.mesh, axes.DATA)
    return jax.ShapeDtypeStruct((self._slices * size,), dtype, sharding=over)

  def _fit(self, schedule, slots, bucket) -> decode.Slots:
    """Brings the slots into a bucket, layer by layer: only one layer exists twice."""
    if slots is None:
      schedule.bucket = bucket
      schedule.owner = np.full((self._slices, bucket.batch), -1, np.int32)
      empty = self._abstract_slots(bucket)
      if empty.features is not None:
        schedule.pages = features_lib.Pages(self._slices, self.options.features_sizes)
      return self._new_slots(schedule, *decode.zeros((empty.kv, empty.features)))
    for goal in self.options.path(schedule.bucket, bucket):
      row = self._place(schedule.move(goal.batch))
      kv, features = list(slots.kv), slots.features
      slots, key = None, (*schedule.bucket, *goal)
      length = goal.length + self._scratch
      for i in range(len(kv)):
        # Not queued: only one layer is to exist twice; and where rows change slices,
        # XLA's CPU devices can deadlock in collectives of several queued programs.
        kv[i] = self._run("resize", key, kv[i], row, length=length)
        jax.block_until_ready(kv[i])
      schedule.bucket = goal
      slots = self._new_slots(schedule, tuple(kv), features)
    return slots

  def _paged(self, schedule, features) -> features_lib.Features | None:
    """Kept features with the pages that the requests in slots have from now on."""
    if features is None:
      return None
    data = features.data
    for source, goal in schedule.assign_pages():
      data = self._run("move_features", (), data, source, goal)
      jax.block_until_ready(data)  # not queued either
    page = self._place(schedule.pages.table(schedule.owner))
    return features_lib.Features(data, page)

  def _new_slots(self, schedule, kv, features) -> decode.Slots:
    """The slots' requests as the host knows them, with their KV and features."""
    r, free = schedule.requests, schedule.owner < 0
    of = lambda x: self._place(x[np.where(free, 0, schedule.owner)])
    left = (r.max_tokens - schedule.drawn).astype(np.int32)
    return decode.Slots(
      pending=of(schedule.pending),
      position=of(schedule.position.astype(np.int32)),
      remaining=self._place(np.where(free, 0, left[schedule.owner])),
      stop_tokens=of(r.stop_tokens),
      sampling=sampling_lib.Sampling(
        **{
          f.name: of(getattr(r, f.name)) for f in dataclasses.fields(sampling_lib.Sampling)
        }
      ),
      kv=kv,
      features=self._paged(schedule, features),
    )

  def _prefill_shape(self) -> tuple[int, int, int]:
    o = self.options
    return self._slices, o.prefill_rows, min(o.prefill_block, o.max_prompt)

  def _abstract_prefill(self):
    """Shapes of a prefill's tokens, start and row."""
    _, rows, block = self._prefill_shape()
    i32 = self._abstract(rows, np.int32)
    return i32.update(shape=(*i32.shape, block)), i32, i32

  def _prefill(self, params, store, prefills, requests) -> decode.Context:
    """Computes the KV of new prompts, a block of tokens of some rows at a time."""
    slices, width, block = self._prefill_shape()
    waiting = [[p for p in prefills if p.slice == s] for s in range(slices)]
    while any(waiting):
      now = [queue[:width] for queue in waiting]
      waiting = [queue[width:] for queue in waiting]
      longest = max(len(requests.prompts[p.prompt]) for queue in now for p in queue)
      # The last token stays pending: its KV is computed with the first draw.
      for start in range(0, longest - 1, block):
        tokens = np.zeros((slices, width, block), np.int32)
        row = np.full((slices, width), self.options.prompt_rows, np.int32)
        for s, queue in enumerate(now):
          for j, p in enumerate(queue):
            part = requests.prompts[p.prompt][start : start + block]
            tokens[s, j, : len(part)] = part
            row[s, j] = p.row
        starts = np.full(row.shape, start, np.int32)
        args = (self._place(x) for x in (tokens, starts, row))
        store = self._run("prefill", (), params, store, *args)
    return store

  def _admit(self, schedule, slots, store, admissions) -> decode.Slots:
    row = np.full(schedule.owner.shape, -1, np.int32)
    for a in admissions:
      slot = int(np.argmax(schedule.owner[a.slice] < 0))
      schedule.owner[a.slice, slot] = a.request
      row[a.slice, slot] = a.row
    features = self._paged(schedule, slots.features)
    args = (slots.kv, features, store, self._place(row))
    return self._new_slots(schedule, *self._run("admit", schedule.bucket, *args))

  def _book(self, schedule, samples, emitted: decode.Emitted, slots) -> list[int]:
    """Books what a chunk drew, frees the slots of the requests that finished: these."""
    owner, finished = schedule.owner.reshape(-1), []
    samples.computed_tokens += int(emitted.steps.sum()) * schedule.bucket.batch
    if emitted.accepted is not None:
      samples.accepted += emitted.accepted.sum(0)
    for slot in np.flatnonzero(owner >= 0):
      i = owner[slot]
      count, start = int(emitted.count[slot]), int(samples.length[i])
      for name in ("tokens", "logp", "logp_filtered"):
        drawn = getattr(emitted, name)[slot, :count]
        getattr(samples, name)[i, start : start + count] = drawn
      samples.length[i] += count
      schedule.pending[i] = samples.tokens[i, start + count - 1]
      if emitted.remaining[slot] == 0:
        stopped = samples.tokens[i, start + count - 1] in schedule.requests.stop_tokens[i]
        samples.finish_reason[i] = requests_lib.STOP if stopped else requests_lib.LENGTH
        if samples.features is not None:
          known = int(schedule.position[i])
          where = schedule.pages.where(int(i), known)  # whole pages: of few shapes
          samples.features[i] = np.asarray(slots.features.data[where])[:known]
        owner[slot] = -1
        finished.append(int(i))
        if self._memory is not None:
          self._memory.add(schedule.requests.prompt(i), samples.response(i))
    return finished


@contextlib.contextmanager
def _unless_out_of_memory(bucket):
  """Leaves out what does not fit; a rollout goes on with smaller buckets then."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if not programs.is_out_of_memory(e):
      raise
    logging.warning("no memory to try %d slots of %d tokens a slice", *bucket)


_NO_REQUESTS = requests_lib.make_requests([], max_tokens=1)


def make(
  config: config_lib.ModelConfig,
  mesh,
  options: Options,
  drafter: drafter_lib.DrafterConfig | None = None,
  policy: strategy_lib.Policy | None = None,
  verification: str = speculate.COUPLED,
  spot: spot_lib.Spot | None = None,
) -> Rollout:
  """A rollout function `(params, requests, draft_params) -> samples`.

  Programs are compiled by `compile`, or when a bucket is first used.

  Args:
    drafter, policy: for speculative decoding: what drafts, and how and when.
    verification: "coupled" or "likeliest", with which none of this changes a token, or
      "rejection", which keeps their distribution only; see `speculate`
    spot: what trains the drafter meanwhile; its parameters are the drafter's then
  """
  if verification not in speculate.VERIFICATIONS:
    raise ValueError(
      f"verification is one of {', '.join(speculate.VERIFICATIONS)}, not {verification!r}"
    )
  strategies = policy.strategies if policy is not None else ()
  models = [s for s in strategies if s.source == strategy_lib.MODEL]
  if drafter is None and models:
    raise ValueError(f"strategy {models[0]} needs a drafter")
  if drafter is not None and policy is None:
    raise ValueError("a drafter needs a policy that says when it drafts")
  deepest = max((s.depth for s in strategies), default=0)
  if deepest + 1 > options.chunk:
    raise ValueError(
      f"a chunk of {options.chunk} tokens has no room for a strategy of depth {deepest}"
    )
  if spot is not None and (drafter is None or spot.trainer.longest < options.max_length):
    raise ValueError(
      f"spot training needs a drafter, and positions for {options.max_length} tokens"
    )
  return Rollout(config, mesh, options, drafter, policy, verification, spot)
