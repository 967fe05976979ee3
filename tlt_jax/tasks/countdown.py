"""Countdown: combine all the given numbers with + - * / to hit a target.

Problems and the verifier are reasoning-gym's. A response is a written search, one
character per token, whose length has a natural long tail:

    prompt    14 12 11>22:
    response  14+12=26,26-11=15;14-12=2,11+2=13;11*2=22!

Each step takes two of the numbers left and puts the result back. The character after a
result says how many numbers are left: `|` three, `,` two, and with one left `!` (the
target) or `;` (a dead end: the search backtracks).
"""

import functools
import hashlib
import random
import re
from typing import TYPE_CHECKING, Literal

import reasoning_gym

from tlt_jax import ranges

if TYPE_CHECKING:
  import transformers

CHARACTERS = "0123456789+-*/=|,;!> :\n"
STOP = "\n"
_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)([|,;!])")
_MAX_INTERMEDIATE = 400  # written searches skip results above this


def _held_out(numbers: list[int], target: int) -> bool:
  """One problem in 16 is held out, by its numbers in any order and its target."""
  name = f"{sorted(numbers)}>{target}".encode()
  return hashlib.sha256(name).digest()[0] < 16


class Problems:
  """A random-access source of `{"prompt", "answer"}` records.

  Problem i depends on (split, i) alone. The splits share no problem: 1/16 of
  all (multiset of numbers, target) pairs are kept for `held_out`.

  Args:
    split: part of all problems to draw from; the two share none
    size: number of problems
    four_share: share of problems with four numbers; the others have three
  """

  def __init__(
    self,
    split: Literal["train", "held_out"],
    size: ranges.Large,
    four_share: ranges.Share = 0.25,
  ):
    ranges.check(Problems, locals())
    self._held_out = split == "held_out"
    self._size = size
    self._four_share = four_share
    self._tables = {
      n: reasoning_gym.create_dataset(
        "countdown",
        min_numbers=n,
        max_numbers=n,
        min_value=1,
        max_value=20,
        min_target=10,
        max_target=99,
        seed=0,
        size=2**62,
      )
      for n in (3, 4)
    }

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, i: int) -> dict[str, str]:
    if not 0 <= i < self._size:
      raise IndexError(i)
    rng = random.Random(f"0 {self._held_out} {i}")
    table = self._tables[4 if rng.random() < self._four_share else 3]
    while True:
      entry = table[rng.randrange(2**48)]["metadata"]
      numbers, target = entry["numbers"], entry["target"]
      if _held_out(numbers, target) == self._held_out:
        break
    prompt = f"{' '.join(map(str, numbers))}>{target}:"
    return {"prompt": prompt, "answer": entry["expression"]}


def _parse(prompt: str) -> tuple[list[int], int]:
  numbers, target = prompt.rstrip(":").split(">")
  return [int(n) for n in numbers.split()], int(target)


def _moves(numbers: list[int]) -> list[tuple[str, int, list[int]]]:
  """All (step as text, result, numbers left), without negatives and fractions."""
  moves = {}
  for i in range(len(numbers)):
    for j in range(i):
      a, b = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
      rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
      moves[f"{a}+{b}"] = (a + b, rest)
      moves[f"{a}-{b}"] = (a - b, rest)
      moves[f"{a}*{b}"] = (a * b, rest)
      if b and a % b == 0:
        moves[f"{a}/{b}"] = (a // b, rest)
  return [
    (step, c, [c, *rest])
    for step, (c, rest) in moves.items()
    if c <= _MAX_INTERMEDIATE
  ]


def write_search(prompt: str, rng: random.Random, max_length: int) -> str | None:
  """Writes a depth-first search in random order, as a response ending in `STOP`.

  Returns:
    None if the search finds nothing within `max_length` characters
  """
  numbers, target = _parse(prompt)
  text, length = [], 0

  def search(numbers: list[int]) -> bool:
    nonlocal length
    moves = _moves(numbers)
    rng.shuffle(moves)
    for step, result, left in moves:
      solved = len(left) == 1 and result == target
      mark = {3: "|", 2: ",", 1: "!" if solved else ";"}[len(left)]
      text.append(f"{step}={result}{mark}")
      length += len(text[-1])
      if solved or length >= max_length:
        return solved
      if len(left) > 1 and (search(left) or length >= max_length):
        return length < max_length
    return False

  found = search(numbers)
  return "".join(text) + STOP if found and length < max_length else None


def give_up(search: str, rng: random.Random) -> str:
  """Cuts a written search at one of its dead ends, if it has any."""
  ends = [i + 1 for i, character in enumerate(search) if character == ";"]
  return search[: rng.choice(ends)] + STOP if ends else search


def _is_right(a: int, op: str, b: int, result: int) -> bool:
  if op == "/":
    return b != 0 and a == b * result
  return result == {"+": a + b, "-": a - b, "*": a * b}[op]


def answer_expression(numbers: list[int], response: str) -> str | None:
  """The expression of the steps that lead to `!`, None if one of them is illegal.

  A step may only use numbers that are left, and its result must be right. Whether the
  expression hits the target is for the verifier to decide.

  Worked row, numbers 14 12 11: going backwards from `!`, the nearest step of each depth is
  11*2=22 (one number is left) and 14-12=2 (two are):

      14+12=26,26-11=15;14-12=2,2+11=13;11*2=22!   ->   (11*(14-12))
  """
  if not response.endswith("!" + STOP):
    return None
  steps = _STEP.findall(response)
  path, depth = [], 0
  for step in reversed(steps):
    if {"!": 1, ";": 1, ",": 2, "|": 3}[step[4]] == depth + 1:
      path.insert(0, step)
      depth += 1
    if depth == len(numbers) - 1:
      break
  pool = [(n, str(n)) for n in numbers]
  for a, op, b, result, _ in path:
    if not _is_right(int(a), op, int(b), int(result)):
      return None
    operands = []
    for value in (int(a), int(b)):
      i = next((i for i, (n, _) in enumerate(pool) if n == value), None)
      if i is None:
        return None
      operands.append(pool.pop(i)[1])
    pool.append((int(result), f"({operands[0]}{op}{operands[1]})"))
  return pool[0][1] if len(pool) == 1 else None


@functools.cache
def _verifier():
  return reasoning_gym.create_dataset("countdown", size=1)


def score(prompt: str, response: str, answer: str) -> float:
  """1.0 if the response's search ends in a right solution, else 0.0."""
  del answer  # one solution of many; the verifier evaluates the response's own
  numbers, target = _parse(prompt)
  expression = answer_expression(numbers, response)
  entry = {"metadata": {"numbers": numbers, "target": target}}
  if expression is None:
    return 0.0
  return float(_verifier().score_answer(expression, entry) == 1.0)


def tokenizer() -> "transformers.PreTrainedTokenizerFast":
  """A tokenizer with a token per character; id 0 pads, and `STOP` ends a response."""
  import tokenizers  # here, because both take seconds to import
  import transformers

  vocabulary = {"<pad>": 0} | {c: i for i, c in enumerate(CHARACTERS, 1)}
  inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  inner.decoder = tokenizers.decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner,
    pad_token="<pad>",
    eos_token=STOP,
    clean_up_tokenization_spaces=False,
  )
