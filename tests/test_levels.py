"""Selectors, as configs describe them."""

import pytest

from tests import tiny
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.speculation import levels as levels_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation.rules import epsilon_greedy
from tlt_jax.spec_decode.speculation.rules import predictive

RULES = {
  "predictive": predictive.Predictive,
  "epsilon_greedy": epsilon_greedy.EpsilonGreedy,
}
CHAIN, NGRAM = strategy_lib.parse("3_1_4"), strategy_lib.parse("ngram_5")


def test_levels_are_read_in_any_order_and_written_as_they_are_read():
  text = "up to 2 live: off or 3_1_4; up to 8 live: ngram_5"
  levels = levels_lib.parse(text)
  assert levels == ((2, (None, CHAIN)), (8, (NGRAM,)))
  assert levels_lib.write(levels) == text
  assert levels_lib.parse("up to 8 live: ngram_5;  up to 2 live: off or 3_1_4; ") == levels
  assert levels_lib.parse("") == ()


def test_one_way_for_each_number_is_fixed():
  text = "up to 8 live: ngram_5; up to 2 live: 3_1_4"
  selector = selector_lib.make(text, "predictive", True)
  chosen = [selector.choose(live) for live in (1, 2, 3, 8, 9)]
  assert chosen == [CHAIN, CHAIN, NGRAM, NGRAM, None]


@pytest.mark.parametrize("rule", RULES)
def test_of_several_ways_a_rule_learns_the_fastest(rule):
  selector = selector_lib.make("up to 2 live: off or 3_1_4; up to 8 live: off", rule, True)
  assert isinstance(selector, RULES[rule])
  assert selector.arms(2) == (None, CHAIN)
  assert selector.arms(8) == selector.arms(9) == (None,)


def test_without_a_drafter_n_grams_are_left_or_nothing():
  selector = selector_lib.make("up to 2 live: 3_1_4 or ngram_5", "predictive", False)
  assert selector.strategies == (NGRAM,)
  assert selector_lib.make("up to 2 live: off or 3_1_4", "predictive", False) is None
  assert selector_lib.make("", "predictive", True) is None


@pytest.mark.parametrize("size, shifted", [(8, True), (16, True), (4, False), (2, False)])
def test_automatic_strategies_of_a_drafter_of_blocks_fit_its_block(size, shifted):
  block = drafter_lib.Block(size=size, shifted=shifted)
  drafter = drafter_lib.of_target(tiny.CONFIG, "block", block=block)
  (level,) = levels_lib.parse(levels_lib.automatic(drafter))
  strategy_lib.check_depths(level.arms, block)
  drafted = list(filter(strategy_lib.uses_drafter, level.arms))
  assert max(arm.depth for arm in drafted) == min(block.guesses, 8)
  assert {arm.width > 1 for arm in drafted} == {False, True}


def test_a_rule_of_ones_own_is_called_by_its_module():
  rule = "my_package.in_turn"
  selector = selector_lib.make("up to 2 live: off or 3_1_4", rule, True)
  assert isinstance(selector, selector_lib.Selector)
  assert [selector.choose(1, None) for _ in range(3)] == [None, CHAIN, None]
