"""Simulated runs of many steps: what is drawn is trained once, and waits are counted."""

import dataclasses
import itertools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import commands
from tlt_jax.simulate import groups as groups_lib
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.simulate import ways
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import quorum as quorum_lib

command = commands.module("simulate")
table = commands.module("ways")
SMALL = dataclasses.replace(
  scenario_lib.read(command.SCENARIOS / "qwen2_5_7b.json"),
  prompts=4,
  responses=3,
  max_tokens=4096,
  lengths={"log_normal": {"median": 500, "sigma": 1.2}},
  slices=(4,),
)
STEPS, SLICES = 6, 4
WAYS = {
  "synchronous": ways.Synchronous(),
  "TLT": ways.Synchronous(side="tlt"),
  "partial": ways.Partial(versions=2),
  "partial, TLT": ways.Partial(versions=2, side="tlt"),
  "one_off": ways.OneOff(),
  "asynchronous": ways.Asynchronous(bound=2),
  "asynchronous, frozen": ways.Asynchronous(bound=2, side="frozen"),
}


def ledger(way, draws=3, scenario=SMALL, slots=128):
  draws = draws if isinstance(way, ways.APART) else SLICES
  comparison = ways.Comparison(ways=(way,), steps=STEPS, warm_up=2, slots=slots)
  return comparison.run(scenario, way, SLICES, draws)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_group_is_trained_once_with_all_its_tokens(way):
  """Whoever drew them; and no device does more than there is time for."""
  book = ledger(way)
  numbers = [number for update in book.updates for number in update.groups]
  assert len(book.updates) == STEPS and len(numbers) == len(set(numbers)) == 4 * STEPS
  for update in book.updates:
    drawn = sum(int(SMALL.draw_group(number).sum()) for number in update.groups)
    assert update.tokens == sum(update.by_age) == drawn
    assert len(update.versions) == 4 * 3 and min(update.versions) >= 1
  ends = [update.end_s for update in book.updates]
  assert np.all(np.diff(ends) > 0)
  assert sum(book.updates[-1].busy.values()) <= SLICES * ends[-1] * 1.0001
  summary = book.summary(2)
  assert sum(summary.by_age) == pytest.approx(1)
  assert summary.tokens_per_s == pytest.approx(
    sum(update.tokens for update in book.updates[2:]) / (ends[-1] - ends[1])
  )


def seconds_of(draws):
  """Seconds of rollouts one by one, and of updates on them: f64[steps] each."""
  crew = ways.Crew(SMALL, "plain", draws, SLICES, SMALL.prompts, 128)
  rollout_s, update_s = [], []
  for _ in range(STEPS + 1):
    began_s, groups = crew.timer.now(), crew.prompts.ask(4)
    crew.draw_all(groups, 0)
    rollout_s.append(crew.timer.now() - began_s)
    update_s.append(crew.update_s(groups))
  return np.array(rollout_s), np.array(update_s)


def test_a_step_takes_the_rollout_and_the_update():
  """One after the other on all slices; or at the same time, on slices of their own."""
  sync_s = SMALL.costs.weight_sync_s()
  together, (rollout_s, update_s) = ledger(WAYS["synchronous"]), seconds_of(SLICES)
  ends = np.cumsum(rollout_s + update_s + sync_s)[:STEPS]
  assert [update.end_s for update in together.updates] == pytest.approx(ends.tolist())
  assert together.summary(2).stale == 0
  for draws in (1, 3):
    apart, (rollout_s, update_s) = ledger(WAYS["one_off"], draws), seconds_of(draws)
    took_s = np.maximum(rollout_s[1:], update_s[:-1]) + sync_s
    ends = rollout_s[0] + np.cumsum(took_s)
    assert [update.end_s for update in apart.updates] == pytest.approx(ends.tolist())
    ages = [update.by_age for update in apart.updates]
    assert len(ages[0]) == 1 and all(by_age[0] == 0 for by_age in ages[1:])


def test_what_is_carried_over_does_not_depend_on_speculation():
  """Which groups, and how many tokens of each age; nor on devices or slots."""
  plain = ledger(WAYS["partial"]).updates
  for way, slots in ((WAYS["partial, TLT"], 128), (WAYS["partial"], 3)):
    for one, other in zip(plain, ledger(way, slots=slots).updates, strict=True):
      assert (one.groups, one.by_age, one.versions) == (
        other.groups,
        other.by_age,
        other.versions,
      )
  assert any(len(update.by_age) > 1 for update in plain)
  assert max(n for update in plain for n in update.versions) == 2


def test_what_goes_on_is_scored_before_the_update():
  """A pass over its responses that this version has drawn a part of, with their prompts."""
  crew = ways.Crew(SMALL, "plain", SLICES, SLICES, 4, 128)
  group = groups_lib.Group(0, np.array([9, 9, 9]), {})
  group.by_version = {1: np.array([2, 9, 0]), 2: np.array([1, 0, 0])}
  crew.score([group], 2)
  tokens = 3 + SMALL.prompt_tokens
  expected_s = SMALL.costs.policy_update_s(tokens, SLICES) / 4  # of four passes
  assert crew.timer.now() == pytest.approx(expected_s)
  assert crew.ledger.busy["update"] == pytest.approx(SLICES * expected_s)
  crew.score([group], 3)
  assert crew.timer.now() == pytest.approx(expected_s)


def test_carrying_nothing_over_is_synchronous():
  one, other = ways.Partial(asked=1.0, versions=1), WAYS["synchronous"]
  updates = zip(ledger(one).updates, ledger(other).updates, strict=True)
  for mine, theirs in updates:
    assert mine.groups == theirs.groups and mine.by_age == theirs.by_age
    assert mine.end_s == pytest.approx(theirs.end_s)


@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
@hypothesis.given(
  st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=5),
  st.data(),
)
def test_a_step_draws_as_few_tokens_as_its_groups_need(left, data):
  """Against all numbers in turn, with responses that end in any order."""
  left = np.array(left)
  must = np.array(
    data.draw(st.lists(st.booleans(), min_size=left.size, max_size=left.size))
  )
  wanted = data.draw(st.integers(0, len(left)))

  def suffices(n: int) -> bool:
    return (left <= n).all(1).sum() >= wanted and (left.ravel()[must] <= n).all()

  groups = [
    groups_lib.Group(i, 3 + n, {0: np.full(2, 3)} if n.any() else {})
    for i, n in enumerate(left)
  ]
  batch = groups_lib.Batch(groups, 4, 16)
  until = quorum_lib.Quorum(wanted, must).until(batch.requests())
  samples = samples_lib.empty(batch.requests())
  for i in data.draw(st.permutations(range(left.size))):
    bound = until(samples, [])
    if bound is None or samples.length[i] < bound[i]:
      samples.length[i] = batch.lengths[i]
      until(samples, [i])
  assert until.tokens == next(n for n in itertools.count() if suffices(n))


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_prompts_are_asked_no_further_ahead_than_the_bound(bound, monkeypatch):
  """So that responses of one length are never older than it."""
  asked, ask = [], groups_lib.Prompts.ask

  def watched(self, count):
    asked.append(self.asked + count)
    return ask(self, count)

  monkeypatch.setattr(groups_lib.Prompts, "ask", watched)
  way = ways.Asynchronous(bound=bound)
  equal = dataclasses.replace(SMALL, lengths={"given": [700]})
  for scenario in (equal, SMALL):
    book = ledger(way, scenario=scenario)
    assert asked == [4 * (version + bound + 1) for version in range(STEPS)]
    asked.clear()
    oldest = max(len(update.by_age) for update in book.updates) - 1
    assert oldest <= bound or scenario is SMALL


def test_a_response_must_end_with_the_last_version_it_may_span():
  group = groups_lib.Group(0, np.array([9, 9, 9]), {})
  group.by_version = {1: np.array([2, 9, 0]), 2: np.array([1, 0, 0])}
  assert group.must_end(2, 2).tolist() == [True, False, False]
  assert group.must_end(3, 4).tolist() == [False, False, False]
  assert group.must_end(1, 1).tolist() == [True, False, False]
  group.by_version[3] = np.array([6, 0, 9])
  assert group.versions.tolist() == [3, 1, 1]


def test_the_best_split_is_found():
  """Among those that leave the learner enough slices; else there is none."""
  way = ways.OneOff()
  comparison = ways.Comparison(ways=(way,), steps=3, warm_up=1, least_learner=1)
  draws, summary = comparison.best(SMALL, way, 4)
  each = {n: comparison.run(SMALL, way, 4, n).summary(1).tokens_per_s for n in (1, 2, 3)}
  assert summary.tokens_per_s == max(each.values()) == each[draws]
  lone = dataclasses.replace(comparison, least_learner=4)
  assert lone.best(SMALL, way, 4) is None


def test_a_scenario_names_its_ways():
  named = ways.Comparison.of(SMALL)
  assert named.ways[0] == ways.Synchronous() and len({w.name for w in named.ways}) > 5

  def of(**changes):
    return ways.Comparison.of(dataclasses.replace(SMALL, **changes))

  with pytest.raises(ValueError, match="one of synchronous, partial"):
    of(ways={"compared": [{"kind": "late"}]})
  with pytest.raises(ValueError, match="bound: Unexpected keyword argument"):
    of(ways={"compared": [{"kind": "partial", "bound": 2}]})
  with pytest.raises(ValueError, match="side: Input should be 'plain', 'frozen' or 'tlt'"):
    of(ways={"compared": [{"kind": "one_off", "side": "fast"}]})
  with pytest.raises(ValueError, match="compares no ways"):
    of(ways={})
  with pytest.raises(ValueError, match="leaves none"):
    of(ways={"compared": [], "steps": 3, "warm_up": 3})
  with pytest.raises(ValueError, match='"kind": "synchronous"'):
    of(ways={"compared": [{"kind": "one_off"}]})
  tail = scenario_lib.read(command.SCENARIOS / "tail.json")
  with pytest.raises(ValueError, match="need updates of the policy"):
    ways.Comparison.of(tail)


def test_the_table_and_the_figure(tmp_path, capsys):
  chosen = [{"kind": "synchronous"}, {"kind": "asynchronous", "bound": 1}]
  sizes = {"steps": 3, "warm_up": 1, "least_learner": 1, "compared": chosen}
  found = table.compare(dataclasses.replace(SMALL, ways=sizes, slices=(2, 4)))
  assert [r.devices for r in found] == [2, 2, 4, 4]
  table.report(found)
  assert "async 1 " in capsys.readouterr().out
  assert "the fastest without stale tokens" in table.verdict(found)
  assert (tmp_path / "ways.png").samefile(table.draw(found, tmp_path))
  assert table.as_json(found)[0]["way"] == "synchronous"
