"""Selectors, as configs describe them."""

import pytest

from tlt_jax.spec_decode.speculation import adaptive
from tlt_jax.spec_decode.speculation import rules
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

CHAIN, NGRAM = strategy_lib.parse("3_1_4"), strategy_lib.parse("ngram_5")


def test_levels_are_read_in_any_order_and_written_as_they_are_read():
  text = "up to 2 live: off or 3_1_4; up to 8 live: ngram_5"
  levels = rules.parse(text)
  assert levels == ((2, (None, CHAIN)), (8, (NGRAM,)))
  assert rules.write(levels) == text
  assert rules.parse("up to 8 live: ngram_5;  up to 2 live: off or 3_1_4; ") == levels
  assert rules.parse("") == ()


@pytest.mark.parametrize(
  "text, message",
  [
    ("up to 2: 3_1_4", "read like 'up to 2 live: .*, not 'up to 2: 3_1_4'"),
    ("3_1_4", "not '3_1_4'"),
    ("up to 2 live: 3_1_4, off", "not 'up to 2 live: 3_1_4, off'"),
    ("up to 2 live: 5x1", "DEPTH_WIDTH_VERIFY, ngram_DEPTH or off, not '5x1'"),
    ("up to 2 live: off; up to 2 live: 3_1_4", "named twice"),
  ],
)
def test_levels_that_cannot_be_read_are_quoted(text, message):
  with pytest.raises(ValueError, match=message):
    rules.parse(text)


def test_one_way_for_each_number_is_fixed():
  selector = rules.make("up to 8 live: ngram_5; up to 2 live: 3_1_4", "predictive", True)
  chosen = [selector.choose(live) for live in (1, 2, 3, 8, 9)]
  assert chosen == [CHAIN, CHAIN, NGRAM, NGRAM, None]


@pytest.mark.parametrize("rule", adaptive.RULES)
def test_of_several_ways_a_rule_learns_the_fastest(rule):
  selector = rules.make("up to 2 live: off or 3_1_4; up to 8 live: off", rule, True)
  assert isinstance(selector, adaptive.RULES[rule])
  assert selector.arms(2) == (None, CHAIN)
  assert selector.arms(8) == selector.arms(9) == (None,)


def test_without_a_drafter_n_grams_are_left_or_nothing():
  selector = rules.make("up to 2 live: 3_1_4 or ngram_5", "predictive", False)
  assert selector.strategies == (NGRAM,)
  assert rules.make("up to 2 live: off or 3_1_4", "predictive", False) is None
  assert rules.make("", "predictive", True) is None


def only_last(levels):
  """A rule of a user's own: always the last way."""
  return strategy_lib.ByLiveBatch([(most, arms[-1]) for most, arms in levels])


def test_a_rule_of_ones_own_is_called_by_its_dotted_name():
  selector = rules.make("up to 2 live: off or 3_1_4", f"{__name__}.only_last", True)
  assert selector.choose(1) == CHAIN


@pytest.mark.parametrize(
  "rule, message",
  [
    ("predictve", "no strategy rule 'predictve'; .* did you mean 'predictive'"),
    ("tests.test_rules.only_lst", "did you mean 'only_last'"),
  ],
)
def test_a_rule_that_does_not_exist_is_told_with_the_nearest(rule, message):
  with pytest.raises(ValueError, match=message):
    rules.make("up to 2 live: off or 3_1_4", rule, True)
