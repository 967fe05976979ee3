"""Groups of responses whose lengths are known, who drew how much of them, and pauses."""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib


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
    """i32[R]: how many policy versions drew tokens of each response."""
    return sum(tokens > 0 for tokens in self.by_version.values())

  def must_end(self, version: int, most: int) -> np.ndarray:
    """bool[R]: which are to end with this version, so that none has more than `most`.

    Those that `most - 1` earlier ones have drawn, one after the other.
    """
    before = [n > 0 for v, n in self.by_version.items() if v < version]
    begun = sum(before, np.zeros(len(self.lengths), np.int32))
    return (self.drawn < self.lengths) & (begun >= most - 1)


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


class Pause:
  """An `Until` that ends a rollout when enough groups are complete.

  Every response draws at most n tokens. Of all n that complete `wanted` groups, and let the
  responses end that have to, it finds the least, whatever was drawn in which order: what
  is drawn beyond it is to be dropped.
  """

  def __init__(
    self, group: np.ndarray, begun: np.ndarray, must_end: np.ndarray, wanted: int
  ):
    """Of requests i32[B] their group, tokens before, and which have to end, bool[B]."""
    self._group, self._begun, self._must_end = group, begun, must_end
    self._wanted = wanted
    self._drew = np.full(len(group), -1)  # i64[B]  tokens of those that have ended

  def __call__(self, samples: samples_lib.Samples, ended: list[int]) -> np.ndarray | None:
    self._drew[ended] = samples.length[ended] - self._begun[ended]
    most = self.most
    return None if most is None else self._begun + most

  @property
  def most(self) -> int | None:
    """The least n of what is known by now; None: too little has ended."""
    has_ended = self._drew >= 0
    if not has_ended[self._must_end].all():
      return None
    last = np.zeros(self._group.max(initial=-1) + 1, np.int64)
    np.maximum.at(last, self._group, np.where(has_ended, self._drew, np.iinfo(int).max))
    last = np.sort(last[last < np.iinfo(int).max])
    if len(last) < self._wanted:
      return None
    enough = last[self._wanted - 1] if self._wanted > 0 else 0
    return int(max(enough, self._drew[self._must_end].max(initial=0)))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
