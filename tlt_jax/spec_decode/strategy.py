"""Speculation strategies, and which one a chunk runs with.

A strategy is `(depth, width, verify)`: drafting steps, children per node, and nodes
per verification pass, the root included. `None` is plain decoding. None of them
changes a token.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Protocol


@dataclasses.dataclass(frozen=True, order=True)
class Strategy:
  """How far to guess; a chain has width 1 and verify = depth + 1."""

  depth: int
  width: int
  verify: int

  def __post_init__(self):
    if self.depth < 1 or self.width < 1:
      raise ValueError(f"{self}: depth and width must be at least 1")
    if self.width == 1 and self.verify != self.depth + 1:
      raise ValueError(f"{self}: a chain verifies depth + 1 = {self.depth + 1} nodes")
    most = self.width + (self.depth - 1) * self.width**2 + 1
    if not self.depth < self.verify <= most:
      raise ValueError(
        f"{self}: verify must lie in [{self.depth + 1}, {most}], the nodes drafted"
      )

  def __str__(self) -> str:
    return f"{self.depth}_{self.width}_{self.verify}"


def parse(text: str) -> Strategy | None:
  """'5_1_6' or 'off'."""
  if text == "off":
    return None
  if not re.fullmatch(r"\d+_\d+_\d+", text):
    raise ValueError(f"a strategy reads DEPTH_WIDTH_VERIFY or off, not {text!r}")
  return Strategy(*map(int, text.split("_")))


class Policy(Protocol):
  """Chooses the strategy of each chunk, the same on every process."""

  strategies: tuple[Strategy, ...]  # all that it may choose

  def choose(self, live: int) -> Strategy | None:
    """What the next chunk runs with, for the live requests of the fullest slice."""


@dataclasses.dataclass(frozen=True)
class ByLiveBatch:
  """The strategy of the first (most live requests, strategy) that covers a batch.

  Plain decoding above the last.
  """

  steps: Sequence[tuple[int, Strategy | None]]

  @property
  def strategies(self) -> tuple[Strategy, ...]:
    return tuple(dict.fromkeys(s for _, s in self.steps if s is not None))

  def choose(self, live: int) -> Strategy | None:
    ordered = sorted(self.steps, key=lambda step: step[0])
    return next((strategy for most, strategy in ordered if live <= most), None)
