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
    # Where it stands.
    r"so \boxed{72}",
    r"\boxed{71} or rather \boxed{72}",
    r"#### 71, no: \boxed{72}, of 5",
    r"\boxed{\text{\boxed{72}}}",
    r"\boxed{\text{the answer is } \boxed{72}}",
    r"\boxed{71 \text{ no, } \boxed{72}}",
    r"\fbox{72}",
    "#### 72",
    "####72",
    "####\n72",
    "#### 71\nagain\n#### 72\nof 5",
    "She has 48 + 24 = 72 clips.",
    "She has 72.",
    "72",
    "In 5 days, 48 and 24, so **72**",
    "- 48 in April\n- 24 in May\n- 72",
    "It is:\n- 72",
    "The answer is\n  - **72**",
    "She has\n\u2013 72 clips",
    "The answer is $72$.",
    r"The answer is \(72\).",
    r"\[ 48 + 24 = 72 \]",
    "So she has 72!",
    "Answer: `72`",
    "<think>8, or 9</think>\n72",
    r"<think>\boxed{8}</think> It is \boxed{72}.",
    "so it is, " * 10_000 + r"\boxed{72}",
    "8" * 100_000 + "\n#### 72",
    # Signs, separators, currency, units, words.
    r"\boxed{\$72.00}",
    r"\boxed{72\text{ clips}}",
    r"\boxed{72 \text{ clips per month}}",
    r"\boxed{72\%}",
    r"\boxed{x = 72}",
    r"\boxed{48 + 24 = 72}",
    r"\boxed{= 72}",
    r"\boxed{\approx 72}",
    r"\boxed{x \approx 72}",
    r"\boxed{72.}",
    r"\boxed{+72}",
    r"\boxed{(72)}",
    r"\boxed{\mathbf{72}}",
    r"\boxed{\mathbf{\text{72}}}",
    r"\boxed{\text{She has } 72 \text{ clips.}}",
    r"\boxed{\textbf{Answer: } \mathrm{72\,km/h}}",
    r"\boxed{72 \text{ m}^2}",
    r"\boxed{72\ \text{cm}^{3}}",
    r"\boxed{72^\circ}",
    r"\boxed{72 \text{ jalapeños}}",
    r"\boxed{72 \text{ one-dollar bills}}",
    r"\boxed{€72}",
    r"\boxed{**72**}",
    r"\boxed{７２}",
    "#### 72.",
    "#### **72**",
    "#### = 72",
    "#### $72.00 per hour",
    "#### **$72** per hour",
    "#### 72 clips per month",
    "#### 72-inch boards",
    "#### 72." + "0" * 100,
    r"\boxed{72." + "0" * 3000 + "}",
    # Fractions, powers of ten, arithmetic.
    r"\boxed{\frac{144}{2}}",
    r"\boxed{144/2}",
    r"\boxed{7.2 \times 10^1}",
    r"\boxed{7.2 \cdot 10^{1}}",
    "#### 7.2e1",
    "It is 7.2 × 10^1 meters.",
    r"\boxed{144 \div 2}",
    r"\boxed{48 + 24}",
    r"\boxed{2^3 \times 9}",
    r"\boxed{2^{3} \cdot 9 \text{ clips}}",
    r"\boxed{\sqrt{5184}}",
    r"\boxed{(48 + 24) \times 1.0}",
    # What else is named and denied.
    r"\boxed{72 \text{ apples, not } 8}",
    r"\boxed{72, \text{ rather than } 8}",
    "#### 72 apples, not 8",
    "#### 72 instead of 8",
    "She has 72 apples, not 8.",
    "She has 72 apples rather than 8.",
    "She has 72 instead of the expected 8.",
    "It isn't 8 but 72.",
    # Words beside it that do not change it.
    "Therefore, 120 - 48 = 72 girls are not in the team.",
    "so she earns $36 x 2 = $72 in two days.",
    "There are 40 + 32 = 72 cows in eight stalls.",
    "There are 300+312-540=72 M&M's",
    r"\boxed{72 \text{ dollars for three days}}",
    r"\boxed{72 \text{ students did not pass}}",
  ],
  "7": [r"\boxed{\text{\boxed{7}}}", r"\boxed{\mathbf{\text{7}}}", "7 apples, not 8"],
  "5": [r"\boxed{\approx 5}", "5.", "#### 5." + "0" * 90, "It is 5." + "0" * 3000],
  "-5": [
    *("#### -5", r"\boxed{-5}", r"\boxed{- 5}", r"\boxed{-\$5}", r"\boxed{$-5$}", "-5"),
    *(rf"\boxed{{{minus}5}}" for minus in "\u2010\u2011\u2012\u2013\u2014\u2212\uff0d"),
    *("#### \u22125", "#### \u20135", "loses \u20135 dollars", "loses -$5", "{-}5"),
    *(r"\boxed{\text{negative } 5}", r"\boxed{-(5)}", "#### minus 5", r"\boxed{{-}5}"),
  ],
  "1234": [
    *("1,234", r"\boxed{1,234}", r"\boxed{1{,}234}", r"\boxed{{1{,}234}}", "#### 1,234"),
    *(r"\boxed{1\,234}", r"\boxed{1,\!234}", r"\boxed{1~234}", "#### 1\u202f234"),
    *(r"\$1,234", "$1,234.00", "#### $1,234.", r"\boxed{\$1{,}234.00}"),
  ],
  "5000000": [
    *(r"\boxed{5 \text{ million}}", r"\boxed{\$5 \text{ million dollars}}", "5 million"),
    *("#### 5 million", "#### 5,000 thousand", r"\boxed{5\text{ Million}}"),
    *(r"\boxed{5 \times 10^6}", "5e6", "#### 5E6", r"\boxed{50 \text{ hundred thousand}}"),
  ],
  "60": ["5 dozen eggs", r"\boxed{5 \text{ dozen}}", "#### 5 dozens"],
  "500": ["5 hundred", r"\boxed{5\text{ hundred}}"],
  "1000": ["#### 1e3", "#### 1E3", "1e+3", r"\boxed{1 \times 10^3}", "10^2 * 10 = 1000"],
  "1500": ["#### 1.5e3", r"\boxed{1.5 \times 10^{3}}", "1.5k"],
  "0.5": [
    *("½", "1/2", r"$\frac{1}{2}$", r"So $\dfrac{1}{2}$.", r"\tfrac12 of it", ".5"),
    *(r"\boxed{½}", r"\boxed{\frac{1}{2}}", "#### 1/2", r"\boxed{\frac{1}{2} \text{ cup}}"),
    *("#### 0.50", "1⁄2", r"\boxed{\dfrac{1}{2}}"),
  ],
  "2.5": [
    *("2½", r"\boxed{2½}", "#### 2 ½ cups", "2 1/2", r"\boxed{2\frac{1}{2}}"),
    *(r"2 \frac{1}{2} hours", r"\boxed{2.5}", r"\boxed{\frac{5}{2}}"),
  ],
  "-2.5": [
    r"\boxed{-2\frac{1}{2}}",
    "-2½",
    r"\boxed{-\frac{5}{2}}",
    r"\boxed{\frac{-5}{2}}",
  ],
}
REFUSED = {
  "72": [
    "",
    "none",
    "1,072",
    "0,072",
    "-72",
    "72.5",
    "7 2",
    # No answer where one is announced.
    r"\boxed{71} though 72",
    r"\boxed{}72",
    r"72 \boxed{ }",
    r"72, so \boxed{72",
    r"\boxed{72} and \boxed{7",
    "72 ####",
    "#### \n",
    "72\n#### seventy-two",
    r"<think>\boxed{72}</think>",
    "<think>72</think> Nobody knows.",
    "72" * 50_000,
    # Several numbers.
    r"\boxed{71, 72}",
    r"\boxed{72 72}",
    r"\boxed{71 \text{ or } 72}",
    r"\boxed{72, 71}",
    r"\boxed{x = 71, y = 72}",
    r"\boxed{x = 71 \text{ or } x = 72}",
    r"\boxed{71; 72}",
    "#### 71 or 72",
    "#### 72 and 71",
    "#### 72 (or 71)",
    "71 or 72",
    "72 or 71",
    "71 clips or 72",
    "It is 71, 72",
    # Ranges, times, ratios, dates.
    "between 10-72",
    "10\u201372",
    "10 to 72",
    "#### 10-72",
    # A minus that stands apart.
    "48 - 120 = - 72",
    "x = \u2212 72",
    "The answer is - 72",
    "The answer is - $72.",
    "**The answer is** - 72.",
    "The total gives - 72",
    "Answer: - 72",
    "Answer: -(72)",
    r"So \(x = -(72)\)",
    r"so $x = - {72}$",
    "x = ( - 72)",
    r"\boxed{10-72}",
    r"\boxed{144-72}",
    "#### 3:72",
    "at 3:72",
    r"\boxed{1:72}",
    "on 1/3/72",
    # Other numbers.
    r"\boxed{72 thousand}",
    "#### 72k",
    "#### 72e1",
    "#### 72e999",
    r"\boxed{72 \times 10^2}",
    r"\boxed{72 \text{ and a half}}",
    "72 and a half",
    "72 hundredths",
    r"\boxed{72 \text{ dozen}}",
    r"\boxed{72!}",
    r"\boxed{72\pi}",
    r"\boxed{72x}",
    r"\boxed{72^2}",
    r"\boxed{72²}",
    r"\boxed{\frac{72}{5}}",
    r"\boxed{\sqrt{72}}",
    r"\boxed{1\frac{1}{72}}",
    r"\boxed{72/0}",
    r"\boxed{72 \text{ hours thirty minutes}}",
    r"\boxed{72\frac{1}{2}}",
    "72½",
    "72³",
    "x^72",
    "x^{72}",
    r"2^{72}",
    r"so $\sqrt{72}$",
    r"$\frac{72}{5}$",
    r"$\frac{x}{72}$",
    "5/72",
    "A72",
    r"\boxed{72.0000001}",
    r"\boxed{72.0000000001 \times 1}",
    # What is not said to be the number.
    r"\boxed{\text{not } 72}",
    "not 72",
    "She has 8 apples, not 72.",
    "#### 8 rather than 72",
    "72 is not the answer",
    "72 is wrong",
    "72 isn't right.",
    "72 and thirty",
    "#### 72 thirty",
    r"\boxed{> 72}",
    r"\boxed{\neq 72}",
    r"\boxed{x != 72}",
    r"\boxed{\leq 72}",
    "x ≠ 72",
    "x < 72",
    "more than 72",
    r"\boxed{\text{at least } 72}",
    r"\boxed{\text{half of } 72}",
    "half of 72",
    "a third of the 72",
    "50% of 72",
    "twice 72",
    r"\boxed{\pm 72}",
    "Is it 72?",
    # Calculations that are not carried out, in prose; broken ones, anywhere.
    "3 * 72",
    "100 + 72",
    "That is 100 (28 + 72).",
    r"\boxed{72+}",
    r"\boxed{72*}",
    r"\boxed{\div 72}",
    r"\boxed{9 \times\times 8}",
    r"\boxed{70(2)}",
    r"\boxed{36{36}}",
    r"\boxed{\frac{144}{2}",
    r"\boxed{9{8}}",
    r"\boxed{7**2}",
    # What would keep a computer algebra busy.
    r"\boxed{9^99999999}",
    r"\boxed{99^9999999}",
    r"\boxed{9^{99999999}}",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{9^{99}^{99}}",
    r"\boxed{(9^{99})^{99}}",
    r"\boxed{\sqrt{9^{99}+1}}",
    r"\boxed{\sqrt{" + "9" * 50 + "}}",
    r"\boxed{" + "(" * 3000 + "71+1" + ")" * 3000 + "}",
    r"\boxed{" + "9" * 4400 + "}",
    r"\boxed{" * 20000,
    "9" * 9000,
    "1" * 9000 + "." * 10 + "0" * 3998 + "72",
  ],
  "3": ["10^3", "10³", r"$2^3$", "x_3", r"2^{3}", "#### v2.3"],
  "5": [
    "half of it is -5",
    "negative 5",
    "5 million",
    r"\boxed{5e}",
    "5-7",
    r"\boxed{5~7}",
  ],
  "7": ["#### 5-7", "5 to 7", "It takes 5\u20137 days.", r"\boxed{5\text{ to }7}"],
  "-2": ["5-7", r"\boxed{5-7}", "#### 5 - 7", "#### 5\u20137"],
  "30": ["3:30", "at 3:30 pm", r"\boxed{3:30}", "#### 3:30"],
  "3.5": ["3:30", r"\boxed{3.5.2}"],
  "2": [r"$\frac{1}{2}$", "1/2", "½", r"so \frac12"],
  "27": [r"\boxed{24(3)}"],
}


def _cases(table):
  return [(gold, text) for gold, texts in table.items() for text in texts]


def _name(value):
  return value if len(value) < 60 else f"{value[:30]}...({len(value)})"


@pytest.mark.parametrize("gold, response", _cases(ACCEPTED), ids=_name)
def test_the_final_answer_is_found_however_it_is_written(gold, response):
  assert gsm8k.score("", response, f"48+24=72\n#### {gold}") == 1.0


@pytest.mark.parametrize("gold, response", _cases(REFUSED), ids=_name)
def test_what_a_strict_reader_refuses_scores_nothing(gold, response):
  assert gsm8k.score("", response, gold) == 0.0


def test_gold_answers_are_numbers():
  for response, gold in (("-1005.5", "#### -1,005.5"), ("70,000", 70000), ("½", 0.5)):
    assert gsm8k.score("", response, gold) == 1.0
  with pytest.raises(ValueError, match="'abc' is not a number"):
    gsm8k.score("", "72", "abc")


def test_gold_solutions_score_against_themselves_only():
  """All 1319 of the test set."""
  if not GSM8K.exists():
    pytest.skip("the GSM8K test file is not there")
  answers = [json.loads(line)["answer"] for line in GSM8K.open()]
  golds = [a.rpartition("####")[2].replace(",", "") for a in answers]
  shifted = [str(float(g) + 1) for g in golds]
  score = lambda text, answer: gsm8k.score("", text, answer)
  rewards = lambda texts, answers: list(map(score, texts, answers))
  for texts in (answers, [rf"\boxed{{{g}}}" for g in golds], [f"So {g}." for g in golds]):
    assert min(rewards(texts, answers)) == 1.0
    assert max(rewards(texts, shifted)) == 0.0


PIECES = st.sampled_from(
  [
    *"0123456789{}()[]^_-+*/=.,:;!?$%<>xk \n\\",
    *(r"\frac", r"\frac{", r"\dfrac", r"\sqrt{", "^{", "}{", r"\times", r"\div", r"\cdot"),
    *(r"\boxed{", r"\text{", r"\mathbf{", "####", "**", r"\,", "{,}", r"\(", "1,234"),
    *("½", "\u2013", "\u2212", "²", "é", "\u00a0", "\u202f", "\x00", "\ud800", "９"),
    *(" not ", "n't ", " or ", " million", " dozen", " half of ", "e3", " 10^", "\\\\"),
  ]
)
SHORT = st.lists(PIECES, max_size=40).map("".join)
LONG = st.builds(
  lambda a, b, times: (a * times + b * times)[:20000], SHORT, SHORT, st.integers(1, 20000)
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  st.sampled_from(["{}", r"\boxed{{{}}}", r"\boxed{{{}", "#### {}", r"So $\frac{{{}}}$"]),
  st.one_of(SHORT, LONG),
)
def test_every_text_gets_a_verdict_at_once(form, text):
  """Of CPU time, so that a busy machine does not matter; a verdict takes 10 ms at most."""
  began = time.process_time()
  found = gsm8k.score("", form.format(text), "72")
  assert time.process_time() - began < 0.2
  assert found in (0.0, 1.0) and isinstance(found, float)
