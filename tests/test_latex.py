"""The verifier of LaTeX answers: which are the same, and that every verdict ends."""

import pytest

from tests import tiny
from tests.answers import math_pairs
from tlt_jax.rl import judge
from tlt_jax.tasks import latex


@pytest.mark.parametrize("kind", math_pairs.PAIRS)
def test_answers_count_as_what_they_mean(kind):
  """However they are written; what differs is refused."""
  wrong = []
  for gold, equal, different in math_pairs.PAIRS[kind]:
    for expected, finals in ((1.0, equal), (0.0, different)):
      for final in finals:
        if latex.score("", rf"Hence \boxed{{{final}}}.", gold) != expected:
          wrong.append((gold, final, expected))
  assert not wrong


@pytest.mark.parametrize(
  "response, answer, right",
  [
    (r"\boxed{\frac{1}{3}} or \boxed{\frac{1}{2}}", r"so it is \boxed{\frac{1}{2}}", 1),
    (r"\boxed{\frac{1}{2}} or \boxed{\frac{1}{3}}", r"so it is \boxed{\frac{1}{2}}", 0),
    (r"\boxed{x^2", "x^2", 0),
    (r"\boxed{}", "x^2", 0),
    ("#### 1/2\n", r"\frac{1}{2}", 1),
    ("So the answer is $\\frac{1}{2}$.", r"\frac{1}{2}", 1),
    (r"Thus \(x^2 + 1\)", "1+x^2", 1),
    ("", "3", 0),
    ("\\boxed{\ud800}", "3", 0),
    ("\\boxed{３}", "3", 1),
    ("\\boxed{\u2212x^2}", "-x^2", 1),
  ],
)
def test_the_final_answer_is_boxed_or_stands_on_the_last_line(response, answer, right):
  assert latex.score("", response, answer) == right


HOSTILE = [
  r"\boxed{" + "x+" * 50_000 + "x}",
  "9" * 100_000,
  "\\boxed{" * 20_000,
  r"\boxed{__import__('os').system('true')}",
]
# What a computer algebra does not finish. Each costs a process.
ENDLESS = [
  r"\boxed{9^{9^{9^{9}}}}",
  r"\boxed{(x+1)^{100000}}",
  r"\boxed{\int_0^1 \sin(x^{x^x}) \sqrt{\tan(x)} dx}",
  r"\boxed{100000000!!}",
  r"\boxed{\binom{99999999}{4999999}}",
]


@pytest.mark.parametrize("endless", [ENDLESS[:1], tiny.slow(ENDLESS)])
def test_every_answer_gets_a_verdict(endless):
  """Whatever it asks a computer algebra for; what never ends is worth nothing."""
  options = judge.Options(processes=2, cpu_s=5.0)
  judges = judge.Judge("tlt_jax.tasks.latex.score", options=options)
  texts = [*HOSTILE, *endless, r"\boxed{1+x^2}"]
  found = judges(texts, texts, ["x^2+1"] * len(texts))
  judges.close()
  assert found.reward.tolist() == [0.0] * (len(texts) - 1) + [1.0]
  assert not any(found.failure[: len(HOSTILE)])
