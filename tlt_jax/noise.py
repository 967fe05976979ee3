"""Gumbel noise as a pure function of (seed, request, position, token).

Sampling is `argmax(logits / T + noise)`. Because the noise is a counter-based hash, a
request's tokens depend on the target and the seed alone: not on the batch, the slot, the
number of devices, or on speculation (Daliri, Musco & Suresh 2024,
https://arxiv.org/abs/2408.07978).

`jax.random` draws whole arrays; here the noise of a token is a function of its id, so that
each vocabulary shard, and each block of a kernel, computes its own. It is also faster:
2.8 ms for 1.2 million tokens on a CPU, against 20 ms by threefry in the high-range mode
that `gumbel` would need.
"""

import chex
import jax
import jax.numpy as jnp

# Separates the lower half of a token's hash from its upper half.
LOW = -0x481EAE9E


def mix(x):
  """A bijection of i32[...] in which every input bit flips half the output bits.

  The two-round multiply-xorshift found by C. Wellons' hash prospector (bias
  0.17), public domain.

  It uses operators alone, so that XLA, Pallas and Triton compile this one definition, and
  signed integers, since TPU kernels have few operations on unsigned ones: products wrap the
  same way, and a mask makes a shift logical.
  """
  x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
  x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
  return x ^ ((x >> 16) & 0xFFFF)


def row_key(seed: jax.Array, request: jax.Array, position: jax.Array) -> jax.Array:
  """The key u32[... 2] of index `position` in a request's sequence, prompt included."""
  a, b = -0x61C88647, 0x243F6A88
  for word in (seed, request, position):
    word = jnp.asarray(word).astype(jnp.int32)
    a = mix(a ^ word)
    b = mix(b + a)
    a = a + b
  return _unsigned(jnp.stack([a, b], -1))


def high(k0, k1, tokens):
  """The upper half of each token's hash, i32[...], from the two words of the row's key."""
  return mix(mix(tokens ^ k0) + k1)


def small_exponential(v):
  """-log(1 - v) for v f32[...] in [0, 1/8], with operators alone: Triton has no log1p."""
  rest = 1 / 5 + v * (1 / 6 + v * (1 / 7 + v * (1 / 8)))
  return v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * rest))))


def _unsigned(x):
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def gumbel(key: jax.Array, tokens: jax.Array) -> jax.Array:
  """Standard Gumbel noise of each token: f32[... n].

  64 hash bits per token: 24 would cut the noise at 16.6, which large vocabularies show.
  """
  chex.assert_axis_dimension(key, -1, 2)
  chex.assert_rank(tokens, 1)
  key = jax.lax.bitcast_convert_type(key, jnp.int32)
  upper = high(key[..., None, 0], key[..., None, 1], tokens.astype(jnp.int32))
  lower = mix(upper ^ LOW)
  upper, lower = (_unsigned(x).astype(jnp.float32) for x in (upper, lower))
  # v is uniform on (0, 1), with full float precision near 0, where the noise is largest.
  v = upper * 2.0**-32 + (lower + 0.5) * 2.0**-64
  exponential = -jnp.log1p(-jnp.minimum(v, 1.0 - 2.0**-24))
  return -jnp.log(exponential)
