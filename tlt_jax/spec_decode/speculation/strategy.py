"""Speculation strategies, and which one a chunk runs with.

A strategy is `(depth, width, verify)`: drafting steps, children per node, and nodes
per verification pass, the root included. `None` is plain decoding. None of them
changes a token.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any, Protocol

MODEL, NGRAM = "model", "ngram"  # a drafter with weights; lookup in known sequences


@dataclasses.dataclass(frozen=True, order=True)
class Strategy:
  """How far to guess; a chain has width 1.

  Width and verify are compiled in, depth is not: chains that share `verify` share a
  program.
  """

  depth: int
  width: int
  verify: int
  source: str = MODEL  # what drafts

  def __post_init__(self):
    if self.source not in (MODEL, NGRAM):
      raise ValueError(f"a strategy's source is {MODEL} or {NGRAM}, not {self.source!r}")
    if self.source == NGRAM and self.width > 1:
      raise ValueError(f"{self}: n-grams draft chains only")
    if self.depth < 1 or self.width < 1:
      raise ValueError(f"{self}: depth and width must be at least 1")
    if self.verify <= self.depth:
      raise ValueError(
        f"{self}: to accept {self.depth} tokens takes a pass over {self.depth + 1} nodes"
      )

  @property
  def longest(self) -> int:
    """The deepest strategy that its program can run."""
    return self.verify - 1 if self.width == 1 else self.depth

  def __str__(self) -> str:
    shape = f"{self.depth}_{self.width}_{self.verify}"
    return shape if self.source == MODEL else f"{self.source}_{self.depth}"


def parse(text: str) -> Strategy | None:
  """'5_1_6', 'ngram_5' or 'off'."""
  if text == "off":
    return None
  if m := re.fullmatch(r"ngram_(\d+)", text):
    return Strategy(int(m[1]), 1, int(m[1]) + 1, NGRAM)
  if not re.fullmatch(r"\d+_\d+_\d+", text):
    raise ValueError(
      f"a strategy reads DEPTH_WIDTH_VERIFY, ngram_DEPTH or off, not {text!r}"
    )
  return Strategy(*map(int, text.split("_")))


def name(strategy: Strategy | None) -> str:
  """What `parse` reads."""
  return "off" if strategy is None else str(strategy)


@dataclasses.dataclass(frozen=True)
class Observation:
  """What a chunk did, the same on every process."""

  live: int  # requests of the fullest slice, at its start
  bucket: Any  # `schedule.Bucket`
  strategy: Strategy | None
  steps: int  # iterations of the busiest slice
  tokens: int  # drawn, over all slices
  passes: int  # of the target over a live request
  accepted: Sequence[int]  # passes that drew more than 0, 1, ... tokens; () if plain
  seconds: float = 0.0


class Policy(Protocol):
  """Chooses the strategy of each chunk, the same on every process."""

  strategies: tuple[Strategy, ...]  # all that it may choose

  def choose(self, live: int, bucket) -> Strategy | None:
    """What the next chunk runs with, for the live requests of the fullest slice."""

  def arms(self, live: int) -> tuple[Strategy | None, ...]:
    """All that `choose` may return for so many; their programs are compiled ahead."""

  def observe(self, seen: Observation) -> None:
    """Told of every chunk."""


@dataclasses.dataclass(frozen=True)
class ByLiveBatch:
  """The strategy of the first (most live requests, strategy) that covers a batch.

  Plain decoding above the last.
  """

  steps: Sequence[tuple[int, Strategy | None]]

  @property
  def strategies(self) -> tuple[Strategy, ...]:
    return tuple(dict.fromkeys(s for _, s in self.steps if s is not None))

  def choose(self, live: int, bucket=None) -> Strategy | None:
    ordered = sorted(self.steps, key=lambda step: step[0])
    return next((strategy for most, strategy in ordered if live <= most), None)

  def arms(self, live: int) -> tuple[Strategy | None]:
    return (self.choose(live),)

  def observe(self, seen: Observation) -> None:
    """Nothing to learn."""


def always(strategy: Strategy) -> ByLiveBatch:
  """The same for every live batch."""
  return ByLiveBatch(((10**9, strategy),))
