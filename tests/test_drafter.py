"""Drafters: what training unrolls is what drafting does, and training trains."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax import packing
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import target
from tlt_jax.rl import draft_learner
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode import draft_loss
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode import strategy as strategy_lib

CONFIGS = tiny.DRAFTERS
params = functools.partial(tiny.draft_params, seed=1)


def apply(kind, *args, method):
  module = drafter_lib.Drafter(CONFIGS[kind])
  method = getattr(drafter_lib.Drafter, method)
  return module.apply({"params": params(kind)}, *args, method=method)


@functools.cache
def target_states(kind, T=12):
  """Tokens i32[1 T+1] of a random sequence, and the states that a drafter reads."""
  tokens = np.random.default_rng(0).integers(0, 64, (1, T + 1)).astype(np.int32)
  positions = jnp.arange(T)[None]
  features, tapped, _ = target.Target(tiny.CONFIG).apply(
    {"params": tiny.params()},
    *(tokens[:, :T], positions, CONFIGS[kind].taps),
    method=target.Target.with_taps,
  )
  return tokens, positions, features if tapped is None else tapped


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_unrolled_steps_are_those_of_drafting(kind):
  """Step k at pair t equals k steps over a cache that holds the true pairs to t-k."""
  tokens, positions, states = target_states(kind)
  T, steps, frozen = states.shape[1], 4, tiny.params()
  mask = jnp.tril(jnp.ones((1, T, T), bool))
  following = tokens[:, 1:]
  unrolled = apply(
    kind, frozen, states, following, positions, mask, steps, method="unroll"
  )
  h = apply(kind, states, method="features")
  k, v = apply(kind, frozen, h, following, positions, method="keys_values")
  for start in (3, 7):  # the last true pair
    cache = drafter_lib.init_cache(CONFIGS[kind], 1, T)
    true = np.where(np.arange(T) <= start, np.arange(T), T)[None]
    cache = cache_lib.write(cache, k, v, true)
    at = jnp.full((1, 1), start)
    args = (frozen, h[:, start][:, None], following[:, start][:, None], at)
    out = apply(kind, *args, cache_lib.visible(at, T), cache, method="over_cache")
    np.testing.assert_allclose(out[0, 0], unrolled[0][0, start], atol=1e-5)
    for step in range(1, steps):
      at = at + 1
      token = following[:, start + step][:, None]
      seen = cache_lib.visible(at, T)
      args = (frozen, out, token, at, seen, cache, at)
      out, cache = apply(kind, *args, method="__call__")
      np.testing.assert_allclose(out[0, 0], unrolled[step][0, start + step], atol=1e-5)


def sequences(count=48, seed=0):
  """Prompts and responses that the target itself draws, at random lengths."""
  made = tiny.requests(count // 4, 4, max_tokens=24, stop_tokens=[3], seed=seed)
  options = rollout.Options(max_length=40, max_prompt=12, slots=count, prompt_rows=16)
  samples = rollout.make(tiny.CONFIG, tiny.mesh(1), options)(tiny.params(), made)
  prompts = [made.prompts[p] for p in made.prompt_idx]
  return prompts, [samples.response(i) for i in range(count)]


def learner(kind, data=1, **loss):
  return draft_learner.make(
    tiny.CONFIG,
    CONFIGS[kind],
    draft_loss.Loss(**{"steps": 3, **loss}),
    optimizer.make("adamw", 1e-2, warmup=2),
    tiny.mesh(data),
    [(8, 48)],
  )


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("distance", draft_loss.DISTANCES)
def test_training_raises_agreement_and_acceptance(kind, distance):
  """Each drafting step agrees more with the target; a rollout accepts more drafts."""
  made, batch = learner(kind, distance=distance), sequences()
  state, history = made.init(params(kind)), []
  for _ in range(40):
    state, metrics = made.train(state, tiny.params(), *batch)
    history.append(metrics)
  for k in (1, 2, 3):
    name = f"drafter/agreement_{k}"
    assert history[-1][name] > history[0][name] + 0.05, name
  always = strategy_lib.ByLiveBatch(((99, strategy_lib.Strategy(3, 1, 4)),))
  options = rollout.Options(max_length=40, max_prompt=12, slots=48, chunk=16)
  run = rollout.make(tiny.CONFIG, tiny.mesh(1), options, CONFIGS[kind], always)
  requests = tiny.requests(8, 4, max_tokens=24, stop_tokens=[3], seed=5)
  lengths = [
    run(tiny.params(), requests, p).mean_acceptance_length
    for p in (params(kind), state.params)
  ]
  assert lengths[1] > lengths[0] + 0.1


def test_packing_and_slices_do_not_change_the_update():
  """Packed rows give the gradient of single sequences; two slices that of one."""
  prompts, responses = sequences(16)
  results = []
  for data, buckets in ((1, [(16, 40)]), (1, [(4, 96)]), (2, [(4, 96)])):
    made = dataclasses.replace(
      learner("eagle2", data), buckets=tuple(packing.Bucket(*b) for b in buckets)
    )
    state, metrics = made.train(
      made.init(params("eagle2")), tiny.on(tiny.mesh(data)), prompts, responses
    )
    results.append((metrics, jax.device_get(state.params)))
  for metrics, after in results[1:]:
    for name, value in results[0][0].items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), after, results[0][1]
    )


def test_the_target_gets_no_gradient():
  """Embedding and head are frozen: the loss does not depend on them for training."""
  prompts, responses = sequences(8)
  packed = packing.pack(prompts, responses, [packing.Bucket(8, 48)])[0].micro_batch(0)
  shape = (8, 48, tiny.CONFIG.width)
  features = jax.random.normal(jax.random.key(0), shape)

  def loss(frozen):
    args = (params("eagle2"), frozen, packed, features, features)
    return draft_loss.loss(draft_loss.Loss(), CONFIGS["eagle2"], tiny.CONFIG, *args)[0]

  for x in jax.tree.leaves(jax.grad(loss)(tiny.params())):
    assert not x.any()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_drafter_loads_bit_for_bit(kind, tmp_path):
  drafter_files.save(tmp_path / "d", CONFIGS[kind], params(kind))
  config, loaded = drafter_files.load(tmp_path / "d", tiny.CONFIG, tiny.mesh(1, 2))
  assert config == CONFIGS[kind]
  jax.tree.map(np.testing.assert_array_equal, loaded, params(kind))


def test_a_drafter_that_cannot_be_used_is_named(tmp_path):
  with pytest.raises(convert.CheckpointError, match="no drafter there"):
    drafter_files.load(tmp_path / "none", tiny.CONFIG)
  drafter_files.save(tmp_path / "d", CONFIGS["eagle2"], params("eagle2"))
  wide = dataclasses.replace(tiny.CONFIG, width=64)
  with pytest.raises(convert.CheckpointError, match="for a target of width 32, not 64"):
    drafter_files.load(tmp_path / "d", wide)
  file = tmp_path / "d" / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(convert.CheckpointError, match="cannot be read"):
    drafter_files.load(tmp_path / "d", tiny.CONFIG)


def test_settings_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match="eagle2, eagle3"):
    drafter_lib.of_target(tiny.CONFIG, "eagle4")
  with pytest.raises(ValueError, match="cross_entropy, total_variation"):
    draft_loss.Loss(distance="l2")
