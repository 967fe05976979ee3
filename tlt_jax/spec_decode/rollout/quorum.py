"""Rollouts that end once enough prompts have all their responses, whatever the timing.

Each response draws up to n tokens in the rollout, for the least n by which so many prompts
are complete, and every response that must end has ended. It is what would happen if all
drew in step, a token at a time. So n follows from lengths, which follow from weights and
noise: slots, strategies, chunks and the machine change neither n nor a token. They change
how many tokens are drawn beyond n and dropped.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np

from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib


@dataclasses.dataclass(frozen=True)
class Quorum:
  """When a rollout ends."""

  wanted: int  # prompts of the requests that are to be complete
  must_end: np.ndarray  # bool[B]

  def until(self, requests: requests_lib.Requests) -> "Until":
    """Raises ValueError if there are fewer prompts with requests than are wanted."""
    return Until(self, requests)


class Until:
  """The `samples.Until` of one rollout."""

  def __init__(self, quorum: Quorum, requests: requests_lib.Requests):
    self._quorum, self._requests = quorum, requests
    prompts, self._prompt = np.unique(requests.prompt_idx, return_inverse=True)
    if quorum.wanted > len(prompts):
      raise ValueError(
        f"{quorum.wanted} prompts are to be complete, and {len(prompts)} are asked"
      )
    # i32[B]  tokens that each request drew in this rollout; beyond all: it still draws
    self._drew = np.full(len(requests), _UNKNOWN)

  def __call__(self, samples: samples_lib.Samples, ended: list[int]) -> np.ndarray | None:
    begun = self._requests.begun_length
    self._drew[ended] = samples.length[ended] - begun[ended]
    n = self.tokens
    return None if n is None else begun + n

  @property
  def tokens(self) -> int | None:
    """n, or more while some of its requests draw; None: as yet not even that."""
    complete = np.zeros(int(self._prompt.max(initial=-1)) + 1, np.int64)
    np.maximum.at(complete, self._prompt, self._drew)
    by_prompt = np.sort(complete)[: self._quorum.wanted]
    n = max(by_prompt.max(initial=0), self._drew[self._quorum.must_end].max(initial=0))
    return None if n == _UNKNOWN else int(n)


_UNKNOWN = np.iinfo(np.int64).max


def draw(
  rollout: Callable[..., samples_lib.Samples],
  params: Any,
  requests: requests_lib.Requests,
  quorum: Quorum | None,
  score: samples_lib.Score | None = None,
  **hooks: Any,
) -> samples_lib.Samples:
  """A rollout until the quorum; responses are cut at what each may have.

  Args:
    rollout: an `Engine`
    quorum: None: all responses end
    score: sees the samples when they are cut; see `Engine.__call__`, as for `hooks`
  """
  if quorum is None:
    return rollout(params, requests, score=score, **hooks)
  until = quorum.until(requests)

  def begin(samples):
    samples.cut(requests.begun_length + until.tokens)
    return None if score is None else score(samples)

  return rollout(params, requests, until=until, score=begin, **hooks)
