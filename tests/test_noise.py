"""Gumbel noise: its law, its independence, and that any part is part of one whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tlt_jax import noise

AXES = ("seed", "request", "position", "token")
EULER = 0.5772156649


@jax.jit
def _grid(seed, request, position, token):
  key = noise.row_key(seed[:, None, None], request[:, None], position)
  return noise.gumbel(key, token)


def grid(seed, request, position, token):
  """f32[seed request position token] noise of all combinations."""
  return np.asarray(_grid(*(jnp.asarray(x) for x in (seed, request, position, token))))


@functools.cache
def block():
  """Noise around an arbitrary point: 8 x 16 x 64 x 128, some of it far apart."""
  return grid(
    np.arange(8),
    np.arange(16) + 1000,
    np.arange(64) + 500,
    np.concatenate([np.arange(64), np.arange(64) + 150_000]),
  )


def uniform(g):
  """What Gumbel noise is the transform of."""
  return np.exp(-np.exp(-g.astype(np.float64)))


def test_moments_are_those_of_a_standard_gumbel():
  """Mean, variance and skewness of a million draws, within four standard errors."""
  g = block().astype(np.float64).ravel()
  error = 4 / np.sqrt(g.size)
  assert abs(g.mean() - EULER) < error * np.pi / np.sqrt(6)
  assert abs(g.var() - np.pi**2 / 6) < error * np.sqrt(4.4) * np.pi**2 / 6
  assert abs(stats.skew(g) - 1.1395) < error * 8


@pytest.mark.parametrize("axis", range(4), ids=AXES)
def test_the_noise_is_gumbel_along_each_coordinate(axis):
  """KS and chi-square over one coordinate alone, the other three held fixed."""
  at = [np.array([7]), np.array([3]), np.array([40]), np.array([123])]
  at[axis] = np.arange(2**17)
  g = grid(*at).ravel()
  assert stats.kstest(g, stats.gumbel_r.cdf).pvalue > 1e-3
  counts = np.histogram(uniform(g), 256, (0, 1))[0]
  assert stats.chisquare(counts).pvalue > 1e-3


def neighbours():
  """Steps between two points of the grid: single, by powers of two, and diagonal."""
  single = [
    tuple(2**k * (i == axis) for i in range(4)) for axis in range(4) for k in (0, 1)
  ]
  return single + [(1, -1, 0, 0), (0, 1, -1, 0), (0, 0, 1, -1), (0, 1, 0, 1), (1, 1, 1, 1)]


def pairs(x, step):
  """All pairs of points of the grid that lie `step` apart."""
  a = tuple(slice(max(-s, 0), n - max(s, 0)) for s, n in zip(step, x.shape, strict=True))
  b = tuple(slice(max(s, 0), n - max(-s, 0)) for s, n in zip(step, x.shape, strict=True))
  return x[a].ravel(), x[b].ravel()


@pytest.mark.parametrize("step", neighbours(), ids=str)
def test_neighbours_are_independent(step):
  """Adjacent seeds, requests, positions and tokens: no correlation, no joint pattern."""
  a, b = pairs(uniform(block()), step)
  assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)
  table = np.histogram2d(a, b, 16, [(0, 1), (0, 1)])[0]
  assert stats.chisquare(table.ravel()).pvalue > 1e-3


def test_no_two_positions_share_a_key():
  """Over a million (seed, request, position), in every role of the small numbers."""
  n = np.arange(101, dtype=np.uint32)
  key = noise.row_key(n[:, None, None], n[None, :, None], n[None, None, :])
  key = np.asarray(key).astype(np.uint64).reshape(-1, 2)
  assert len(np.unique(key[:, 0] << np.uint64(32) | key[:, 1])) == 101**3


def test_the_noise_is_what_it_was():
  """Pinned: another noise means other tokens for every seed ever written down."""
  g = grid([7], [3], [11], [0, 1, 2, 151_935])
  np.testing.assert_allclose(
    g.ravel(), [-1.364645, 0.2632295, 0.03729215, 0.9078795], rtol=1e-5
  )
  np.testing.assert_array_equal(g, grid([7], [3], [11], [0, 1, 2, 151_935]))


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_any_part_of_the_vocabulary_has_the_noise_of_the_whole(size):
  """Blocks of any size and any order of ids, and one row among many."""
  whole = grid([1, 2], [5], np.arange(9), np.arange(4000))
  for start in (0, 1, 1501, 4000 - size):
    part = grid([2], [5], [8], np.arange(start, start + size))
    np.testing.assert_allclose(
      part[0, 0, 0], whole[1, 0, 8, start : start + size], rtol=0, atol=1e-6
    )
  shuffled = np.random.default_rng(0).permutation(4000)[:size]
  part = grid([2], [5], [8], shuffled)
  np.testing.assert_allclose(part[0, 0, 0], whole[1, 0, 8, shuffled], rtol=0, atol=1e-6)


def test_shards_of_the_vocabulary_have_the_noise_of_the_whole():
  """Split over 8 devices, and computed shard by shard from each one's own ids."""
  mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec
  key = noise.row_key(jnp.uint32(1), jnp.arange(6), jnp.int32(4))
  ids = jnp.arange(4096)
  sharded = jax.jit(
    noise.gumbel,
    out_shardings=jax.sharding.NamedSharding(mesh, spec(None, "model")),
  )(key, ids)
  by_hand = jax.jit(
    jax.shard_map(
      lambda key: noise.gumbel(key, jax.lax.axis_index("model") * 512 + jnp.arange(512)),
      mesh=mesh,
      in_specs=spec(),
      out_specs=spec(None, "model"),
    )
  )(key)
  whole = noise.gumbel(key, ids)
  np.testing.assert_allclose(sharded, whole, rtol=0, atol=1e-6)
  np.testing.assert_allclose(by_hand, whole, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_tail_is_filled_beyond_24_bits():
  """2^27 draws: all finite, and as many beyond 14 and beyond 16.64 as there should be.

  A uniform of 24 bits has nothing beyond 16.64.
  """

  @jax.jit
  def count(request):
    def one(position, totals):
      g = noise.gumbel(noise.row_key(7, request, position), jnp.arange(2**17))
      above = jnp.array([14.0, 16.64])[:, None]
      return totals + jnp.append(jnp.sum(g > above, 1), jnp.sum(~jnp.isfinite(g)))

    return jax.lax.fori_loop(0, 2**10, one, jnp.zeros(3, jnp.int32))

  beyond_14, beyond_24_bits, not_finite = count(jnp.uint32(1))
  assert not_finite == 0
  for found, level in ((beyond_14, 14.0), (beyond_24_bits, 16.64)):
    mean = 2**27 * -np.expm1(-np.exp(-level))
    assert 1e-3 < stats.poisson.cdf(found, mean) < 1 - 1e-3


def test_every_hash_gives_finite_noise(monkeypatch):
  """From the largest, where the hash is 0, to the smallest, where it is 2^32 - 1."""
  monkeypatch.setattr(noise, "mix", lambda x: x)  # token id = upper half of the hash
  ids = np.array([0, 1, 2, 255, 2**16, 2**31, 2**32 - 129, 2**32 - 1], np.uint32)
  g = np.asarray(noise.gumbel(jnp.zeros(2, jnp.uint32), jnp.asarray(ids)))
  v = (ids.astype(np.float64) + (ids ^ np.uint32(0xB7E15162)) * 2.0**-32) * 2.0**-32
  exact = -np.log(-np.log1p(-np.minimum(v, 1 - 2.0**-24)))
  np.testing.assert_allclose(g, exact, rtol=1e-6, atol=1e-6)
  assert (np.diff(g) <= 0).all() and 22 < g[0] < 45 and np.isfinite(g).all()
