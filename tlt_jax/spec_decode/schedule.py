"""The host's side of a rollout: which request runs where, in which bucket.

Plain arithmetic on host arrays, no device: every process comes to the same
decisions from the same replicated summaries. None of them changes a token.
"""

import collections
import dataclasses
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode import requests as requests_lib


@dataclasses.dataclass(frozen=True)
class Options:
  """Sizes of a rollout; none of them changes a token.

  Counts are per slice. The largest bucket is added if it is missing.
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
  cache_tokens: int | None = None  # memory budget: tokens of all slots' KV
  rebalance: bool = False  # move live requests to other slices
  features: bool = False  # keep and return the target's features

  def __post_init__(self):
    tops = {"batch_buckets": self.slots, "cache_buckets": self.max_length}
    for name, largest in tops.items():
      buckets = sorted({b for b in getattr(self, name) if b < largest} | {largest})
      object.__setattr__(self, name, tuple(buckets))
    if self.cache_tokens is not None and self.cache_tokens < self.max_length:
      raise ValueError(
        f"cache_tokens ({self.cache_tokens}) cannot hold one sequence of max_length "
        f"({self.max_length})"
      )


class Bucket(NamedTuple):
  """The shape of a compiled program, per slice."""

  batch: int
  length: int


class Admission(NamedTuple):
  slice: int
  row: int  # of the prompt store
  request: int


class Prefill(NamedTuple):
  slice: int
  row: int  # of the prompt store
  prompt: int


@dataclasses.dataclass
class Schedule:
  """Where every request stands."""

  options: Options
  requests: requests_lib.Requests
  queues: list[collections.deque[int]]  # per slice: requests not yet admitted
  prompt_row: list[dict[int, int]]  # per slice: prompt -> row of the store
  owner: np.ndarray  # i32[slices, batch]  request in each slot, -1 if free
  total: np.ndarray  # i32[B]  tokens of the prompt and the longest response
  drawn: np.ndarray  # i32[B]  response tokens so far
  bucket: Bucket | None = None  # None before the first chunk
  excluded: set[Bucket] = dataclasses.field(default_factory=set)  # ran out of memory

  @classmethod
  def start(cls, options: Options, requests: requests_lib.Requests, slices: int):
    """All requests queued; a prompt and its responses stay on one slice."""
    queues = [collections.deque() for _ in range(slices)]
    for i, prompt in enumerate(requests.prompt_idx):
      queues[prompt % slices].append(i)
    return cls(
      options=options,
      requests=requests,
      queues=queues,
      prompt_row=[{} for _ in queues],
      owner=np.full((slices, 0), -1, np.int32),
      total=requests.total_length,
      drawn=np.zeros(len(requests), np.int32),
    )

  @property
  def live(self) -> np.ndarray:
    """i32[slices]: requests in slots."""
    return np.sum(self.owner >= 0, 1)

  @property
  def done(self) -> bool:
    return not (any(self.queues) or self.live.any())

  @property
  def position(self) -> np.ndarray:
    """i32[B]: index of each request's last known token."""
    return self.total - self.requests.max_tokens + self.drawn - 1

  def need(self, requests) -> int:
    """Cache slots that these requests touch in one more chunk."""
    end = np.minimum(self.position + self.options.chunk, self.total)
    return int(np.max(end[requests], initial=1))

  def admit(self) -> tuple[list[Admission], list[Prefill]]:
    """Takes requests off the queues, and says which prompts must be prefilled.

    A slice stops when its slots are full, when the cache would get too large, or
    when every row of its store is in use for this admission. The row that is
    needed again last makes room.
    """
    admissions, prefills = [], []
    count, length = self.live, self.need(self.owner[self.owner >= 0])
    for s, queue in enumerate(self.queues):
      used = set()
      while queue:
        longer = max(length, self.need(queue[0]))
        fuller = int(max(count.max(), count[s] + 1))
        if self.choose(fuller, longer) is None:
          break
        row, is_new = self._store_row(s, used)
        if row is None:
          break
        request = queue.popleft()
        prompt = int(self.requests.prompt_idx[request])
        used.add(prompt)
        if is_new:
          prefills.append(Prefill(s, row, prompt))
        admissions.append(Admission(s, row, request))
        count[s], length = count[s] + 1, longer
    return admissions, prefills

  def _store_row(self, s: int, used: set[int]) -> tuple[int | None, bool]:
    """The store's row for the next prompt of a slice, and whether it is new there."""
    rows, queue = self.prompt_row[s], self.queues[s]
    prompt = int(self.requests.prompt_idx[queue[0]])
    if prompt in rows:
      return rows[prompt], False
    if len(rows) < self.options.prompt_rows:
      rows[prompt] = len(rows)
    elif set(rows) <= used:
      return None, False
    else:
      order = [int(self.requests.prompt_idx[i]) for i in queue]
      again = lambda p: order.index(p) if p in order else len(order)
      rows[prompt] = rows.pop(max(set(rows) - used, key=again))
    return rows[prompt], True

  def allowed(self, bucket: Bucket) -> bool:
    budget = self.options.cache_tokens
    return bucket not in self.excluded and (
      budget is None or bucket.batch * bucket.length <= budget
    )

  def choose(self, batch: int, length: int) -> Bucket | None:
    """The smallest allowed bucket for that many slots and cache tokens."""
    for S in self.options.cache_buckets:
      for b in self.options.batch_buckets:
        if b >= batch and S >= length and self.allowed(Bucket(b, S)):
          return Bucket(b, S)
    return None

  def preempt(self) -> None:
    """Sends the youngest requests back until the rest can run a chunk.

    They start over when there is room: their noise makes them draw the same.
    """
    while True:
      running = self.owner[self.owner >= 0]
      if self.choose(int(max(self.live)), self.need(running)) is not None:
        return
      s = int(np.argmax(self.live))
      if self.live[s] <= 1:
        raise MemoryError(
          f"no allowed bucket holds one request of {self.need(running)} tokens"
        )
      slot = min(
        np.flatnonzero(self.owner[s] >= 0),
        key=lambda j: (self.drawn[self.owner[s, j]], -self.owner[s, j]),
      )
      request = int(self.owner[s, slot])
      self.owner[s, slot], self.drawn[request] = -1, 0
      self.queues[s].appendleft(request)

  def out_of_memory(self, bucket: Bucket, admissions: list[Admission]) -> None:
    """Rules out a bucket and all larger ones; everything live starts over."""
    self.excluded |= {
      Bucket(b, S)
      for b in self.options.batch_buckets
      for S in self.options.cache_buckets
      if b >= bucket.batch and S >= bucket.length
    }
    for s, queue in enumerate(self.queues):
      lost = {int(i) for i in self.owner[s] if i >= 0}
      lost |= {a.request for a in admissions if a.slice == s}
      self.drawn[list(lost)] = 0
      queue.extendleft(sorted(lost, reverse=True))
    self.owner = self.owner[:, :0]
    self.prompt_row = [{} for _ in self.queues]
    self.bucket = None

  def fit(self, admissions: list[Admission]) -> Bucket:
    """The bucket that holds the fullest slice, for all slices.

    While requests are admitted or wait, all slots are there, so that a request is
    admitted in one batch size only. A cache is cut only if memory demands it.
    """
    coming = np.bincount([a.slice for a in admissions], minlength=len(self.queues))
    running = [*self.owner[self.owner >= 0], *(a.request for a in admissions)]
    batch, length = int(max(self.live + coming)), self.need(running)
    longer = max(length, self.bucket.length) if self.bucket else length
    if admissions or any(self.queues):
      kept = self.choose(self.options.slots, longer)
      if kept is not None:
        return kept
    elif self.options.rebalance:
      batch = -(-len(running) // len(self.queues))
    return self.choose(batch, longer) or self.choose(batch, length)

  def move(self, batch: int) -> np.ndarray:
    """Moves the live requests into `batch` slots per slice.

    A request changes its slice only if it must (`rebalance`).

    Returns:
      i32[slices, batch]: the old slot, counted over all slices, of each new one;
      -1 for a free one
    """
    old_batch = self.owner.shape[1]
    live = [s * old_batch + np.flatnonzero(row >= 0) for s, row in enumerate(self.owner)]
    surplus = [slot for slots in live for slot in slots[batch:]]
    order = np.full((len(live), batch), -1, np.int32)
    for s, slots in enumerate(live):
      kept = list(slots[:batch])
      while surplus and len(kept) < batch:
        kept.append(surplus.pop(0))
      order[s, : len(kept)] = kept
    self.owner = np.where(order >= 0, self.owner.reshape(-1)[order], -1)
    return order
