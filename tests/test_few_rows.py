"""Products of few rows: right, and without a copy of the weights in a program."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax import few_rows_matmul
from tlt_jax.models import target


@pytest.mark.parametrize(
  "shape", [(5,), (1, 1, 5), (3, 5), (3, 4, 5), (65, 5)]
)
def test_the_product_is_that_of_the_matrices(shape):
  """Also where rows are padded, in another type, and its gradient."""
  x, w = (np.random.RandomState(i).randn(*s) for i, s in enumerate((shape, (6, 5))))
  x, w = jnp.float32(x), jnp.float32(w)
  linear = jax.jit(few_rows_matmul.linear, static_argnums=2)
  np.testing.assert_allclose(linear(x, w, None), x @ w.T, atol=1e-5)
  assert linear(jnp.bfloat16(x), w, jnp.float32).dtype == jnp.float32

  def gradient(f):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1))(x, w)

  found = gradient(few_rows_matmul.linear)
  for one, other in zip(found, gradient(lambda x, w: x @ w.T), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_each_of_several_matrices_is_read_as_it_is(rows):
  x, w = np.random.RandomState(0).randn(2, rows, 6), np.random.RandomState(1).randn(2, 9, 6)
  found = jax.jit(few_rows_matmul.times_transposed)(jnp.float32(x), jnp.float32(w))
  np.testing.assert_allclose(found, x @ w.swapaxes(1, 2), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (2, 2, 5)])
def test_one_row_is_computed_as_several_on_accelerators(shape):
  x, w = jnp.zeros(shape), jnp.zeros((6, 5))
  traced = jax.jit(few_rows_matmul.linear).trace(x, w)
  for platform in ("cpu", "tpu", "cuda"):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("tensor<8x5xf32>" in text) == (platform != "cpu" and x.size == 5)


@pytest.mark.parametrize("tied", [True, False])
def test_programs_do_not_copy_weights(tied):
  """A product reads a matrix where it is."""
  config = dataclasses.replace(tiny.CONFIG, width=40, mlp_width=72, tie_embeddings=tied)
  params = target.init_params(config, jax.random.key(0))
  tokens, method = jnp.zeros((4, 2), jnp.int32), target.Target.features_and_logits

  def steps(params):
    def step(i, drawn):
      apply = target.Target(config).apply
      logits = apply({"params": params}, drawn, drawn + i, method=method)[1]
      return jnp.argmax(logits, -1).astype(drawn.dtype)

    return jax.lax.fori_loop(0, 3, step, tokens)

  text = jax.jit(steps).lower(params).compile().as_text()
  sizes = {x.shape for x in jax.tree.leaves(params) if x.ndim > 1}
  sizes = {f"{a},{b}" for shape in sizes for a, b in (shape, shape[::-1])}
  moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
  assert not sizes & set(moved)
