"""Rewards for format and length."""

import pytest

from tlt_jax.tasks import form


@pytest.mark.parametrize(
  "response, expected",
  [
    ("<think>hm</think> 4", 1),
    ("hm</think>\n4", 1),  # the template has opened it
    (" <think>\nhm\n</think>\n\n4\n", 1),
    ("<think>hm</think>", 0),
    ("", 0),
    ("so <think>hm</think> 4", 0),
    ("<think>a</think> 4 <think>b</think> 5", 0),
    ("<think><think>a</think> 4", 0),
  ],
)
def test_thoughts_come_before_the_answer(response, expected):
  assert form.think("", response, "") == expected


def test_a_pattern_matches_the_whole_response():
  score = form.matches(pattern="<answer>.+</answer>\\s*")
  assert score("", "<answer>1\n2</answer>\n", "") == 1.0
  assert score("", "So <answer>1</answer>", "") == 0.0


def test_the_last_tokens_are_punished_more_and_more():
  """Equation 13 of DAPO at hand numbers: L = 20, buffer 4."""
  score = form.overlong(buffer=4)
  given = [score("", "", "", length=n, max_tokens=20) for n in (1, 16, 17, 18, 20)]
  assert given == [0, 0, -0.25, -0.5, -1]
