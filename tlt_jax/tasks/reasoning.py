r"""Tasks of reasoning-gym, by name: procedurally generated problems that it can verify.

    source="tlt_jax.tasks.reasoning.Problems", task="chain_sum", options="min_terms=2"
    source="tlt_jax.tasks.reasoning.mixture", tasks="2 * chain_sum(min_terms=2) + gcd"

The answer of a response is, in this order of precedence, the content of the last
\boxed{...}, the line after the last ####, and otherwise the last number in the text, or,
if the right answer is no number, the last line, or as many as that has. Text before
</think> does not count. Numbers are read by `written_number`: 1,234 and 1234.0 are the same
answer. reasoning-gym grades the answer: `score` is 1 for full marks only, `graded` is the
grade.
"""

import ast
import functools
import hashlib
import json
import random
from typing import Any, Literal

import reasoning_gym

from tlt_jax import calls
from tlt_jax import data
from tlt_jax import ranges
from tlt_jax.tasks import gsm8k
from tlt_jax.tasks import written_number

_PROBLEMS = 2**48  # of a task
# These tasks generate all problems in advance, or take smaller seeds.
_FEWER = dict.fromkeys(("acre", "gsm_symbolic", "list_functions", "word_ladder"), 20_000)
_FEWER["pool_matrix"] = 2**31
# Their verifiers expect a tuple of rows; JSON has lists.
_GRIDS = ("arc_agi", "rearc")
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
    DataError: no such task, or it takes other options
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
    problem = json.loads(json.dumps(problem))
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
  return float(dataset.score_answer(final, problem))


def final_answer(response: str, gold: str | None) -> str | None:
  """The final answer of a response in the task's format; None if there is none."""
  value = None if gold is None else written_number.read(gold)
  if value is None:
    final = gsm8k.final_answer(response)
    if final is None:
      lines = gsm8k.after_thoughts(response).strip().splitlines()
      final = "\n".join(lines[-len((gold or "").splitlines() or [""]) :]).strip()
    return final or None
  found = gsm8k.final_number(response)
  if found is None or found == value:
    return None if found is None else gold
  return str(found)


@functools.cache
def _dataset(task: str, options: str) -> reasoning_gym.dataset.ProceduralDataset:
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
