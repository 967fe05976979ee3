"""The running requests on the devices: slots, and the pages of KV and features.

A `Batch` and the `Running` inside it change together: whoever has a slot there has the
arrays of a slot here. Pages outlive slots: with other slots only tables and the small
arrays are others.
"""

from collections.abc import Iterator
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
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib


class Batch:
  """The slots of a rollout, and who sits in them."""

  def __init__(self, programs: programs_lib.Programs, requests: requests_lib.Requests):
    self.programs, self._shapes = programs, programs.shapes
    count, shapes = self._shapes.slices, self._shapes
    pages = pages_lib.Pages(count, shapes.pages, shapes.room.behind)
    self.running = running_lib.Running(requests, pages, count)
    self.slots: slots_lib.Slots | None = None
    self._stops = requests.stop_tokens.shape[1]

  @property
  def key(self) -> tuple[int, ...]:
    """Names the programs of the bucket at hand."""
    return self.running.bucket, self._stops

  def drop(self) -> None:
    """Frees everything on the devices."""
    self.slots = None
    self.running.pages.clear()

  def follow(self, plan: schedule_lib.Plan, params, tokens: int) -> None:
    """Gives every slice the slots of a plan, and seats its admissions.

    Args:
      params: the target's
      tokens: that each request may draw next, for which it gets pages
    """
    running = self.running
    changed = plan.bucket != running.bucket
    if changed:
      running.resize(plan.bucket)
    if plan.admissions:
      pools, features = self._arrays()
      pools, features = self._prefill(params, pools, features, plan.prefills)
      self._place_slots(*self._admit(pools, features, plan.admissions), tokens)
    elif changed:
      self._place_slots(*self._arrays(), tokens)

  def extend(self, tokens: int) -> None:
    """Gives requests in slots pages for so many tokens more."""
    self.slots = self.slots.replace(kv=self._kv(self.slots.kv.pools, tokens))

  def seat_all(self, bucket: int, tokens: int, slices: int | None = None) -> None:
    """Seats requests 0, 1, ... in all slots, without their prompts: for timing.

    Args:
      tokens: that each may draw next
      slices: the first ones, whose slots are meant; None: all
    """
    shape = self._shapes.slices, bucket
    self.running.owner = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    if slices is not None:
      self.running.owner[slices:] = -1
    self._place_slots(*self._arrays(), tokens)

  def features_of(self, request: int) -> np.ndarray:
    """The features of a request that has just ended, f[prompt + length - 1, E]."""
    known = int(self.running.position[request])
    page, at = self.running.pages.where(request, known)
    return processes.fetch(self.slots.features[page, at])[:known]

  def store(self, rows: jax.Array, pieces: np.ndarray, count: np.ndarray) -> jax.Array:
    """Training rows with the features of requests that have just ended.

    Args:
      rows, pieces, count: see `spot.rows.make_store`
    """
    placed = self._place(pieces), self._place(count)
    return self.programs.run("store", (), rows, self.slots.features, *placed)

  def _arrays(self) -> tuple[tuple[cache_lib.Pool, ...], jax.Array | None]:
    """Gives up the slots: the pools and features that others will have."""
    slots = self.slots or self._shapes.slots(self.running.bucket, self._stops)
    self.slots = None
    return slices.zeros((slots.kv.pools, slots.features))

  def _prefill(self, params, pools, features, prefills: list[schedule_lib.Prefill]):
    """Computes new prompts into their pages, a block of tokens of some rows at a time."""
    held = {(p.slice, p.row): self.running.hold(*p) for p in prefills}
    for rows, tokens, start in self._blocks(prefills):
      table = np.full((*start.shape, self._shapes.pages.most), self._sink, np.int32)
      for s, of_slice in enumerate(rows):
        for j, row in enumerate(of_slice):
          table[s, j] = held[s, row]
      placed = map(self._place, (table, tokens, start))
      run = self.programs.run
      pools, features = run("prefill", (), params, pools, features, *placed)
    return pools, features

  def _blocks(
    self, prefills: list[schedule_lib.Prefill]
  ) -> Iterator[tuple[list[list[int]], np.ndarray, np.ndarray]]:
    """What a prefill computes: rows of each slice, tokens, and where they begin."""
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
        for s, queue in enumerate(now):
          for j, p in enumerate(queue):
            part = prompts[p.prompt][start : start + block]
            tokens[s, j, : len(part)] = part
        rows = [[p.row for p in queue] for queue in now]
        yield rows, tokens, np.full(tokens.shape[:2], start, np.int32)

  def _admit(self, pools, features, admissions: list[schedule_lib.Admission]):
    """Seats requests; those whose prompt does not fill its last page get a copy of it."""
    running = self.running
    copies = [[] for _ in range(self._shapes.slices)]
    for a in admissions:
      copies[a.slice] += running.share(a.slice, a.row, a.request)
      running.seat(a.slice, a.request)
    # As many as there are slots at most, whatever the bucket: one program.
    pages = np.full(
      (2, len(copies), self._shapes.options.slots), self._sink, np.int32
    )
    for s, of_slice in enumerate(copies):
      pages[:, s, : len(of_slice)] = np.array(of_slice).reshape(-1, 2).T
    return self.programs.run("copy", (), pools, features, *map(self._place, pages))

  def _kv(self, pools, tokens: int) -> cache_lib.KVCache:
    """The KV with the pages of who has a slot, for so many tokens more."""
    running = self.running
    running.pages.assign(running.owner, running.end(tokens))
    table = self._place(running.pages.table(running.owner))
    return cache_lib.KVCache(pools, table, self._shapes.options.kernels)

  def _place_slots(self, pools, features, tokens: int) -> None:
    """Makes the slots of who has one."""
    running, r = self.running, self.running.requests
    free = running.owner < 0

    def rows(x):
      return self._place(x[np.where(free, 0, running.owner)])

    left = (r.max_tokens - running.drawn).astype(np.int32)
    sampling = {
      f.name: rows(getattr(r, f.name)) for f in dataclasses.fields(sampling_lib.Sampling)
    }
    self.slots = slots_lib.Slots(
      pending=rows(running.pending),
      position=rows(running.position.astype(np.int32)),
      remaining=self._place(np.where(free, 0, left[running.owner])),
      stop_tokens=rows(r.stop_tokens),
      sampling=sampling_lib.Sampling(**sampling),
      kv=self._kv(pools, tokens),
      features=features,
    )

  @property
  def _sink(self) -> int:
    return self._shapes.pages.pages

  def _place(self, x: np.ndarray) -> jax.Array:
    return slices.place(self._shapes.mesh, x)
