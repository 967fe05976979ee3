"""Levels: which strategies may run at how many live requests.

Configs write them as "up to 2 live: off or 3_1_4; up to 8 live: off or 2_1_3", where live
requests are those of the fullest slice. A single strategy always runs; among several a
rule learns which is fastest (`selector.make`). Above the last level decoding is plain.
"""

from collections.abc import Iterable
import re
from typing import NamedTuple

from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

_LEVEL = re.compile(r"up to (\d+) live: (\S+(?: or \S+)*)")


class Level(NamedTuple):
  """The strategies that may run while at most `most` requests are live."""

  most: int
  arms: tuple[strategy_lib.Strategy | None, ...]

  def __str__(self) -> str:
    return f"up to {self.most} live: " + " or ".join(map(strategy_lib.name, self.arms))


def parse(text: str) -> tuple[Level, ...]:
  """Reads levels, sorted by `most`; ValueError where a number or a strategy is repeated."""
  levels = []
  for part in filter(None, map(str.strip, text.split(";"))):
    match = _LEVEL.fullmatch(part)
    if match is None:
      raise ValueError(
        "strategies read like 'up to 2 live: off or 3_1_4; up to 8 live: 2_1_3', or '' to "
        "decode plainly, not "
        f"{part!r}"
      )
    arms = tuple(map(strategy_lib.parse, match[2].split(" or ")))
    if len(set(arms)) < len(arms):
      raise ValueError(f"a strategy is named twice: {part!r}")
    if not int(match[1]):
      raise ValueError(f"no request is live up to 0: give 1 or more in {part!r}")
    levels.append(Level(int(match[1]), arms))
  if len({level.most for level in levels}) < len(levels):
    raise ValueError(f"a number of live requests is named twice: {text!r}")
  return tuple(sorted(levels, key=lambda level: level.most))


def automatic(drafter: drafter_lib.DrafterConfig | None) -> str:
  """Levels for a drafter, or without one.

  Of a block all guesses cost the same: only verification bounds how many are used.
  """
  if drafter is None:
    arms = ["ngram_3", "ngram_5"]
  elif drafter.block is None:
    arms = ["3_1_4", "5_1_6", "4_2_8", "ngram_3"]
  else:
    short, long = (min(depth, drafter.block.guesses) for depth in (4, 8))
    arms = [f"{short}_1_{short + 1}", f"{long}_1_{long + 1}", f"{long}_3_16", "ngram_3"]
  return f"up to 8 live: {' or '.join(dict.fromkeys(['off', *arms]))}"


def write(levels: Iterable[Level]) -> str:
  return "; ".join(map(str, levels))
