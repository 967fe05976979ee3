"""A rollout: requests in, responses out, through slots that are kept busy.

The host looks only between chunks: it fills free slots from each slice's queue,
picks the smallest compiled program that holds what runs, starts a chunk and reads
what the chunk emitted. What it decides (see `schedule`) follows from replicated
values, so that every process decides the same.

A prompt is prefilled once, into a bounded store, and its KV copied to the slots of
its requests. Everything on the devices but the parameters is freed at the end.
"""

from collections.abc import Callable
import dataclasses
import logging
import time

import jax
import numpy as np

from tlt_jax import axes
from tlt_jax import programs
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode import decode
from tlt_jax.spec_decode import requests as requests_lib
from tlt_jax.spec_decode import sampling as sampling_lib
from tlt_jax.spec_decode import schedule as schedule_lib

Options = schedule_lib.Options


class Rollout:
  """See `make`."""

  def __init__(self, config, mesh, options):
    self.config: config_lib.ModelConfig = config
    self.mesh: jax.sharding.Mesh = mesh
    self.options: Options = options
    self.pool = programs.Pool()
    self._slices = mesh.shape[axes.DATA]
    self._width = np.int32(options.chunk)
    self._programs = decode.make_programs(
      config, mesh, options.chunk, options.features, options.rebalance
    )

  def __call__(
    self,
    params,
    requests: requests_lib.Requests,
    on_chunk: Callable[[float, list[int]], None] | None = None,
  ) -> requests_lib.Samples:
    """Runs all requests to their end.

    A bucket whose program runs out of memory is not used again by this rollout;
    its requests start over in smaller ones, and draw the same tokens.

    Args:
      params: the target's, laid out by `axes.ROLLOUT`
      on_chunk: told seconds since the start and live requests per slice
    Raises:
      RequestError: a request does not fit the options
      MemoryError: not even the smallest bucket fits
    """
    self._check(requests)
    began = time.perf_counter()
    schedule = schedule_lib.Schedule.start(self.options, requests, self._slices)
    samples = self._empty_samples(schedule)
    slots = store = None
    while not schedule.done:
      if store is None:
        store = self._new_context(self.options.prompt_rows, self.options.max_prompt)
      schedule.preempt()
      admissions, prefills = schedule.admit()
      bucket = schedule.fit(admissions)
      try:
        if admissions:
          slots = self._fit(schedule, slots, bucket)
          store = self._prefill(params, store, prefills, requests)
          slots = self._admit(schedule, slots, store, admissions)
          bucket = schedule.fit([])
        if bucket != schedule.bucket or admissions:
          slots = self._fit(schedule, slots, bucket)
          held = programs.live_bytes() + self.pool.temp_bytes
          samples.peak_bytes = max(samples.peak_bytes, held)
        slots, emitted = self._run("chunk", bucket, params, slots, self._width)
        emitted = jax.device_get(emitted)
      except jax.errors.JaxRuntimeError as e:
        if not programs.is_out_of_memory(e):
          raise
        slots = store = None
        schedule.out_of_memory(bucket, admissions)
        logging.warning(
          "out of memory with %d slots of %d tokens a slice; going on with less, "
          "no request is lost",
          *bucket,
        )
        continue
      self._book(schedule, samples, emitted, slots)
      seconds, live = time.perf_counter() - began, schedule.live.tolist()
      samples.timeline.append((seconds, live))
      if on_chunk:
        on_chunk(seconds, live)
    return samples

  def compile(self, params, stop_tokens: int) -> None:
    """Compiles every program a rollout of these options can need, ahead of time.

    Args:
      params: the target's, or their shapes and shardings
      stop_tokens: E, stop tokens per request (`Requests.stop_tokens`)
    """
    o = self.options
    buckets = [
      schedule_lib.Bucket(b, S) for b in o.batch_buckets for S in o.cache_buckets
    ]
    shapes = lambda bucket: decode.abstract_slots(
      self.mesh, self.config, *bucket, stop_tokens, o.features
    )
    store = decode.abstract_context(
      self.mesh, self.config, o.prompt_rows, o.max_prompt, o.features
    )
    self._get("prefill", (), params, store, *self._abstract_prefill())
    for bucket in buckets:
      slots = shapes(bucket)
      self._get("chunk", bucket, params, slots, self._width)
      if bucket.batch == o.slots:
        rest = slots.replace(context=None)
        self._get("admit", bucket, slots, store, rest.pending, rest)
      longer = [S for S in o.cache_buckets if S > bucket.length][:1]
      for S in longer:
        self._get("grow", (*bucket, S), slots.context.kv[0], length=S)
      smaller = [b for b in o.batch_buckets if b < bucket.batch][-1:]
      for b in smaller:
        row = shapes(bucket._replace(batch=b)).pending
        self._get("gather", (*bucket, b), slots.context.kv[0], row)
        if bucket.length == o.cache_buckets[0]:
          self._get("gather_rest", (bucket.batch, b), slots.replace(context=None), row)

  def time_chunk(self, params, batch: int, length: int) -> float:
    """Seconds of one chunk with all slots of a bucket live, none finishing.

    The caches are as full as a chunk leaves room for.
    """
    B, start = batch * self._slices, length - self.options.chunk - 1
    requests = requests_lib.make_requests([[1]] * B, max_tokens=self.options.chunk + 1)
    schedule = schedule_lib.Schedule.start(self.options, requests, self._slices)
    slots = self._fit(schedule, None, schedule_lib.Bucket(batch, length))
    everyone = np.arange(B).reshape(self._slices, batch)
    slots = self._new_slots(schedule, everyone).replace(
      context=slots.context, position=self._place(np.full(everyone.shape, start, np.int32))
    )
    run = self._get("chunk", schedule.bucket, params, slots, self._width)
    jax.block_until_ready(slots)
    began = time.perf_counter()
    jax.block_until_ready(run(params, slots, self._width))
    return time.perf_counter() - began

  def _get(self, name: str, key: tuple, *args, **static):
    return self.pool.get(name, tuple(key), self._programs[name], *args, **static)

  def _run(self, name: str, key: tuple, *args, **static):
    return self._get(name, key, *args, **static)(*args)

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
      timeline=[(0.0, [min(len(q), self.options.slots) for q in schedule.queues])],
    )

  def _new_context(self, rows: int, length: int) -> decode.Context:
    return decode.init_context(
      self.mesh, self.config, rows, length, self.options.features
    )

  def _place(self, x: np.ndarray) -> jax.Array:
    """[slices, b, ...] on the host -> [slices * b, ...] over the slices."""
    flat = x.reshape(-1, *x.shape[2:])
    return jax.device_put(flat, axes.sharding(self.mesh, axes.DATA))

  def _fit(self, schedule, slots, bucket) -> decode.Slots:
    """Brings the slots into a bucket, one step of batch or length at a time.

    Layer by layer, so that only one layer exists twice.
    """
    if slots is None:
      schedule.bucket = bucket
      schedule.owner = np.full((self._slices, bucket.batch), -1, np.int32)
      free = self._new_slots(schedule, schedule.owner)
      return free.replace(context=self._new_context(*bucket))
    while bucket.batch != schedule.bucket.batch:
      b = _next(self.options.batch_buckets, schedule.bucket.batch, bucket.batch)
      slots = self._gather(schedule, slots, b)
    while bucket.length != schedule.bucket.length:
      S = _next(self.options.cache_buckets, schedule.bucket.length, bucket.length)
      slots = self._grow(schedule, slots, S)
    return slots

  def _gather(self, schedule, slots, batch: int) -> decode.Slots:
    row = self._place(schedule.move(batch))
    b, S = schedule.bucket
    rest = self._run("gather_rest", (b, batch), slots.replace(context=None), row)
    free = self._place(schedule.owner < 0)
    rest = rest.replace(remaining=jax.numpy.where(free, 0, rest.remaining))
    take = lambda x: self._run("gather", (b, S, batch), x, row)
    features = lambda x: self._run("gather_features", (b, S, batch), x, row)
    context = _layerwise(slots.context, take, features)
    schedule.bucket = schedule_lib.Bucket(batch, S)
    return rest.replace(context=context)

  def _grow(self, schedule, slots, length: int) -> decode.Slots:
    b, S = schedule.bucket
    key = (b, S, length)
    context = _layerwise(
      slots.context,
      lambda x: self._get("grow", key, x, length=length)(x),
      lambda x: self._get("grow_features", key, x, length=length)(x),
    )
    schedule.bucket = schedule_lib.Bucket(b, length)
    return slots.replace(context=context)

  def _new_slots(self, schedule, request: np.ndarray) -> decode.Slots:
    """Slots without context for requests i32[slices, b]; -1 leaves one free."""
    r = schedule.requests
    of = lambda x: self._place(x[np.maximum(request, 0)])
    last = np.array([p[-1] for p in r.prompts], np.int32)[r.prompt_idx]
    left = np.where(request >= 0, r.max_tokens[np.maximum(request, 0)], 0)
    return decode.Slots(
      pending=of(last),
      position=of(schedule.position.astype(np.int32)),
      remaining=self._place(left.astype(np.int32)),
      stop_tokens=of(r.stop_tokens),
      sampling=sampling_lib.Sampling(
        **{
          f.name: of(getattr(r, f.name))
          for f in dataclasses.fields(sampling_lib.Sampling)
        }
      ),
      context=None,
    )

  def _prefill_shape(self) -> tuple[int, int, int]:
    o = self.options
    return self._slices, o.prefill_rows, min(o.prefill_block, o.max_prompt)

  def _abstract_prefill(self):
    """Shapes of a prefill's tokens, start and row."""
    slices, rows, block = self._prefill_shape()
    over = axes.sharding(self.mesh, axes.DATA)
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.int32, sharding=over)
    n = slices * rows
    return shape(n, block), shape(n), shape(n)

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
    request = np.full(schedule.owner.shape, -1, np.int32)
    for a in admissions:
      slot = int(np.argmax(schedule.owner[a.slice] < 0))
      schedule.owner[a.slice, slot] = request[a.slice, slot] = a.request
      row[a.slice, slot] = a.row
    new = self._new_slots(schedule, request)
    return self._run("admit", schedule.bucket, slots, store, self._place(row), new)

  def _book(self, schedule, samples, emitted: decode.Emitted, slots) -> None:
    """Books what a chunk drew, and frees the slots of what has finished."""
    owner = schedule.owner.reshape(-1)
    samples.computed_tokens += int(emitted.steps.sum()) * schedule.bucket.batch
    for slot in np.flatnonzero(owner >= 0):
      i = owner[slot]
      count, start = int(emitted.count[slot]), int(samples.length[i])
      for name in ("tokens", "logp", "logp_filtered"):
        drawn = getattr(emitted, name)[slot, :count]
        getattr(samples, name)[i, start : start + count] = drawn
      samples.length[i] += count
      if emitted.remaining[slot] == 0:
        stopped = samples.tokens[i, start + count - 1] in schedule.requests.stop_tokens[i]
        samples.finish_reason[i] = requests_lib.STOP if stopped else requests_lib.LENGTH
        if samples.features is not None:
          kept = slots.context.features[slot, : schedule.position[i]]
          samples.features[i] = np.asarray(kept)
        owner[slot] = -1


def _next(buckets: tuple[int, ...], now: int, goal: int) -> int:
  """The neighbour of `now` on the way to `goal`."""
  i = buckets.index(now)
  return buckets[i + 1] if goal > now else buckets[i - 1]


def _layerwise(context: decode.Context, of_layer, of_features) -> decode.Context:
  """Applies functions to each layer's cache; the old one is freed before the next."""
  kv, features = list(context.kv), context.features
  context = None
  for i in range(len(kv)):
    kv[i] = of_layer(kv[i])
  if features is not None:
    features = of_features(features)
  return decode.Context(tuple(kv), features)


def make(config: config_lib.ModelConfig, mesh, options: Options) -> Rollout:
  """A rollout function `(params, requests) -> samples` for one model and mesh.

  Programs are compiled by `compile`, or when a bucket is first used.
  """
  return Rollout(config, mesh, options)
