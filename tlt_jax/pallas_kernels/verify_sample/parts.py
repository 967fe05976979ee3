"""Statistics of a row of logits over part of its tokens, and their combination.

A block of a kernel, a program and a shard of the vocabulary each make a `Part`. The order
in which they are combined depends on the vocabulary alone: a row's result is the same bits
in every batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import shards

LEAST = -1e30  # `top` of an empty part; -inf would make inf - inf
NO_TOKEN = 2**31 - 1  # `token` of a part without kept tokens


class Part(NamedTuple):
  """Statistics of each row over some tokens; logits are divided by the temperature."""

  best: jax.Array  # f32[R]  largest perturbed logit that is kept; -inf: none is
  token: jax.Array  # i32[R]  its id, the smallest among ties
  at: jax.Array  # f32[R]  its logit
  top: jax.Array  # f32[R]  largest logit, kept or not
  total: jax.Array  # f32[R]  sum of exp(logit - top)
  kept: jax.Array  # f32[R]  the same over what is kept


class Sample(NamedTuple):
  token: jax.Array  # i32[R]
  logp: jax.Array  # f32[R]  before filters
  logp_filtered: jax.Array  # f32[R]  of the distribution it was drawn from


def combine(a: Part, b: Part) -> Part:
  wins = a.best >= b.best
  top = jnp.maximum(a.top, b.top)
  old, new = jnp.exp(a.top - top), jnp.exp(b.top - top)
  return Part(
    best=jnp.where(wins, a.best, b.best),
    token=jnp.where(wins, a.token, b.token),
    at=jnp.where(wins, a.at, b.at),
    top=top,
    total=a.total * old + b.total * new,
    kept=a.kept * old + b.kept * new,
  )


def combine_all(parts: Part) -> Part:
  """Combines [count R] parts, in order of their tokens, as a tree of neighbours."""
  count = parts.best.shape[0]
  if count == 1:
    return jax.tree.map(lambda x: x[0], parts)
  even = count // 2 * 2
  left, right, last = (
    jax.tree.map(lambda x, s=s: x[s], parts)
    for s in (slice(0, even, 2), slice(1, even, 2), slice(even, count))
  )
  pairs = combine(left, right)
  return combine_all(jax.tree.map(lambda *x: jnp.concatenate(x), pairs, last))


def over_shards(part: Part, axis: str | None) -> Part:
  """Combines the shards of a vocabulary, with reductions of [shards R] only."""
  return combine_all(jax.tree.map(lambda x: shards.side_by_side(x, axis), part))


def finish(part: Part, temperature: jax.Array) -> Sample:
  before = part.at - (part.top + jnp.log(part.total))
  after = part.at - (part.top + jnp.log(part.kept))
  # A row of NaN keeps nothing: any token is valid.
  token = jnp.where(part.token == NO_TOKEN, 0, part.token)
  return Sample(token, before, jnp.where(temperature > 0, after, 0.0))
