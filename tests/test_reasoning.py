"""Tasks of reasoning-gym: disjoint splits, answers found in prose, clear errors."""

import json

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


def test_thoughts_and_answers_of_several_lines():
  """What stands before </think> is no answer; the last lines are, as many as there are."""
  assert reasoning.score("", "<think>7</think>\n1205", record("", "1205")) == 1.0
  assert reasoning.score("", "<think>1205</think>\nno", record("", "1205")) == 0.0
  grid = record("", "a b\nc d")
  for response in ("a b\nc d", "So:\na b\nc d\n", r"\boxed{a b" + "\nc d}"):
    assert reasoning.score("", response, grid) == 1.0
  assert reasoning.score("", "c d", grid) == 0.0


ALL_TASKS = sorted(set(factory.DATASETS) - {"composite"})


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
    if name != "game_of_life_halting":  # takes every text without a "True" as "False"
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
