"""What is fastest is found and followed, and trying costs little: simulated chunks."""

import dataclasses
import functools
import json
import random

import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import chooser
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation.rules import epsilon_greedy
from tlt_jax.spec_decode.speculation.rules import predictive as predictive_lib

CHAIN, THREE, LONG, TREE = map(strategy_lib.parse, ("2_1_3", "3_1_4", "5_1_6", "3_2_6"))
ARMS = ((4, (None, CHAIN, LONG)), (16, (None, CHAIN)))
BUCKET = 4  # slots
STEPS = 40
COLD = 1.055  # time at the start over that of the best arm alone
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
    of = functools.partial(self.clock.step_s, self.bucket)
    doubt = functools.partial(self.clock.doubt, self.bucket)
    return selector_lib.StepSeconds(self.bucket, of, doubt)

  def rate(self, arm, live):
    """Tokens per second of a request."""
    depth = arm.depth if arm else 0
    per_pass = 1 + sum(self.stands**k for k in range(1, depth + 1))
    return per_pass / self.cost(arm, live)

  def run(self, selector, live, arm=..., steps=STEPS):
    arm = selector.choose(live, self.step_s) if arm is ... else arm
    passes = steps * live
    accepted = [passes]
    for _ in range(arm.depth if arm else 0):
      accepted.append(sum(self.dice.random() < self.stands for _ in range(accepted[-1])))
    tokens = sum(accepted)
    step_s = self.cost(arm, live) * self.dice.lognormvariate(0, self.noise)
    book = dict(steps=steps, tokens=tokens, longest=steps, seconds=steps * step_s)
    self.clock.book(self.bucket, arm, **book)
    seen = selector_lib.Observation(
      live=live,
      bucket=self.bucket,
      strategy=arm,
      steps=steps,
      tokens=tokens,
      passes=passes,
      accepted=() if arm is None else [*accepted, 0, 0],
      seconds=steps * step_s,
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


def cost_of_one(arm, live):
  return cost(arm, 1)


def predictive(world):
  selector = predictive_lib.Predictive(ARMS)
  for live in (1, 2, 4, 8):
    for arm in selector.arms(live):
      world.clock.measured(BUCKET, arm, world.cost(arm, 4))
  return selector


PER_PASS = {None: 1.0, THREE: 1 + 0.8 + 0.64 + 0.512}  # tokens that a chain draws at 0.8


def time_over_best(gain, factor, slow, seed, chunks, buckets=1, counts_slow=False):
  """Time of the rule over that of the best arm, where the machine is slow for a while.

  Args:
    gain: of the chain over plain decoding
    factor: by which steps are slower
    slow: those of the chunks in which they are
    chunks: after the first hundred
    counts_slow: whether their time counts
  """
  base = {arm: 1e-3 * PER_PASS[arm] / (1.0 if arm is None else gain) for arm in PER_PASS}
  times = 1.0
  world = World(0.8, lambda arm, live: base[arm] * times, seed=seed)
  selector = predictive_lib.Predictive(((16, (None, THREE)),))
  two = [BUCKET, 8][:buckets]
  for bucket in two:
    for arm in base:
      world.clock.measured(bucket, arm, base[arm])
  taken, fixed = 0.0, dict.fromkeys(base, 0.0)
  for chunk in range(-100, chunks):
    times = factor if chunk in slow else 1.0
    world.bucket = two[chunk // 5 % buckets]
    tokens, seconds = world.tokens, world.seconds
    world.run(selector, 16)
    if chunk >= 0 and (counts_slow or chunk not in slow):
      taken += world.seconds - seconds
      for arm in base:
        fixed[arm] += (world.tokens - tokens) / world.rate(arm, 16)
  return taken / min(fixed.values())


@pytest.mark.parametrize("stalled", [2, 12, 100])
def test_after_a_stall_the_best_arm_goes_on(stalled):
  """Of the whole machine: an arm is compared with others in the same period only."""
  for seed, (gain, factor, buckets) in enumerate(
    [(0.8, 0.5, 1), (1.36, 2.0, 2), (2.0, 4.0, 1)]
  ):
    lost = time_over_best(gain, factor, range(stalled), seed, stalled + 300, buckets)
    assert lost < 1.03, gain


@pytest.mark.parametrize(("slow", "of"), [(1, 8), (30, 60)])
def test_a_machine_that_is_slow_again_and_again_costs_little(slow, of):
  for seed, gain in enumerate((1.1, 1.36)):
    chunks = [i for i in range(300) if i % of < slow]
    lost = time_over_best(gain, 2.0, chunks, seed, 300, counts_slow=True)
    assert lost < 1.03, gain


class Growing:
  """Rollouts of which n-grams draft better the longer they are, and from one to the next.

  A model drafter learns meanwhile. Four responses run at first, then fewer.
  """

  ARMS = tuple(map(strategy_lib.parse, ("off", "1_1_2", "3_1_4", "ngram_3")))
  COST = dict(zip(ARMS, (1.0, 1.5, 2.1, 1.25), strict=True))

  def __init__(self, selector, wrong=(None, 1.0)):
    self.selector, self.time = selector, []  # seconds and tokens of each rollout
    self.world, self.lengths = World(0.0, self.cost), random.Random(1)
    for batch in (1, 2, 4):
      for arm in self.ARMS:
        step_s = self.world.cost(arm, batch) * (wrong[1] if arm == wrong[0] else 1.0)
        self.world.clock.measured(batch, arm, step_s)

  def cost(self, arm, live):
    return 1e-2 * self.COST[arm] * (1 + 0.1 * live)

  def stands(self, arm, position):
    """How often a draft stands."""
    rollout = len(self.time)
    if arm is None or arm.source == "model":
      return 0.7 * min(1.0, rollout / 20)
    return 0.55 * min(1.0, 0.45 + 0.06 * rollout) * min(1.0, position / 120)

  def rollout(self):
    left = [self.lengths.choice((60, 120, 200, 300, 450)) for _ in range(4)]
    world, position, seconds, tokens = self.world, 0.0, 0.0, 0.0
    while live := sum(length > position for length in left):
      world.bucket = 4 if live > 2 else live
      arm = self.selector.choose(live, world.step_s)
      world.stands = self.stands(arm, position)
      per_pass = sum(world.stands**k for k in range(arm.depth + 1 if arm else 1))
      before = world.seconds, world.tokens
      steps = max(1, round(16 / per_pass))
      world.run(self.selector, live, arm=arm, steps=steps)
      position += world.tokens - before[1]
      tokens += (world.tokens - before[1]) * live
      seconds += world.seconds - before[0]
    self.time.append((seconds, tokens))


@pytest.mark.parametrize(
  ("arm", "factor"),
  [("off", 1.0), tiny.slow("off", 0.5), tiny.slow("ngram_3", 2.0), ("3_1_4", 0.5)],
)
def test_from_the_start_no_arm_alone_is_much_faster(arm, factor):
  """N-grams draw nothing at first, and a drafter is random: neither is given up for long.

  Over each ten rollouts; what trying costs is within this, as is the noise of both sides.
  """
  rule = predictive_lib.Predictive(((4, Growing.ARMS),))
  sides = [Growing(rule, (strategy_lib.parse(arm), factor))]
  sides += [Growing(selector_lib.ByLiveBatch(((4, a),))) for a in Growing.ARMS]
  for side in sides:
    for _ in range(25):
      side.rollout()
  for start in range(16):
    token_s = [np.divide(*np.sum(s.time[start : start + 10], axis=0)) for s in sides]
    assert token_s[0] < COLD * min(token_s[1:]), start


def test_of_equal_buckets_the_best_arm_is_found():
  for stands, best in ((0.9, LONG), (0.75, CHAIN), (0.2, None)):
    world = World(stands, cost_of_one)
    selector = predictive(world)
    chosen = [world.run(selector, 2) for _ in range(40)]
    assert max(ARMS[0][1], key=lambda arm: world.rate(arm, 2)) == best
    # The longer chain loses 2% at 0.75, and may be tried more often for that.
    assert chosen[-20:].count(best) >= (16 if best == CHAIN else 18)


def test_speculation_goes_off_and_on_again_with_acceptance():
  world = World(0.9, cost_of_one)
  selector = predictive(world)
  assert [world.run(selector, 4) for _ in range(30)][-1] == LONG
  world.stands = 0.05
  assert [world.run(selector, 4) for _ in range(60)][-1] is None
  world.stands = 0.9
  assert [world.run(selector, 4) for _ in range(1500)].count(LONG) > 300


def test_a_drafter_that_is_always_wrong_costs_little():
  """Within the budget of regret: 2% of the time, and what the first chunks teach."""
  world = World(0.0, cost)
  selector = predictive(world)
  for chunk in range(2000):
    live = (8, 4, 2, 1)[chunk // 10 % 4]
    world.run(selector, live)
  assert world.seconds < 1.03 * world.tokens * cost(None, 1)


def test_epsilon_greedy_tries_every_arm_and_then_mostly_the_best():
  world = World(0.9, cost_of_one)
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
  world = World(0.5, cost_of_one)
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


def test_what_the_choice_lost_is_known_at_the_end():
  """A plain chunk where the chain is twice as fast; the machine was three times as slow."""
  clock = clock_lib.Clock()
  selector = predictive_lib.Predictive(((4, (None, CHAIN)),))
  selector.tokens_per_pass = {None: 1.0, CHAIN: 3.0}.get
  for arm, step_s in ((None, 1.0), (CHAIN, 1.5)):
    clock.measured(BUCKET, arm, step_s)
  plain = samples_lib.ChunkRecord(0.0, 30.0, BUCKET, "off", [2], [10], [0], 20, 20)
  lucky = samples_lib.ChunkRecord(0.0, 15.0, BUCKET, "2_1_3", [1], [10], [0], 30, 10)
  samples = samples_lib.empty(tiny.requests(1, 1))
  for chunks in ([plain], [plain, lucky]):
    drawn = dataclasses.replace(samples, chunks=chunks)
    gains = chooser.Chooser(selector, clock).gains([], drawn)
    assert gains["lost_s"] == pytest.approx(15.0)


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


def test_an_adaptive_rollout_draws_the_same_and_can_be_followed():
  options = rollout.Options(**tiny.SIZES, slots=8, chunk=8)
  mesh = tiny.mesh(1)
  selector = predictive_lib.Predictive(((4, (None, CHAIN, TREE)), (8, (None, CHAIN))))
  engine = rollout.make(tiny.CONFIG, mesh, options, tiny.frozen("eagle2"), selector)
  made = tiny.requests(4, 3, max_tokens=np.linspace(10, 70, 12).astype(int))
  engine.compile(tiny.on(mesh), made.stop_tokens.shape[1])
  programs = len(engine.pool)
  engine.measure(tiny.on(mesh), made.stop_tokens.shape[1])
  plain = rollout.make(tiny.CONFIG, mesh, options)(tiny.on(mesh), made)
  drawn = engine(tiny.on(mesh), made)
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain, drawn)
  assert result.differing_tokens == 0 and result.near_ties <= 1
  assert any(name == "strategy of off, 2_1_3, 3_2_6" for name, _ in drawn.decisions)
  assert len(engine.pool) == programs
  again = engine(tiny.on(mesh), made, decide=clock_lib.Decisions(drawn.decisions))
  assert [c.strategy for c in again.chunks] == [c.strategy for c in drawn.chunks]
