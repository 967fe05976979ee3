"""Kinds of drafters: a new one is one new file, and all else takes it as it is."""

import pathlib

import jax
from my_package import mtp
import numpy as np
import optax
import pytest

from tests import test_drafter
from tests import tiny
from tlt_jax import packing
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import loss as draft_loss

MTP = test_drafter.CONFIGS["mtp"]


def updated(params, count: int):
  """The losses of `count` updates on random sequences, and the parameters after them."""
  rng = np.random.default_rng(0)
  prompts, responses = (rng.integers(0, 64, (8, n)).astype(np.int32) for n in (2, 14))
  (packed,) = packing.pack(prompts, responses, [packing.Bucket(8, 16)])
  batch = packed.micro_batch(0)
  features, tapped, _ = target.Target(tiny.CONFIG).apply(
    {"params": tiny.params()},
    batch.tokens,
    batch.positions,
    MTP.taps,
    packing.segment_mask(batch.segments, batch.positions),
    method=target.Target.with_taps,
  )
  kept = features_lib.Kept(drafter_input=tapped, final=features)
  options, optimizer = draft_loss.Loss(steps=2), optax.adam(1e-2)

  def loss(params):
    return draft_loss.loss(
      options, MTP, tiny.CONFIG, params, tiny.params(), batch, kept
    )

  @jax.jit
  def update(params, opt_state):
    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    step, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, step), opt_state, value

  losses, opt_state = [], optimizer.init(params)
  for _ in range(count):
    params, opt_state, value = update(params, opt_state)
    losses.append(float(value))
  return losses, params


def test_a_new_kind_is_one_file_that_trains_and_drafts():
  """A kind of somebody else's, found by its dotted name; no token depends on it."""
  assert len(pathlib.Path(mtp.__file__).read_text().splitlines()) <= 60
  losses, params = updated(drafter_lib.init_params(MTP, jax.random.key(1)), 8)
  assert losses[-1] < 0.9 * losses[0]

  mesh, made = tiny.mesh(1), tiny.requests(4, 4, max_tokens=24)
  options = rollout.Options(max_length=40, max_prompt=12, slots=16, chunk=8)
  plain = rollout.make(tiny.CONFIG, mesh, options)(tiny.on(mesh), made)
  strategy = strategy_lib.Strategy(3, 2, 7)
  run = test_drafter.speculative(MTP, params, mesh, options, strategy)
  drawn = run(tiny.on(mesh), made)
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain, drawn)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1
  assert drawn.mean_acceptance_length > 1


def test_names_of_kinds_are_told_from_folders():
  for name in ("eagle2", "eagle3", "my_package.mtp"):
    assert drafters.is_kind(name)
  for name in ("experiments/drafters/countdown", "eagle4", "runs.d", "../eagle2", ""):
    assert not drafters.is_kind(name)


@pytest.mark.parametrize(
  ("kind", "fields", "message"),
  [
    ("eagle4", {}, "no drafter kind 'eagle4': .* has eagle2, eagle3, and"),
    ("tests.tiny", {}, "no drafter kind 'tests.tiny': .* has no 'KIND'"),
    ("eagle2", dict(taps=(1,)), r"eagle2 drafters have no taps; leave out \(1,\)"),
    ("eagle3", dict(taps=()), "eagle3 drafters need taps"),
  ],
)
def test_what_a_kind_does_not_have_is_refused(kind, fields, message):
  with pytest.raises(ValueError, match=message):
    drafter_lib.of_target(tiny.CONFIG, kind, **fields)
