"""The larger policy of benchmarks computes what the smaller one does; so its drafter."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import convert
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import layers
from tlt_jax.models import target

ROOT = pathlib.Path(__file__).parents[1]
POLICY, DRAFTER = "experiments/policies/countdown", "experiments/drafters/countdown"
TIMES, T = 2, 12


def run(policy, drafter):
  """Features and logits of the policy, and of the drafter that reads these features."""
  config, params = convert.load_hf(policy)
  tokens, at = jnp.arange(T)[None], jnp.arange(T)[None]

  @jax.jit
  def run_target(params):
    model = target.Target(config)
    features, _ = model.apply({"params": params}, tokens, at)
    apply = dict(method=target.Target.logits)
    return features, model.apply({"params": params}, features, **apply)

  features, logits = run_target(params)
  drafter_config, draft_params = drafter_files.load(drafter, config)

  @jax.jit
  def run_drafter(params, draft_params, features):
    drafter = drafter_lib.Drafter(drafter_config)
    by, mask = layers.rotation(config, at), jnp.tril(jnp.ones((1, T, T), bool))
    of = {"params": draft_params}
    h, _ = drafter.apply(of, params, features, tokens, by, mask)
    head = drafter.apply(of, params, method=drafter_lib.Drafter.output_head)
    return h, drafter.apply(of, head, h, method=drafter_lib.Drafter.logits)

  return features, logits, *run_drafter(params, draft_params, features)


@pytest.mark.slow
def test_larger_models_compute_the_same(tmp_path):
  widen = [sys.executable, "-m", "experiments.bench.widen", "--layers=9"]
  widen.append(f"--times={TIMES}")
  subprocess.run([*widen, f"--workdir={tmp_path}"], cwd=ROOT, check=True)
  small = run(ROOT / POLICY, ROOT / DRAFTER)
  wide = run(tmp_path / "policy", tmp_path / "drafter")
  for a, b in zip(small, wide, strict=True):
    assert b.shape[-1] in (a.shape[-1], TIMES * a.shape[-1])
    np.testing.assert_allclose(b[..., : a.shape[-1]], a, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(b[..., a.shape[-1] :], 0)
