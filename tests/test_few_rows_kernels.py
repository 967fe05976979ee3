"""A decoder's layers by the kernels for few rows, interpreted: exact, and bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import few_rows as bench
from benchmarks import shapes
from tests import mutants
from tests import tiny
from tests import triton_kernels
from tlt_jax.pallas_kernels import few_rows

pytestmark = triton_kernels.requires_triton

LENGTH = 96
CONFIGS = {name: bench.tiny(config) for name, config in shapes.MODELS.items()}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """In steps of 32, so that each product is cut into parts."""
  triton = few_rows.of("triton")
  monkeypatch.setattr(triton, "_STEP", 32)
  monkeypatch.setattr(triton, "_SPLIT", 64)
  with triton_kernels.interpreted():
    yield


def assert_as_reference(config, rows, nodes):
  """To 3% of the largest number.

  Triton's interpreter cuts numbers off where a GPU rounds them to bfloat16.
  """
  hidden, cache = pass_of("triton", config, rows, nodes)
  wanted, caches = pass_of("ref", config, rows, nodes)
  hidden, wanted = (np.asarray(x.astype(jnp.float32)) for x in (hidden, wanted))
  assert np.abs(hidden - wanted).max() < 2**-5 * np.abs(wanted).max()
  for found, other in zip(jax.tree.leaves(cache), jax.tree.leaves(caches), strict=True):
    found, other = (np.asarray(x.astype(jnp.float32)) for x in (found, other))
    written = np.isfinite(found)
    assert np.abs(found - other)[written].max() < 2**-5 * np.abs(other).max()
    assert written.sum() >= rows * nodes * config.num_kv_heads * config.head_dim


def pass_of(impl, config, rows, nodes):
  """Hidden states and caches of a pass over chains; unwritten slots hold NaN."""
  params = bench.weights(config, 2)
  start = np.array([0, 61, LENGTH - nodes, 33][:rows], np.int32)
  shape = (rows, nodes, config.width)
  x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
  cache = bench.caches(config, 2, rows, LENGTH, start)
  if impl == "ref":  # reads all slots
    cache = jax.tree.map(jnp.nan_to_num, cache)
  count = bench.counters(config, rows)
  run = jax.jit(functools.partial(bench.step, config, few_rows.of(impl)))
  return run(params, x, start, cache, count)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows, nodes", [(1, 1), (3, 4), tiny.slow(2, 16)])
def test_layers_are_those_of_the_reference(name, rows, nodes):
  """With biases, and with norms of queries and keys."""
  assert_as_reference(CONFIGS[name], rows, nodes)


PRODUCTS = {
  "a tile's squares": ("for tile in range(TILES)", "for tile in range(1)"),
  "a part is left out": ("for split in range(1, SPLITS)", "for split in range(2, SPLITS)"),
  "rotated backwards": ("b * cos + a * sin", "b * cos - a * sin"),
}
ATTENTION = {
  "the tail is not masked": ("shifted & 1", "1"),
  "splits are not rescaled": ("sums = sums * mine[:, None] +", "sums = sums +"),
}


@pytest.mark.parametrize("fault", [*PRODUCTS, *ATTENTION])
def test_faults_are_found(fault, monkeypatch, tmp_path):
  """In the kernels themselves."""
  triton = few_rows.of("triton")
  name = "products" if fault in PRODUCTS else "attention"
  file = getattr(triton, name).__file__
  mutant = mutants.load(file, (PRODUCTS | ATTENTION)[fault], tmp_path)
  monkeypatch.setattr(triton, name, mutant)
  with pytest.raises(AssertionError):
    assert_as_reference(CONFIGS["qwen3-0.6b"], 3, 4)


@pytest.mark.parametrize("name", [tiny.slow("qwen2.5-7b"), "qwen3-0.6b"])
def test_a_row_has_its_bits_whatever_is_computed_with_it(name):
  """A chain's nodes among those of others, and plain steps of one request alone."""
  found = bench.differing_bits(CONFIGS[name], few_rows.of("triton"), 3, LENGTH)
  assert found["differing"] == 0 and found["numbers"] > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("requests", bench.REQUESTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_on_a_gpu(name, requests):
  found = bench.differing_bits(shapes.MODELS[name], few_rows.of("triton"), requests, 512)
  assert found["differing"] == 0
