"""Log-probabilities and entropies by blocks, against the softmax written down."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dev import hlo_counts
from tests import tiny
from tlt_jax import axes
from tlt_jax.models import layers
from tlt_jax.rl import log_probability


class Case:
  """Features, a head, targets, and weights of the results in a loss."""

  def __init__(self, V=24, N=70, unused=(), dtype="float32"):
    self.config = dataclasses.replace(
      tiny.CONFIG, vocab_size=V, unused_rows=unused, dtype=dtype
    )
    rng, D = np.random.default_rng(0), self.config.width
    self.features = jnp.asarray(rng.normal(size=(N, D)), dtype)
    self.head = jnp.asarray(rng.normal(0, 0.3, (V, D)), jnp.float32)
    self.targets = jnp.asarray(rng.integers(0, V, N), jnp.int32)
    self.temperature = jnp.asarray(rng.uniform(0.5, 1.5, N), jnp.float32)
    self.weights = jnp.asarray(rng.normal(size=(2, N)), jnp.float32)

  def loss(self, scores, features, head):
    found = scores(self.config, features, head, self.targets, self.temperature)
    return jnp.sum(self.weights * jnp.stack(found)), found

  def gradient(self, scores, wrt=(0, 1)):
    of = jax.grad(functools.partial(self.loss, scores), wrt, has_aux=True)
    return jax.jit(of)(self.features, self.head)


def plain(config, features, head, targets, temperature):
  logits = jnp.matmul(features.astype(jnp.float32), head.T, precision="highest")
  logits = layers.mask_unused(logits, config) / temperature[:, None]
  logp = jax.nn.log_softmax(logits, -1)
  entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
  return jnp.take_along_axis(logp, targets[:, None], -1)[:, 0], entropy


CASES = {
  "one block": dict(),
  "blocks of the vocabulary": dict(V=9000),
  "blocks of tokens with a rest": dict(V=300, N=4099),
  # The first block has no token; the last is one of the targets nonetheless.
  "unused rows": dict(V=9000, unused=((0, 5000), (8999, 9000))),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_those_of_a_softmax(case):
  """Of log-probabilities and entropies at each token's temperature."""
  made = Case(**CASES[case])
  (d, found), (expected_d, expected) = map(made.gradient, (log_probability.scores, plain))
  seen = expected[0] > -1e20  # else the target is no token
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x[seen], y[seen], rtol=1e-5, atol=1e-5)
  assert (found[0][~seen] < -1e20).all()
  for x, y in zip(d, expected_d, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * float(jnp.abs(y).max()))


def test_scores_in_bfloat16_are_those_of_the_same_numbers():
  """Sums are in float32, and so is the head's gradient; products round to bfloat16."""
  made = Case(V=5000, N=100, dtype="bfloat16")
  made.head = made.head.astype(jnp.bfloat16).astype(jnp.float32)
  (d, found), (expected_d, expected) = map(made.gradient, (log_probability.scores, plain))
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  assert [x.dtype for x in d] == ["bfloat16", "float32"]
  for x, y in zip(d, expected_d, strict=True):
    error = np.asarray(x, np.float32) - np.asarray(y, np.float32)
    assert np.linalg.norm(error) < 2**-8 * np.linalg.norm(np.asarray(y, np.float32))


@pytest.mark.parametrize("wrt", [0, 1])
def test_what_is_not_trained_has_no_gradient(wrt):
  """And the product that it takes is left out."""
  made = Case(V=9000)
  d, _ = made.gradient(log_probability.scores, wrt)
  expected = made.gradient(log_probability.scores)[0][wrt]
  np.testing.assert_array_equal(d, expected)


def test_no_array_has_all_tokens_and_the_whole_vocabulary():
  """Nor in the gradient: the largest is the head's gradient, or a block of logits."""
  made = Case(V=3 * 4096, N=3 * 2048)
  of = jax.jit(jax.grad(functools.partial(made.loss, log_probability.scores), (0, 1), True))
  module = hlo_counts.computations(of.lower(made.features, made.head).compile().as_text())
  largest = max(i.num_elements for body in module.values() for i in body)
  assert largest <= 2048 * 4096 < made.features.shape[0] * made.head.shape[0]


def test_a_head_that_is_split_is_not_gathered():
  """The scores are those of the whole head; what is summed is as large as the features."""
  made, mesh = Case(V=9000), tiny.mesh(1, 2)
  expected_d, expected = made.gradient(log_probability.scores)
  placed = jax.device_put(made.head, axes.sharding(mesh, axes.MODEL, None))
  of = jax.grad(functools.partial(made.loss, log_probability.scores), (0, 1), has_aux=True)
  with jax.set_mesh(mesh):
    compiled = jax.jit(of).lower(made.features, placed).compile()
    d, found = compiled(made.features, placed)
  text = compiled.as_text()
  assert "all-gather" not in text and f"f32[{9000},{made.config.width}]" not in text
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    (d, found),
    (expected_d, expected),
  )
