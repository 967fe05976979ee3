"""What is fastest is found and followed, and trying costs little: simulated chunks."""

import json
import random

import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation.rules import epsilon_greedy
from tlt_jax.spec_decode.speculation.rules import predictive as predictive_lib

CHAIN, LONG, TREE = map(strategy_lib.parse, ("2_1_3", "5_1_6", "3_2_6"))
ARMS = ((4, (None, CHAIN, LONG)), (16, (None, CHAIN)))
BUCKET = options_lib.Bucket(4, 64)
STEPS = 40
RULES = {
  "predictive": predictive_lib.Predictive,
  "epsilon_greedy": epsilon_greedy.EpsilonGreedy,
}


class World:
  """Chunks whose time and acceptance are known: what a selector is up against."""

  def __init__(self, stands, cost, noise=0.05, seed=0):
    self.stands, self.cost, self.noise = stands, cost, noise
    self.dice = random.Random(seed)
    self.seconds = self.tokens = 0.0
    self.by_live = {}  # live: [tokens of a request, seconds]
    self.clock = clock_lib.Clock()
    self.bucket = BUCKET

  @property
  def step_s(self):
    """Seconds of a step by arm, as far as they are known."""
    of = lambda arm: self.clock.step_s(self.bucket, arm)
    return selector_lib.StepSeconds(self.bucket, of)

  def rate(self, arm, live):
    """Tokens per second of a request."""
    depth = arm.depth if arm else 0
    per_pass = 1 + sum(self.stands**k for k in range(1, depth + 1))
    return per_pass / self.cost(arm, live)

  def run(self, selector, live):
    arm = selector.choose(live, self.step_s)
    passes = STEPS * live
    accepted = [passes]
    for _ in range(arm.depth if arm else 0):
      accepted.append(sum(self.dice.random() < self.stands for _ in range(accepted[-1])))
    tokens = sum(accepted)
    step_s = self.cost(arm, live) * self.dice.lognormvariate(0, self.noise)
    book = dict(steps=STEPS, tokens=tokens, longest=STEPS, seconds=STEPS * step_s)
    self.clock.book(self.bucket, arm, **book)
    seen = selector_lib.Observation(
      live=live,
      bucket=self.bucket,
      strategy=arm,
      steps=STEPS,
      tokens=tokens,
      passes=passes,
      accepted=() if arm is None else [*accepted, 0, 0],
      seconds=STEPS * step_s,
    )
    selector.observe(seen)
    self.seconds += seen.seconds
    self.tokens += tokens / live
    here = self.by_live.setdefault(live, [0.0, 0.0])
    here[0], here[1] = here[0] + tokens / live, here[1] + seen.seconds
    return arm


def cost(arm, live):
  """Milliseconds of a step: free guesses for one request, dear ones for many."""
  return 1e-3 * (1 + (0.1 + 0.12 * live) * (arm.depth if arm else 0))


def predictive(world, arms=ARMS, lives=(1, 2, 4, 8)):
  selector = predictive_lib.Predictive(arms)
  for live in lives:
    for arm in selector.arms(live):
      world.clock.measured(BUCKET, arm, world.cost(arm, 4))
  return selector


def test_of_equal_buckets_the_best_arm_is_found():
  for stands, best in ((0.9, LONG), (0.75, CHAIN), (0.2, None)):
    world = World(stands, lambda arm, live: cost(arm, 1))
    selector = predictive(world)
    chosen = [world.run(selector, 2) for _ in range(40)]
    assert max(ARMS[0][1], key=lambda arm: world.rate(arm, 2)) == best
    assert chosen[-20:].count(best) >= 19


def test_speculation_goes_off_and_on_again_with_acceptance():
  world = World(0.9, lambda arm, live: cost(arm, 1))
  selector = predictive(world)
  assert [world.run(selector, 4) for _ in range(30)][-1] == LONG
  world.stands = 0.05
  assert [world.run(selector, 4) for _ in range(60)][-1] is None
  world.stands = 0.9
  assert [world.run(selector, 4) for _ in range(1500)].count(LONG) > 300


def test_slow_steps_of_a_while_do_not_end_speculation_in_a_bucket():
  """As where another program takes a core; it is tried again although others speculate."""
  slow = 1.0
  world = World(0.9, lambda arm, live: cost(arm, 1) * (slow if arm else 1.0))
  selector = predictive(world)
  other = options_lib.Bucket(4, 128)
  for arm in selector.arms(4):
    world.clock.measured(other, arm, world.cost(arm, 4))

  def chunks(count, bucket):
    world.bucket = bucket
    return [world.run(selector, 4) for _ in range(count)]

  chunks(20, other)
  assert chunks(20, BUCKET)[-1] == LONG
  slow = 6.0
  assert chunks(40, BUCKET)[-1] is None
  slow = 1.0
  later = [arm for _ in range(10) for b in (other, BUCKET) for arm in chunks(10, b)]
  assert later[-20:].count(LONG) >= 18


def test_a_step_that_was_timed_badly_beforehand_is_timed_again():
  """Plain ones here, in one of two buckets, where they seem too slow to be used."""
  world = World(0.2, lambda arm, live: cost(arm, 1))
  selector = predictive(world)
  other = options_lib.Bucket(4, 128)
  for arm in selector.arms(4):
    world.clock.measured(other, arm, world.cost(arm, 4))
  world.clock.measured(BUCKET, None, 2 * world.cost(None, 4))
  chosen = []
  for _ in range(12):
    for world.bucket in (other, BUCKET):
      arms = [world.run(selector, 4) for _ in range(10)]
    chosen += arms
  assert chosen[:10] == [CHAIN] * 10
  assert chosen[-40:].count(None) >= 38


def test_what_one_live_batch_teaches_serves_another():
  world = World(0.05, lambda arm, live: cost(arm, 1))
  selector = predictive(world)
  for _ in range(40):
    world.run(selector, 2)
  assert selector.choose(8, world.step_s) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_is_always_wrong_costs_little(seed):
  """Within the budget of regret: 2% of the time, and what the first chunks teach."""
  world = World(0.0, cost, seed=seed)
  selector = predictive(world)
  for chunk in range(2000):
    live = (8, 4, 2, 1)[chunk // 10 % 4]
    world.run(selector, live)
  assert world.seconds < 1.03 * world.tokens * cost(None, 1)


@pytest.mark.parametrize("stands", [0.2, 0.6, 0.9])
def test_the_best_fixed_strategy_in_hindsight_is_hardly_better(stands):
  lives = [(8, 4, 2, 1)[chunk // 10 % 4] for chunk in range(600)]
  world = World(stands, lambda arm, live: cost(arm, 1))
  selector = predictive_lib.Predictive(ARMS)  # nothing measured beforehand
  for live in lives:
    world.run(selector, live)
  for live, (tokens, seconds) in world.by_live.items():
    best = max(world.rate(arm, live) for arm in selector.arms(live))
    assert tokens / seconds > 0.9 * best, live


def test_epsilon_greedy_tries_every_arm_and_then_mostly_the_best():
  world = World(0.9, lambda arm, live: cost(arm, 1))
  selector = epsilon_greedy.EpsilonGreedy(ARMS, epsilon=0.1)
  chosen = [world.run(selector, 4) for _ in range(200)]
  assert set(chosen[:3]) == {None, CHAIN, LONG}
  assert 160 <= chosen.count(LONG) < 200


@pytest.mark.parametrize("rule", RULES)
def test_a_selector_goes_on_from_its_state(rule):
  selectors = [RULES[rule](ARMS) for _ in range(2)]
  world = World(0.8, cost)
  for _ in range(30):
    world.run(selectors[0], 4)
  selectors[1].restore(json.loads(json.dumps(selectors[0].state())))
  worlds = [World(0.8, cost, seed=3) for _ in selectors]
  after = [[w.run(p, 4) for _ in range(30)] for w, p in zip(worlds, selectors, strict=True)]
  assert after[0] == after[1]


def test_trees_are_judged_by_what_they_drew():
  world = World(0.5, lambda arm, live: cost(arm, 1))
  selector = predictive_lib.Predictive(((4, (None, TREE)),))
  assert {world.run(selector, 2) for _ in range(40)} == {None, TREE}
  assert selector.tokens_per_pass(TREE) == pytest.approx(1.875, abs=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_what_speculation_gains_is_predicted(rule):
  world, selector = World(0.8, cost), RULES[rule](ARMS)
  assert selector.gain(2, CHAIN, world.step_s) == 1  # nothing is known yet
  for _ in range(40):
    world.run(selector, 2)
  assert world.step_s(None) == pytest.approx(cost(None, 2), rel=0.1)
  for arm in (CHAIN, LONG):
    gain = world.rate(arm, 2) / world.rate(None, 2)
    assert selector.gain(2, arm, world.step_s) == pytest.approx(gain, rel=0.15)


def test_arms_that_make_no_sense_are_errors():
  with pytest.raises(ValueError, match="needs an arm"):
    predictive_lib.Predictive(((4, ()),))
  with pytest.raises(ValueError, match="named twice"):
    predictive_lib.Predictive(((4, (None, CHAIN)), (4, (LONG,))))


def test_the_state_of_another_rule_is_left_alone():
  greedy, predictive = epsilon_greedy.EpsilonGreedy(ARMS), predictive_lib.Predictive(ARMS)
  before = predictive.state()
  for state in (None, greedy.state()):
    predictive.restore(state)
  assert predictive.state() == before


def test_long_after_it_was_useless_a_drafter_is_tried_again():
  world = World(0.05, lambda arm, live: cost(arm, 1))
  selector = predictive(world)
  for _ in range(4000):
    world.run(selector, 4)
  world.stands = 0.9
  assert [world.run(selector, 4) for _ in range(400)].count(LONG) > 100


def test_a_drafter_that_has_learnt_is_soon_found_out():
  """N-grams draft meanwhile, in several buckets, in each of which little runs."""
  ngram = strategy_lib.parse("ngram_2")
  stands = {"model": 0.02, "ngram": 0.02}
  world = World(0.0, lambda arm, live: cost(arm, 1))
  selector = predictive_lib.Predictive(((4, (None, CHAIN, ngram)),))
  buckets = [options_lib.Bucket(4, 64 * length) for length in range(1, 6)]

  def chunks(count):
    found = []
    for i in range(count):
      world.bucket, choose = buckets[i // 2 % len(buckets)], selector.choose
      arm = choose(4, world.step_s)
      selector.choose = lambda *_, arm=arm: arm
      world.stands = stands[arm.source] if arm else 0.0
      found.append(world.run(selector, 4))
      selector.choose = choose
    return found

  for bucket in buckets:
    for arm in selector.arms(4):
      world.clock.measured(bucket, arm, world.cost(arm, 4))
  chunks(4)
  stands["ngram"] = 0.7  # there was nothing to look up before
  assert chunks(40)[-20:].count(ngram) >= 18
  stands["model"] = 0.9
  assert chunks(120)[-20:].count(CHAIN) >= 18


def test_what_deep_drafts_did_long_ago_is_forgotten():
  """Shorter chains of the same drafter ran in between, and say nothing of that depth."""
  world = World(0.3, lambda arm, live: cost(arm, 1))
  selector = predictive_lib.Predictive(ARMS)

  def chunks(count, arm):
    selector.choose = lambda *_: arm
    for _ in range(count):
      world.run(selector, 4)

  chunks(20, LONG)
  world.stands = 0.9
  chunks(100, CHAIN)
  chunks(2, LONG)
  expected = 1 + sum(0.9**k for k in range(1, LONG.depth + 1))
  assert selector.tokens_per_pass(LONG) == pytest.approx(expected, rel=0.1)


def test_a_deep_arm_is_not_judged_by_a_single_pass():
  """Chunks of one live request hold a few passes, of which one or none reaches far."""
  selector = predictive_lib.Predictive(((1, (None, LONG)),))

  def observe(*accepted):
    seen = selector_lib.Observation(
      live=1,
      bucket=BUCKET,
      strategy=LONG,
      steps=accepted[0],
      tokens=sum(accepted),
      passes=accepted[0],
      accepted=[*accepted],
      seconds=1.0,
    )
    selector.observe(seen)

  for _ in range(3):
    observe(4, 3, 2, 1, 0, 0)
  assert selector.tokens_per_pass(LONG) is None  # 12 passes say little
  observe(4, 3, 2, 1, 0, 0)
  stands = 0.75  # of the first draft; deeper ones have been reached 12 times at most
  expected = 1 + sum(stands**k for k in range(1, LONG.depth + 1))
  assert selector.tokens_per_pass(LONG) == pytest.approx(expected)
  observe(400, 40, 20, 20, 20, 20)  # many passes outweigh a few
  assert selector.tokens_per_pass(LONG) == pytest.approx(1.3, abs=0.1)


def test_a_deep_arm_is_tried_again_although_its_source_drafts_all_the_time():
  """It was useless once; what its source has learnt since shows in shorter chains."""
  world = World(0.1, lambda arm, live: cost(arm, 1))
  selector = predictive(world, (((1, (None, LONG)), (4, (None, CHAIN)))), lives=(1, 4))
  for _ in range(40):
    world.run(selector, 1)
  world.stands = 0.9
  found = []
  for _ in range(30):
    found += [world.run(selector, live) for live in (4, 4, 4, 4, 4, 4, 1, 1)]
  assert found[-80:].count(LONG) >= 15


def test_an_adaptive_rollout_draws_the_same_and_can_be_followed():
  options = rollout.Options(**tiny.SIZES, slots=8, chunk=8)
  mesh = tiny.mesh(1)
  selector = predictive_lib.Predictive(((4, (None, CHAIN, TREE)), (8, (None, CHAIN))))
  engine = rollout.make(tiny.CONFIG, mesh, options, tiny.DRAFTERS["eagle2"], selector)
  made = tiny.requests(4, 3, max_tokens=np.linspace(10, 70, 12).astype(int))
  draft_params = tiny.draft_params("eagle2", seed=5)
  engine.compile(tiny.on(mesh), made.stop_tokens.shape[1], draft_params)
  programs = len(engine.pool)
  engine.measure(tiny.on(mesh), made.stop_tokens.shape[1], draft_params)
  plain = rollout.make(tiny.CONFIG, mesh, options)(tiny.on(mesh), made)
  drawn = engine(tiny.on(mesh), made, draft_params)
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain, drawn)
  assert result.differing_tokens == 0 and result.near_ties <= 1
  assert any(name == "strategy of off, 2_1_3, 3_2_6" for name, _ in drawn.decisions)
  assert len(engine.pool) == programs
  again = engine(
    *(tiny.on(mesh), made, draft_params),
    decide=clock_lib.Decisions(drawn.decisions),
  )
  assert [c.strategy for c in again.chunks] == [c.strategy for c in drawn.chunks]
