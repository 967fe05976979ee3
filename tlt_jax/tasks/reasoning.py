r"""Tasks of reasoning-gym, by name: procedurally generated problems that it can verify.

    source="tlt_jax.tasks.reasoning.Problems", task="chain_sum", options="min_terms=2"
    source="tlt_jax.tasks.reasoning.mixture", tasks="2 * chain_sum(min_terms=2) + gcd"

The answer of a response is, in this order of precedence, the content of the last
\boxed{...}, the line after the last ####, and otherwise the last number in the text, or,
if the right answer is no number, the last line, or as many as that has. Text before
</think> does not count. Numbers are read by `written_number`: 1,234 and 1234.0 are the same
answer. reasoning-gym grades the answer: `score` is 1 for full marks only, `graded` is the
grade. Tasks that give full marks to one wrong answer for most problems are refused.
"""

import ast
import fractions
import functools
import hashlib
import json
import logging
import random
import re
from typing import Any, Literal

import reasoning_gym

from tlt_jax import calls
from tlt_jax import data
from tlt_jax import ranges
from tlt_jax.tasks import gsm8k
from tlt_jax.tasks import written_number

# What 110 fixed answers, parts of the question and answers of other problems get, with the
# default options, over 300 problems of each task of reasoning-gym 0.1.25; a slow test of
# `tests/test_reasoning.py` measures it again.
_REFUSED = {
  "coin_flip": "0 gets full marks in 95%, as all that its answers begin with",
  "complex_arithmetic": "nan gets full marks in 95%, and negative numbers of any size",
  "game_of_life_halting": "any text gets full marks",
  "propositional_logic": "P ∧ P gets full marks in 63%, and a premise as the conclusion",
  "puzzle24": "6*4*1*1 gets full marks, whatever numbers are given",
}
# Right by chance: an answer, the share of problems in which it gets full marks, mean grade.
_GUESSES = {
  "acre": ("on", 0.36, 0.36),
  "circuit_logic": ("0", 0.66, 0.66),
  "course_schedule": ("False", 0.51, 0.51),
  "game_of_life": ("a grid of zeros", 0.1, 0.96),
  "isomorphic_strings": ("False", 0.53, 0.53),
  "letter_counting": ("1", 0.36, 0.36),
  "mahjong_puzzle": ("Chi", 0.36, 0.36),
  "maze": ("5", 0.33, 0.33),
  "pool_matrix": ("the question's matrix", 0.34, 0.34),
  "polynomial_equations": ("0", 0.19, 0.33),
  "prime_factorization": ("the question's number", 0.12, 0.56),
  "ransom_note": ("False", 0.5, 0.5),
  "rectangle_count": ("5", 0.11, 0.43),
  "rotten_oranges": ("-1", 0.34, 0.34),
  "self_reference": ("2", 0.37, 0.37),
  "shortest_path": ("infeasible", 0.36, 0.36),
  "string_insertion": ("the question's string", 0.94, 0.94),
  "syllogism": ("Yes", 0.67, 0.67),
  "time_intervals": ("00:00", 0.0, 0.4),
}
_PROBLEMS = 2**48  # of a task
# These tasks generate all problems in advance, or take smaller seeds.
_FEWER = dict.fromkeys(("acre", "gsm_symbolic", "list_functions", "word_ladder"), 20_000)
_FEWER["pool_matrix"] = 2**31
# Their verifiers expect a tuple of rows; JSON has lists.
_GRIDS = ("arc_agi", "rearc")
# Not 2 * 3, whose value says less than it does, nor 3i, D3 or a hexadecimal 1e3.
_GOLD_NUMBER = re.compile(
  r"\$?-?(?:\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?|\d+/\d+|\\frac\{\d+\}\{\d+\})\$?"
)
_MINUS = re.compile(r"\A\s*(?:negative|minus|-)\s+(?=\d)", re.IGNORECASE)
_RATIO = re.compile(
  r"\d\s*(?:[/\u2044]|\}\s*\{)\s*(\d[\d,]*(?:\.\d+)?|\.\d+)|frac\s*\d\s*(\d)"
)
_TRIES = 2000  # problems drawn to find one of a split
_REPEATS = 2000  # of held-out problems, until there seem to be no others


class Problems:
  """A random-access source of `{"prompt", "answer"}` records of a reasoning-gym task.

  An answer has the task, and the whole problem in reasoning-gym's format, after a round
  trip through JSON, so that all processes judge the same.

  Problem i depends on (task, options, split, seed, i) alone. The splits share no
  question: one in 16 is kept for `held_out`, whose problems are distinct, as long as there
  are enough.

  Args:
    task: name of the task in reasoning-gym, such as chain_sum
    split: part of all problems to draw from; the two share none
    size: number of problems
    options: arguments of the task, as in "min_terms=2, max_terms=3"; those left out have
      reasoning-gym's defaults
    seed: seed of the sequence of problems
  Raises:
    DataError: no such task, it takes other options, or its verifier is useless
  """

  def __init__(
    self,
    task: str,
    split: Literal["train", "held_out"],
    size: ranges.Large,
    options: str = "",
    seed: ranges.Seed = 0,
  ):
    ranges.check(Problems, locals())
    self._task, self._options, self._size, self._seed = task, options, size, seed
    self._is_held_out = split == "held_out"
    self._different: dict[str, dict] = {}  # held-out problems so far, by question
    self._repeats = 0  # drawn among them
    self._all = _dataset(task, options)
    _report_guesses(task)

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, i: int) -> dict[str, Any]:
    if not 0 <= i < self._size:
      raise IndexError(i)
    if not self._is_held_out:
      return self._record(self._draw(i))
    while i >= len(self._different) and self._repeats < _REPEATS:
      problem = self._draw(len(self._different) + self._repeats)
      self._repeats += problem["question"] in self._different
      self._different.setdefault(problem["question"], problem)
    known = list(self._different.values())
    return self._record(known[i % len(known)])

  def _draw(self, i: int) -> dict[str, Any]:
    rng = random.Random(f"{self._seed} {self._is_held_out} {i}")
    for _ in range(_TRIES):
      problem = self._all[rng.randrange(_FEWER.get(self._task, _PROBLEMS))]
      held_out = hashlib.sha256(problem["question"].encode()).digest()[0] < 16
      if held_out == self._is_held_out:
        return problem
    raise data.DataError(
      f"task {self._task!r} has too few different questions to hold some out: none of "
      f"{_TRIES:,} is of the split that is wanted; give it other options"
    )

  def _record(self, problem: dict[str, Any]) -> dict[str, Any]:
    # The verifiers of some tasks need the whole problem to judge an answer.
    problem = json.loads(json.dumps(problem, default=str))
    answer = {"task": self._task, "options": self._options, "problem": problem}
    return {"prompt": problem["question"], "answer": answer}


def mixture(
  tasks: str, split: Literal["train", "held_out"], size: ranges.Large, seed: ranges.Seed = 0
) -> data.Mixture | list[dict[str, Any]]:
  """Problems of several tasks: drawn by weight, or, held out, a set for each.

  Args:
    tasks: as in "2 * chain_sum(min_terms=2, max_terms=2) + gcd + 0.5 * base_conversion"
    split: part of all problems to draw from; the two share none
    size: number of problems, of each task
    seed: seed of the sequence of problems
  Raises:
    DataError: no such task, or it takes other options
  """
  ranges.check(mixture, locals())
  try:
    listed = calls.weighted(tasks)
  except ValueError as e:
    raise data.DataError(f"tasks={tasks!r} {e}") from e
  made = []
  for call in listed:
    options = ", ".join(f"{name}={value!r}" for name, value in (call.options or {}).items())
    made.append(Problems(call.path, split, size, options, seed))
  if split == "train":
    return data.Mixture(made, [call.weight for call in listed])
  return [
    record | {"set": call.path}
    for call, problems in zip(listed, made, strict=True)
    for record in problems
  ]


def score(prompt: object, response: str, answer: dict[str, Any]) -> float:
  return float(graded(prompt, response, answer) == 1.0)


def graded(prompt: object, response: str, answer: dict[str, Any]) -> float:
  del prompt
  task, problem = answer["task"], answer["problem"]
  if task in _GRIDS:
    grid = tuple(map(tuple, problem["metadata"]["output"]))
    problem = problem | {"metadata": problem["metadata"] | {"output": grid}}
  final = final_answer(response, problem["answer"])
  dataset = _dataset(task, answer["options"])
  try:
    return float(dataset.score_answer(final, problem))
  except Exception:  # of some verifiers, for answers that do not have the task's form
    return 0.0


def final_answer(response: str, gold: str | None) -> str | None:
  """The final answer of a response in the task's format; None if there is none.

  If the gold answer is a number, it is one that is worked out: neither 12 + 7 nor 38/2 is
  19, because otherwise what the question says is an answer.
  """
  gold, final = gold or "", gsm8k.final_answer(response)
  text = gsm8k.after_thoughts(response) if final is None else final
  if not _GOLD_NUMBER.fullmatch(gold):
    if final is None:
      text = "\n".join(text.strip().splitlines()[-len(gold.splitlines() or [""]) :])
    return text.strip() or None
  text = _MINUS.sub("-", text)
  found = written_number.read_last(text)  # None for calculations
  if found is None or (final is not None and written_number.read(text) != found):
    return None
  *_, (last, below) = [(0, None), *_ratios(text)]
  if below not in (None, found.denominator) and not re.search(r"\d", text[last:]):
    return None
  return gold if found == written_number.read(gold) else str(found)


def _ratios(text: str) -> list[tuple[int, fractions.Fraction]]:
  """The ends and denominators of fractions that are written with digits."""
  found = [(m.end(), m[1] or m[2]) for m in _RATIO.finditer(text)]
  return [(end, fractions.Fraction(below.replace(",", ""))) for end, below in found]


@functools.cache
def _report_guesses(task: str) -> None:
  if task in _GUESSES:
    guess, solved, grade = _GUESSES[task]
    logging.warning(
      "task %s of reasoning-gym, with its default options: %s, always, gets full marks for "
      "%.0f%% of the problems and a mean grade of %.2f",
      *(task, guess, 100 * solved, grade),
    )


@functools.cache
def _dataset(task: str, options: str) -> reasoning_gym.dataset.ProceduralDataset:
  if task in _REFUSED:
    raise data.DataError(
      f"task {task!r} of reasoning-gym cannot be a reward: {_REFUSED[task]}; use another"
    )
  try:
    call = ast.parse(f"options({options})", mode="eval").body
    given = {argument.arg: ast.literal_eval(argument.value) for argument in call.keywords}
    if call.args or None in given:
      raise ValueError("each is NAME=VALUE")
  except (SyntaxError, ValueError, AttributeError) as e:
    raise data.DataError(
      f"options={options!r}: takes arguments as in 'min_terms=2, max_terms=3' ({e})"
    ) from e
  try:
    size = _FEWER.get(task, _PROBLEMS)
    return reasoning_gym.create_dataset(task, **given | {"seed": 0, "size": size})
  except (TypeError, ValueError, AssertionError) as e:
    raise data.DataError(f"task {task!r} of reasoning-gym, options={options!r}: {e}") from e
