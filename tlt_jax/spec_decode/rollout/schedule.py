"""Which request runs where next, and in which bucket.

Arithmetic on host arrays: every process comes to the same decisions from the same
summaries and the same `Decisions`. None of them changes a token.
"""

import collections
from collections.abc import Sequence
import functools
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import joining
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import running as running_lib


class Admission(NamedTuple):
  slice: int
  row: int  # of the prefixes that have pages
  request: int


class Prefill(NamedTuple):
  slice: int
  row: int  # of the prefixes that have pages
  prefix: int  # see `Requests.prefix_idx`


class Plan(NamedTuple):
  bucket: int  # slots for running requests and admissions
  admissions: list[Admission]
  prefills: list[Prefill]  # for them


class Schedule:
  def __init__(
    self,
    options: options_lib.Options,
    running: running_lib.Running,
    clock: clock_lib.Clock,
    decide: clock_lib.Decisions,
    grows: bool = False,
  ):
    """Queues all requests; the responses to a prompt begin on one slice.

    Where there are fewer prompts than slices they begin on several. If it `grows`, queues
    are empty until `ask` fills them.
    """
    self.options, self.running, self.clock, self.decide = options, running, clock, decide
    self._grows = grows
    self._asked = 0  # prompts that were queued by `ask`
    slices = len(running.owner)
    # Per slice: the requests not yet admitted, in the order of their numbers; those that
    # lost their slot come first again.
    self.queues = [collections.deque() for _ in range(slices)]
    # Per slice: the prefixes (see `Requests.prefix_idx`) that have pages, with their rows.
    self.prompt_row: list[dict[int, int]] = [{} for _ in range(slices)]
    self._bound: np.ndarray | None = None  # see `pause`
    if not grows:
      self._deal_out()
    self.tokens = options.chunk  # that a slot may draw in the next chunk
    self.excluded: set[int] = set()  # buckets that ran out of memory
    # That may run in the next chunk, by bucket and strategy; None: all.
    self.programs: frozenset[joining.Key] | None = None
    # i32[slices]  requests that a slice kept when its pages ran out: until one of them has
    # ended, none joins them. 0: it has pages
    self._full = np.zeros(slices, np.int32)

  def _deal_out(self) -> None:
    """Queues all requests."""
    requests = self.running.requests
    prompts = len(requests.prompts)
    if requests.begun is not None:  # prompts differ in what is left of them
      self.ask(prompts)
      return
    dealt = collections.Counter()  # requests of each prompt
    for i, prompt in enumerate(requests.prompt_idx.tolist()):
      homes = _dealt_out(prompt, prompts, len(self.queues))
      self.queues[homes[dealt[prompt] % len(homes)]].append(i)
      dealt[prompt] += 1

  @property
  def done(self) -> bool:
    return not (any(self.queues) or self.running.live.any())

  def ask(self, prompts: int) -> None:
    """Queues what is new of the first `prompts`, where the fewest requests are left."""
    for prompt in range(self._asked, prompts):
      requests = np.flatnonzero(self.running.requests.prompt_idx == prompt)
      homes = len(_dealt_out(prompt, prompts, len(self.queues)))
      for part in np.array_split(requests, min(homes, len(requests)) or 1):
        left = self.running.live + [len(queue) for queue in self.queues]
        self.queues[int(np.argmin(left))].extend(part.tolist())
    self._asked = max(self._asked, prompts)

  def pause(self, bound: np.ndarray) -> None:
    """Takes requests out that have so many response tokens, i32[B]; see `samples.Until`."""
    running, self._bound = self.running, bound
    running.pause(bound)
    going = running.drawn < bound
    for s, queue in enumerate(self.queues):
      self.queues[s] = collections.deque(i for i in queue if going[i])

  def begin_chunk(self, least: int = 1, most: int = 0, long_s: float = 0.0) -> None:
    """Decides how long the next chunk is, and makes room for it.

    If memory does not suffice the youngest requests go back to the queue; their noise makes
    them draw the same again. A slot may draw `least` tokens in one step. A chunk may have
    up to `most` tokens instead of `Options.chunk` if fewer would not take `long_s` seconds.

    Raises:
      MemoryError: not even one request fits
    """
    running = self.running
    running.pages.keep(running.owner)  # those of ended requests are free
    self.tokens = self.decide(
      "tokens", functools.partial(self._tokens_within, least, most, long_s)
    )
    if self._bound is not None:
      going = [*running.seated, *(i for queue in self.queues for i in queue)]
      left = int(max(self._bound[going] - running.drawn[going], default=0))
      self.tokens = min(self.tokens, max(left, least))
    while min(left := self._pages_left(self.tokens)) < 0:
      s = int(np.argmin(left))
      if running.live[s] <= 1:
        raise MemoryError(
          f"the pages of a slice do not hold one request of "
          f"{int(max(running.end(self.tokens)[running.owner[s]]))} tokens; set cache_tokens"
        )
      self.queues[s].appendleft(running.send_back(s))
      running.pages.keep(running.owner)
      self._full[s] = running.live[s]

  def _pages_left(self, tokens: int) -> np.ndarray:
    running = self.running
    return running.pages.left(running.owner, running.end(tokens))

  def _tokens_within(self, least: int, most: int, long_s: float) -> int:
    wanted, token_s = self.options.chunk, self.clock.token_s(self.running.bucket)
    if most > self.options.chunk and min(self._pages_left(most)) < 0:
      most = 0
    if token_s:
      wanted = min(max(wanted, long_s / token_s), self.options.chunk_s / token_s)
    return int(np.clip(wanted, least, max(most, self.options.chunk)))

  def limits(self, arm: clock_lib.Arm, exact_steps: bool) -> tuple[chunk_lib.Limits, int]:
    """How far the next chunk goes, and the most steps that this is; see `steps_within`."""
    tokens = np.int32(self.tokens)
    if arm is None:
      return chunk_lib.Limits(tokens), self.tokens
    bucket = self.running.bucket
    within = functools.partial(self.steps_within, bucket, arm, exact_steps)
    steps = self.decide("steps", within)
    return chunk_lib.Limits(tokens, np.int32(steps), np.int32(arm.depth)), steps

  def steps_within(self, bucket: int, arm: clock_lib.Arm, exact_steps: bool) -> int:
    """Most steps of a strategy within the next chunk's time.

    While several slices decode, as many as every row has room for, whatever is accepted:
    else the slice of most acceptance would be full first, and wait. With `exact_steps` it
    takes exactly that many, because slices train for as long.
    """
    most = self.tokens
    if exact_steps or np.count_nonzero(self.running.live) > 1:
      most = max(self.tokens // (arm.depth + 1), 1)
    step_s = self.clock.step_s(bucket, arm)
    within = self.options.chunk_s / step_s if step_s else most
    return int(np.clip(within, 1, most))

  def seat(self) -> tuple[running_lib.Work, bool]:
    """Seats waiting requests, in the smallest bucket that holds all that run then.

    While some wait whose queue is known from the start, that is the widest. Returns the
    devices' work for them, and whether any were seated: once that work is done, their
    prompts' rows are free for others.
    """
    plan = self.plan()
    work = self.running.admit(plan.bucket, plan.prefills, plan.admissions)
    return work, bool(plan.admissions)

  def plan(self) -> Plan:
    """Takes requests off the queues, and chooses the bucket for all that run then."""
    admissions, prefills = self._admit()
    return Plan(self._fit(admissions), admissions, prefills)

  def _admit(self) -> tuple[list[Admission], list[Prefill]]:
    """The requests that get a slot, and the prompts that must be prefilled.

    A slice stops when its slots are full, its pages would run out, or every row of prompts
    is in use for this admission. The row that is needed again last makes room.
    """
    admissions, prefills = [], []
    if not self.joins():
      return admissions, prefills
    requests = self.running.requests
    for s, rows in enumerate(self.prompt_row):  # these are their requests' by now
      self.prompt_row[s] = {k: row for k, row in rows.items() if not requests.is_own(k)}
    left = self._pages_left(self.tokens)
    self._full[self.running.live < self._full] = 0
    left[self._full > 0] = 0
    count, most = self.running.live, self.widest()
    for s, queue in enumerate(self.queues):
      used = set()
      while queue and count[s] < most:
        taken = self._pages_of_next(s)
        if taken > left[s]:
          break
        row, is_new = self._prompt_row(s, used)
        if row is None:
          break
        request = queue.popleft()
        prefix = int(requests.prefix_idx[request])
        used.add(prefix)
        if is_new:
          prefills.append(Prefill(s, row, prefix))
        admissions.append(Admission(s, row, request))
        count[s] += 1
        left[s] -= taken
    return admissions, prefills

  def _pages_of_next(self, s: int) -> int:
    running, request = self.running, self.queues[s][0]
    known, tokens = running.position[request], running.end(self.tokens)[request]
    is_new = int(running.requests.prefix_idx[request]) not in self.prompt_row[s]
    return running.pages.added(int(tokens), int(known), is_new)

  def joins(self) -> bool:
    """Whether waiting requests join those that run.

    Slots given up as requests ended come back only in a rollout that grows, or when nothing
    runs.
    """
    running = self.running
    if not running.live.any() or not any(self.queues):
      return True
    return self._grows or running.bucket >= self._slots_to_admit(running.live)

  def _slots_to_admit(self, live: np.ndarray) -> int:
    """Slots for those that run, live i32[slices], and those that wait.

    All slots if the queue is known from the start, so that a request is admitted in one
    bucket only; as few as needed if it grows: empty slots cost time.
    """
    if not self._grows:
      return self.widest()
    return min(int(max(live + [len(queue) for queue in self.queues])), self.widest())

  def _prompt_row(self, s: int, used: set[int]) -> tuple[int | None, bool]:
    """The row for the next prefix of a slice, and whether it is new there."""
    rows, queue = self.prompt_row[s], self.queues[s]
    prefix_idx = self.running.requests.prefix_idx
    prefix = int(prefix_idx[queue[0]])
    if prefix in rows:
      return rows[prefix], False
    if free := set(range(self.options.prompt_rows)) - set(rows.values()):
      rows[prefix] = min(free)
    elif set(rows) <= used:
      return None, False
    else:
      order = [int(prefix_idx[i]) for i in queue]
      again = {k: i for i, k in reversed([*enumerate(order)])}
      rows[prefix] = rows.pop(max(set(rows) - used, key=lambda k: again.get(k, len(order))))
    return rows[prefix], True

  def _fit(self, admissions: list[Admission]) -> int:
    coming = np.bincount([a.slice for a in admissions], minlength=len(self.queues))
    live = self.running.live + coming
    slots = int(max(live))
    if admissions or (any(self.queues) and self.joins()):
      slots = max(slots, self._slots_to_admit(live))
    return self.bucket_for(slots)

  def bucket_for(self, live: int) -> int:
    """The smallest bucket for so many live requests; MemoryError: see `widest`."""
    return self.options.bucket(live, self._unusable()) or self.widest()

  def can_run(self, bucket: int, arm: clock_lib.Arm) -> bool:
    return self.programs is None or (bucket, arm) in self.programs

  def _unusable(self) -> set[int]:
    compiling = {n for n in self.options.buckets if not self.can_run(n, None)}
    return self.excluded | compiling

  def widest(self) -> int:
    """Most slots that a bucket has; MemoryError: every bucket has run out of memory."""
    widest = self.options.bucket(self.options.slots, self._unusable())
    if widest is None:
      raise MemoryError(
        f"even {self.options.buckets[0]} slots a slice do not fit; lower rollout.slots or "
        "add smaller rollout.buckets, or set rollout.cache_tokens"
      )
    return widest

  def out_of_memory(self) -> int:
    """Rules out the bucket that was to run, and all larger ones; all starts over."""
    bucket, running = self.running.bucket, self.running
    self.excluded |= {n for n in self.options.buckets if n >= bucket}
    for s, queue in enumerate(self.queues):
      lost = {int(i) for i in running.owner[s] if i >= 0}
      running.start_over(list(lost))
      queue.extendleft(sorted(lost, reverse=True))
    self.prompt_row = [{} for _ in self.queues]
    running.close()
    return bucket


def _dealt_out(prompt: int, prompts: int, slices: int) -> Sequence[int]:
  """The slices that a prompt's responses begin on: several if there are fewer prompts."""
  return range(prompt, slices, prompts) or (prompt % slices,)
