"""Sums over micro-batches whose number is known at run time only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax import accumulate


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_sum_goes_on_from_another(count):
  """Of trees of unlike arrays; of none it is zero, or what it started from."""

  def term(i):
    return {"a": jnp.full((2, 3), i, jnp.float32), "b": i * i}

  total = jax.jit(lambda n: accumulate.sum_over(n, term))(count)
  twice = jax.jit(lambda n: accumulate.sum_over(n, term, total))(count)
  i = np.arange(count)
  np.testing.assert_array_equal(total["a"], np.full((2, 3), i.sum()))
  np.testing.assert_array_equal(total["b"], (i * i).sum())
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), twice, total)
  assert total["b"].dtype == jnp.int32
