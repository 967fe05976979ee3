"""The running requests on the host: who sits in which slot, and how far each has got.

Plain arithmetic on host arrays, the same on every process. The arrays on the devices
that belong to it are `batch`'s; what runs where next is `schedule`'s to say.
"""

from typing import NamedTuple

import numpy as np

from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.speculation import source as source_lib


class Ended(NamedTuple):
  """A request that has ended, and where its features are until the next chunk."""

  request: int
  slice: int
  pages: np.ndarray | None  # i32[most]  of that slice; see `pages.Pages`


class Running:
  """Where every request of a rollout stands."""

  def __init__(
    self,
    requests: requests_lib.Requests,
    slices: int,
    kv_pages: pages_lib.Pages | None = None,
  ):
    """Starts with every slot free and no bucket.

    Args:
      requests: that are to run
      slices: that they run on
      kv_pages: of the KV, where it lies in pages; prompts have theirs there too
    """
    self.requests = requests
    self.total = requests.total_length  # i32[B]  of the prompt and the longest response
    self.drawn = np.zeros(len(requests), np.int32)  # i32[B]  response tokens so far
    self.pending = requests.last_token.copy()  # i32[B]  each one's last known token
    self.bucket: options_lib.Bucket | None = None  # None while nothing runs
    # i32[slices batch]  request in each slot, -1 if it is free
    self.owner = np.full((slices, 0), -1, np.int32)
    self.pages: pages_lib.Pages | None = None  # where features are kept
    self.kv_pages = kv_pages

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
    """Tokens of KV that a slice has memory for: all slots', or the pages' in use.

    Of the fullest slice; pages of prompts count, rows of prompts in a store do not.
    """
    if self.kv_pages is None:
      return self.bucket.batch * self.bucket.length
    return int(self.kv_pages.used.max()) * self.kv_pages.sizes.page

  def end(self, tokens: int) -> np.ndarray:
    """i32[B]: tokens of each request after it has drawn so many more, at most."""
    return np.minimum(self.position + tokens, self.total)

  def open(self, bucket: options_lib.Bucket, sizes: pages_lib.Sizes | None) -> None:
    """Makes free slots of a bucket, and of pages, where features are kept."""
    slices = len(self.owner)
    self.bucket = bucket
    self.owner = np.full((slices, bucket.batch), -1, np.int32)
    self.pages = pages_lib.Pages(slices, sizes) if sizes else None

  def close(self) -> None:
    """Takes all slots away; who still sat there must start over."""
    self.bucket = None
    self.owner = self.owner[:, :0]

  def seat(self, s: int, request: int) -> int:
    """Puts a request into a free slot of a slice; returns the slot."""
    slot = int(np.argmax(self.owner[s] < 0))
    self.owner[s, slot] = request
    return slot

  def send_back(self, s: int) -> int:
    """Frees the slot of a slice's youngest request, which must start over.

    Its noise makes it draw the same again.
    """
    slots = np.flatnonzero(self.owner[s] >= 0)
    age = lambda slot: (self.drawn[self.owner[s, slot]], -self.owner[s, slot])
    slot = min(slots, key=age)
    request = int(self.owner[s, slot])
    self.owner[s, slot] = -1
    self.start_over([request])
    return request

  def hold(self, s: int, row: int, prompt: int) -> np.ndarray:
    """Gives a prompt pages of KV, in a row of a slice's store: i32[most].

    Its last token stays pending: its KV is computed with the first draw.
    """
    known = len(self.requests.prompts[prompt]) - 1
    return self.kv_pages.hold(s, row, known)

  def share(self, s: int, row: int, request: int) -> list[tuple[int, int]]:
    """Lets a request begin with the pages of its prompt; which are to be copied."""
    return self.kv_pages.share(request, s, row, int(self.position[request]))

  def start_over(self, requests: list[int]) -> None:
    """Forgets what these have drawn."""
    self.drawn[requests] = 0
    self.pending[requests] = self.requests.last_token[requests]

  def move(self, bucket: options_lib.Bucket) -> np.ndarray:
    """Moves the live requests into the slots of a bucket.

    A request changes its slice only if it must, where slices are rebalanced.

    Returns:
      i32[slices batch]: the old slot, counted over all slices, of each new one; -1 for
      a free one
    """
    old, batch = self.owner.shape[1], bucket.batch
    live = [s * old + np.flatnonzero(row >= 0) for s, row in enumerate(self.owner)]
    surplus = [slot for slots in live for slot in slots[batch:]]
    order = np.full((len(live), batch), -1, np.int32)
    for s, slots in enumerate(live):
      kept = list(slots[:batch])
      while surplus and len(kept) < batch:
        kept.append(surplus.pop(0))
      order[s, : len(kept)] = kept
    self.owner = np.where(order >= 0, self.owner.reshape(-1)[order], -1)
    self.bucket = bucket
    return order

  def advance(
    self, emitted: slots_lib.Emitted, samples: samples_lib.Samples
  ) -> list[Ended]:
    """Books what a chunk drew, and frees the slots of the requests that ended.

    Args:
      emitted: of the chunk, on the host
      samples: gets the tokens, and what is known of a response once it has ended
    """
    ended = []
    samples.count_chunk(emitted, self.bucket.batch)
    for s, slot in zip(*np.nonzero(self.owner >= 0), strict=True):
      row, i = s * self.bucket.batch + slot, int(self.owner[s, slot])
      count, start = int(emitted.count[row]), int(self.drawn[i])
      samples.extend(i, start, emitted, row)
      self.drawn[i] = start + count
      self.pending[i] = samples.tokens[i, start + count - 1]
      if emitted.remaining[row] == 0:
        samples.end(i, start + count, self.requests.stop_tokens[i])
        pages = self.pages[i][1] if self.pages else None
        ended.append(Ended(i, int(s), pages))
        self.owner[s, slot] = -1
    return ended

  def progress(self, samples: samples_lib.Samples) -> source_lib.Running:
    """The sequences in slots, for sources of drafts."""

    def one(i):
      if i < 0:
        return None
      return source_lib.Progress(
        prompt_idx=int(self.requests.prompt_idx[i]),
        prompt=self.requests.prompt(i),
        response=samples.tokens[i, : self.drawn[i]],
      )

    return [[one(i) for i in row] for row in self.owner]
