"""What is known of a row of logits from part of its tokens, and how parts combine.

A block of a kernel, a program and a shard of the vocabulary each give a `Part`. They are
combined in a fixed order, which the vocabulary decides and the batch does not: a row's
token and log-probability are the same bits whatever rows are around it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import shards

# The least scaled logit that counts as one; -inf would make inf - inf of empty parts.
LEAST = -1e30
# The token of a part of which nothing is kept.
NO_TOKEN = 2**31 - 1


class Part(NamedTuple):
  """Of each row over some of its tokens. Logits are divided by the temperature."""

  best: jax.Array  # f32[R]  largest perturbed logit that is kept; -inf: none is
  token: jax.Array  # i32[R]  its id; of equals the smallest
  at: jax.Array  # f32[R]  its logit
  top: jax.Array  # f32[R]  largest logit, kept or not
  total: jax.Array  # f32[R]  sum of exp(logit - top)
  kept: jax.Array  # f32[R]  the same over what is kept


class Sample(NamedTuple):
  """The drawn token of each row."""

  token: jax.Array  # i32[R]
  logp: jax.Array  # f32[R]  before filters
  logp_filtered: jax.Array  # f32[R]  of the distribution it was drawn from


def combine(a: Part, b: Part) -> Part:
  """Two parts as one: tokens of `a` come before those of `b`."""
  wins = a.best >= b.best
  pick = lambda x, y: jnp.where(wins, x, y)
  top = jnp.maximum(a.top, b.top)
  old, new = jnp.exp(a.top - top), jnp.exp(b.top - top)
  return Part(
    best=pick(a.best, b.best),
    token=pick(a.token, b.token),
    at=pick(a.at, b.at),
    top=top,
    total=a.total * old + b.total * new,
    kept=a.kept * old + b.kept * new,
  )


def combine_all(parts: Part) -> Part:
  """Combines [count R] parts, in order of their tokens, by neighbours."""
  count = parts.best.shape[0]
  if count == 1:
    return jax.tree.map(lambda x: x[0], parts)
  even = count // 2 * 2
  take = lambda start, stop, step: jax.tree.map(lambda x: x[start:stop:step], parts)
  pairs = combine(take(0, even, 2), take(1, even, 2))
  last = take(even, count, 1)
  return combine_all(jax.tree.map(lambda *x: jnp.concatenate(x), pairs, last))


def over_shards(part: Part, axis: str | None) -> Part:
  """Combines the shards of a vocabulary, by reductions of [shards R] alone."""
  return combine_all(jax.tree.map(lambda x: shards.side_by_side(x, axis), part))


def finish(part: Part, temperature: jax.Array) -> Sample:
  """The token, and its log-probabilities from the sums: those of the whole row."""
  before = part.at - (part.top + jnp.log(part.total))
  after = part.at - (part.top + jnp.log(part.kept))
  # Of a row of NaN nothing is kept: any token will do.
  token = jnp.where(part.token == NO_TOKEN, 0, part.token)
  return Sample(token, before, jnp.where(temperature > 0, after, 0.0))
