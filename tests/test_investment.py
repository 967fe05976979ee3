"""A drafter trains for as long as that pays: simulated rollouts and learning curves."""

import json
import math
import random

import pytest

from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import investment as investment_lib

CHAIN = strategy_lib.parse("3_1_4")
BUCKET = 4
PLAIN_S = 10.0  # seconds of a rollout that is decoded plainly
UPDATE_S = 0.05
ROWS = 64
SHARE = 0.5
NONE = investment_lib.Progress(0, 0, None)


def drafter(q_first, per_e_fold):
  """A learning curve: updates -> how often its drafts are accepted."""
  return lambda updates: (
    1 - math.exp(math.log(1 - q_first) - per_e_fold * math.log(1 + updates / 20))
  )


class World:
  """Rollouts of a policy, whose drafter trains when the account says so."""

  def __init__(self, curve, cost=1.3, idle_updates=0, seed=0, update_s=UPDATE_S):
    self.update_s = update_s
    self.curve, self.cost, self.idle_updates = curve, cost, idle_updates
    self.account = investment_lib.Investment(SHARE)
    self.updates = 0
    self.dice = random.Random(seed)
    self.invested: list[float] = []  # seconds after each rollout
    self.idle: list[bool] = []  # whether idle slices trained
    self.rollout_s: list[float] = []

  def train(self, updates):
    """Trains, the first half on new rows; returns what a run measures."""
    on_new = -(-updates // 2)
    q = self.curve(self.updates + on_new / 2)
    self.updates += updates
    noisy = min(max(q + self.dice.gauss(0, 0.03), 0.02), 0.98)
    return investment_lib.Progress(updates, on_new, noisy)

  def step_s(self, arm):
    return 1e-2 * (self.cost if arm else 1.0)

  def rollout(self):
    account = self.account
    q = self.curve(self.updates)
    tokens = 1 + q + q**2 + q**3
    drafts = tokens > self.cost
    seconds = PLAIN_S * min(1.0, self.cost / tokens)
    trains = account.in_idle_slices
    account.begin_rollout()
    accepted = (400, int(400 * q), int(400 * q**2)) if drafts else ()
    passes = 400
    account.observe(
      selector_lib.Observation(
        live=1,
        bucket=BUCKET,
        strategy=CHAIN if drafts else None,
        steps=passes,
        tokens=int(passes * tokens) if drafts else passes,
        passes=passes,
        accepted=accepted,
        seconds=seconds,
      ),
      (None, CHAIN),
      selector_lib.StepSeconds(BUCKET, self.step_s),
    )
    progress = NONE
    if trains and self.idle_updates:
      progress = self.train(self.idle_updates)
    idle_s = self.update_s * progress.updates
    wanted = account.end_rollout(seconds, progress, idle_s, ROWS)
    assert 0 <= wanted.seconds <= SHARE * seconds + 1e-9
    more = min(math.ceil(wanted.seconds / self.update_s), int(wanted.updates))
    if more:
      account.trained(self.train(more), more * self.update_s)
    self.idle.append(trains)
    self.invested.append(more * self.update_s)
    self.rollout_s.append(seconds)

  def run(self, count):
    for _ in range(count):
      self.rollout()
    return self


NEW = (0.1, 0.3)  # a new drafter's curve


@pytest.mark.parametrize("seed", range(3))
def test_a_new_drafter_on_one_slice_pays_for_itself(seed):
  """It trains at once, for ever less, and the whole is faster than plain decoding."""
  world = World(drafter(*NEW), seed=seed).run(40)
  assert world.invested[0] == pytest.approx(SHARE * PLAIN_S)
  assert sum(world.invested[:10]) > 2 * sum(world.invested[-10:])
  assert sum(world.rollout_s) + sum(world.invested) < 0.9 * 40 * PLAIN_S
  assert world.account.saved_s > sum(world.invested)
  assert world.account.invested_s == pytest.approx(sum(world.invested), rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_cheap_updates_do_not_repeat_the_same_rows(seed):
  """Half of a rollout's time would be a thousand updates on its few rows."""
  world = World(drafter(*NEW), update_s=PLAIN_S / 2000, seed=seed).run(10)
  assert max(world.invested) <= 4 * ROWS * world.update_s
  assert world.invested[0] == max(world.invested)
  assert sum(world.rollout_s) + sum(world.invested) < 0.75 * 10 * PLAIN_S


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_learns_nothing_more_stops(seed):
  world = World(drafter(0.8, 0.0), idle_updates=25, seed=seed).run(100)
  assert sum(world.invested) < 0.02 * sum(world.rollout_s)
  assert sum(world.idle[20:]) < 30


@pytest.mark.parametrize("seed", range(3))
def test_it_trains_again_when_fewer_drafts_are_accepted(seed):
  """The policy has moved on; training brings back what was lost."""
  world = World(drafter(0.8, 0.0), idle_updates=25, seed=seed)
  while world.account.in_idle_slices and len(world.idle) < 100:
    world.rollout()
  at = len(world.idle)
  assert at < 60
  base = world.updates
  world.curve = lambda updates: drafter(0.5, 0.25)(updates - base)
  world.run(5)
  assert any(world.idle[at:]) and sum(world.invested[at:]) > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_whose_drafts_cannot_pay_is_given_up(seed):
  """A step with drafts takes as long as the tokens that it could draw at most."""
  world = World(drafter(*NEW), cost=4.0, seed=seed).run(100)
  assert sum(world.invested) < 0.03 * sum(world.rollout_s)


def test_nothing_is_invested_where_the_drafter_may_not_draft():
  account = investment_lib.Investment(SHARE)
  assert account.end_rollout(10.0, NONE, 0.0, ROWS).seconds == 0.0


def test_an_account_goes_on_from_its_state():
  worlds = [World(drafter(*NEW)).run(8) for _ in range(2)]
  state = json.loads(json.dumps(worlds[0].account.state()))
  worlds[1].account = investment_lib.Investment(SHARE)
  worlds[1].account.restore(state)
  for world in worlds:
    world.run(8)
  assert worlds[0].invested == worlds[1].invested
