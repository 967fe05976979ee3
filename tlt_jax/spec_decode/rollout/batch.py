"""The running requests on the devices: slots, the prompt store, pages of features.

A `Batch` and the `Running` inside it change together: whoever is seated there has the
arrays of a slot here.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import jax
import numpy as np

from tlt_jax import processes
from tlt_jax.models import cache as cache_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib


class Batch:
  """The slots of a rollout, and who sits in them; each has a row of KV in one piece."""

  def __init__(
    self,
    programs: programs_lib.Programs,
    options: options_lib.Options,
    requests: requests_lib.Requests,
  ):
    """Starts without slots; `fit` makes them. Options name the buckets that are ready."""
    self.programs, self._shapes, self._options = programs, programs.shapes, options
    slices, pages = self._shapes.slices, None
    if self._shapes.kv_pages:
      sizes, beyond = self._shapes.kv_pages, self._shapes.room.target
      pages = pages_lib.Pages(slices, sizes, beyond)
    self.running = running_lib.Running(requests, slices, pages)
    self.slots: slots_lib.Slots | None = None
    self._store: slots_lib.PromptStore | None = None
    self._stops = requests.stop_tokens.shape[1]

  @property
  def key(self) -> tuple[int, ...]:
    """Names the programs of the bucket at hand."""
    return (*self.running.bucket, self._stops)

  def drop(self) -> None:
    """Frees everything on the devices."""
    self.slots = self._store = None

  def follow(self, plan: schedule_lib.Plan, params, tokens: int) -> bool:
    """Fits the slots into a plan's bucket, and seats its admissions.

    Args:
      params: the target's
      tokens: that each request may draw next
    Returns:
      whether the slots are others now
    """
    changed = plan.bucket != self.running.bucket
    self.fit(plan.bucket, tokens)
    if plan.admissions:
      self._admit(params, plan, tokens)
    return changed or bool(plan.admissions)

  def fit(self, bucket: options_lib.Bucket, tokens: int) -> None:
    """Brings the slots into a bucket.

    Args:
      bucket: for whoever sits there
      tokens: that each may draw next
    """
    running, shapes = self.running, self._shapes
    if running.bucket is None:
      empty = shapes.slots(bucket, self._stops)
      running.open(bucket, shapes.options.page_sizes if shapes.layout else None)
      kv, features = slices.zeros((self._emptied(empty.kv), empty.features))
      self.slots = self._seated(kv, self._paged(features, tokens))
      return
    for goal in self._options.path(running.bucket, bucket):
      start, features = running.bucket, self.slots.features
      kv = self._resized(start, goal, running.move(goal))
      self.slots = self._seated(kv, self._paged(features, tokens))

  def _emptied(self, empty: cache_lib.KVCache) -> cache_lib.KVCache:
    """Gives the slots up; what of their KV serves in new ones, and shapes of the rest."""
    self.slots = None
    return empty

  def _resized(
    self, start: options_lib.Bucket, goal: options_lib.Bucket, order: np.ndarray
  ) -> cache_lib.KVCache:
    """Gives the slots up; their KV in another bucket.

    Args:
      order: i32[slices batch]  the old slot of each new one, see `Running.move`
    """
    key, length, row = (*start, *goal), self._shapes.length(goal), self._place(order)
    kv, self.slots = list(self.slots.kv), None
    for i in range(len(kv)):
      # Not queued: only one layer is to exist twice; and where rows change slices,
      # XLA's CPU devices can deadlock in collectives of several queued programs.
      kv[i] = self.programs.run("resize", key, kv[i], row, length=length)
      jax.block_until_ready(kv[i])
    return tuple(kv)

  def _admit(self, params, plan: schedule_lib.Plan, tokens: int) -> None:
    """Computes new prompts, and seats requests with a copy of theirs."""
    self._prefill(params, plan.prefills)
    placed = map(self._place, self._copied(plan.admissions))
    features, key = self._paged(self.slots.features, tokens), self.running.bucket
    kv, features = self.programs.run(
      *("admit", key, self.slots.kv, features, self._store), *placed
    )
    self.slots = self._seated(kv, features)

  def _copied(self, admissions: list[schedule_lib.Admission]) -> Sequence[np.ndarray]:
    """Seats requests; row and known tokens of each one's prompt, i32[slices batch]."""
    row, known = places = np.zeros((2, *self.running.owner.shape), np.int32)
    for a in admissions:
      at = a.slice, self.running.seat(a.slice, a.request)
      row[at], known[at] = a.row, self.running.position[a.request]
    return places

  def seat_all(self, tokens: int, slices: int | None = None) -> None:
    """Seats requests 0, 1, ... in all slots, without their prompts: for timing.

    Args:
      tokens: that each may draw next
      slices: the first ones, whose slots are meant; None: all
    """
    shape = self.running.owner.shape
    owner = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    if slices is not None:
      owner[slices:] = -1
    self.running.owner = owner
    self.slots = self._seated(self.slots.kv, self._paged(self.slots.features, tokens))

  def _prefill(self, params, prefills: list[schedule_lib.Prefill]) -> None:
    """Computes the KV of new prompts, a block of tokens of some rows at a time."""
    if self._store is None:
      self._store = slices.zeros(self._shapes.store())
    for tokens, start, row in self._blocks(prefills):
      placed = map(self._place, (tokens, start, row))
      self._store = self.programs.run("prefill", (), params, self._store, *placed)

  def _blocks(
    self, prefills: list[schedule_lib.Prefill]
  ) -> Iterator[tuple[np.ndarray, ...]]:
    """What a prefill takes: tokens, where they begin, and rows of the store."""
    prompts, options = self.running.requests.prompts, self._shapes.options
    width, block = options.prefill_rows, self._shapes.prefill_block
    waiting = [
      [p for p in prefills if p.slice == s] for s in range(self._shapes.slices)
    ]
    while any(waiting):
      now = [queue[:width] for queue in waiting]
      waiting = [queue[width:] for queue in waiting]
      longest = max(len(prompts[p.prompt]) for queue in now for p in queue)
      # The last token stays pending: its KV is computed with the first draw.
      for start in range(0, longest - 1, block):
        tokens = np.zeros((len(now), width, block), np.int32)
        row = np.full((len(now), width), options.prompt_rows, np.int32)
        for s, queue in enumerate(now):
          for j, p in enumerate(queue):
            part = prompts[p.prompt][start : start + block]
            tokens[s, j, : len(part)] = part
            row[s, j] = p.row
        yield tokens, np.full_like(row, start), row

  def extend(self, tokens: int) -> None:
    """Gives requests in slots pages for so many tokens more, where features are kept."""
    features = self._paged(self.slots.features, tokens)
    self.slots = self.slots.replace(features=features)

  def _paged(
    self, features: pages_lib.Features | None, tokens: int
  ) -> pages_lib.Features | None:
    """Kept features with the pages that the requests in slots have from now on."""
    if features is None:
      return None
    running, data = self.running, features.data
    for source, goal in running.pages.assign(running.owner, running.end(tokens)):
      data = self.programs.run("move_features", (), data, source, goal)
      jax.block_until_ready(data)  # not queued either, see `fit`
    return pages_lib.Features(data, self._place(running.pages.table(running.owner)))

  def features_of(self, request: int) -> np.ndarray:
    """The features of a request that has just ended, f[prompt + length - 1, E]."""
    known = int(self.running.position[request])
    where = self.running.pages.where(request, known)  # whole pages: of few shapes
    return processes.fetch(self.slots.features.data[where])[:known]

  def store(self, rows: jax.Array, pieces: np.ndarray, count: np.ndarray) -> jax.Array:
    """Training rows with the features of requests that have just ended.

    Args:
      rows, pieces, count: see `spot.rows.make_store`
    """
    placed = map(self._place, (pieces, count))
    return self.programs.run("store", (), rows, self.slots.features.data, *placed)

  def _seated(self, kv, features) -> slots_lib.Slots:
    """The slots of who sits there, with their KV and features."""
    running, r = self.running, self.running.requests
    free = running.owner < 0
    rows = lambda x: self._place(x[np.where(free, 0, running.owner)])
    left = (r.max_tokens - running.drawn).astype(np.int32)
    sampling = {
      f.name: rows(getattr(r, f.name)) for f in dataclasses.fields(sampling_lib.Sampling)
    }
    return slots_lib.Slots(
      pending=rows(running.pending),
      position=rows(running.position.astype(np.int32)),
      remaining=self._place(np.where(free, 0, left[running.owner])),
      stop_tokens=rows(r.stop_tokens),
      sampling=sampling_lib.Sampling(**sampling),
      kv=kv,
      features=features,
    )

  def _place(self, x: np.ndarray) -> jax.Array:
    return slices.place(self._shapes.mesh, x)
