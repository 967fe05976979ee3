"""Verifiers: finding them, and asking them."""

import decimal
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.rl import judge
from tlt_jax.rl import reward
from tlt_jax.tasks import countdown


def test_a_reward_is_found_by_its_dotted_path(tmp_path, monkeypatch):
  """In this package and in the user's."""
  assert reward.parse("tlt_jax.tasks.countdown.score")[0].score is countdown.score
  (tmp_path / "mine_reward.py").write_text(
    "def length(prompt, response, answer):\n  return len(response)\n"
    "def two(prompt, response):\n  return 0\n"
  )
  (tmp_path / "broken_reward.py").write_text("import not_there_at_all\n")
  monkeypatch.syspath_prepend(tmp_path)
  score = reward.parse("mine_reward.length")[0].score
  assert [verify(score, text).rewards for text in ("x", "yz")] == [(1,), (2,)]
  for path in ("mine_reward.two", "broken_reward.score", "tlt_jax.tasks.countdown.STOP"):
    with pytest.raises(reward.RewardError):
      reward.parse(path)


def verify(score, response="b", solved_at=1.0):
  term = reward.Term("own.score", 1.0, score)
  return reward.verify([term], solved_at, "p", response, "x", {})


def constant(value):
  def score(prompt, response, answer):
    del prompt, answer
    if isinstance(value, BaseException):
      raise value
    return value

  return score


@pytest.mark.parametrize(
  "value",
  [
    *(np.nan, 1e39, None, "1.0", jnp.ones(2), (1.0,), [1.0, True], (1.0, 1)),
    *((np.nan, True), (True, 0.5)),
  ],
)
def test_a_result_that_is_no_finite_number_or_pair_is_a_failure(value):
  """That is told, with the sample. A pair is a number and a bool."""
  found = verify(constant(value))
  assert not found.solved
  assert "finite number" in found.failure and "response 'b'" in found.failure


def test_a_response_is_solved_at_a_threshold():
  """Of rewards that are no 0 and 1."""
  for solved_at, expected in ((1.0, False), (0.5, True), (0.75, False), (-1.0, True)):
    assert verify(constant(0.5), solved_at=solved_at) == ((0.5,), expected, "")


def test_a_verifier_may_say_itself_what_is_solved():
  """Whatever the threshold; numpy's and JAX's bools too."""
  for said in (True, np.True_, jnp.bool_(True)):
    assert verify(constant((0.25, said))) == ((0.25,), True, "")
  assert verify(constant((2.0, False))) == ((2.0,), False, "")


@pytest.mark.parametrize(
  "leaves", [SystemExit(0), SystemExit("done"), GeneratorExit(), KeyError("k")]
)
def test_a_verifier_that_raises_or_would_end_the_run_fails(leaves):
  """`sys.exit()` in a reward would end training with status 0, and nothing saved."""
  assert f"own.score: {type(leaves).__name__}: " in verify(constant(leaves)).failure
  with pytest.raises(KeyboardInterrupt):
    verify(constant(KeyboardInterrupt()))


@pytest.fixture
def mine(tmp_path, monkeypatch):
  """A module of a user: a verifier that fails at nothing, and one made with arguments."""
  (tmp_path / "mine_sum.py").write_text(
    "def right(prompt, response, answer):\n  return response == answer\n"
    "def says(word, worth=1.0):\n"
    "  return lambda prompt, response, answer: worth * (word in response)\n"
    "def short(prompt, response, answer, length, max_tokens):\n"
    "  return length < max_tokens\n"
    "def nothing():\n  return None\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  yield
  sys.modules.pop("mine_sum", None)


def here(text, solved_at=1.0):
  """Judges in this process."""
  return judge.Judge(text, solved_at, judge.Options(processes=0))


def test_several_rewards_are_added_up_and_the_first_says_what_is_solved(mine):
  """Hand numbers; each part is there unweighted, by a name of its own."""
  judges = here(
    "mine_sum.right\n  + 0.5 * mine_sum.says(word='b') - mine_sum.says(word='c', worth=2)"
    " + 0.25 * mine_sum.short"
  )
  lengths = {"length": [1, 4, 5], "max_tokens": [4, 4, 4]}
  found = judges("ppp", ["a", "b", "bc"], ["a", "a", "bc"], **lengths)
  np.testing.assert_allclose(found.reward, [1.25, 0.5, 1 + 0.5 - 2])
  assert found.solved.tolist() == [True, False, True]
  assert {name: part.tolist() for name, part in found.parts.items()} == {
    "mine_sum.right": [1, 0, 1],
    "mine_sum.says": [0, 1, 1],
    "mine_sum.says_2": [0, 0, 2],
    "mine_sum.short": [1, 0, 0],
  }


class _Silent(BaseException):
  def __str__(self):
    raise RuntimeError("no text")

  __repr__ = __str__


class _Hidden(type):
  @property
  def __name__(cls):
    raise RuntimeError("no name")


class Nameless(Exception, metaclass=_Hidden):
  pass


@pytest.mark.parametrize(
  "value, name",
  [
    (_Silent(), "_Silent"),
    (Nameless("why"), "Nameless: why"),
    (ValueError("x", 10**5000), "ValueError"),
    (BaseExceptionGroup("two", [SystemExit()]), "BaseExceptionGroup"),
    (10**5000, "int"),
    ([_Silent()], "list"),
    (decimal.Decimal("nan"), "Decimal"),
  ],
  ids=range(7),
)
def test_what_cannot_be_shown_is_named(value, name):
  """By its class: an exception without text, a result with too many digits."""
  assert name in verify(constant(value)).failure


@pytest.mark.parametrize(
  "library, parameters",
  [
    ("verl", "data_source, solution_str, ground_truth, extra_info=None"),
    ("TRL", "completions, answer, **kwargs"),
    ("TRL", "prompts, completions, **kwargs"),
  ],
)
def test_rewards_of_other_libraries_are_named(library, parameters, tmp_path, monkeypatch):
  """They would get a prompt where they expect something else."""
  (tmp_path / "their_rewards.py").write_text(f"def score({parameters}): return 1.0\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "their_rewards", raising=False)
  with pytest.raises(reward.RewardError, match=f"{library}'s rewards; wrap it"):
    reward.parse("their_rewards.score")
