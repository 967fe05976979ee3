"""GSM8K's verifier: which final answers count, and that every verdict ends."""

import json
import pathlib
import time

import hypothesis
from hypothesis import strategies as st
import pytest

from tlt_jax.tasks import gsm8k

GSM8K = pathlib.Path(__file__).parents[1] / "../shared/data/gsm8k/test.jsonl"

ACCEPTED = {
  "72": [
    # The last box, else the last mark, else the last number.
    *(r"\boxed{71} or rather \boxed{72}", r"#### 71, no: \boxed{72}, of 5"),
    *(r"\boxed{71 \text{ no, } \boxed{72}}", "#### 71\nagain\n#### 72\nof 5", "####72"),
    *("She has 48 + 24 = 72 clips.", "In 5 days, 48 and 24, so **72**", "- 24\n- 72"),
    *("<think>8, or 9</think>\n72", r"<think>\boxed{8}</think> It is \boxed{72}."),
    # Currency, units, words, digits of other scripts.
    *(r"\boxed{\$72.00}", r"\boxed{72 \text{ clips per month}}", r"\boxed{x \approx 72}"),
    *(r"\boxed{\textbf{Answer: } \mathrm{72\,km/h}}", r"\boxed{72 \text{ m}^2}"),
    *(r"\boxed{７２}", "#### **$72** per hour", "#### 72-inch boards"),
    # Fractions, powers of ten, arithmetic.
    *(r"\boxed{\frac{144}{2}}", r"\boxed{7.2 \cdot 10^{1}}", "#### 7.2e1"),
    *(r"\boxed{2^{3} \cdot 9 \text{ clips}}", r"\boxed{\sqrt{5184}}"),
    # What else is named and denied.
    *(r"\boxed{72, \text{ rather than } 8}", "She has 72 apples, not 8."),
  ],
  "-5": ["#### -5", r"\boxed{-\$5}", "#### \u22125", "loses -$5", "#### minus 5"],
  "1234": ["1,234", r"\boxed{1{,}234}", r"\boxed{1\,234}", "$1,234.00", "#### 1\u202f234"],
  "5000000": [r"\boxed{5 \text{ million}}", "#### 5,000 thousand", "5e6"],
  "60": ["5 dozen eggs"],
  "0.5": ["½", "1/2", r"So $\dfrac{1}{2}$.", r"\tfrac12 of it", "#### 0.50"],
  "-2.5": [r"\boxed{-2\frac{1}{2}}", "-2½", r"\boxed{\frac{-5}{2}}"],
}
REFUSED = {
  "72": [
    *("", "none", "1,072", "-72", "72.5", "7 2", "72" * 50_000),
    # No answer where one is announced.
    *(r"\boxed{71} though 72", r"72 \boxed{ }", r"\boxed{72} and \boxed{7", "72 ####"),
    *(r"<think>\boxed{72}</think>", "<think>72</think> Nobody knows."),
    # Several numbers, ranges, times.
    *(r"\boxed{71, 72}", r"\boxed{x = 71 \text{ or } x = 72}", "#### 72 (or 71)"),
    *("71 or 72", "10\u201372", "#### 10-72", r"\boxed{144-72}", "#### 3:72"),
    # Other numbers.
    *("48 - 120 = - 72", "#### 72k", r"\boxed{72 \times 10^2}", "72 and a half"),
    *(r"\boxed{72!}", r"\boxed{72^2}", r"\boxed{\sqrt{72}}", r"\boxed{72/0}", "5/72"),
    *("72½", r"2^{72}", r"$\frac{72}{5}$", r"\boxed{72.0000001}"),
    # Not that number.
    *("not 72", "#### 8 rather than 72", "72 is wrong", r"\boxed{\neq 72}", "x < 72"),
    *(r"\boxed{\text{at least } 72}", "50% of 72", r"\boxed{\pm 72}", "Is it 72?"),
    # Arithmetic in prose, or broken.
    *("3 * 72", r"\boxed{72+}", r"\boxed{70(2)}", r"\boxed{\frac{144}{2}"),
    # What would keep a computer algebra busy.
    *(r"\boxed{9^{9^{9^9}}}", r"\boxed{(9^{99})^{99}}", r"\boxed{\sqrt{9^{99}+1}}"),
    *(r"\boxed{" + "(" * 3000 + "71+1" + ")" * 3000 + "}", r"\boxed{" * 20000),
    *("9" * 9000, "1" * 9000 + "." * 10 + "0" * 3998 + "72"),
  ],
  "-2": ["5-7", r"\boxed{5-7}", "#### 5 - 7"],
}


def _cases(table):
  return [(gold, text) for gold, texts in table.items() for text in texts]


def _name(value):
  return value if len(value) < 60 else f"{value[:30]}...({len(value)})"


@pytest.mark.parametrize("gold, response", _cases(ACCEPTED), ids=_name)
def test_the_final_answer_is_found_however_it_is_written(gold, response):
  assert gsm8k.score("", response, f"48+24=72\n#### {gold}") == 1.0


@pytest.mark.parametrize("gold, response", _cases(REFUSED), ids=_name)
def test_other_answers_score_nothing(gold, response):
  assert gsm8k.score("", response, gold) == 0.0


def test_gold_answers_are_numbers():
  for response, gold in (("-1005.5", "#### -1,005.5"), ("70,000", 70000), ("½", 0.5)):
    assert gsm8k.score("", response, gold) == 1.0
  assert gsm8k.score("", "1" + "0" * 16, 1e16) == gsm8k.score("", "0.0000001", 1e-7) == 1.0
  nothing = (None, float("nan"), float("inf"), "", " ", "null", {}, [], True)
  for gold in (*nothing, {"ground_truth": "72"}, ["72"], "abc"):
    for response in ("72", r"\boxed{None}", r"\boxed{nan}", "1", ""):
      with pytest.raises(ValueError, match="gold answer"):
        gsm8k.score("", response, gold)


def test_gold_solutions_score_against_themselves_only():
  """All 1319 of the test set."""
  if not GSM8K.exists():
    pytest.skip("the GSM8K test file is not there")
  answers = [json.loads(line)["answer"] for line in GSM8K.open()]
  golds = [a.rpartition("####")[2].replace(",", "") for a in answers]
  for gold, answer in zip(golds, answers, strict=True):
    for text in (answer, rf"\boxed{{{gold}}}", f"So {gold}."):
      assert gsm8k.score("", text, answer) == 1.0
      assert gsm8k.score("", text, str(float(gold) + 1)) == 0.0


PIECES = st.sampled_from(
  [
    *"0123456789{}()[]^_-+*/=.,:;!?$%<>xk \n\\",
    *(r"\frac{", r"\sqrt{", "^{", "}{", r"\times", r"\boxed{", r"\text{", "####", "**"),
    *("{,}", "1,234", "½", "\u2212", "²", "\x00", "\ud800", "９", " not ", " or ", " 10^"),
  ]
)
SHORT = st.lists(PIECES, max_size=40).map("".join)
LONG = st.builds(
  lambda a, b, times: (a * times + b * times)[:20000], SHORT, SHORT, st.integers(1, 20000)
)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
  st.sampled_from(["{}", r"\boxed{{{}}}", r"\boxed{{{}", "#### {}"]), st.one_of(SHORT, LONG)
)
def test_every_text_gets_a_verdict_at_once(form, text):
  """Of CPU time, so that a busy machine does not matter; a verdict takes 10 ms at most."""
  began = time.process_time()
  found = gsm8k.score("", form.format(text), "72")
  assert time.process_time() - began < 0.2
  assert found in (0.0, 1.0) and isinstance(found, float)
