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
from tlt_jax.spec_decode.speculation import source as source_lib


class Ended(NamedTuple):
  """A request that has ended, and its pages, which are its own until the next chunk."""

  request: int
  slice: int
  pages: np.ndarray  # i32[most]  of that slice; see `pages.Pages`


class Running:
  """Which request is in which slot, and how far every request has got."""

  def __init__(self, requests: requests_lib.Requests, pages: pages_lib.Pages, slices: int):
    self.requests, self.pages = requests, pages
    self.total = requests.total_length  # i32[B]  of the prompt and the longest response
    self.drawn = np.zeros(len(requests), np.int32)  # i32[B]  response tokens so far
    self.pending = requests.last_token.copy()  # i32[B]  each one's last known token
    # i32[slices bucket]  request in each slot, -1 if it is free; no slots at first
    self.owner = np.full((slices, 0), -1, np.int32)

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
    self.owner[s, slot] = -1
    self.start_over([request])
    return request

  def start_over(self, requests: list[int]) -> None:
    """Forgets what these have drawn."""
    self.drawn[requests] = 0
    self.pending[requests] = self.requests.last_token[requests]

  def hold(self, s: int, row: int, prompt: int) -> np.ndarray:
    """Gives a prompt pages, in a row of a slice's prompts: i32[most].

    Its last token stays pending: its KV is computed with the first draw.
    """
    return self.pages.hold(s, row, len(self.requests.prompts[prompt]) - 1)

  def share(self, s: int, row: int, request: int) -> list[tuple[int, int]]:
    """Lets a request begin with the pages of its prompt; which are to be copied."""
    return self.pages.share(request, s, row, int(self.position[request]))

  def advance(
    self, emitted: slots_lib.Emitted, samples: samples_lib.Samples
  ) -> list[Ended]:
    """Books what a chunk drew, and frees the slots of the requests that ended.

    Args:
      emitted: of the chunk, on the host
      samples: gets the tokens, and what is known of a response once it has ended
    """
    ended = []
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

  def progress(self, samples: samples_lib.Samples) -> source_lib.Running:
    """The sequences in slots, for sources of drafts."""

    def one(i):
      if i < 0:
        return None
      return source_lib.Progress(
        request=int(i),
        prompt_idx=int(self.requests.prompt_idx[i]),
        prompt=self.requests.prompt(i),
        response=samples.tokens[i, : self.drawn[i]],
        pages=self.pages[int(i)],
      )

    return [[one(i) for i in row] for row in self.owner]
