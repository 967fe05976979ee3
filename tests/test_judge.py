"""Judging whole batches: a verifier that fails costs its response, and no other."""

import json
import sys

import numpy as np
import pytest

from tlt_jax.rl import judge
from tlt_jax.rl import reward

VERIFIERS = """
import os, sys, time

def good(prompt, response, answer, length):
  return len(response) / length, response == answer

def bad(prompt, response, answer, length):
  if response == "spin":
    while True:
      pass
  if response == "wait":
    time.sleep(1000)
  if response == "raise":
    raise KeyError("k")
  if response == "leave":
    sys.exit(0)
  if response == "end":
    os._exit(0)
  if response == "nan":
    return float("nan")
  return good(prompt, response, answer, length)

def named(prompt, response, answer):
  return float(prompt[0]["content"] == response and answer["is"] == "ä\\ud800")
"""
FAILURES = {
  "spin": "took more than verifier.cpu_s=0.1 or verifier.wall_s=",
  "wait": "took more than",
  "raise": "KeyError: 'k'",
  "leave": "SystemExit: 0",
  "end": "ended its process",
  "nan": "returned nan, neither a finite number",
}


@pytest.fixture(autouse=True)
def verifiers(tmp_path, monkeypatch):
  """A module that only this test can import."""
  (tmp_path / "own_verifiers.py").write_text(VERIFIERS)
  monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def made():
  """Makes judges whose processes end with the test."""
  judges = []

  def make(text, solved_at=1.0, **options):
    judges.append(judge.Judge(text, solved_at, judge.Options(**options)))
    return judges[-1]

  yield make
  for each in judges:
    each.close()


def test_a_verifier_that_fails_costs_its_response_and_no_other(made, caplog):
  """It hangs, waits, raises, exits, ends its process or returns NaN for 5% of them."""
  texts = [f"{i}" for i in range(120)]
  where = dict(zip(range(3, 120, 20), FAILURES, strict=True))
  for i, text in where.items():
    texts[i] = text
  samples = texts, texts, [str(i) for i in range(120)]
  length = [i % 3 + 1 for i in range(120)]
  others = [i for i in range(120) if i not in where]
  one = made("own_verifiers.good", processes=0)(*samples, length=length)
  text = "own_verifiers.bad + 2 * own_verifiers.good"
  judges = made(text, processes=1, cpu_s=0.1, wall_s=5.0, failed_reward=-1.0)
  found = judges(*samples, length=length)
  np.testing.assert_array_equal(found.reward[others], 3 * one.reward[others])
  np.testing.assert_array_equal(found.solved[others], one.solved[others])
  assert one.solved[others].all() and not any(one.failure)
  np.testing.assert_array_equal(found.parts["own_verifiers.good"], one.reward)
  assert np.flatnonzero(found.failure != "").tolist() == list(where)
  for i, text in where.items():
    assert found.reward[i] == -1 + 2 * one.reward[i] and not found.solved[i]
    assert found.failure[i].startswith("reward own_verifiers.bad: ")
    assert FAILURES[text] in found.failure[i] and f"response '{text}'" in found.failure[i]
  assert "6 of 120 responses are not judged, the first: reward own" in caplog.text
  judges.check(found)


def test_failures_on_too_many_responses_end_the_run(made):
  """In one line that says what went wrong first."""
  judges = made("own_verifiers.bad", processes=0, most_failed=0.25)
  texts = ["1", "raise", "2", "3"]
  score = lambda: judges(texts, texts, texts, length=[1, 5, 1, 1])
  judges.check(score())
  texts[3] = "nan"
  with pytest.raises(reward.RewardError, match=r"2 of 4 .* no more than 1; .* KeyError"):
    judges.check(score())


def test_messages_and_answers_reach_a_process_whole(made):
  """Chats, any text, and what else JSON gives back; other things are refused."""
  judges = made("own_verifiers.named", processes=1)
  prompt, answer = [{"role": "user", "content": "x\n"}], {"is": "ä\ud800"}
  assert judges([prompt] * 2, ["x\n", "y"], [answer] * 2).reward.tolist() == [1, 0]
  with pytest.raises(reward.RewardError, match="not JSON serializable; .*processes=0"):
    judges([prompt], ["x"], [{1j}])
  for lost in ({"is": ("ä",)}, {"is": "ä", 1: 2}):
    with pytest.raises(reward.RewardError, match="the answer .* tuples .*processes=0"):
      judges([prompt], ["x"], [lost])
  here = made("own_verifiers.named", processes=0)
  assert here([prompt], ["x\n"], [{"is": "ä\ud800", 1: 2}]).reward.tolist() == [1]


def test_what_a_verifier_takes_must_be_given(made):
  """Said once, of whichever processes."""
  for processes in (0, 1):
    judges = made("own_verifiers.good", processes=processes)
    with pytest.raises(reward.RewardError, match="good takes length, which is not known"):
      judges("p", "r", "a", max_tokens=[1])


def test_a_sum_that_no_float_holds_is_a_failure(made):
  judges = made("3e38 * own_verifiers.good + 3e38 * own_verifiers.good", processes=0)
  found = judges("pp", ["a", ""], "ab", length=[1, 1])
  assert found.reward.tolist() == [0, 0]
  assert [bool(failure) for failure in found.failure] == [True, False]
  json.dumps(found.failure.tolist())  # plain texts


def test_a_verifier_that_only_this_process_can_import_is_named(
  made, monkeypatch, tmp_path
):
  judges = made("own_verifiers.good", processes=1)
  monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
  with pytest.raises(reward.RewardError, match="no module 'own_verifiers'.*processes=0"):
    judges("p", "r", "a", length=[1])
