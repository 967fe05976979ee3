"""Weights that lie transposed: the same model, without a copy of any in a program."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax import few_rows_matmul
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import few_rows
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import chunk as chunk_lib

CONFIGS = {
  "qwen2": dict(architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),
  "qwen3": {},
  "bfloat16": dict(dtype="bfloat16"),
  "llama": dict(architecture="LlamaForCausalLM", qk_norm=False, tie_embeddings=True),
}


def one_device() -> jax.sharding.Mesh:
  return axes.make_mesh(1, jax.devices()[:1])


def params_of(config: config_lib.ModelConfig) -> dict:
  """Random ones, biases included, on one device."""
  params = target.init_params(config, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noise = lambda x, key: x + 0.1 * jax.random.normal(key, x.shape)
  noisy = list(map(noise, leaves, keys))
  return jax.device_put(tree.unflatten(noisy), axes.sharding(one_device()))


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 12])
def test_the_product_is_that_of_the_matrices(rows):
  """Also where rows are padded, for each of several matrices, and in another type."""
  x, w = np.random.RandomState(0).randn(2, rows, 6), np.random.RandomState(1).randn(2, 9, 6)
  product = jax.jit(few_rows_matmul.times_transposed, static_argnums=2)
  found = product(jnp.float32(x), jnp.float32(w), None)
  np.testing.assert_allclose(found, x @ w.swapaxes(1, 2), atol=1e-5)
  assert product(jnp.bfloat16(x), jnp.bfloat16(w), jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (3, 5), (2, 2, 5)])
def test_one_row_is_computed_as_several_on_gpus_only(shape):
  """The same product; on a CPU nothing is padded."""
  x, w = (np.random.RandomState(i).randn(*s) for i, s in enumerate((shape, (5, 2, 3))))
  x, w = jnp.float32(x), jnp.float32(w)
  times = jax.jit(few_rows_matmul.times)
  np.testing.assert_allclose(times(x, w), np.tensordot(x, w, 1), atol=1e-5)
  lowered = lambda platform: (
    times.trace(x, w).lower(lowering_platforms=(platform,)).as_text()
  )
  assert "tensor<8x5xf32>" not in lowered("cpu")
  assert ("tensor<8x5xf32>" in lowered("cuda")) == (x.size == 5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_the_same(name):
  """Features and logits, to rounding; with matrices that are square, too."""
  config = dataclasses.replace(tiny.CONFIG, num_heads=2, num_kv_heads=2, **CONFIGS[name])
  params = params_of(config)
  turned = few_rows.transposed(config, one_device(), params)
  tokens = jax.random.randint(jax.random.key(2), (2, 3), 0, config.vocab_size)
  places = jnp.tile(jnp.arange(3), (2, 1))
  method = target.Target.features_and_logits
  run = jax.jit(lambda p: few_rows.apply(config, p, tokens, places, method=method)[:2])
  for one, other in zip(run(params), run(turned), strict=True):
    assert one.dtype == other.dtype
    atol = 2e-5 if config.dtype == "float32" else 0.1
    np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=atol)


def test_shapes_are_those_of_the_arrays():
  mesh, params = one_device(), params_of(tiny.CONFIG)
  abstract = axes.with_shardings(
    mesh, axes.ROLLOUT, target.abstract_params(tiny.CONFIG)
  )
  made, shapes = (few_rows.transposed(tiny.CONFIG, mesh, p) for p in (params, abstract))
  for x, shape in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
    assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
    assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
  norm = lambda p: p["final_norm"]["scale"]
  assert norm(made.params) is norm(params)  # what is no matrix is not there twice


def test_programs_do_not_copy_weights():
  """The point of it: a product reads a matrix where it lies."""
  config = dataclasses.replace(tiny.CONFIG, width=40, mlp_width=72)
  turned = few_rows.transposed(config, one_device(), params_of(config))
  tokens, method = jnp.zeros((4, 2), jnp.int32), target.Target.features_and_logits

  def steps(params):
    def step(i, drawn):
      logits = few_rows.apply(config, params, drawn, drawn + i, method=method)[1]
      return jnp.argmax(logits, -1).astype(drawn.dtype)

    return jax.lax.fori_loop(0, 3, step, tokens)

  text = jax.jit(steps).lower(turned).compile().as_text()
  matrices = {x.shape for x in jax.tree.leaves(turned) if x.ndim > 1}
  sizes = {f"{n},{size // n}" for size, n in ((np.prod(s), s[0]) for s in matrices)}
  sizes |= {",".join(reversed(size.split(","))) for size in sizes}
  moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
  assert not sizes & set(moved)


def test_none_where_nothing_is_gained(monkeypatch):
  """Without devices or a model, where weights are split, or a family has its own block."""
  params = params_of(tiny.CONFIG)
  split = axes.make_mesh(2, jax.devices()[:2])
  assert few_rows.transposed(tiny.CONFIG, split, params) is None
  assert few_rows.transposed(tiny.CONFIG, axes.make_mesh(1, 4), params) is None
  assert few_rows.transposed(tiny.CONFIG, one_device(), None) is None
  own = families.Family("mine", block=type("Block", (layers.Block,), {}))
  monkeypatch.setitem(families.FAMILIES, "mine", own)
  config = dataclasses.replace(tiny.CONFIG, architecture="mine")
  assert few_rows.transposed(config, one_device(), params) is None


def test_passes_over_few_rows_take_them():
  weights = chunk_lib.Weights("as they are", None, "transposed")
  taken = [weights.of_target(rows) for rows in (1, 3, 4, 48, 49)]
  assert taken == ["as they are"] * 2 + ["transposed"] * 2 + ["as they are"]
  assert chunk_lib.Weights("as they are").of_target(8) == "as they are"
