"""A fork adds a source of drafts, or a rule, as one file, and edits no other."""

import pytest

from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

OPTIONS = rollout.Options(**tiny.SIZES, slots=8, chunk=16)


def run(selector, verification="coupled"):
  mesh = tiny.mesh(2)
  engine = rollout.make(
    tiny.CONFIG, mesh, OPTIONS, selector=selector, verification=verification
  )
  made = tiny.requests(temperature=0.5 if verification == "coupled" else 0.0)
  engine.compile(tiny.on(mesh), made.stop_tokens.shape[1])
  programs = len(engine.pool)
  samples = engine(tiny.on(mesh), made)
  assert len(engine.pool) == programs, engine.pool.report()
  plain = rollout.make(tiny.CONFIG, mesh, OPTIONS)(tiny.on(mesh), made)
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain, samples)
  assert result.differing_tokens == 0, result.where
  return samples


# At depth 3 with rejection the CPU compiler of jaxlib 0.11 and 0.12 does not end.
@pytest.mark.parametrize(("verification", "depth"), [("coupled", 3), ("rejection", 2)])
def test_a_source_of_ones_own_drafts_losslessly(verification, depth):
  """Named by its module in the strategy; rejection is tried where it has one outcome."""
  strategy = strategy_lib.parse(f"tests.extensions.repeat_{depth}")
  assert str(strategy) == f"tests.extensions.repeat_{depth}"
  samples = run(selector_lib.always(strategy), verification)
  if verification == "coupled":
    assert samples.mean_acceptance_length > 1


def test_a_rule_of_ones_own_chooses():
  arms = tuple(map(strategy_lib.parse, ("off", "ngram_3", "tests.extensions.repeat_2")))
  selector = selector_lib.make([(8, arms)], "tests.extensions.in_turn")
  samples = run(selector)
  assert [c.strategy for c in samples.chunks[:3]] == [*map(strategy_lib.name, arms)]
  again = selector_lib.make([(8, arms)], "tests.extensions.in_turn")
  again.restore(selector.state())
  assert again.count == selector.count == len(samples.chunks)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("tests.extensions.reapeat_3", "no source of drafts 'tests.extensions.reapeat'"),
    ("ngarm_3", "no source of drafts 'ngarm'"),
    ("ngram_3_2_7", "n-grams draft chains only"),
  ],
)
def test_a_source_that_cannot_draft_is_refused(text, message):
  selector = selector_lib.always(strategy_lib.parse(text))
  with pytest.raises(ValueError, match=message):
    rollout.make(tiny.CONFIG, tiny.mesh(1), OPTIONS, selector=selector)


def test_a_rule_that_is_none_is_refused():
  arms = tuple(map(strategy_lib.parse, ("off", "ngram_3")))
  with pytest.raises(ValueError, match="no strategy rule 'predictve'"):
    selector_lib.make([(8, arms)], "predictve")
