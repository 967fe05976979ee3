"""The verifier of LaTeX answers: which are the same, and that every verdict ends."""

import pytest

from tests.answers import math_pairs
from tests.answers import reported_pairs
from tlt_jax.rl import judge
from tlt_jax.tasks import latex


@pytest.mark.parametrize(
  "pairs",
  [
    pytest.param(pairs, id=kind)
    for module in (math_pairs, reported_pairs)
    for kind, pairs in module.PAIRS.items()
  ],
)
def test_answers_count_as_what_they_mean(pairs):
  """However they are written; what differs is refused."""
  wrong = []
  for gold, equal, different in pairs:
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
    ("The answer is $5$ or $6$.", "5", 0),
    ("The answer is not $5$.", "5", 0),
    ("The roots are $x=1$ and $x=2$.", "1, 2", 1),
    ("The answer is x+1", "1+x", 1),
    ("So she has 72 hens.", "72", 1),
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
  r"\boxed{9^{9^{9^{9}}}}",
  r"\boxed{(x+1)^{100000}}",
  r"\boxed{e^{e^{e^{10}}}}",
  r"\boxed{\int_0^1 \sin(x^{x^x}) \sqrt{\tan(x)} dx}",
  r"\boxed{100000000!!}",
  r"\boxed{(x!)!!}",
  r"\boxed{\binom{99999999}{4999999}}",
  r"\boxed{" + "(" * 400 + "x" + ")" * 400 + "}",
  r"\boxed{" + "+".join(["2^{60000}"] * 60) + "}",
  r"\boxed{" + r"\pm" * 300 + "1}",
]


def test_every_answer_gets_a_verdict():
  """Whatever it asks to be computed, and soon."""
  options = judge.Options(processes=2, cpu_s=5.0)
  judges = judge.Judge("tlt_jax.tasks.latex.score", options=options)
  texts = [*HOSTILE, r"\boxed{1+x^2}"]
  found = judges(texts, texts, ["x^2+1"] * len(texts))
  judges.close()
  assert found.reward.tolist() == [0.0] * (len(texts) - 1) + [1.0]
  assert not any(found.failure)
