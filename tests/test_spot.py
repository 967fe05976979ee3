"""Idle slices train the drafter inside the rollout, and no token changes."""

import dataclasses
import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tlt_jax import processes
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import grpo
from tlt_jax.rl import learner as learner_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import pages as features_lib
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import buffer as buffer_lib
from tlt_jax.spec_decode.spot import fused
from tlt_jax.spec_decode.spot import investment
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import rows as rows_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import state as state_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

OPTIONS = rollout.Options(**tiny.SIZES, slots=16, chunk=8, buckets=(4,))
CHAIN = strategy_lib.Strategy(depth=3, width=1, verify=4)
# Plain decoding first, chains for the last few requests.
SWITCHES = selector_lib.ByLiveBatch(((2, CHAIN),))


def requests(seed=7, **options):
  """Every other prompt has short responses: the slices that get these run dry early."""
  limits = np.where(np.arange(24) // 3 % 2, np.linspace(5, 80, 24).astype(int), 6)
  return tiny.requests(8, 3, max_tokens=limits, stop_tokens=[], seed=seed, **options)


SIZES = {
  "row_tokens": 32,
  "context_tokens": 4,
  "rows": 12,
  "carried_rows": 6,
  "chunk_tokens": 16,
  "max_batch": 4,  # of two buckets one, which leaves a program out
  "average": 0.0,
  "after_rollout_share": 0.0,
}


@functools.cache
def trainer_of(kind, data, model, learning_rate, options):
  return spot_lib.make_trainer(
    tiny.CONFIG,
    tiny.DRAFTERS[kind],
    tiny.mesh(data, model),
    optimizer=optax.adam(learning_rate),
    longest=tiny.SIZES["max_length"],
    loss=draft_loss.Loss(steps=2, distance="cross_entropy"),
    options=options,
  )


def make_spot(kind="eagle2", data=2, model=1, learning_rate=1e-2, **options):
  options = spot_lib.Options(**(SIZES | options))
  trainer = trainer_of(kind, data, model, learning_rate, options)
  return spot_lib.Spot(trainer, options, tiny.draft_params(kind, seed=5))


@pytest.fixture(autouse=True)
def two_micro_batches(monkeypatch):
  """Training is worth it, and a chunk has time for so much, whatever the clock says."""
  monkeypatch.setattr(clock_lib.Clock, "micro_batches_within", lambda *_: 2)
  monkeypatch.setattr(investment.Investment, "_pays", lambda *_: True)


def make_engine(spot, data=2, model=1, selector=SWITCHES):
  mesh = tiny.mesh(data, model)
  with tiny.shared_programs(spot.trainer, selector):
    return rollout.make(tiny.CONFIG, mesh, OPTIONS, spot, selector)


def loss_at_hand(spot, params):
  """The loss on all rows of the buffer, a sum."""
  trainer, params = spot.trainer, jax.device_get(params)
  rows = jax.device_get(spot.rows())
  rows = rows.replace(table=rows.table.reshape(-1, *rows.table.shape[-2:]))
  rotations = trainer._rotations()
  loss = jax.jit(lambda row: trainer._loss(params, tiny.params(), rotations, *row)[0])
  filled = np.flatnonzero(rows.table.any((1, 2)))
  return sum(float(loss(rows.row(i))) for i in filled)


@functools.cache
def plain(seed=7):
  engine = rollout.make(tiny.CONFIG, tiny.mesh(1), OPTIONS)
  return engine(tiny.on(tiny.mesh(1)), requests(seed))


def assert_same(seed, drawn):
  made = requests(seed)
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain(seed), drawn)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1


def flat(params):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(params))])


@pytest.mark.parametrize(
  ("kind", "data", "model"),
  [
    tiny.slow("eagle2", 2, 1),
    tiny.slow("eagle3", 2, 1),
    ("eagle2_vocab", 2, 2),
    tiny.slow("eagle2_vocab", 4, 2),
  ],
)
def test_idle_slices_train_and_no_token_changes(kind, data, model):
  """The loss on the rows at hand falls over a few rollouts; they never left the devices."""
  spot = make_spot(kind, data, model)
  engine = make_engine(spot, data, model)
  # A copy: the state is donated.
  before = jax.tree.map(jnp.array, spot.state.params)
  for seed in range(7, 11):
    samples = engine(tiny.on(engine.mesh), requests(seed), train=True)
    assert_same(seed, samples)
    trained = [(c.batch, sum(c.trained)) for c in samples.chunks]
    assert any(n for _, n in trained) and samples.training
    assert not any(n for batch, n in trained if batch > SIZES["max_batch"])
  after = spot.state.params
  assert np.abs(flat(after) - flat(before)).max() > 1e-3
  assert loss_at_hand(spot, after) < loss_at_hand(spot, before)
  assert int(spot.state.skipped) == 0 and int(spot.state.step) > 4


def test_slices_train_in_blocks_of_logits(monkeypatch):
  """With a head that is trained: as without blocks."""
  options = spot_lib.Options(**SIZES)
  plainly = dataclasses.replace(
    trainer_of("eagle3_vocab", 2, 1, 1e-2, options), optimizer=optax.sgd(0.1)
  )

  def trained():
    trainer = dataclasses.replace(plainly)  # traced again
    spot = spot_lib.Spot(trainer, options, tiny.draft_params("eagle3_vocab", seed=5))
    for s in range(2):
      spot.buffer.add(s, np.arange(3), np.arange(20 + s, dtype=np.int32))
    states = trainer.make_train()(tiny.on(trainer.mesh), spot.training(2)).states
    return jax.device_get(states.params)

  whole, before = trained(), tiny.draft_params("eagle3_vocab", seed=5)
  assert all(np.abs(x - before["head"]).max() > 1e-4 for x in whole["head"])
  monkeypatch.setattr(draft_loss, "_LOGITS", 0)
  monkeypatch.setattr(draft_loss, "_POSITIONS", 10)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), trained(), whole)


def test_a_schedule_that_is_followed_trains_the_same_drafter(monkeypatch):
  """Bit for bit, whatever the clock would have said; a log of another run is noticed."""
  first, again = make_spot(), make_spot()
  logged = make_engine(first)(tiny.on(tiny.mesh(2)), requests(), train=True)
  assert ("micro_batches", 2) in logged.decisions
  monkeypatch.setattr(clock_lib.Clock, "micro_batches_within", lambda *_: 9)
  engine = make_engine(again)

  def follow(log, **options):
    return engine(
      tiny.on(engine.mesh),
      requests(),
      train=True,
      decide=clock_lib.Decisions(log, **options),
    )

  samples = follow(logged.decisions)
  assert samples.decisions == logged.decisions
  np.testing.assert_array_equal(flat(first.state.params), flat(again.state.params))
  for wrong in (logged.decisions[:5], [*logged.decisions, ("more", 0)]):
    with pytest.raises(ValueError, match="it is of a run with other settings"):
      follow(wrong)
  assert len(follow(logged.decisions[:5], strict=False).decisions) > 5


def test_a_gradient_that_is_not_finite_skips_its_update(monkeypatch):
  """It is counted; tokens, drafter and the updates before it stay."""
  spot = make_spot()
  engine = make_engine(spot)
  engine(tiny.on(engine.mesh), requests(), train=True)
  before = flat(spot.state.params)
  steps = int(spot.state.step)
  spot.take_features(spot.features.at[:].set(np.nan))
  monkeypatch.setattr(spot.buffer, "add", lambda *_: [])  # nothing but what is poisoned
  samples = engine(tiny.on(engine.mesh), requests(8), train=True)
  assert_same(8, samples)
  assert int(spot.state.skipped) > 0 and int(spot.state.step) == steps
  metrics = samples.training_metrics()
  assert metrics["drafter/skipped"] > 0 and metrics["drafter/updates"] == 0
  np.testing.assert_array_equal(flat(spot.state.params), before)


def equal_on_all_slices(spot):
  states = jax.tree.leaves(jax.device_get(spot.training(0).states))
  return all(np.array_equal(x[0], y) for x in states for y in x[1:])


def test_what_slices_learn_is_exchanged_after_so_many_updates_and_at_the_end():
  """Between exchanges nothing drafts with it; a checkpoint holds what all have."""
  spot = make_spot(
    updates_per_exchange=3,
    micro_batches_per_update=2,
    min_micro_batches=1,
    average=0.5,
    max_batch=16,
  )
  engine = make_engine(spot)
  exchanged, exchange = [], spot.exchange

  def watched(program):
    before, drafted = spot.updates.sum(), spot.params
    assert spot.apart and flat(spot.params) is not None
    exchange(program)
    exchanged.append(int(before))
    assert equal_on_all_slices(spot) and spot.params is not drafted

  spot.exchange, clock = watched, engine.clock
  told = clock.exchanged
  clock.exchanged = lambda seconds: told(min(seconds, 1e-9))  # whatever runs beside
  samples = engine(tiny.on(engine.mesh), requests(), train=True)
  assert_same(7, samples)
  trained = np.array([c.trained for c in samples.chunks], float)
  waiting, updates, since, expected = np.zeros(len(trained[0])), 0, 0, []
  for of_slices in trained:
    if since >= 3:
      expected.append(since)
      since, waiting = 0, np.full_like(waiting, waiting.mean())
    made, waiting = np.divmod(waiting + of_slices, 2)
    since, updates = since + made.sum(), updates + made.sum()
  assert exchanged == [*expected, since] and len(expected) > 0 and since > 0, trained
  assert samples.training_metrics()["drafter/updates"] == updates
  state = spot.state
  np.testing.assert_array_equal(flat(spot.params), flat(state.average))
  assert np.abs(flat(state.average) - flat(state.params)).max() > 1e-4
  assert clock.exchange_s > 0
  exchanged.clear()
  clock.exchange_s = 1e6  # then only the end of a rollout is worth one
  samples = engine(tiny.on(engine.mesh), requests(seed=8), train=True)
  assert exchanged == [samples.training_metrics()["drafter/updates"]]
  assert ("exchange", 0) in samples.decisions and clock.exchange_s < 1e6
  again = make_spot(average=0.5)
  again.restore(spot.arrays(), json.loads(json.dumps(spot.data())))
  for x, y in ((spot, again), (spot.training(0).states, again.training(0).states)):
    x, y = (s.params if isinstance(s, spot_lib.Spot) else s for s in (x, y))
    np.testing.assert_array_equal(flat(x), flat(y))


def filled_spot(sizes, **options):
  """Data of as many slices as there are lists of sizes; learning by plain steps."""
  spot = make_spot(data=len(sizes), **options)
  for s, of_slice in enumerate(sizes):
    for n in of_slice:
      spot.buffer.add(s, *sequence(n))
  spot.take_features(jax.random.normal(jax.random.key(0), spot.features.shape))
  return spot


def train_by(program, spot, most):
  """Trains by a program of `Trainer.make_train`; gives its account."""
  trained = program(tiny.on(spot.trainer.mesh), spot.training(most))
  account = spot.trainer.account(trained.states, processes.gather(trained.totals))
  spot.take(account)
  return account


def train(spot, most):
  train_by(spot.trainer.make_train(), spot, most)
  return spot


def test_a_drafters_first_updates_train_cross_entropy():
  """By the loss: cross-entropy is far above 1 here, total variation never is."""
  spot = filled_spot([[20]])
  loss = draft_loss.Loss(steps=1, distance="total_variation", cross_entropy_updates=1)
  spot.trainer = dataclasses.replace(spot.trainer, loss=loss)
  program = spot.trainer.make_train()
  losses = [train_by(program, spot, 1).metrics["loss_1"] for _ in range(2)]
  assert losses[0] > 2 and losses[1] < 1


def test_agreement_on_new_rows_is_that_before_they_were_trained_on():
  """Two rows are new, then a third; without one there is no agreement on new rows."""
  spot = filled_spot([[32, 32]])
  program = spot.trainer.make_train()
  first = train_by(program, spot, 1).metrics
  assert first["new_rows"] == 1
  mean = np.mean([first["agreement_1"], first["agreement_2"]])
  assert first["new_agreement"] == pytest.approx(mean, rel=1e-5)
  both = train_by(program, spot, 5).metrics  # one is new, then both in turn
  assert both["new_rows"] == 1 and both["new_agreement"] < both["agreement_1"]
  spot.buffer.add(0, *sequence(32))
  again = [train_by(program, spot, 1).metrics["new_rows"] for _ in range(2)]
  assert again == [1, 0]
  spot.buffer.begin_rollout()  # old rows do not become new ones
  assert train_by(program, spot, 3).metrics["new_rows"] == 0


def test_the_mean_of_slices_counts_their_updates():
  """By hand: of a slice alone nothing is lost; two slices' drafters are averaged."""
  alone = train(filled_spot([[20, 31], []]), 3)
  own = jax.device_get(alone.training(0).states)
  assert alone.updates.tolist() == [3, 0]
  alone.exchange(alone.trainer.make_exchange())
  np.testing.assert_array_equal(flat(alone.state), flat(jax.tree.map(lambda x: x[0], own)))
  both = train(filled_spot([[20], [31]]), 3)
  own = jax.device_get(both.training(0).states)
  both.exchange(both.trainer.make_exchange())
  mean = jax.tree.map(lambda x: x.mean(0), own.params)
  np.testing.assert_allclose(flat(both.params), flat(mean), atol=1e-6)
  assert int(both.state.step) == 3 and not both.updates.any()


def test_micro_batches_that_wait_are_shared_out():
  """What waits in one slice makes updates in all; none is lost, and nothing else moves."""
  spot = train(filled_spot([[20, 31], []], micro_batches_per_update=4), 3)
  own = jax.device_get(spot.training(0).states.waiting)
  spot.exchange(spot.trainer.make_exchange())
  shared = jax.device_get(spot.training(0).states.waiting)
  np.testing.assert_array_equal(own.micro_batches, [3, 0])
  np.testing.assert_array_equal(shared.micro_batches, [1.5, 1.5])
  halves = jax.tree.map(lambda x: np.broadcast_to(x.sum(0) / 2, x.shape), own)
  np.testing.assert_allclose(flat(shared), flat(halves), atol=1e-6)
  start = filled_spot([[20, 31], []])
  np.testing.assert_allclose(flat(spot.params), flat(start.params), rtol=1e-6)
  assert int(spot.state.step) == 0 and not spot.apart


def test_micro_batches_of_an_update_are_summed():
  """An update on two rows of a slice is that of one row which holds both.

  The first of them may be of an earlier program.
  """
  two = filled_spot([[20, 30]], micro_batches_per_update=2, learning_rate=0.1)
  before = flat(train(two, 1).training(0).states.params)
  np.testing.assert_array_equal(before, flat(two.params))
  assert two.apart and not two.updates.any()
  train(two, 2)
  assert float(two.training(0).states.waiting.micro_batches[0]) == 1
  two.exchange(two.trainer.make_exchange())
  one = train(filled_spot([[20, 30]], learning_rate=0.1), 2)
  assert int(two.state.step) == 1 and one.updates.tolist() == [2]

  def uses(spot):
    return sum(row.uses for row in spot.buffer.rows[0])

  assert uses(two) == 3 and uses(one) == 2
  first = filled_spot([[20, 30]])
  t, training = first.trainer, first.training(0)
  rows = training.rows

  def summed(params):
    def value(i):
      return t._loss(params, tiny.params(), t._rotations(), *rows.micro_batch(i))

    (a, told_a), (b, told_b) = value(0), value(1)
    return (a + b) / (told_a["tokens"] + told_b["tokens"])

  grads = jax.jit(jax.grad(summed))(first.params)
  updates, _ = optax.adam(0.1).update(grads, optax.adam(0.1).init(first.params))
  expected = optax.apply_updates(first.params, updates)
  sure = np.abs(flat(grads)) > 1e-6  # where it is nearly 0 Adam's first step is noise
  np.testing.assert_allclose(flat(two.params)[sure], flat(expected)[sure], atol=2e-3)


def test_the_average_of_the_weights():
  """By hand, with a decay of 0.9; an update that is left out does not count."""
  optimizer, one = optax.sgd(1.0), {"w": jnp.float32(1)}
  zero = jnp.int32(0)
  state = state_lib.State(one, optimizer.init(one), one, zero, zero)
  metrics = {"tokens": jnp.float32(2)}
  for gradient in (2.0, np.nan):
    grads = {"w": jnp.float32(gradient)}
    state, _ = state_lib.update(optimizer, state, zero, metrics, grads, decay=0.9)
    assert float(state.params["w"]) == 0
    assert float(state.drafting["w"]) == pytest.approx(0.9)
  assert (int(state.step), int(state.skipped)) == (1, 1)


def test_what_is_not_finite_does_not_wait_for_an_update():
  """The other two make one: the mean of their gradients, 2, is taken from 1."""
  optimizer, one = optax.sgd(1.0), {"w": jnp.float32(1)}
  zero, none = jnp.int32(0), jnp.float32(0)

  def sums(x, n):
    return state_lib.Sums(none, {"tokens": n}, {"w": x}, micro_batches=n)

  waiting = sums(none, none)
  state = state_lib.State(one, optimizer.init(one), None, zero, zero, waiting)
  told = []
  for gradient in (3.0, np.nan, 1.0):
    micro_batch = sums(jnp.float32(gradient), jnp.float32(1))
    state, found = state_lib.learn(optimizer, state, micro_batch, per_update=2)
    told.append((float(found["skipped"]), float(found["updated"])))
  assert told == [(0, 0), (1, 0), (0, 1)]
  assert (int(state.step), int(state.skipped)) == (1, 1)
  assert float(state.params["w"]) == -1


@pytest.mark.parametrize(
  ("remaining", "steps", "midway", "quota"),
  [
    ([0, 0], 0, 0, 8),  # idle from the start
    ([0, 3], 0, 0, 0),  # has a request left
    ([0, 0], 4, 8, 4),  # has run dry after 4 of 10 steps
    ([0, 0], 4, 0, 0),  # and was the only one to decode
    ([0, 0], 12, 8, 0),  # later than was expected
  ],
)
def test_what_a_slice_may_train(remaining, steps, midway, quota):
  """Of 8 micro-batches in a chunk of 10 steps, by hand."""
  rows = rows_lib.Rows(None, None, np.array([2, 0, 1], np.int32))
  training = trainer_lib.Training(None, rows, np.int32(8), np.int32(midway), np.int32(10))
  emitted = slots_lib.Emitted(
    *[None] * 4, remaining=np.array(remaining), steps=np.array([steps])
  )
  assert int(fused.quota(training, emitted)) == quota


@pytest.mark.slow
def test_one_slice_of_two_devices_trains_the_same_drafter():
  """XLA refuses sums over a single slice of what is split within it."""

  def make(model):
    return filled_spot([[20]], model=model, learning_rate=1e-3)

  one, two = (train(make(model), 2) for model in (1, 2))
  for spot in (one, two):
    spot.exchange(spot.trainer.make_exchange())
    assert int(spot.state.step) == 2
  np.testing.assert_allclose(flat(two.params), flat(one.params), atol=5e-5)


def test_one_slice_trains_when_the_rollout_is_over():
  """There is no idle slice that could; a logged schedule says here for how long.

  And while rewards are computed, for as long as they are.
  """
  spot = make_spot(data=1, after_rollout_share=0.0)
  engine = make_engine(spot, data=1)
  args = (tiny.on(engine.mesh), requests())
  decisions = engine(*args, train=True).decisions
  assert decisions[-1] == ("more", 0) and int(spot.state.step) == 0
  more = [*decisions[:-1], ("more", 1), ("more", 1), ("more", 0)]
  samples = engine(*args, train=True, decide=clock_lib.Decisions(more))
  assert_same(7, samples)
  assert int(spot.state.step) == len(samples.training) == 2
  assert samples.harvested_s == 0 and samples.training_s > 0
  drawn, answers = [], iter([True, True, False])

  def score(samples):
    drawn.append(samples.length.sum())
    return lambda: next(answers)

  samples = engine(*args, train=True, score=score)
  assert drawn == [samples.length.sum()]
  assert int(spot.state.step) == 4 and len(samples.training) == 2
  more = [*decisions[:-1], ("more", 3), ("more", 0)]  # one program, three updates
  samples = engine(*args, train=True, decide=clock_lib.Decisions(more))
  assert int(spot.state.step) == 7 and len(samples.training) == 1


def test_a_rollout_may_draft_with_another_drafter_than_the_one_in_training():
  """As one that is repeated does; nothing is trained, and programs are shared."""
  spot = make_spot()
  engine = make_engine(spot)
  samples = engine(tiny.on(engine.mesh), requests(), train=True)
  with tiny.shared_programs(spot.trainer, SWITCHES):
    other = dataclasses.replace(tiny.frozen("eagle2"), spot=spot)
    args = tiny.CONFIG, engine.mesh, OPTIONS, other, SWITCHES
    frozen = rollout.make(*args, pool=engine.pool)
  programs, step = len(engine.pool), int(spot.state.step)
  assert_same(7, frozen(tiny.on(engine.mesh), requests()))
  assert_same(7, samples)
  assert len(engine.pool) == programs and int(spot.state.step) == step
  with pytest.raises(ValueError, match="no drafter that trains"):
    frozen(tiny.on(engine.mesh), requests(), train=True)


@pytest.mark.slow
def test_thirty_steps_of_training_are_those_of_a_plain_run():
  """Tokens, rewards and the policy, step by step, while the drafter learns beside.

  A near-tie, which would part the runs, is counted; both then go on from the plain one.
  """
  mesh, spot = tiny.mesh(2), make_spot()
  engines = rollout.make(tiny.CONFIG, mesh, OPTIONS), make_engine(spot)
  algorithm = grpo.make()
  learner = learner_lib.make(
    *(tiny.CONFIG, algorithm, optax.adam(1e-3), mesh), buckets=((8, 128),)
  )

  def copy():
    return jax.tree.map(jnp.copy, tiny.params())

  states = [learner.init(copy()) for _ in engines]
  ties, rewards = 0, []
  for step in range(30):
    made = requests(first_request=24 * step)
    policies = [learner.to_rollout(state.params) for state in states]
    drawn = [
      engines[0](policies[0], made),
      engines[1](policies[1], made, train=True),
    ]
    result = compare.compare(tiny.CONFIG, jax.device_get(policies[0]), made, *drawn)
    assert result.differing_tokens == 0, result.where
    ties += result.near_ties
    if result.near_ties:
      drawn[1] = drawn[0]
    for i, samples in enumerate(drawn):
      reward = [np.mean(samples.response(b) < 20) for b in range(len(made))]
      batch = batch_lib.Batch(
        prompts=[made.prompt(b) for b in range(len(made))],
        responses=[samples.response(b) for b in range(len(made))],
        temperature=made.temperature,
        scored=algorithm_lib.Responses(
          reward=np.reshape(reward, (8, 3)), length=samples.length.reshape(8, 3)
        ),
      )
      states[i], _ = learner.train(states[i], batch)
    rewards.append(np.mean(reward))
    assert hash_of(states[0]) == hash_of(states[1])
  assert ties <= 2 and int(spot.state.step) > 30
  assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.05  # the policy did move


def hash_of(state) -> str:
  digest = hashlib.sha256()
  for x in jax.tree.leaves(jax.device_get(state)):
    digest.update(np.ascontiguousarray(x))
  return digest.hexdigest()


def sequence(size):
  return np.zeros(1, np.int32), np.arange(size, dtype=np.int32)


def test_the_buffer_packs_and_makes_room_by_age_and_length():
  """Two rows of ten places: sequences of n+1 tokens take n."""
  buffer = buffer_lib.Buffer(slices=1, rows=2, length=10, carried=1, context=2)
  assert buffer.add(0, *sequence(4)) == [(0, 0, 0, 4)]
  assert buffer.add(0, *sequence(5)) == [(0, 4, 0, 5)]
  assert buffer.add(0, *sequence(3)) == [(1, 0, 0, 3)]
  targets, positions, segments, _ = buffer.table[0, 0]
  assert segments.tolist() == [1] * 4 + [2] * 5 + [0]
  assert positions.tolist() == [*range(4), *range(5), 0]
  assert targets[4:9].tolist() == [0, 1, 2, 3, 4]
  assert buffer.add(0, *sequence(10)) == [(1, 0, 0, 10)]  # in place of the shorter one
  assert buffer.add(0, *sequence(2)) == []
  assert buffer.order()[0].tolist() == [2, 2, 1, 0]
  buffer.begin_rollout()  # keeps the row of the longest
  assert buffer.filled(0) == [1]
  assert buffer.add(0, *sequence(9)) == [(0, 0, 0, 9)]
  assert buffer.add(0, *sequence(2)) == [(1, 0, 0, 2)]  # the older one goes, longer or not


def test_the_newest_rows_outlive_a_rollout_and_the_least_used_are_next():
  """Long sequences of long ago do not keep out what is new."""
  buffer = buffer_lib.Buffer(slices=1, rows=6, length=10, carried=2, context=2)
  rows = [buffer.add(0, *sequence(10))[0].row for _ in range(3)]
  buffer.trained([4])
  assert [buffer.rows[0][row].uses for row in rows] == [2, 1, 1]
  assert buffer.filled(0) == [1, 2, 0]
  for _ in range(2):  # rollouts of shorter ones
    buffer.begin_rollout()
    old, new = set(buffer.filled(0)), [buffer.add(0, *sequence(n)) for n in (8, 7)]
    new = [piece.row for (piece,) in new]
    assert len(old) == 2 and buffer.filled(0)[:2] == new
    buffer.trained([1])
    assert buffer.filled(0)[-1] == new[0]
  assert [buffer.rows[0][row].longest for row in sorted(old)] == [8, 7]


def test_long_sequences_are_cut_and_every_token_is_trained_on_once():
  buffer = buffer_lib.Buffer(slices=1, rows=4, length=10, carried=1, context=3)
  prompt, response = np.arange(3, dtype=np.int32), np.arange(3, 25, dtype=np.int32)
  pieces = buffer.add(0, prompt, response)
  assert pieces == [(0, 0, 0, 10), (1, 0, 7, 10), (2, 0, 14, 10)]
  targets, positions, _, mask = np.moveaxis(buffer.table[0], 1, 0)
  assert np.sort(targets[mask > 0]).tolist() == response.tolist()
  assert positions[1].tolist() == [*range(7, 17)]
  # A piece only makes room for those of longer sequences, never for its own.
  assert len(buffer.add(0, prompt, np.arange(40, dtype=np.int32))) == 4


def test_features_are_stored_where_their_pieces_are():
  spot = make_spot(data=1, rows=3, carried_rows=1)
  sequences = [sequence(n)[1] for n in (70, 20)]
  pages = features_lib.Pages(1, features_lib.Sizes(pages=8, most=3, page=32))
  pages.assign(np.array([[7, 8]]), np.array([0] * 7 + [70, 20]))
  shape = (9, 32, spot.trainer.layout.size)
  features = np.random.default_rng(0).normal(size=shape).astype(np.float32)

  def add(x):
    return spot.buffer.add(0, x[:1], x[1:])

  pieces = {i: add(x) for i, x in zip((7, 8), sequences, strict=True)}
  assert [len(p) for p in pieces.values()] == [3, 1]
  where = np.array([(*p, *pages[i]) for i, of in pieces.items() for p in of], np.int32)
  store = rows_lib.make_store(spot.trainer.mesh, shape[2])
  spot.take_features(store(spot.features, features, where, np.full(1, 4, np.int32)))
  for i, of_request in pieces.items():
    for row, offset, start, size in of_request:
      page, slot = (x[start : start + size] for x in pages.where(i, {7: 70, 8: 20}[i]))
      stored = spot.features[row, offset : offset + size]
      np.testing.assert_array_equal(stored, features[page, slot])


def test_a_buffer_goes_on_from_its_saved_state():
  buffer, again = (buffer_lib.Buffer(1, 2, 10, carried=1, context=2) for _ in range(2))
  buffer.add(0, *sequence(4))
  buffer.trained([3])
  again.set_state(json.loads(json.dumps(buffer.state())), buffer.table)
  assert again.state() == buffer.state()
  assert again.add(0, *sequence(5)) == buffer.add(0, *sequence(5)) == [(0, 4, 0, 5)]


@pytest.mark.parametrize("slices", [1, 3])
def test_a_buffer_of_other_slices_is_dealt_out(slices):
  """The longest sequences first; nothing is there twice."""

  def make(n):
    return buffer_lib.Buffer(n, 3, 40, carried=1, context=2)

  buffer, again = make(2), make(slices)
  for s, lengths in enumerate([(38, 20, 9), (30, 25)]):
    for length in lengths:
      buffer.add(s, *sequence(length))
  source = again.set_state(json.loads(json.dumps(buffer.state())), buffer.table)
  before, after = buffer.table.reshape(-1, 4, 40), again.table.reshape(-1, 4, 40)
  kept = source.reshape(-1)
  np.testing.assert_array_equal(after[kept >= 0], before[kept[kept >= 0]])
  assert not after[kept < 0].any()
  assert len(set(kept[kept >= 0])) == np.count_nonzero(kept >= 0)
  longest = sorted(row.longest for row in sum(buffer.rows, []) if row.sizes)
  dealt = [row.longest for row in sum(again.rows, []) if row.sizes]
  assert sorted(dealt) == longest[-3 * slices :]
  again.add(0, *sequence(5))
