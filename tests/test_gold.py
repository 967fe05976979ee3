"""Gold answers are tried with the reward before a run depends on them."""

import logging
import re
import time

import pytest

from tlt_jax.rl import gold
from tlt_jax.rl import judge
from tlt_jax.tasks import latex

REWARDS = """
import time

def contains(prompt, response, answer):
  return float(answer in response)

def tagged(prompt, response, answer):
  return float(response.split("<answer>")[1].split("</answer>")[0] == answer)

def none(prompt, response, answer):
  return 0.0

def late(prompt, response, answer):
  time.sleep(0.2)
  return 0.0

def short(prompt, response, answer, length, max_tokens):
  return 1 - length / max_tokens
"""
NAN = float("nan")


@pytest.fixture
def tried(tmp_path, monkeypatch, caplog):
  """Tries answers with a reward; gives which cannot be used, and what is logged."""
  (tmp_path / "own_rewards.py").write_text(REWARDS)
  monkeypatch.syspath_prepend(tmp_path)
  caplog.set_level(logging.INFO)

  def run(reward, answers, processes=1, whole=True):
    records = [
      {"prompt": "?", "answer": x, "place": f"x, row {i}"} for i, x in enumerate(answers)
    ]
    judged = judge.Judge(reward, options=judge.Options(processes=processes))
    caplog.clear()
    problems = gold.Trial(judged, 100, whole)(records, "x")
    judged.close()
    return [i for i, problem in enumerate(problems) if problem], caplog.text

  return run


GOOD = ["2", 2, 2.5, "-1,000", r"\frac{1}{2}"]
BAD = [None, NAN, "", {}, [], True, {"ground_truth": "2"}, ["2"], "  "]


@pytest.mark.parametrize("reward", ["gsm8k", "latex"])
def test_an_answer_that_is_none_is_found(tried, reward):
  bad, log = tried(f"tlt_jax.tasks.{reward}.score", GOOD + BAD)
  assert bad == list(range(len(GOOD), len(GOOD + BAD)))
  assert "gold answers: 5 of" in log and "as solved" in log


def test_latex_takes_no_other_type():
  for answer in BAD:
    with pytest.raises(ValueError, match="gold answer"):
      latex.score("", r"\boxed{None}", answer)
  assert latex.score("", r"\boxed{72}", 72.0) == 1.0


@pytest.mark.parametrize(
  "reward, answers, expected, said",
  [
    ("own_rewards.contains", ["a", None, 3, ["b"], NAN], [1, 2, 3, 4], "1 of 5"),
    ("own_rewards.tagged", ["a", None], [1], "1 of 2"),  # raises on all but one form
    ("own_rewards.none", ["a", None, {}, NAN], [], "0 of 4 .* as with rewards"),
    ("own_rewards.none", [(1,), {1: 2}, 1j], [0, 1, 2], "^$"),  # not as JSON
    ("own_rewards.short", ["a"], [], "0 of 1"),
    ("tlt_jax.tasks.form.think", ["", None], [], "of 2"),
    ("tlt_jax.tasks.gsm8k.score", ["x", "7"], [0], "1 of 2.*; that of x, row 0 does not"),
  ],
)
def test_the_reward_says_which_answers_it_takes(tried, reward, answers, expected, said):
  bad, log = tried(reward, answers)
  assert bad == expected
  assert re.search(said, log), log


def test_a_slow_reward_is_tried_for_a_while(tried, monkeypatch):
  """All are tried where the result says what is dropped."""
  monkeypatch.setattr(gold, "_SECONDS", 1.0)
  monkeypatch.setattr(gold, "_UNSOLVED", 2)
  began = time.monotonic()
  _, log = tried("own_rewards.late", ["1"] * 40, whole=False)
  assert "are not tried now" in log and time.monotonic() - began < 8
  _, log = tried("own_rewards.late", ["1"] * 12, whole=True)
  assert "not tried" not in log


def test_many_answers_take_some_seconds(tried):
  answers = [f"so {i}\n#### {i}" for i in range(3000)] + ["no number"]
  began = time.monotonic()
  bad, log = tried("tlt_jax.tasks.gsm8k.score", answers, processes=2)
  assert bad == [3000] and "3,000 of 3,001" in log
  assert time.monotonic() - began < 15
