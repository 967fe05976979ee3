"""The running requests on the devices: slots, the prompt store, pages of features.

A `Batch` and the `Running` inside it change together: whoever is seated there has the
arrays of a slot here.
"""

import dataclasses

import jax
import numpy as np

from tlt_jax import processes
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
  """The slots of a rollout, and who sits in them."""

  def __init__(
    self,
    programs: programs_lib.Programs,
    options: options_lib.Options,
    requests: requests_lib.Requests,
  ):
    """Starts without slots; `fit` makes them. Options name the buckets that are ready."""
    self.programs, self._shapes, self._options = programs, programs.shapes, options
    self.running = running_lib.Running(requests, self._shapes.slices)
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
    """Brings the slots into a bucket, layer by layer: only one layer exists twice.

    Args:
      bucket: for whoever sits there
      tokens: that each may draw next
    """
    running, shapes = self.running, self._shapes
    if running.bucket is None:
      self.slots = None  # before new ones are made
      empty = shapes.slots(bucket, self._stops)
      running.open(bucket, shapes.options.page_sizes if shapes.layout else None)
      kv, features = slices.zeros((empty.kv, empty.features))
      self.slots = self._seated(kv, self._paged(features, tokens))
      return
    for goal in self._options.path(running.bucket, bucket):
      key, length = (*running.bucket, *goal), shapes.length(goal)
      row = self._place(running.move(goal))
      kv, features = list(self.slots.kv), self.slots.features
      self.slots = None
      for i in range(len(kv)):
        # Not queued: only one layer is to exist twice; and where rows change slices,
        # XLA's CPU devices can deadlock in collectives of several queued programs.
        kv[i] = self.programs.run("resize", key, kv[i], row, length=length)
        jax.block_until_ready(kv[i])
      self.slots = self._seated(tuple(kv), self._paged(features, tokens))

  def _admit(self, params, plan: schedule_lib.Plan, tokens: int) -> None:
    """Computes new prompts, and seats requests with a copy of theirs."""
    if self._store is None:
      self._store = slices.zeros(self._shapes.store())
    self._prefill(params, plan.prefills)
    row, known = np.zeros((2, *self.running.owner.shape), np.int32)
    for a in plan.admissions:
      at = a.slice, self.running.seat(a.slice, a.request)
      row[at], known[at] = a.row, self.running.position[a.request]
    features, key = self._paged(self.slots.features, tokens), self.running.bucket
    kv, features = self.programs.run(
      *("admit", key, self.slots.kv, features, self._store),
      *map(self._place, (row, known)),
    )
    self.slots = self._seated(kv, features)

  def seat_all(self, tokens: int) -> None:
    """Seats requests 0, 1, ... in all slots, without their prompts: for timing.

    Args:
      tokens: that each may draw next
    """
    owner = self.running.owner
    self.running.owner = np.arange(owner.size, dtype=np.int32).reshape(owner.shape)
    self.slots = self._seated(self.slots.kv, self._paged(self.slots.features, tokens))

  def _prefill(self, params, prefills: list[schedule_lib.Prefill]) -> None:
    """Computes the KV of new prompts, a block of tokens of some rows at a time."""
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
        placed = map(self._place, (tokens, np.full_like(row, start), row))
        self._store = self.programs.run("prefill", (), params, self._store, *placed)

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
