"""Verifiers: finding them, and running them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl import reward
from tlt_jax.tasks import countdown


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
