"""A run that replays another's decisions is the same in bfloat16, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests import tiny
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib

BF16 = dataclasses.replace(tiny.CONFIG, dtype="bfloat16", num_layers=1)
DRAFTER = drafter_lib.of_target(BF16, "eagle2")
SIZES = dict(tiny.SIZES, slots=4, chunk=16, buckets=(4, 2))


def uneven_clock(seed: int):
  """A clock whose seconds are now short, now long."""
  rng, passed = np.random.default_rng(seed), [0.0]

  def now():
    passed[0] += rng.uniform(0.5, 2) * rng.choice((0.01, 0.03, 0.1))
    return passed[0]

  return now


@functools.cache
def trainer(options):
  return spot_lib.make_trainer(
    BF16,
    DRAFTER,
    tiny.mesh(2),
    optimizer=optax.adam(1e-2),
    longest=SIZES["max_length"],
    loss=draft_loss.Loss(steps=1),
    options=options,
  )


def run(monkeypatch, seed: int, replay=(None, None)):
  """Two rollouts in which a drafter trains: samples of each, and the drafter."""
  now = uneven_clock(seed)
  monkeypatch.setattr("time.perf_counter", now)
  options = spot_lib.Options(
    row_tokens=32, context_tokens=4, rows=4, carried_rows=2, max_batch=4, chunk_tokens=16
  )
  first = drafter_lib.init_params(DRAFTER, jax.random.key(1))
  spot = spot_lib.Spot(trainer(options), options, first)
  selector = selector_lib.make("up to 4 live: off or 2_1_3", "predictive", has_drafter=True)
  with tiny.shared_programs(BF16):
    engine = rollout.make(
      BF16, tiny.mesh(2), rollout.Options(**SIZES), spot, selector
    )
  engine.clock.now = now
  params = {k: x for k, x in tiny.params().items() if k != "layer_1"}
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  limits = np.where(np.arange(16) // 4 % 2, np.linspace(20, 40, 16).astype(int), 6)
  limits[-2:] = 80  # a tail, in which the smaller bucket pays by any clock
  drawn = []
  for i, log in enumerate(replay):
    requests = tiny.requests(
      4, 4, max_tokens=limits, stop_tokens=[], seed=7, first_request=100 * i
    )
    decide = clock_lib.Decisions(log)
    drawn.append(engine(params, requests, train=True, decide=decide))
  monkeypatch.undo()
  return drawn, jax.device_get(spot.state.params)


def test_a_replayed_run_is_the_same_bit_for_bit(monkeypatch):
  """Tokens, log-probabilities, chunks, and the drafter that trained meanwhile."""
  one, drafter = run(monkeypatch, seed=0)
  logs = [samples.decisions for samples in one]
  two, other = run(monkeypatch, seed=1, replay=logs)
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logp, b.logp)

    def shape(c):
      return (c.batch, c.strategy, c.live, c.steps, c.trained)

    assert list(map(shape, a.chunks)) == list(map(shape, b.chunks))
  jax.tree.map(np.testing.assert_array_equal, drafter, other)
  chunks = [c for samples in one for c in samples.chunks]
  assert len({c.batch for c in chunks}) > 1  # else this says nothing
  assert {c.strategy for c in chunks} == {"off", "2_1_3"}
  assert sum(sum(c.trained) for c in chunks) > 0
  by_clock, _ = run(monkeypatch, seed=1)
  assert [samples.decisions for samples in by_clock] != logs
