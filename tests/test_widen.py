"""The larger policy of benchmarks is the smaller one, and so is its drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments import widen
from tests import tiny
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models import target

TIMES = 3
TOKENS = jnp.arange(12)[None] * 5
POSITIONS = jnp.arange(12)[None]


def run_target(config, params):
  features, _ = target.Target(config).apply({"params": params}, TOKENS, POSITIONS)
  logits = target.Target(config).apply(
    {"params": params}, features, method=target.Target.logits
  )
  return features, logits


def run_drafter(config, params, target_params, features):
  module = drafter_lib.Drafter(config)
  mask = jnp.tril(jnp.ones((1, 12, 12), bool))
  by = layers.rotation(config.layer, POSITIONS)
  h, _ = module.apply({"params": params}, target_params, features, TOKENS, by, mask)
  logits = module.apply(
    {"params": params}, target_params, h, method=drafter_lib.Drafter.logits
  )
  return h, logits


def test_larger_models_compute_the_same():
  small, params = tiny.CONFIG, tiny.params()
  model = widen.larger(small, small.num_layers + 1, TIMES)
  wide = widen.embed(params, target.init_params(model, jax.random.key(1)), TIMES)
  features, logits = run_target(small, params)
  wide_features, wide_logits = run_target(model, wide)
  assert wide_features.shape[-1] == TIMES * small.width
  np.testing.assert_allclose(wide_features[..., : small.width], features, atol=1e-4)
  np.testing.assert_array_equal(wide_features[..., small.width :], 0)
  np.testing.assert_allclose(wide_logits, logits, atol=1e-3)

  drafter, draft_params = tiny.DRAFTERS["eagle2"], tiny.draft_params("eagle2", 1)
  one = dataclasses.replace(drafter, layer=widen.padded(drafter.layer, TIMES))
  random = drafter_lib.init_params(one, jax.random.key(2))
  wide_params = widen.embed(draft_params, random, TIMES, parts=2)
  assert wide_params["mlp"]["up_proj"].shape[-1] == drafter.layer.mlp_width
  h, logits = run_drafter(drafter, draft_params, params, features)
  wide_h, wide_logits = run_drafter(one, wide_params, wide, wide_features)
  np.testing.assert_allclose(wide_h[..., : small.width], h, atol=1e-4)
  np.testing.assert_allclose(wide_logits, logits, atol=1e-3)
