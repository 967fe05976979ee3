"""Verifiers: finding them, running them, and GSM8K's."""

import concurrent.futures
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl import reward
from tlt_jax.tasks import countdown
from tlt_jax.tasks import gsm8k

GSM8K = pathlib.Path(__file__).parents[1] / "../shared/data/gsm8k/test.jsonl"


def test_a_reward_is_found_by_its_dotted_path(tmp_path, monkeypatch):
  """In this package and in the user's."""
  assert reward.make("tlt_jax.tasks.countdown.score") is countdown.score
  (tmp_path / "mine_reward.py").write_text(
    "def length(prompt, response, answer):\n  return len(response)\n"
    "def two(prompt, response):\n  return 0\n"
  )
  (tmp_path / "broken_reward.py").write_text("import not_there_at_all\n")
  monkeypatch.syspath_prepend(tmp_path)
  score = reward.make("mine_reward.length")
  np.testing.assert_array_equal(reward.score_all(score, "ab", ["x", "yz"], "cd"), [1, 2])
  with pytest.raises(reward.RewardError, match="cannot be called as two"):
    reward.make("mine_reward.two")
  with pytest.raises(reward.RewardError, match="failed: No module named 'not_there"):
    reward.make("broken_reward.score")


@pytest.mark.parametrize(
  "path, message",
  [
    ("score", "package.module.name"),
    ("tlt_jax.tasks.countdown.scores", "has no 'scores'; did you mean 'score'"),
    ("tlt_jax.tasks.countdwon.score", "no module .*; did you mean 'countdown'"),
    ("tlt_jacks.tasks.countdown.score", "did you mean 'tlt_jax'"),
    ("tlt_jax.tasks.countdown.STOP", "STOP is no function"),
  ],
)
def test_a_mistyped_path_names_the_nearest(path, message):
  """Typos in the package, the module and the function."""
  with pytest.raises(ValueError, match=message):
    reward.make(path)


def constant(value):
  def score(prompt, response, answer):
    del prompt, answer
    if isinstance(value, Exception) and response == "b":
      raise value
    return value if response == "b" else 0

  return score


def test_every_kind_of_number_is_a_reward():
  """Python's, numpy's and JAX's."""
  for value in (True, 1, 1.0, np.float32(1), np.int64(1), jnp.float32(1)):
    rewards = reward.score_all(constant(value), "pp", ["a", "b"], "xx")
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [0, 1])


@pytest.mark.parametrize(
  "value", [np.nan, np.inf, 1e39, None, "1.0", [1.0], jnp.ones(2), jnp.float32(np.nan)]
)
def test_a_result_that_is_no_finite_number_names_the_sample(value):
  """And the function."""
  with pytest.raises(reward.RewardError, match=r"constant\S*score.*sample 1.*finite"):
    reward.score_all(constant(value), "pp", ["a", "b"], "xx")


def test_a_verifier_that_fails_names_the_sample():
  """The cause stays attached."""
  with pytest.raises(reward.RewardError, match="failed on sample 1: KeyError") as e:
    reward.score_all(constant(KeyError("k")), "pp", ["a", "b"], "xx")
  assert isinstance(e.value.__cause__, KeyError)


@pytest.mark.parametrize(
  "response",
  [
    r"so \boxed{72}",
    r"\boxed{\$72.00}",
    r"\boxed{72\text{ clips}}",
    r"\boxed{72\%}",
    r"\boxed{x = 72}",
    r"\boxed{\frac{144}{2}}",
    r"\boxed{7.2 \times 10^1}",
    "#### 72.",
    "#### **$72** per hour",
    "She has 48 + 24 = 72 clips.",
    "5 clips, so **72**",
    r"#### 71, no: \boxed{72}, of 5",
    r"\boxed{71} or rather \boxed{72}",
    "#### 71\nagain\n#### 72\nof 5",
    "between 10-72",
  ],
)
def test_the_final_answer_is_found_however_it_is_written(response):
  """Box, then ####, then the last number; the last of each."""
  assert gsm8k.score("", response, "48+24=72\n#### 72") == 1.0


@pytest.mark.parametrize(
  "response",
  [
    "",
    "none",
    "72 or 71",
    "1,072",
    "-72",
    r"\boxed{71} though 72",
    r"\boxed{}72",
    r"\boxed{71, 72}",
    r"\boxed{71 \text{ or } 72}",
    r"\boxed{72 thousand}",
    r"\boxed{72!}",
    r"\boxed{72\pi}",
    r"\boxed{72/0}",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{7**2}",
    "9" * 9000,
    r"\boxed{" * 20000,
  ],
)
def test_anything_else_scores_nothing_and_quickly(response):
  """Two answers, other values, and what would keep a computer algebra busy."""
  assert gsm8k.score("", response, "72") == 0.0


def test_numbers_compare_by_value():
  """Separators, signs and decimals, in the response and in the gold answer."""
  for response, gold in (
    (r"\boxed{70{,}000}", "#### 70,000"),
    (r"\boxed{70,\!000}", 70000),
    ("loses -$1,005.50", "#### -1005.5"),
    ("\\boxed{\u22125}", "-5"),
    (r"\boxed{\dfrac{1}{2}}", 0.5),
  ):
    assert gsm8k.score("", response, gold) == 1.0
  with pytest.raises(ValueError, match="'abc' is not a number"):
    gsm8k.score("", "72", "abc")


def test_math_verify_works_off_the_main_thread():
  """Its own timeouts would raise there."""
  responses = [rf"\boxed{{\frac{{{2 * i}}}{{2}}}}" for i in range(8)]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    scores = pool.map(lambda i: gsm8k.score("", responses[i], str(i)), range(8))
    assert list(scores) == [1.0] * 8


def test_gsm8k_gold_solutions_score_against_themselves_only():
  """All 1319 of the test set."""
  if not GSM8K.exists():
    pytest.skip("the GSM8K test file is not there")
  answers = [json.loads(line)["answer"] for line in GSM8K.open()]
  golds = [a.rpartition("####")[2].replace(",", "") for a in answers]
  shifted = [str(float(g) + 1) for g in golds]
  prompts = [""] * len(answers)
  assert reward.score_all(gsm8k.score, prompts, answers, answers).min() == 1.0
  assert reward.score_all(gsm8k.score, prompts, answers, shifted).max() == 0.0
