"""A fork adds a source of drafts, a rule or a family as one file, and edits no other.

The files are those of `examples/my_fork`; see `pythonpath` in pyproject.toml.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from tests import tiny
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

OPTIONS = rollout.Options(**tiny.SIZES, slots=8, chunk=16)


def run(selector):
  mesh = tiny.mesh(2)
  engine = rollout.make(tiny.CONFIG, mesh, OPTIONS, selector=selector)
  made = tiny.requests(temperature=0.5)
  engine.compile(tiny.on(mesh), made.stop_tokens.shape[1])
  programs = len(engine.pool)
  samples = engine(tiny.on(mesh), made)
  assert len(engine.pool) == programs, engine.pool.report()
  plain = rollout.make(tiny.CONFIG, mesh, OPTIONS)(tiny.on(mesh), made)
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain, samples)
  assert result.differing_tokens == 0, result.where
  return samples


def test_a_source_of_ones_own_drafts_losslessly():
  """Named by its module in the strategy."""
  strategy = strategy_lib.parse("my_package.repeat_3")
  assert str(strategy) == "my_package.repeat_3"
  assert run(selector_lib.always(strategy)).mean_acceptance_length > 1


def test_a_rule_of_ones_own_chooses():
  arms = ["off", "ngram_3", "my_package.repeat_2"]
  args = f"up to 8 live: {' or '.join(arms)}", "my_package.in_turn", False
  selector = selector_lib.make(*args)
  samples = run(selector)
  assert [c.strategy for c in samples.chunks[:3]] == arms
  again = selector_lib.make(*args)
  again.restore(selector.state())
  assert again.count == selector.count == len(samples.chunks)


ARCEE = dataclasses.replace(
  tiny.CONFIG, architecture="my_package.arcee", qk_norm=False, num_layers=1
)


def arcee_params():
  made = jax.jit(lambda key: target.init_params(ARCEE, key))(jax.random.key(0))
  return made | {"head": made["head"] * 20.0}


def test_a_family_of_ones_own_is_read_and_saved(tmp_path):
  """With its own tensors, and under its own name."""
  params = arcee_params()
  hf.save(tmp_path, ARCEE, params)
  raw = json.loads((tmp_path / "config.json").read_text())
  assert raw["architectures"] == ["my_package.arcee"]
  assert (raw["model_type"], raw["hidden_act"]) == ("arcee", "relu2")
  stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  assert sorted(name for name in stored if ".mlp." in name) == [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
  ]
  config, again = hf.load(tmp_path)
  assert config == ARCEE
  jax.tree.map(np.testing.assert_array_equal, params, again)


def test_a_family_of_ones_own_computes_with_its_own_block():
  """What the MLP adds to the residual stream, by NumPy."""
  params = arcee_params()
  without = jax.tree.map(np.asarray, params)
  without["layer_0"]["mlp"]["down_proj"] = np.zeros((ARCEE.width, ARCEE.mlp_width))
  tokens = np.arange(12)[None]

  def model(params):
    apply, method = target.Target(ARCEE).apply, target.Target.with_taps
    return apply({"params": params}, tokens, tokens, (0,), method=method)[1]

  before, after = np.float64(model(without)), np.float64(model(params))
  layer = params["layer_0"]
  normed = before / np.sqrt(np.mean(before**2, -1, keepdims=True) + ARCEE.norm_eps)
  hidden = np.maximum(normed @ np.float64(layer["mlp"]["up_proj"]).T, 0) ** 2
  np.testing.assert_allclose(
    after - before, hidden @ np.float64(layer["mlp"]["down_proj"]).T, atol=1e-6
  )
  assert np.abs(after - before).max() > 1e-5


def test_a_family_of_ones_own_is_drafted_for_losslessly():
  mesh, made, params = tiny.mesh(1), tiny.requests(temperature=0.5), arcee_params()
  selector = selector_lib.always(strategy_lib.parse("ngram_3"))
  plain, drafted = (
    rollout.make(ARCEE, mesh, OPTIONS, selector=s)(params, made) for s in (None, selector)
  )
  result = compare.compare(ARCEE, params, made, plain, drafted)
  assert result.differing_tokens == 0, result.where
  assert drafted.mean_acceptance_length > 1


def test_a_family_that_is_none_is_refused(tmp_path):
  hf.save(tmp_path, ARCEE, arcee_params())
  file = tmp_path / "config.json"
  raw = json.loads(file.read_text()) | {"architectures": ["my_package.arcce"]}
  file.write_text(json.dumps(raw))
  with pytest.raises(hf.CheckpointError, match="did you mean 'arcee'"):
    hf.load_config(tmp_path)
