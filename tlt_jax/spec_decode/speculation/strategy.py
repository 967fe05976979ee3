"""Speculation strategies: how many tokens to draft, and by which source.

A strategy is `(depth, width, verify)`: drafting steps, children per node, and nodes
per verification pass, the root included. `None` is plain decoding. No strategy changes
a token.
"""

from collections.abc import Iterable
import dataclasses
import re

from tlt_jax.models import drafter as drafter_lib

MODEL, NGRAM = "model", "ngram"  # a drafter with weights; lookup in known sequences


@dataclasses.dataclass(frozen=True, order=True)
class Strategy:
  """The shape of a draft tree and its source; a chain has width 1.

  Width and verify are compiled in; depth is not.
  """

  depth: int
  width: int
  verify: int
  source: str = MODEL  # of drafts; see `source.make`

  def __post_init__(self):
    if self.depth < 1 or self.width < 1:
      raise ValueError(f"{self}: depth and width must be at least 1")
    if self.verify <= self.depth:
      raise ValueError(
        f"{self}: to accept {self.depth} tokens takes a pass over {self.depth + 1} nodes"
      )

  @property
  def longest(self) -> int:
    return self.verify - 1 if self.width == 1 else self.depth

  def __str__(self) -> str:
    shape = f"{self.depth}_{self.width}_{self.verify}"
    if self.source == MODEL:
      return shape
    is_full_chain = self.width == 1 and self.verify == self.depth + 1
    return f"{self.source}_{self.depth if is_full_chain else shape}"


_TEXT = re.compile(r"(?:([A-Za-z_][\w.]*?)_)?(\d+)(?:_(\d+)_(\d+))?")


def parse(text: str) -> Strategy | None:
  """Reads '5_1_6', 'ngram_5', 'my_package.my_source_5' or 'off' (None)."""
  if text == "off":
    return None
  match = _TEXT.fullmatch(text)
  if not match or not (match[1] or match[3]):
    raise ValueError(
      "a strategy reads DEPTH_WIDTH_VERIFY, SOURCE_DEPTH (ngram_5), "
      f"SOURCE_DEPTH_WIDTH_VERIFY or off, not {text!r}"
    )
  depth = int(match[2])
  width, verify = (int(match[3]), int(match[4])) if match[3] else (1, depth + 1)
  return Strategy(depth, width, verify, match[1] or MODEL)


def name(strategy: Strategy | None) -> str:
  return "off" if strategy is None else str(strategy)


def uses_drafter(strategy: Strategy | None) -> bool:
  return strategy is not None and strategy.source == MODEL


def check_depths(
  strategies: Iterable[Strategy | None], block: drafter_lib.Block | None
) -> None:
  """ValueError: a strategy is deeper than the block that the drafter guesses, if any."""
  for strategy in filter(uses_drafter, strategies):
    if block is not None and strategy.depth > block.guesses:
      raise ValueError(
        f"strategy {strategy} guesses {strategy.depth} tokens, the drafter's block has "
        f"{block.guesses}; choose a shorter one"
      )


@dataclasses.dataclass(frozen=True)
class Room:
  """Cache space that strategies need, the same for all of a rollout."""

  longest: int = 1  # A, most tokens that a pass of the target yields
  target: int = 0  # cache slots behind the longest sequence: the nodes of a tree
  # Behind the longest pair: nodes of a tree that have children, or a block.
  drafter: int = 0

  @property
  def behind(self) -> int:
    return max(self.target, self.drafter)

  def filled(self, known: int) -> int:
    """Pairs in the drafter's KV before a chunk, which computes the others itself.

    Args:
      known: tokens of the request
    """
    return max(known - 1 - self.longest, 0)

  @classmethod
  def of(cls, strategies: Iterable[Strategy], block: int = 0) -> "Room":
    """`block` counts the tokens of a block that the drafter guesses in one pass, if any."""
    strategies = tuple(strategies)
    trees = [s for s in strategies if s.width > 1]
    nodes = max((s.verify for s in trees), default=0)
    return cls(
      longest=1 + max((s.longest for s in strategies), default=0),
      target=nodes,
      drafter=block or max([nodes, *(s.width * (s.depth - 1) for s in trees)]),
    )
