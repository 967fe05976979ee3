"""Runs that are the same in bfloat16, whatever the clock says."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import sizes
from tests import test_sizes
from tests import tiny
from tlt_jax import programs
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import nominal
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib

BF16 = dataclasses.replace(tiny.CONFIG, dtype="bfloat16", num_layers=1)
DRAFTER = drafter_lib.of_target(BF16, "eagle2")
SIZES = dict(tiny.SIZES, slots=4, chunk=16, buckets=((4, 48), (2, 96)))


def uneven_clock(seed: int):
  """A clock whose seconds are now short, now long."""
  rng, passed = np.random.default_rng(seed), [0.0]

  def now():
    passed[0] += rng.exponential(rng.choice((1e-4, 1e-2, 1.0)))
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


@functools.cache
def params():
  made = {k: x for k, x in tiny.params().items() if k != "layer_1"}
  return jax.tree.map(lambda x: x.astype(jnp.bfloat16), made)


def run(monkeypatch, seed: int, deterministic: bool, replay=None):
  """Two rollouts in which a drafter trains: samples of each, the drafter, and the selector.

  The first may be done as the log of another run has it, as by a run that resumes.
  """
  now, mesh = uneven_clock(seed), tiny.mesh(2)
  monkeypatch.setattr(time, "perf_counter", now)
  options = spot_lib.Options(
    row_tokens=32, context_tokens=4, rows=4, carried_rows=2, max_batch=4, chunk_tokens=16
  )
  first = drafter_lib.init_params(DRAFTER, jax.random.key(1))
  spot = spot_lib.Spot(trainer(options), options, first)
  with tiny.shared_programs(BF16):
    engine = rollout.make(
      BF16,
      mesh,
      rollout.Options(**SIZES, deterministic=deterministic),
      DRAFTER,
      levels.make("up to 4 live: off or 2_1_3", "predictive", has_drafter=True),
      spot=spot,
    )
  engine.parts.clock.now = now
  limits = np.where(np.arange(16) // 4 % 2, np.linspace(20, 80, 16).astype(int), 6)
  drawn = []
  for i in range(2):
    requests = tiny.requests(
      4, 4, max_tokens=limits, stop_tokens=[], seed=7, first_request=100 * i
    )
    decide = clock_lib.Decisions(replay if i == 0 else None)
    drawn.append(engine(params(), requests, train=True, decide=decide))
  monkeypatch.undo()
  return drawn, jax.device_get(spot.state.params), engine.selector.state()


def decided(drawn):
  return [samples.decisions for samples in drawn]


def test_bfloat16_runs_are_the_same_whatever_the_clock_says(monkeypatch):
  """Tokens, log-probabilities, chunks and the drafter that trained meanwhile, bit for bit.

  So it is where one of them replays its first rollout: it knows as much of strategies
  then. Without the option, the clock decides otherwise.
  """
  one, drafter, knows = run(monkeypatch, seed=0, deterministic=True)
  replay = one[0].decisions
  two, other, knows_too = run(monkeypatch, seed=1, deterministic=True, replay=replay)
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.logp, b.logp)
    shape = lambda c: (c.batch, c.length, c.strategy, c.live, c.steps, c.trained)
    assert list(map(shape, a.chunks)) == list(map(shape, b.chunks))
  assert decided(one) == decided(two)
  jax.tree.map(np.testing.assert_array_equal, drafter, other)
  assert knows == knows_too
  chunks = [c for samples in one for c in samples.chunks]
  assert len({(c.batch, c.length) for c in chunks}) > 1  # else this says nothing
  assert {c.strategy for c in chunks} == {"off", "2_1_3"}
  assert sum(sum(c.trained) for c in chunks) > 0
  by_clock, *_ = run(monkeypatch, seed=0, deterministic=False)
  assert decided(by_clock) != decided(one)


def test_nominal_seconds_follow_the_shape():
  """Of an accelerator drafts are nearly free, of a CPU they are not."""
  bucket, chain = rollout.options.Bucket, strategy.Strategy(3, 1, 4)
  layer = dataclasses.replace(tiny.SMOLLM2, num_layers=1)
  for platform, most in (("cpu", 3.5), ("gpu", 1.6)):
    machine = nominal.Machine.like(platform, devices=1)
    clock = nominal.Clock(machine, tiny.SMOLLM2, layer, trained_tokens=128)
    plain = clock.step_s(bucket(4, 1024), None)
    assert clock.step_s(bucket(4, 2048), None) > plain < clock.step_s(bucket(8, 1024), None)
    assert plain < clock.step_s(bucket(4, 1024), chain) < most * plain
    assert 0 < clock.micro_batch_s
    assert clock.chunk_took(bucket(4, 1024), None, 3, seconds=1e6) == 3 * plain


def test_what_would_follow_from_the_machine_is_refused_or_no_limit():
  """Slots that nobody gave; the time that programs take to compile."""
  budget = programs.Budget(programs=7, compile_s=60.0)
  found = rollout.Options(**SIZES, deterministic=True, budget=budget).budget
  assert (found.programs, found.compile_s) == (7, None)
  assert rollout.Options(**SIZES, budget=budget).budget.compile_s == 60.0
  asked = sizes.Asked(longest=150, prompts=8, responses=4)
  with pytest.raises(ValueError, match="deterministic: rollout.slots .* give a number"):
    test_sizes.fit(asked, deterministic=True)
  assert test_sizes.fit(asked, deterministic=True, slots=4).slots == 4
