"""Sums of two numbers after worked examples, for policies that were only pretrained.

    12 + 7 = 19
    4 + 5 = 9
    8 + 26 = 34
    3 + 6 = 9
    21 + 8 =

A text is continued, so the answer is the first number of a response; what follows, such as
more sums, does not count. No number is 0: copying the other would be right.
"""

import random
import re
from typing import Literal

from tlt_jax import ranges

_EXAMPLES = ((12, 7), (4, 5), (8, 26), (3, 6))
_LARGE, _SMALL = range(1, 31), range(1, 10)
_HELD_OUT = 128
_FIRST_NUMBER = re.compile(r"\d+")


class Problems:
  """A random-access source of `{"prompt", "answer"}` records.

  Problem i depends on (split, i) alone; the splits share none. There are 128 to hold out,
  and 331 others, in a random order that begins again at its end.

  Args:
    split: part of all problems
    size: number of problems
  """

  def __init__(self, split: Literal["train", "held_out"], size: ranges.Large):
    ranges.check(Problems, locals())
    pairs = {(a, b) for a in _LARGE for b in _SMALL}
    pairs = sorted(pairs | {(b, a) for a, b in pairs})
    random.Random(0).shuffle(pairs)
    part = pairs[:_HELD_OUT] if split == "held_out" else pairs[_HELD_OUT:]
    self._pairs, self._size = part, size

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, i: int) -> dict[str, str]:
    if not 0 <= i < self._size:
      raise IndexError(i)
    a, b = self._pairs[i % len(self._pairs)]
    worked = "".join(f"{x} + {y} = {x + y}\n" for x, y in _EXAMPLES)
    return {"prompt": f"{worked}{a} + {b} =", "answer": str(a + b)}


def score(prompt: str, response: str, answer: str) -> float:
  """1.0 if the first number is the sum."""
  del prompt
  found = _FIRST_NUMBER.search(response)
  return float(found is not None and found[0] == answer)
