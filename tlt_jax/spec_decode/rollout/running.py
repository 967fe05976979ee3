"""The running requests on the host: which has which slot, and how far each has got.

Plain arithmetic on host arrays, the same on every process. `devices` has the arrays that
belong to it, `schedule` decides which request runs next.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import source as source_lib


class Ended(NamedTuple):
  """A request that has ended, and its pages, which are its own until the next chunk."""

  request: int
  slice: int
  pages: np.ndarray  # i32[most]  of that slice; see `pages.Pages`


class Prompt(NamedTuple):
  """A prompt that is to be computed."""

  tokens: np.ndarray  # i32[...]
  tables: list[np.ndarray]  # i32[most] each  of the pages that it gets; see `Pages.hold`


class Work(NamedTuple):
  """What the devices have to do before new requests can run, by slice."""

  prompts: list[list[Prompt]]
  copies: list[list[tuple[int, ...]]]  # of pages; see `Pages.share`

  def calls(
    self, rows: int, block: int
  ) -> Iterator[list[list[tuple[Prompt, int] | None]]]:
    """What each slice's rows compute in each call: blocks of prompts, and their starts.

    The longest prompts come first; a row takes the next one when its own is done.
    """
    # The last token of each stays pending: its KV is computed with the first draw.
    waiting = [[p for p in queue if len(p.tokens) > 1] for queue in self.prompts]
    for queue in waiting:
      queue.sort(key=lambda prompt: len(prompt.tokens))
    now: list[list[tuple[Prompt, int] | None]] = [[None] * rows for _ in waiting]
    while any(waiting) or any(any(of_slice) for of_slice in now):
      for queue, of_slice in zip(waiting, now, strict=True):
        for j in range(rows):
          if of_slice[j] is None and queue:
            of_slice[j] = queue.pop(), 0
      yield now
      now = [[_after(row, block) for row in of_slice] for of_slice in now]


def _after(row: tuple[Prompt, int] | None, block: int) -> tuple[Prompt, int] | None:
  """The next block of the row's prompt, if it has one."""
  if row is None or row[1] + block >= len(row[0].tokens) - 1:
    return None
  return row[0], row[1] + block


class Running:
  """Which request is in which slot, and how far every request has got."""

  def __init__(
    self,
    requests: requests_lib.Requests,
    pages: pages_lib.Pages,
    samples: samples_lib.Samples | None = None,
  ):
    """Begins without slots.

    Args:
      pages: all free
      samples: get what is drawn; None: empty ones
    """
    self.requests, self.pages = requests, pages
    self.samples = samples_lib.empty(requests) if samples is None else samples
    self.total = requests.total_length  # i32[B]  of the prompt and the longest response
    self.drawn = requests.begun_length.copy()  # i32[B]  response tokens so far
    self.pending = requests.last_token.copy()  # i32[B]  each one's last known token
    # i32[slices bucket]  request in each slot, -1 if it is free; no slots at first
    self.owner = np.full((pages.slices, 0), -1, np.int32)
    self.vacated = False  # whether slots were freed of which the devices do not know

  @property
  def bucket(self) -> int:
    """Slots per slice; 0 while nothing runs."""
    return self.owner.shape[1]

  @property
  def live(self) -> np.ndarray:
    """i32[slices]: requests in slots."""
    return np.sum(self.owner >= 0, 1)

  @property
  def seated(self) -> np.ndarray:
    """i32[n]: the requests in slots."""
    return self.owner[self.owner >= 0]

  @property
  def position(self) -> np.ndarray:
    """i32[B]: index of each request's last known token."""
    return self.total - self.requests.max_tokens + self.drawn - 1

  @property
  def kv_tokens(self) -> int:
    """Tokens of the pages in use, prompts' included, on the slice with the most."""
    return int(self.pages.used.max()) * self.pages.sizes.page

  def end(self, tokens: int) -> np.ndarray:
    """i32[B]: tokens of each request after it has drawn so many more, at most."""
    return np.minimum(self.position + tokens, self.total)

  def resize(self, bucket: int) -> None:
    """Gives every slice so many slots; running requests keep the first of them."""
    owner = np.full((len(self.owner), bucket), -1, np.int32)
    for s, row in enumerate(self.owner):
      live = row[row >= 0]
      owner[s, : len(live)] = live
    self.owner = owner

  def close(self) -> None:
    """Takes all slots away; who still had one must start over."""
    self.owner = self.owner[:, :0]

  def seat(self, s: int, request: int) -> None:
    """Puts a request into a free slot of a slice."""
    self.owner[s, int(np.argmax(self.owner[s] < 0))] = request

  def send_back(self, s: int) -> int:
    """Frees the slot of a slice's youngest request, which must start over.

    Its noise makes it draw the same again.
    """

    def age(slot):
      return self.drawn[self.owner[s, slot]], -self.owner[s, slot]

    slot = min(np.flatnonzero(self.owner[s] >= 0), key=age)
    request = int(self.owner[s, slot])
    self.owner[s, slot], self.vacated = -1, True
    self.start_over([request])
    return request

  def start_over(self, requests: list[int]) -> None:
    """Forgets what these have drawn."""
    begun = self.requests.begun_length[requests]
    self.samples.dropped_tokens += int((self.drawn[requests] - begun).sum())
    self.drawn[requests] = begun
    self.pending[requests] = self.requests.last_token[requests]

  def admit(
    self,
    bucket: int,
    prompts: Sequence[tuple[int, int, int]],
    requests: Sequence[tuple[int, int, int]],
  ) -> Work:
    """Seats requests in so many slots.

    Those whose prompt does not fill its last page get a copy of it.

    Args:
      prompts: slice, row of the prefixes that have pages there, and prefix: new ones
      requests: slice, row of the request's prefix there, and request
    """
    if bucket != self.bucket:
      self.resize(bucket)
    work = Work([[] for _ in self.owner], [[] for _ in self.owner])
    for s, row, prefix in prompts:
      # The last token stays pending: its KV is computed with the first draw.
      tokens = self.requests.prefix(prefix)
      tables = self.pages.hold(s, row, len(tokens) - 1)
      work.prompts[s].append(Prompt(tokens, tables))
    for s, row, request in requests:
      known = int(self.position[request])
      if self.requests.is_own(self.requests.prefix_idx[request]):
        self.pages.take_over(request, s, row)
      else:
        work.copies[s].extend(self.pages.share(request, s, row, known))
      self.seat(s, request)
    return work

  def seat_all(self, bucket: int, slices: int | None = None) -> None:
    """Seats requests 0, 1, ... in all slots, without their prompts: for timing.

    Args:
      slices: the first ones, whose slots are meant; None: all
    """
    shape = len(self.owner), bucket
    self.owner = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    if slices is not None:
      self.owner[slices:] = -1

  def take_pages(self, tokens: int) -> None:
    """Gives the requests in slots pages for so many tokens more."""
    self.pages.assign(self.owner, self.end(tokens))

  def advance(self, emitted: slots_lib.Emitted) -> list[Ended]:
    """Books what a chunk drew, and frees the slots of the requests that ended.

    Args:
      emitted: of the chunk, on the host
    """
    ended, samples = [], self.samples
    samples.count_chunk(emitted, self.bucket)
    for s, slot in zip(*np.nonzero(self.owner >= 0), strict=True):
      row, i = s * self.bucket + slot, int(self.owner[s, slot])
      count, start = int(emitted.count[row]), int(self.drawn[i])
      samples.extend(i, start, emitted, row)
      self.drawn[i] = start + count
      self.pending[i] = samples.tokens[i, start + count - 1]
      if emitted.remaining[row] == 0:
        samples.end(i, start + count, self.requests.stop_tokens[i])
        ended.append(Ended(i, int(s), self.pages[i]))
        self.owner[s, slot] = -1
    return ended

  def pause(self, bound: np.ndarray) -> None:
    """Frees the slots of requests that have so many response tokens, i32[B]."""
    paused = (self.owner >= 0) & (self.drawn[self.owner] >= bound[self.owner])
    self.owner[paused] = -1
    self.vacated |= bool(paused.any())

  def progress(self) -> source_lib.Running:
    """The sequences in slots, for sources of drafts."""

    def one(i):
      if i < 0:
        return None
      return source_lib.Progress(
        request=int(i),
        prompt_idx=int(self.requests.prompt_idx[i]),
        prompt=self.requests.prompt(i),
        response=self.samples.tokens[i, : self.drawn[i]],
        pages=self.pages[int(i)],
      )

    return [[one(i) for i in row] for row in self.owner]

  def known_after(self, emitted: slots_lib.Emitted) -> dict[int, int]:
    """Tokens, prompt included, of each request that continues after a chunk."""
    owner, position = self.owner.reshape(-1), self.position
    going = np.flatnonzero((owner >= 0) & (emitted.remaining > 0))
    return {
      int(owner[row]): int(position[owner[row]] + 1 + emitted.count[row]) for row in going
    }
