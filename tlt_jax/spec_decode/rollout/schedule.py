"""The host's side of a rollout: which request runs where, in which bucket.

Plain arithmetic on host arrays, no device: every process comes to the same
decisions from the same replicated summaries. None of them changes a token.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import itertools
import logging
from typing import NamedTuple

import numpy as np

from tlt_jax import programs
from tlt_jax.spec_decode.decoding import pages as features_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib


class Bucket(NamedTuple):
  """The shape of a compiled program, per slice."""

  batch: int  # slots
  length: int  # tokens that a step attends over


def grid(batches: Iterable[int], lengths: Iterable[int]) -> tuple[Bucket, ...]:
  """Every pair: more programs, and none larger than what runs needs."""
  return tuple(itertools.starmap(Bucket, itertools.product(batches, lengths)))


def ladder(slots: int, length: int, shortest: int = 128) -> tuple[Bucket, ...]:
  """Half the slots for twice the tokens, from `shortest` tokens up: few programs.

  As requests end, those that still run get long; the KV takes about as much memory
  on every rung.
  """
  rungs, S = [], min(shortest, length)
  while S < length:
    rungs += [Bucket(slots, S), Bucket(slots, min(2 * S, length))]
    S, slots = min(2 * S, length), max(slots // 2, 2)
  while slots > 2:
    rungs.append(Bucket(slots, S))
    slots //= 2
  return tuple(dict.fromkeys([*rungs, Bucket(slots, S)]))


@dataclasses.dataclass(frozen=True)
class Options:
  """Sizes of a rollout; none of them changes a token.

  Counts are per slice. The largest bucket is added if it is missing; buckets that
  exceed it are dropped.
  """

  max_length: int  # tokens of the longest sequence, prompt included
  max_prompt: int  # tokens of the longest prompt
  slots: int  # requests that run at a time
  buckets: tuple[tuple[int, int], ...] = ()  # (slots, tokens) of compiled programs
  chunk: int = 64  # tokens per slot between two looks of the host
  chunk_s: float = 2.0  # ... or fewer, so that a chunk takes about that long
  prompt_rows: int = 8  # prompts whose KV is kept at a time
  prefill_rows: int = 8  # prompts per prefill call
  prefill_block: int = 128  # prompt tokens per prefill call
  # Memory budget: tokens of all slots' KV. Kept features have room for as many, or for
  # `slots` of the longest sequences.
  cache_tokens: int | None = None
  budget: programs.Budget = programs.Budget()  # of what is compiled ahead of time
  memory_tokens: int = 2**20  # of earlier responses, kept for n-gram drafts
  memory_rows: int = 16  # of them that are looked at in a chunk
  rebalance: bool = False  # move live requests to other slices
  features: bool = False  # keep and return the target's features

  def __post_init__(self):
    top = Bucket(self.slots, self.max_length)
    below = {Bucket(*b) for b in self.buckets if b[0] <= top.batch and b[1] <= top.length}
    object.__setattr__(self, "buckets", tuple(sorted(below | {top}, key=_size)))
    if not isinstance(self.budget, programs.Budget):
      object.__setattr__(self, "budget", programs.Budget(**self.budget))
    if self.cache_tokens is not None and self.cache_tokens < self.max_length:
      raise ValueError(
        f"cache_tokens ({self.cache_tokens}) cannot hold one sequence of max_length "
        f"({self.max_length})"
      )

  def allows(self, bucket: Bucket) -> bool:
    """Whether the memory budget has room for the KV of all its slots."""
    budget = self.cache_tokens
    return budget is None or bucket.batch * bucket.length <= budget

  @property
  def features_sizes(self) -> features_lib.Sizes:
    """Pages for whatever runs in a bucket that is allowed."""
    most = features_lib.pages_for(self.max_length)
    pages = self.slots * most
    if self.cache_tokens is not None:  # each slot's last page may be nearly empty
      pages = min(pages, self.cache_tokens // features_lib.PAGE + self.slots)
    return features_lib.Sizes(pages, most)

  def steps_from(self, bucket: Bucket) -> list[Bucket]:
    """The next buckets with fewer slots or more tokens: none lies in between."""
    later = [b for b in self.buckets if b != bucket and _follows(b, bucket)]
    between = lambda b: any(c != b and _follows(b, c) for c in later)
    return [b for b in later if not between(b)]

  @property
  def edges(self) -> list[tuple[Bucket, Bucket]]:
    """Every resize that a draining rollout can need."""
    return [(a, b) for a in self.buckets for b in self.steps_from(a)]

  def path(self, start: Bucket, goal: Bucket) -> list[Bucket]:
    """Resizes that lead from one bucket to another, each of them a program.

    Fewer slots, more tokens: through the buckets between, so that few programs are
    enough. Anything else, which is rare, in one step.
    """
    path = [start]
    while path[-1] != goal:
      steps = [b for b in self.steps_from(path[-1]) if _follows(goal, b)]
      path.append(min(steps, key=_size) if _follows(goal, path[-1]) else goal)
    return path[1:]


def _size(bucket: Bucket) -> tuple[int, int]:
  return bucket.batch * bucket.length, bucket.length


def _follows(b: Bucket, a: Bucket) -> bool:
  return b.batch <= a.batch and b.length >= a.length


@dataclasses.dataclass
class Costs:
  """What chunks took so far, the same on every process.

  A process measures a chunk, tells it with the next one, and then all of them book
  the longest time that any has measured.
  """

  step_s: dict  # by bucket, or (bucket, strategy): seconds of a step, the last time
  # Likewise, what the fullest slot drew per step.
  step_tokens: dict = dataclasses.field(default_factory=dict)
  seconds: float = 0.0
  tokens: int = 0
  chunk_s: float = 0.0  # of the last chunk, as measured here
  last: tuple | None = None  # what `done` was told of it, but for the seconds

  @staticmethod
  def _key(bucket: Bucket, strategy):
    return bucket if strategy is None else (bucket, strategy)

  def done(self, bucket, strategy, steps, tokens, longest, seconds) -> None:
    """A chunk ended here, in which the fullest slot drew `longest` tokens."""
    self.last, self.chunk_s = (bucket, strategy, steps, tokens, longest), seconds

  def book(self, seconds: float) -> None:
    """Books the last chunk with the time that every process knows of."""
    if self.last is not None:
      bucket, strategy, steps, tokens, longest = self.last
      key = self._key(bucket, strategy)
      self.step_s[key] = seconds / max(steps, 1)
      self.step_tokens[key] = longest / max(steps, 1)
      self.seconds += seconds
      self.tokens += tokens

  def seconds_of_step(self, bucket, strategy) -> float:
    """0 if unknown."""
    return self.step_s.get(self._key(bucket, strategy), 0.0)

  def tokens_of_step(self, bucket, strategy) -> float:
    """Of the fullest slot; 1 if unknown."""
    return max(self.step_tokens.get(self._key(bucket, strategy), 1.0), 1.0)

  def seconds_of_token(self, bucket: Bucket) -> float:
    """Of the fullest slot, with the strategy that runs in this bucket; 0 if unknown."""
    strategy = self.last[1] if self.last and self.last[0] == bucket else None
    return self.seconds_of_step(bucket, strategy) / self.tokens_of_step(bucket, strategy)

  def expected_steps(self, bucket, strategy, most: int, tokens: int) -> int:
    """Steps of a chunk that ends after `most` of them, or `tokens` in a slot."""
    return int(min(most, np.ceil(tokens / self.tokens_of_step(bucket, strategy))))

  def estimate(self, bucket: Bucket, known: Bucket) -> float:
    """Seconds per step; if never seen, in proportion to a known bucket's slots."""
    share = bucket.batch / known.batch
    return self.step_s.get(bucket, self.step_s[known] * share)


class Decisions:
  """What a rollout decided by the clock, in order; another one can decide alike.

  No decision changes a token. But they say on what data, and when, a drafter that is
  trained meanwhile is trained. (Where several processes run, all must take the first
  one's value here.)
  """

  def __init__(self, replay: Iterable[tuple[str, int]] | None = None, strict=True):
    """Follows `replay`, another rollout's `log`, instead of the clock.

    Args:
      strict: whether it is an error if the log is of another rollout; else the clock
        decides from there on
    """
    self.log: list[tuple[str, int]] = []
    self._replay = None if replay is None else iter(replay)
    self._strict = strict

  def __call__(self, name: str, decide: Callable[[], int]) -> int:
    """The decision of that name, now.

    Raises:
      ValueError: the log is of another rollout
    """
    value = None
    if self._replay is not None:
      logged, value = next(self._replay, ("nothing", 0))
      if logged != name:
        self._differs(logged, name)
        value = None
    value = int(decide()) if value is None else value
    self.log.append((name, value))
    return value

  def finish(self) -> None:
    """The rollout is over; so is what was replayed, or that is an error as well."""
    if self._replay is not None and (left := next(self._replay, None)):
      self._differs(left[0], "nothing")

  def _differs(self, logged: str, name: str) -> None:
    message = (
      f"the schedule to replay has {logged!r} where {name!r} is decided (decision "
      f"{len(self.log)}): it is of a run with other settings, prompts or weights"
    )
    if self._strict:
      raise ValueError(message)
    logging.warning("%s; the clock decides from here on", message)
    self._replay = None


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
  pending: np.ndarray  # i32[B]  each request's last known token
  costs: Costs
  tokens: int  # that a slot may draw in the next chunk
  decide: Decisions
  excluded: set[Bucket] = dataclasses.field(default_factory=set)  # ran out of memory
  bucket: Bucket | None = None  # None while nothing runs
  pages: features_lib.Pages | None = None  # of what runs, where features are kept

  @classmethod
  def start(
    cls,
    options: Options,
    requests: requests_lib.Requests,
    slices: int,
    costs: Costs | None = None,
    decide: Decisions | None = None,
  ):
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
      pending=requests.last_token.copy(),
      costs=costs or Costs({}),
      tokens=options.chunk,
      decide=decide or Decisions(),
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
    return int(np.max(self._end[requests], initial=1))

  @property
  def _end(self) -> np.ndarray:
    """i32[B]: tokens of each request after one more chunk, at most."""
    return np.minimum(self.position + self.tokens, self.total)

  def admit(self) -> tuple[list[Admission], list[Prefill]]:
    """Takes requests off the queues, and says which prompts must be prefilled.

    A slice stops when its slots are full, when the cache would get too large, or
    when every row of its store is in use for this admission. The row that is
    needed again last makes room.
    """
    admissions, prefills = [], []
    if not self.joins():
      return admissions, prefills
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

  def joins(self) -> bool:
    """Whether waiting requests join those that run, or wait until these are done.

    All slots attend over as many tokens as the longest request needs, which may
    cost more than it brings: requests join when the tokens that they add to a step
    are not dearer than a token was so far.
    """
    running = self.owner[self.owner >= 0]
    waiting = sum(map(len, self.queues))
    if not len(running) or not waiting:
      return True
    smallest = self.choose(int(max(self.live)), self.need(running))
    if smallest is None:
      return False
    if self.bucket.batch < self.widest(self.bucket.length):
      return False  # has begun to drain
    free = min(waiting, self.owner.size - len(running))

    def cheap():
      if self.bucket not in self.costs.step_s:
        return True
      alone = self.costs.estimate(smallest, self.bucket)
      added = self.costs.step_s[self.bucket] - alone
      return added * self.costs.tokens <= free * self.costs.seconds

    return bool(self.decide("joins", cheap))

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
    return bucket not in self.excluded and self.options.allows(bucket)

  def choose(self, batch: int, length: int) -> Bucket | None:
    """The smallest allowed bucket for that many slots and cache tokens."""
    for bucket in self.options.buckets:
      if bucket.batch >= batch and bucket.length >= length and self.allowed(bucket):
        return bucket
    return None

  def widest(self, length: int) -> int:
    """Most slots that an allowed bucket has for that many cache tokens."""
    return max(
      (b.batch for b in self.options.buckets if b.length >= length and self.allowed(b)),
      default=0,
    )

  @property
  def admitting(self) -> set[Bucket]:
    """The buckets in which requests are admitted."""
    lengths = {b.length for b in self.options.buckets}
    return {self.choose(self.widest(S), S) for S in lengths if self.widest(S)}

  def steps_within(self, bucket: Bucket, strategy) -> int:
    """How many steps of a program a chunk has time for."""
    step_s = self.costs.seconds_of_step(bucket, strategy)
    within = self.options.chunk_s / step_s if step_s else self.tokens
    return int(np.clip(within, 1, self.tokens))

  def _tokens_within(self, least: int, most: int, long_s: float) -> int:
    """Tokens per slot that the next chunk has time for."""
    wanted, token_s = self.options.chunk, self.costs.seconds_of_token(self.bucket)
    if self.bucket is not None:  # no longer than what the cache has room for
      running = self.owner[self.owner >= 0]
      most = min(most, self.bucket.length - int(max(self.position[running])) - 1)
    if token_s:
      wanted = min(max(wanted, long_s / token_s), self.options.chunk_s / token_s)
    return int(np.clip(wanted, least, max(most, self.options.chunk)))

  def begin_chunk(self, least: int = 1, most: int = 0, long_s: float = 0.0) -> None:
    """Settles how long the next chunk is, and makes room for it.

    If memory does not suffice the youngest requests go back. They start over when
    there is room: their noise makes them draw the same.

    Args:
      least: tokens that a slot may draw in one step
      most, long_s: more than `Options.chunk` tokens, up to `most`, if fewer would not
        take that many seconds, and the cache has room
    """
    if not self.live.any():
      self.bucket = None
    tokens = lambda: self._tokens_within(least, most, long_s)
    self.tokens = self.decide("tokens", tokens)
    while True:
      running = self.owner[self.owner >= 0]
      if self.choose(int(max(self.live)), self.need(running)) is not None:
        return
      s = int(np.argmax(self.live))
      if self.live[s] <= 1:
        raise MemoryError(
          f"no allowed bucket holds one request of {self.need(running)} tokens; lower "
          "slots, or set cache_tokens, which kept features follow"
        )
      slot = min(
        np.flatnonzero(self.owner[s] >= 0),
        key=lambda j: (self.drawn[self.owner[s, j]], -self.owner[s, j]),
      )
      request = int(self.owner[s, slot])
      self.owner[s, slot] = -1
      self._start_over([request])
      self.queues[s].appendleft(request)

  def out_of_memory(self, bucket: Bucket, admissions: list[Admission]) -> None:
    """Rules out a bucket and all larger ones; everything live starts over."""
    self.excluded |= {
      b
      for b in self.options.buckets
      if b.batch >= bucket.batch and b.length >= bucket.length
    }
    for s, queue in enumerate(self.queues):
      lost = {int(i) for i in self.owner[s] if i >= 0}
      lost |= {a.request for a in admissions if a.slice == s}
      self._start_over(list(lost))
      queue.extendleft(sorted(lost, reverse=True))
    self.owner = self.owner[:, :0]
    self.prompt_row = [{} for _ in self.queues]
    self.bucket = None

  def _start_over(self, requests: list[int]) -> None:
    self.drawn[requests] = 0
    self.pending[requests] = self.requests.last_token[requests]

  def fit(self, admissions: list[Admission]) -> Bucket:
    """The bucket that holds the fullest slice, for all slices.

    While requests are admitted, all slots are there, so that a request is admitted
    in one batch size only. A cache is cut only if memory demands it.
    """
    coming = np.bincount([a.slice for a in admissions], minlength=len(self.queues))
    running = [*self.owner[self.owner >= 0], *(a.request for a in admissions)]
    batch, length = int(max(self.live + coming)), self.need(running)
    longer = max(length, self.bucket.length) if self.bucket else length
    if admissions or (any(self.queues) and self.joins()):
      batch = max(batch, self.widest(longer))
    elif self.options.rebalance:
      batch = -(-len(running) // len(self.queues))
    return self.choose(batch, longer) or self.choose(batch, length)

  def assign_pages(self) -> list[np.ndarray]:
    """Pages for what the slots' requests may have after a chunk; see `Pages.assign`."""
    return self.pages.assign(self.owner, self._end)

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
