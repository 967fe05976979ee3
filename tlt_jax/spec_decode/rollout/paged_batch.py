"""The running requests on the devices, with KV in pages that follow their tokens.

The pools of pages outlive buckets: a resize changes a table, an admission copies a page.
"""

from collections.abc import Sequence

import numpy as np

from tlt_jax.models import paged_cache
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import batch as batch_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib


class PagedBatch(batch_lib.Batch):
  """The slots of a rollout, and who sits in them; their KV lies in pages."""

  def drop(self) -> None:
    super().drop()
    self.running.kv_pages.clear()

  def _emptied(self, empty: paged_cache.PagedCache) -> paged_cache.PagedCache:
    """With the pools as they are: they hold prompts."""
    if self.slots is not None:
      empty = empty.replace(pools=self.slots.kv.pools)
    self.slots = None
    return empty

  def _resized(
    self, start: options_lib.Bucket, goal: options_lib.Bucket, order: np.ndarray
  ) -> paged_cache.PagedCache:
    """As it is: `_seated` changes the table."""
    return self.slots.kv

  def _copied(self, admissions: list[schedule_lib.Admission]) -> Sequence[np.ndarray]:
    """Further, pages that are copied, and where to: requests share those of prompts."""
    running = self.running
    copies = [[] for _ in range(self._shapes.slices)]
    for a in admissions:
      copies[a.slice] += running.share(a.slice, a.row, a.request)
    pages = np.full((2, *running.owner.shape), self._shapes.kv_pages.pages, np.int32)
    for s, of_slice in enumerate(copies):
      pages[:, s, : len(of_slice)] = np.array(of_slice).reshape(-1, 2).T
    return *super()._copied(admissions), *pages

  def _prefill(self, params, prefills: list[schedule_lib.Prefill]) -> None:
    shapes, running = self._shapes, self.running
    if self._store is None:
      self._store = slices.zeros(shapes.store())
    rows, sizes = shapes.options.prompt_rows, shapes.kv_pages
    # Of every row of the store, and of one beyond it, which has none.
    pages = np.full((shapes.slices, rows + 1, sizes.most), sizes.pages, np.int32)
    for p in prefills:
      pages[p.slice, p.row] = running.hold(p.slice, p.row, p.prompt)
    most = pages_lib.pages_for(shapes.options.max_prompt, sizes.page)
    for tokens, start, row in self._blocks(prefills):
      table = np.take_along_axis(pages, row[..., None], 1)[..., :most]
      kv = self.slots.kv.replace(pages=self._place(table))
      store, placed = self._store.replace(kv=kv), map(self._place, (tokens, start, row))
      store = self.programs.run("prefill", (), params, store, *placed)
      self._store = store.replace(kv=())
      pools = store.kv.pools
      self.slots = self.slots.replace(kv=self.slots.kv.replace(pools=pools))

  def extend(self, tokens: int) -> None:
    super().extend(tokens)
    self.slots = self.slots.replace(kv=self._with_table(self.slots.kv))

  def _paged(
    self, features: pages_lib.Features | None, tokens: int
  ) -> pages_lib.Features | None:
    """Gives requests in slots the pages that they need of both KV and features."""
    running = self.running
    running.kv_pages.assign(running.owner, running.end(tokens))
    return super()._paged(features, tokens)

  def _seated(self, kv: paged_cache.PagedCache, features) -> slots_lib.Slots:
    return super()._seated(self._with_table(kv), features)

  def _with_table(self, kv: paged_cache.PagedCache) -> paged_cache.PagedCache:
    """With the pages of who sits there, as far as the bucket's length goes."""
    running, sizes = self.running, self._shapes.kv_pages
    length = running.bucket.length + self._shapes.room.target
    table = running.kv_pages.table(running.owner)
    table = table[..., : pages_lib.pages_for(length, sizes.page)]
    return kv.replace(pages=self._place(table))
