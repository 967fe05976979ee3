"""A rollout: requests in, responses out, through slots that are kept busy.

The host looks only between chunks: it fills free slots from each slice's queue,
picks the smallest batch and cache bucket that hold what runs, starts a chunk and
reads what the chunk emitted. All it decides follows from replicated values, so
that every process decides the same.

A prompt and its responses stay on one slice. The prompt is prefilled once, into
a bounded store, and its KV copied to each of its requests' slots.
"""

import collections
from collections.abc import Callable
import dataclasses
import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode import decode
from tlt_jax.spec_decode import requests as requests_lib
from tlt_jax.spec_decode import sampling as sampling_lib


@dataclasses.dataclass(frozen=True)
class Options:
  """Sizes of a rollout; none of them changes a token.

  Counts are per slice. The last bucket is added if it is missing.
  """

  max_length: int  # tokens of the longest sequence, prompt included
  max_prompt: int  # tokens of the longest prompt
  slots: int  # requests that run at a time
  batch_buckets: tuple[int, ...] = ()  # slots of a compiled program
  cache_buckets: tuple[int, ...] = ()  # tokens a compiled program attends over
  chunk: int = 64  # tokens per slot between two looks of the host
  prompt_rows: int = 8  # prompts whose KV is kept at a time
  prefill_rows: int = 8  # prompts per prefill call
  prefill_block: int = 128  # prompt tokens per prefill call
  features: bool = False  # keep and return the target's features

  def __post_init__(self):
    tops = {"batch_buckets": self.slots, "cache_buckets": self.max_length}
    for name, largest in tops.items():
      buckets = sorted({b for b in getattr(self, name) if b < largest} | {largest})
      object.__setattr__(self, name, tuple(buckets))


class _Admission(NamedTuple):
  slice: int
  row: int  # of the prompt store
  request: int


class _Prefill(NamedTuple):
  slice: int
  row: int  # of the prompt store
  prompt: int


@dataclasses.dataclass
class _Running:
  """The host's view of one rollout."""

  requests: requests_lib.Requests
  samples: requests_lib.Samples
  queues: list[collections.deque]  # per slice: requests not yet admitted
  prompt_row: list[dict[int, int]]  # per slice: prompt -> row of the store
  owner: np.ndarray  # i32[slices, slots]  request in each slot, -1 if free
  position: np.ndarray  # i32[B]  index of each request's last known token

  @property
  def live(self) -> np.ndarray:
    return np.sum(self.owner >= 0, 1)


class Rollout:
  """See `make`."""

  def __init__(self, config, mesh, options):
    self.config: config_lib.ModelConfig = config
    self.mesh: jax.sharding.Mesh = mesh
    self.options: Options = options
    self._slices = mesh.shape[axes.DATA]
    args = (config, mesh)
    self._prefill = decode.make_prefill(*args, options.features)
    self._admit = decode.make_admit(*args, options.features)
    self._chunk = decode.make_chunk(*args, options.chunk, options.features)

  def __call__(
    self,
    params,
    requests: requests_lib.Requests,
    on_chunk: Callable[[float, list[int]], None] | None = None,
  ) -> requests_lib.Samples:
    """Runs all requests to their end.

    Args:
      params: the target's, laid out by `axes.ROLLOUT`
      on_chunk: told seconds since the start and live requests per slice
    Raises:
      RequestError: a request does not fit the options
    """
    self._check(requests)
    began = time.perf_counter()
    run = self._start(requests)
    slots, store = None, self._new_store()
    while any(run.queues) or run.live.any():
      admissions, prefills = self._choose(run)
      slots = self._fit(run, slots, admissions)
      if admissions:
        store = self._fill_store(params, store, prefills, run)
        slots = self._admit_requests(run, slots, store, admissions)
      slots, emitted = self._chunk(params, slots, jnp.int32(self.options.chunk))
      self._record(run, jax.device_get(emitted), slots)
      seconds, live = time.perf_counter() - began, run.live.tolist()
      run.samples.timeline.append((seconds, live))
      if on_chunk:
        on_chunk(seconds, live)
    return run.samples

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

  def _start(self, requests) -> _Running:
    B, T = len(requests), int(max(requests.max_tokens, default=0))
    zeros = lambda dtype: np.zeros((B, T), dtype)
    queues = [collections.deque() for _ in range(self._slices)]
    for i, prompt in enumerate(requests.prompt_idx):
      queues[prompt % self._slices].append(i)
    prompt_length = np.array([len(p) for p in requests.prompts], np.int32)
    return _Running(
      requests=requests,
      samples=requests_lib.Samples(
        tokens=zeros(np.int32),
        length=np.zeros(B, np.int32),
        logp=zeros(np.float32),
        logp_filtered=zeros(np.float32),
        finish_reason=np.zeros(B, np.int32),
        features=[None] * B if self.options.features else None,
        timeline=[(0.0, [min(len(q), self.options.slots) for q in queues])],
      ),
      queues=queues,
      prompt_row=[{} for _ in queues],
      owner=np.full((self._slices, 0), -1, np.int32),
      position=prompt_length[requests.prompt_idx] - 1 if B else np.zeros(0, np.int32),
    )

  def _new_store(self) -> decode.Context:
    o = self.options
    return decode.init_context(
      self.mesh, self.config, o.prompt_rows, o.max_prompt, o.features
    )

  def _choose(self, run: _Running) -> tuple[list[_Admission], list[_Prefill]]:
    """Takes requests off the queues, and says which prompts must be prefilled.

    A slice stops when its slots are full, or when every row of its store is in
    use for this admission. The row that is needed again last makes room.
    """
    admissions, prefills = [], []
    for s, queue in enumerate(run.queues):
      rows, used = run.prompt_row[s], set()
      free = self.options.slots - run.live[s]
      while queue and free > 0:
        prompt = int(run.requests.prompt_idx[queue[0]])
        if prompt not in rows:
          if len(rows) < self.options.prompt_rows:
            row = len(rows)
          elif set(rows) <= used:
            break
          else:
            order = [int(run.requests.prompt_idx[i]) for i in queue]
            again = lambda p, order=order: order.index(p) if p in order else len(order)
            row = rows.pop(max(set(rows) - used, key=again))
          rows[prompt] = row
          prefills.append(_Prefill(s, row, prompt))
        used.add(prompt)
        admissions.append(_Admission(s, rows[prompt], queue.popleft()))
        free -= 1
    return admissions, prefills

  def _fit(self, run: _Running, slots, admissions) -> decode.Slots:
    """Moves the live requests into the smallest buckets that will do.

    The fullest slice counts for all: every slice runs the same program.
    """
    coming = np.bincount([a.slice for a in admissions], minlength=self._slices)
    batch = _bucket(self.options.batch_buckets, int(max(run.live + coming)))
    there = [*run.owner[run.owner >= 0], *(a.request for a in admissions)]
    end = np.minimum(
      run.position[there] + self.options.chunk, run.requests.total_length[there]
    )
    length = _bucket(self.options.cache_buckets, int(max(end)))
    if slots is None:
      run.owner = np.full((self._slices, batch), -1, np.int32)
      return self._empty_slots(run, batch, length)
    old_batch = run.owner.shape[1]
    old_length = slots.context.kv[0].k.shape[2]
    if batch == old_batch:  # a shorter cache alone is not worth a copy
      length = max(length, old_length)
    if (batch, length) == (old_batch, old_length):
      return slots
    order = np.argsort(run.owner < 0, axis=1, kind="stable")[:, :batch]
    order = np.pad(order, ((0, 0), (0, batch - order.shape[1])))
    owner = np.take_along_axis(run.owner, order, 1)
    owner[np.arange(batch) >= run.live[:, None]] = -1
    run.owner = owner
    return self._resize(slots, order, length, owner)

  def _resize(self, slots, order, length, owner) -> decode.Slots:
    """Gathers slots (i32[slices, b] per slice), array by array to bound memory."""
    rows = self._place(order.reshape(-1).astype(np.int32))
    take = functools.partial(decode.gather_rows, row=rows, mesh=self.mesh)
    context = slots.context
    rest = take(slots.replace(context=None))
    alive = self._place((owner >= 0).reshape(-1))
    rest = rest.replace(remaining=jnp.where(alive, rest.remaining, 0))
    kv, features = list(context.kv), context.features
    del slots, context
    for i in range(len(kv)):  # the old layer is freed before the next one is copied
      kv[i] = take(kv[i], axis=2, length=length)
    if features is not None:
      features = take(features, axis=1, length=length)
    return rest.replace(context=decode.Context(tuple(kv), features))

  def _place(self, x: np.ndarray) -> jax.Array:
    return jax.device_put(x, axes.sharding(self.mesh, axes.DATA))

  def _empty_slots(self, run, batch, length) -> decode.Slots:
    return self._new_slots(run, np.full((self._slices, batch), -1)).replace(
      context=decode.init_context(
        self.mesh, self.config, batch, length, self.options.features
      )
    )

  def _new_slots(self, run: _Running, request: np.ndarray) -> decode.Slots:
    """Slots without context for requests i32[slices, b]; -1 leaves one free."""
    r, flat = run.requests, request.reshape(-1)
    of = lambda x: self._place(x[np.maximum(flat, 0)])
    last = np.array([p[-1] for p in r.prompts], np.int32)[r.prompt_idx]
    return decode.Slots(
      pending=of(last),
      position=of(run.position),
      remaining=self._place(np.where(flat >= 0, r.max_tokens[flat], 0).astype(np.int32)),
      stop_tokens=of(r.stop_tokens),
      sampling=sampling_lib.Sampling(
        **{
          f.name: of(getattr(r, f.name))
          for f in dataclasses.fields(sampling_lib.Sampling)
        }
      ),
      context=None,
    )

  def _fill_store(self, params, store, prefills, run) -> decode.Context:
    """Computes the KV of new prompts, a block of tokens of some rows at a time."""
    per_slice = [[p for p in prefills if p.slice == s] for s in range(self._slices)]
    width = self.options.prefill_rows
    block = min(self.options.prefill_block, self.options.max_prompt)
    while any(per_slice):
      now = [queue[:width] for queue in per_slice]
      per_slice = [queue[width:] for queue in per_slice]
      longest = max(len(run.requests.prompts[p.prompt]) for q in now for p in q)
      # The last token stays pending: its KV is computed with the first draw.
      for start in range(0, longest - 1, block):
        tokens = np.zeros((self._slices, width, block), np.int32)
        row = np.full((self._slices, width), self.options.prompt_rows, np.int32)
        for s, queue in enumerate(now):
          for j, p in enumerate(queue):
            part = run.requests.prompts[p.prompt][start : start + block]
            tokens[s, j, : len(part)] = part
            row[s, j] = p.row
        flat = lambda x: self._place(x.reshape(-1, *x.shape[2:]))
        starts = np.full(row.shape, start, np.int32)
        store = self._prefill(params, store, flat(tokens), flat(starts), flat(row))
    return store

  def _admit_requests(self, run, slots, store, admissions) -> decode.Slots:
    row = np.full(run.owner.shape, -1, np.int32)
    request = np.full(run.owner.shape, -1, np.int32)
    for a in admissions:
      slot = int(np.argmax(run.owner[a.slice] < 0))
      run.owner[a.slice, slot] = request[a.slice, slot] = a.request
      row[a.slice, slot] = a.row
    new = self._new_slots(run, request)
    return self._admit(slots, store, self._place(row.reshape(-1)), new)

  def _record(self, run: _Running, emitted: decode.Emitted, slots) -> None:
    """Books what a chunk drew, and frees the slots of what has finished."""
    samples, r = run.samples, run.requests
    for flat, i in enumerate(run.owner.reshape(-1)):
      if i < 0:
        continue
      count, start = int(emitted.count[flat]), int(samples.length[i])
      for name in ("tokens", "logp", "logp_filtered"):
        getattr(samples, name)[i, start : start + count] = getattr(emitted, name)[
          flat, :count
        ]
      samples.length[i] += count
      run.position[i] += count
      if emitted.remaining[flat] == 0:
        last = samples.tokens[i, samples.length[i] - 1]
        stopped = last in r.stop_tokens[i]
        samples.finish_reason[i] = requests_lib.STOP if stopped else requests_lib.LENGTH
        if samples.features is not None:
          kept = slots.context.features[flat, : run.position[i]]
          samples.features[i] = np.asarray(kept)
        run.owner.reshape(-1)[flat] = -1


def _bucket(buckets: tuple[int, ...], need: int) -> int:
  return next(b for b in buckets if b >= need)


def make(config: config_lib.ModelConfig, mesh, options: Options) -> Rollout:
  """A rollout function `(params, requests) -> samples` for one model and mesh.

  Programs are compiled when a bucket is first used and kept from then on.
  """
  return Rollout(config, mesh, options)
