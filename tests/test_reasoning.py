"""Tasks of reasoning-gym: disjoint splits, answers found in prose, clear errors."""

import collections
import json
import re

import pytest
from reasoning_gym import factory

from tests import tiny
from tlt_jax import data
from tlt_jax.rl import judge
from tlt_jax.tasks import reasoning

SUMS = "min_terms=2, max_terms=2, min_digits=1, max_digits=2"


def problems(split: str, size: int = 300, seed: int = 0) -> reasoning.Problems:
  return reasoning.Problems("chain_sum", split, size, SUMS, seed)


def test_the_splits_share_no_question_and_held_out_ones_differ():
  """However they are drawn; a record is the same whenever it is asked for."""
  train, held_out = ([*problems(split)] for split in ("train", "held_out"))
  asked = {r["prompt"] for r in train}
  assert len({r["prompt"] for r in held_out}) == 300
  assert not asked & {r["prompt"] for r in held_out}
  assert problems("held_out")[123] == held_out[123]
  assert problems("train", size=10**9)[299] == train[299]
  others = problems("train", seed=1)
  assert [others[i] for i in range(5)] != train[:5]
  json.dumps(held_out[0])


def record(question: str, answer: str) -> dict:
  problem = {"question": question, "answer": answer, "metadata": {}}
  return {"task": "chain_sum", "options": SUMS, "problem": problem}


@pytest.mark.parametrize(
  "response, right",
  [
    ("1205", True),
    ("The answer is 1,205.", True),
    ("First 1200, then 5 more: 1200 + 5 = 1205.0", True),
    ("So \\boxed{1205}, which is more than 1000.", True),
    ("It is 1205. No, it is 1206.", False),
    ("\\boxed{}", False),
    ("11205", False),  # reasoning-gym gives a part for an answer that contains the right
    ("", False),
  ],
)
def test_the_answer_is_the_last_number_unless_it_is_marked(response, right):
  answer = record("1200 + 5 =", "1205")
  assert reasoning.score("", response, answer) == float(right)
  assert (reasoning.graded("", response, answer) == 1.0) == right


@pytest.mark.parametrize(
  "gold, response, right",
  [
    ("19", "\\boxed{12 + 7}", False),
    ("19", "\\boxed{38/2}", False),
    ("19", "\\boxed{9.5/0.5}", False),
    ("8", "\\boxed{2^3}", False),
    ("19", "\\boxed{12 + 7 = 19}", True),
    ("19", "Half of 76/2, so 19", True),
    ("-5", "\\boxed{negative 5}", True),
    ("-5", "\\boxed{- 5}", True),
    (r"$\frac{23}{131}$", r"\boxed{\frac{92}{524}}", False),
    (r"$\frac{23}{131}$", "It is 92/524", False),
    (r"$\frac{23}{131}$", r"\boxed{\frac{23}{131}}", True),
    (r"$\frac{23}{131}$", "It is 92/524 = 23/131.", True),
    ("1/2", r"\boxed{\frac24}", False),
    ("7/4", r"\boxed{1 3/4}", True),
    ("2 × 2 × 53", "\\boxed{212}", False),
    ("2 × 2 × 53", "\\boxed{2 × 2 × 53}", True),
    ("8*(5 + 1)/2", "\\boxed{24}", False),
    ("D1", "\\boxed{1}", False),
    ("3.0i", "\\boxed{3}", False),
  ],
)
def test_an_answer_is_worked_out(gold, response, right):
  """What the question says is none: a calculation, its result for it, a long fraction."""
  assert reasoning.score("", response, record("", gold)) == float(right)


def test_thoughts_and_answers_of_several_lines():
  """What stands before </think> is no answer; the last lines are, as many as there are."""
  assert reasoning.score("", "<think>7</think>\n1205", record("", "1205")) == 1.0
  assert reasoning.score("", "<think>1205</think>\nno", record("", "1205")) == 0.0
  grid = record("", "a b\nc d")
  for response in ("a b\nc d", "So:\na b\nc d\n", r"\boxed{a b" + "\nc d}"):
    assert reasoning.score("", response, grid) == 1.0
  assert reasoning.score("", "c d", grid) == 0.0


REFUSED = sorted(reasoning._REFUSED)
ALL_TASKS = sorted(set(factory.DATASETS) - {"composite"} - set(reasoning._REFUSED))


@pytest.mark.parametrize("tasks", [("rearc", "arc_agi"), tiny.slow(ALL_TASKS)])
def test_a_process_of_its_own_judges_as_reasoning_gym_does(tasks):
  """The right answer of a problem, and that of another; however the problem got there."""
  responses, answers, expected = [], [], []
  for name in tasks:
    made = reasoning.Problems(name, "train", 2)
    problems = [made._draw(i) for i in range(2)]
    for i, j in ((0, 0), (0, 1), (1, 1)):
      text = problems[j]["answer"]
      if text is None:  # some tasks have many right answers, and name none
        continue
      response = f"\\boxed{{{text}}}"
      final = reasoning.final_answer(response, problems[i]["answer"])
      expected.append(float(made._all.score_answer(final, problems[i])))
      responses.append(response)
      answers.append(made[i]["answer"])
      assert i != j or expected[-1] == 1.0
  options = judge.Options(processes=1, cpu_s=60.0)
  judges = judge.Judge("tlt_jax.tasks.reasoning.graded", options=options)
  found = judges([""] * len(answers), responses, answers)
  judges.close()
  assert found.reward.tolist() == pytest.approx(expected) and not any(found.failure)


# One of each kind, and those that need care: see `_FEWER`.
SOME_TASKS = ("gcd", "base_conversion", "mini_sudoku", "list_functions", "word_ladder")


def check_task(name: str) -> None:
  """Draws a problem of each split, and judges a right and a wrong answer."""
  for split in ("train", "held_out"):
    problem = reasoning.Problems(name, split, 10)[0]
    gold = problem["answer"]["problem"]["answer"]
    assert problem["prompt"].strip()
    if gold is not None:  # some tasks have many right answers, and name none
      response = f"<think>Hm.</think>\nIt is \\boxed{{{gold}}}"
      assert reasoning.score("", response, problem["answer"]) == 1.0
    assert reasoning.score("", "\\boxed{no such thing}", problem["answer"]) == 0.0


@pytest.mark.parametrize("name", SOME_TASKS)
def test_tasks_go_by_name(name):
  check_task(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_TASKS)
def test_every_task_goes_by_name(name):
  check_task(name)


def test_a_mixture_draws_from_tasks_by_weight():
  """In training; held out, each is a set of its own."""
  tasks = f"3 * chain_sum({SUMS}) + gcd"
  mixed = reasoning.mixture(tasks, "train", 1000)
  batches = data.prompt_iterator(mixed, 8, seed=0)
  names = [r["answer"]["task"] for _ in range(5) for r in next(batches)]
  assert names.count("chain_sum") == 30 and names.count("gcd") == 10
  held_out = reasoning.mixture(tasks, "held_out", 3)
  assert [r["set"] for r in held_out] == ["chain_sum"] * 3 + ["gcd"] * 3
  for wrong in ("chain_summ", "2 *", "chain_sum(terms=2)", "chain_sum(min_terms=os)"):
    with pytest.raises(data.DataError):
      reasoning.mixture(wrong, "train", 3)


def test_an_answer_in_words_is_marked_or_the_last_line():
  answer = record("Sort b, a", "a, b")
  for response in ("a, b", "Sorted:\na, b\n", "\\boxed{a, b} it is", "#### a, b"):
    assert reasoning.score("", response, answer) == 1.0
  assert reasoning.score("", "b, a", answer) == 0.0
  assert 0 < reasoning.graded("", "So a, b", answer) < 1


FIXED = (
  *(
    "-1 0 1 2 3 4 5 6 7 8 9 10 11 12 24 100 0.5 1/2 nan inf yes no Yes No True False"
  ).split(),
  *(
    "heads tails impossible infeasible None null A B C D A1 C4 a x i up down P Q on off"
  ).split(),
  *(
    "Chi Peng Pass mother father Monday knight Alice abba level - . _ {} () [] 00:00"
  ).split(),
  *("x**2", "sin(x)", "the answer", "I don't know", "P ∨ ¬P", "(P ∧ P)", "P → P", "0, 0"),
  *(
    "6*4*1*1",
    "8*3*1*1",
    "(0, 0)",
    "0.0 + 0.0i",
    "[0]",
    "[[0]]",
    '""',
    '[""]',
    "[1, 2, 3]",
  ),
  *(
    '{"A": "B"}',
    "[{}]",
    '["fill A"]',
    "0 1",
    "1 0\n0 1",
    "0 0\n0 0",
    "A# #B",
    "a b",
    "a, b",
  ),
)


def copies(question: str) -> dict[str, str]:
  """Parts of a question that can be found without understanding it."""
  lines, numbers = question.strip().splitlines(), re.findall(r"-?\d+(?:\.\d+)?", question)
  found = {"question": question, "last line": lines[-1], "last word": question.split()[-1]}
  found["after colon"] = question.rpartition(":")[2].strip()
  found |= {f"last {n} lines": "\n".join(lines[-n:]) for n in (3, 5, 9)}
  found |= {f"number {i}": numbers[i] for i in (0, 1, -2, -1) if i < len(numbers) > 1}
  patterns = {"[.]": r"\[.*\]", "$": r"\$(.*?)\$", "step": r"\d+\. (.*)", '"': r'"([^"]*)"'}
  patterns["calculation"] = r"[-\d.(][-\d.+*/() ×]{3,}"
  for name, pattern in patterns.items():
    if parts := re.findall(pattern, question, re.DOTALL if name == "[.]" else 0):
      found[f"last {name}"] = parts[-1].strip()
  return found


def of_guesses(name: str, size: int) -> tuple[collections.Counter, collections.Counter]:
  """The share of full marks and the mean grade of each guess, made without work."""
  made = reasoning.Problems(name, "train", size)
  answers = [made[i]["answer"] for i in range(size)]
  full, grade = collections.Counter(), collections.Counter()
  for i, answer in enumerate(answers):
    problem = answer["problem"]
    guesses = dict(zip(FIXED, FIXED, strict=True)) | copies(problem["question"])
    for j in range(3):
      if i != j and (other := answers[j]["problem"]["answer"]) is not None:
        guesses[f"answer of problem {j}"] = other
    if problem["answer"] is not None:
      assert reasoning.score("", f"\\boxed{{{problem['answer']}}}", answer) == 1.0
    for guess, text in guesses.items():
      value = reasoning.graded("", f"\\boxed{{{text}}}", answer)
      grade[guess] += value / size
      full[guess] += (value == 1.0) / size
  return full, grade


LONG_VERDICTS = {"intermediate_integration": 6, "simple_integration": 12, "knight_swap": 20}


def check_guesses(name: str) -> None:
  full, grade = of_guesses(name, LONG_VERDICTS.get(name, 60))
  _, solved, mean = reasoning._GUESSES.get(name, ("", 0.33, 0.33))
  assert max(full.values()) < max(solved, 0.33) + 0.2, full.most_common(3)
  assert max(grade.values()) < max(mean, 0.33) + 0.2, grade.most_common(3)


@pytest.mark.parametrize("name", ["circuit_logic", "chain_sum", "countdown"])
def test_what_guesses_get_is_known(name, caplog):
  """It is logged, once, if it is much."""
  reasoning._report_guesses.cache_clear()
  check_guesses(name)
  reasoning.Problems(name, "held_out", 3)
  assert caplog.text.count("always, gets full marks for 66%") == (name == "circuit_logic")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_TASKS)
def test_what_guesses_get_is_known_of_every_task(name):
  check_guesses(name)


@pytest.fixture
def all_allowed(monkeypatch):
  monkeypatch.setattr(reasoning, "_REFUSED", {})
  yield
  reasoning._dataset.cache_clear()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_task_is_one_that_a_guess_wins(name, all_allowed):
  full, _ = of_guesses(name, 40)
  assert max(full.values()) > 0.45


@pytest.mark.parametrize("name", REFUSED)
def test_a_task_that_a_guess_wins_is_refused(name):
  """In one line that says which."""
  with pytest.raises(data.DataError, match=f"{name}.*full marks"):
    reasoning.Problems(name, "train", 3)
  with pytest.raises(data.DataError, match=f"{name}.*full marks"):
    reasoning.mixture(f"gcd + {name}", "train", 3)


def test_verifiers_that_raise_and_numbers_that_json_lacks():
  """Of tasks of reasoning-gym: a wrong answer, and metadata with fractions."""
  for name in ("boxnet", "prime_factorization", "game_of_life"):
    made = reasoning.Problems(name, "train", 3)
    for text in ("{}", "[]", "0.5", "x"):
      assert reasoning.score("", f"\\boxed{{{text}}}", made[0]["answer"]) == 0.0
  made = reasoning.Problems("gsm_symbolic", "train", 30)
  json.dumps([made[i] for i in range(30)])
