"""Larger models compute what smaller ones do, whose parameters they begin with."""

import dataclasses
import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments import growth
from tests import tiny
from tlt_jax.models import hf
from tlt_jax.models import target

T = 12


def larger_model(**sizes):
  """A model that can begin as `tiny.CONFIG`, and random parameters of it."""
  c = tiny.CONFIG
  padded = dict(width=c.width * 2, norm_eps=c.norm_eps / 2, num_layers=c.num_layers + 1)
  model = dataclasses.replace(c, **padded | sizes)
  return model, jax.jit(lambda key: target.init_params(model, key))(jax.random.key(1))


def test_a_model_that_begins_as_a_smaller_one_can_learn_more(tmp_path):
  """It computes the same; two steps of training reach all that is new."""
  c = tiny.CONFIG
  hf.save(tmp_path, c, tiny.params())
  sizes = dict(num_heads=2 * c.num_heads, num_kv_heads=2 * c.num_kv_heads)
  model, random = larger_model(**sizes, mlp_width=c.mlp_width + 8)
  begun = params = growth.begin_as(tmp_path, model, random)
  np.testing.assert_allclose(
    growth.logits(model, params), growth.logits(c, tiny.params()), atol=1e-4
  )

  @jax.jit
  def step(params):
    wanted = jax.random.normal(jax.random.key(2), (1, T, model.vocab_size))
    tokens = jnp.arange(T)[None] % model.vocab_size

    def loss(params):
      run = functools.partial(target.Target(model).apply, {"params": params})
      features, _ = run(tokens, jnp.arange(T)[None])
      return jnp.mean((run(features, method=target.Target.logits) - wanted) ** 2)

    return jax.tree.map(lambda x, g: x - 0.1 * g, params, jax.grad(loss)(params))

  for _ in range(2):
    params = step(params)
  old = traverse_util.flatten_dict(tiny.params(), sep="/")
  flat = [traverse_util.flatten_dict(p, sep="/") for p in (begun, params)]
  for path, x in flat[0].items():
    new = np.ones(x.shape, bool)
    if path in old:
      new[tuple(map(slice, old[path].shape))] = False
    moved = np.asarray(flat[1][path]) != x
    if path != "embedding":  # of which only the rows of tokens that are there move
      assert not np.any(new) or np.mean(moved[new]) > 0.9, path
