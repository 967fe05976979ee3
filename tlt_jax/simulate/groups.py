"""Groups of responses whose lengths are known, and who drew how much of them."""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from tlt_jax.spec_decode.decoding import requests as requests_lib


@dataclasses.dataclass
class Group:
  """The responses to a prompt, and how many tokens each policy version drew of them."""

  number: int  # of the prompt, over the whole run
  lengths: np.ndarray  # i32[R]  of whole responses
  by_version: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # i32[R] each

  @property
  def drawn(self) -> np.ndarray:
    return sum(self.by_version.values(), np.zeros_like(self.lengths))

  @property
  def is_complete(self) -> bool:
    return bool(np.all(self.drawn == self.lengths))

  @property
  def versions(self) -> np.ndarray:
    """i32[R]: policy versions from the first that drew tokens of a response to the last."""
    by = {version: tokens > 0 for version, tokens in self.by_version.items()}
    first = np.min([np.where(drew, v, np.inf) for v, drew in by.items()], 0)
    last = np.max([np.where(drew, v, -np.inf) for v, drew in by.items()], 0)
    return (last - first + 1).astype(np.int32)

  def must_end(self, version: int, most: int) -> np.ndarray:
    """bool[R]: which are to end with this version, so that none spans more than `most`."""
    begun = [n > 0 for v, n in self.by_version.items() if v <= version + 1 - most]
    has_begun = np.any(begun, 0) if begun else np.full(len(self.lengths), most == 1)
    return has_begun & (self.drawn < self.lengths)


Draw = Callable[[int], np.ndarray]  # lengths i32[R] of the responses to a prompt


@dataclasses.dataclass
class Prompts:
  """Prompts in the order in which they are asked."""

  draw: Draw
  asked: int = 0

  def ask(self, count: int) -> list[Group]:
    numbers = range(self.asked, self.asked + count)
    self.asked += count
    return [Group(i, self.draw(i)) for i in numbers]


class Batch:
  """What is left of groups, as requests of a rollout: the oldest groups first."""

  def __init__(self, groups: Sequence[Group], prompt_tokens: int, max_tokens: int):
    self.groups = [g for g in groups if not g.is_complete]
    drawn = [g.drawn for g in self.groups]
    left = [np.flatnonzero(g.lengths > n) for g, n in zip(self.groups, drawn, strict=True)]
    # i32[B]: of each request, its group here and its response there.
    self.group = np.repeat(np.arange(len(left)), [len(i) for i in left])
    self.response = _joined(left)
    self.begun = _joined([n[i] for n, i in zip(drawn, left, strict=True)])
    parts = zip(self.groups, left, strict=True)
    self.lengths = _joined([g.lengths[i] for g, i in parts])
    self._sizes = prompt_tokens, max_tokens

  def __len__(self) -> int:
    return len(self.group)

  def requests(self) -> requests_lib.Requests:
    """Without tokens: all are 0. Ids depend on prompt and response alone."""
    prompt_tokens, max_tokens = self._sizes
    nothing = np.zeros(max(prompt_tokens, max_tokens), np.int32)
    made = requests_lib.make_requests(
      [nothing[:prompt_tokens]] * len(self), max_tokens=max_tokens
    )
    responses = len(self.groups[0].lengths)
    number = np.array([g.number for g in self.groups])[self.group]
    return dataclasses.replace(
      made,
      prompts=made.prompts[: len(self.groups)],
      prompt_idx=self.group.astype(np.int32),
      request=(number * responses + self.response).astype(np.uint32),
      begun=[nothing[:n] for n in self.begun] if self.begun.any() else None,
    )

  def take(self, version: int, length: np.ndarray) -> None:
    """Books that a policy version drew responses up to so many tokens, i32[B]."""
    for g, group in enumerate(self.groups):
      here = self.group == g
      tokens = np.zeros_like(group.lengths)
      tokens[self.response[here]] = (length - self.begun)[here]
      if tokens.any():
        group.by_version[version] = group.by_version.get(version, 0) + tokens


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
