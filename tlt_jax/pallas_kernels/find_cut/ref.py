"""find_cut in plain jnp: a radix search for each filter's threshold.

Top-k keeps a token while fewer than k tokens have larger logits, and top-p while those
have less than p of the mass. So each threshold is the least logit above which there is
less weight than some bound. Its bits are found from the highest down, a few at a time, by
the weight above each of their possible values.
Sorting 49,152 logits takes a CPU 14 ms, and on an accelerator writes all of them many
times. This reads them 32 / `bits` times; in most rows once, and then 4,096 of them.

A sum of float32 depends on its order, and which order a device takes on the number of
rows. Where a row must have its bits in every batch, the digits of probabilities are added
up (`exact`): sums of integers have no order.
"""

import functools

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import shards

# The search starts with this number of blocks, and tokens per block.
_BLOCKS, _BLOCK = 64, 64


def find_cut(
  logits: jax.Array,
  temperature: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
  *,
  axis: str | None = None,
  bits: int = 1,
  exact: bool = False,
) -> jax.Array:
  """`find_cut.find_cut` over the shards of `axis`; any `bits` at a time, same result."""
  add = functools.partial(_add_exactly if exact else _add, axis)
  x = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
  most = shards.largest(jnp.max(x, -1), axis)
  weight = jnp.exp(x - most[:, None])
  ones, count = jnp.ones_like(weight), top_k.astype(jnp.float32)
  by_k = _search(logits, ones, count, top_k > 0, axis, bits, functools.partial(_add, axis))
  weight = jnp.where(logits >= by_k[:, None], weight, 0.0)
  total = add(weight)
  by_p = _search(logits, weight, top_p * total, top_p < 1, axis, bits, add)
  likely = (weight > 0) & (weight >= min_p[:, None])
  by_min_p = -shards.largest(-jnp.min(jnp.where(likely, logits, jnp.inf), -1), axis)
  by_min_p = jnp.where(min_p > 0, by_min_p, -jnp.inf)
  # The likeliest token is always kept.
  largest = shards.largest(jnp.max(logits, -1), axis)
  return jnp.maximum(by_k, jnp.minimum(jnp.maximum(by_p, by_min_p), largest))


def _add(axis, x: jax.Array) -> jax.Array:
  return shards.add(jnp.sum(x, -1), axis)


_DIGIT = 13  # bits: the sum of 2^18 digits fits a u32


def _add_exactly(axis, x: jax.Array) -> jax.Array:
  """The sum of f32[... V] in [0, 1], V <= 2^18, to 2^-39 of each: in any order the same."""
  total, scale = 0.0, 1.0
  for _ in range(3):
    x, scale = x * 2.0**_DIGIT, scale * 2.0**-_DIGIT
    digit = jnp.floor(x)
    x = x - digit
    digits = jnp.sum(digit.astype(jnp.uint32), -1).astype(jnp.float32)
    total += shards.add(digits, axis) * scale
  return total


def _search(x, weight, bound, wanted, axis, bits, add) -> jax.Array:
  """The least x of a row above which there is less weight than the bound.

  Most thresholds are within a few blocks of the largest x: no other block has an x above
  `rest`, so all weights above `rest` are known. Otherwise all x are searched.

  Returns f32[R], -inf in rows that are not `wanted`.
  """
  R, V = x.shape

  def everywhere():
    return _by_digits(x, weight, bound, bits, add)

  def search():
    if V <= 2 * _BLOCK * _BLOCKS:
      return everywhere()
    pad = ((0, 0), (0, -V % _BLOCK))
    blocks = jnp.pad(x, pad, constant_values=-jnp.inf).reshape(R, -1, _BLOCK)
    weights = jnp.pad(weight, pad).reshape(blocks.shape)
    largest, chosen = jax.lax.top_k(jnp.max(blocks, -1), _BLOCKS + 1)
    rest = shards.largest(largest[:, -1], axis)
    near, near_weights = (
      jnp.take_along_axis(y, chosen[:, :-1, None], 1).reshape(R, -1)
      for y in (blocks, weights)
    )
    above = add(jnp.where(near > rest[:, None], near_weights, 0.0))
    decided = jnp.all((above >= bound) | ~wanted)
    return jax.lax.cond(
      decided, lambda: _by_digits(near, near_weights, bound, bits, add), everywhere
    )

  found = jax.lax.cond(jnp.any(wanted), search, lambda: jnp.full_like(bound, -jnp.inf))
  return jnp.where(wanted, found, -jnp.inf)


def _by_digits(x, weight, bound, bits, add) -> jax.Array:
  """Finds the threshold of `_search`, `bits` at a time, from the highest down."""
  code = _ordered(x)
  digits = jnp.arange(1, 2**bits, dtype=jnp.uint32)

  def refine(i, low):  # the threshold is in [low, low + 2^(32 - bits * i))
    shift = jnp.uint32(32 - bits * (i + 1))
    pivot = low[:, None] + (digits << shift) - 1
    # Separate sums: XLA may not fuse one of [R digits V] with its input.
    above = jnp.stack([add(jnp.where(code > p[:, None], weight, 0.0)) for p in pivot.T], -1)
    digit = jnp.sum(above >= bound[:, None], -1, dtype=jnp.uint32)
    return low + (digit << shift)

  low = jax.lax.fori_loop(0, 32 // bits, refine, jnp.zeros(x.shape[0], jnp.uint32))
  # The code of -inf if all logits qualify, of inf if none does.
  return _unordered(jnp.clip(low, jnp.uint32(0x007FFFFF), jnp.uint32(0xFF800000)))


def _ordered(x):
  """Maps f32[...] to u32[...] of the same order."""
  x = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  return jnp.where(x >> 31 == 1, ~x, x | jnp.uint32(2**31))


def _unordered(code):
  x = jnp.where(code >> 31 == 1, code & jnp.uint32(2**31 - 1), ~code)
  return jax.lax.bitcast_convert_type(x, jnp.float32)
