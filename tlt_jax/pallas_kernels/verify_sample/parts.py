"""Statistics of a row of logits over part of its tokens, and their combination.

A block of a kernel, a program and a shard of the vocabulary each make a `Part`. The order
in which they are combined depends on the vocabulary alone: a row's result is the same bits
in every batch.
"""

import functools
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


def combine_all(parts: Part) -> Part:
  """Combines [count R] parts, in order of their tokens."""
  each = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(len(parts.best))]
  top = functools.reduce(jnp.maximum, (part.top for part in each))
  weight = [jnp.exp(part.top - top) for part in each]
  best, token, at = each[0][:3]
  for part in each[1:]:
    wins = part.best > best
    token, at = jnp.where(wins, part.token, token), jnp.where(wins, part.at, at)
    best = jnp.maximum(best, part.best)
  return Part(
    best,
    token,
    at,
    top,
    total=sum(part.total * w for part, w in zip(each, weight, strict=True)),
    kept=sum(part.kept * w for part, w in zip(each, weight, strict=True)),
  )


def over_shards(part: Part, axis: str | None) -> Part:
  """Combines the shards of a vocabulary, with reductions of [shards R] only."""
  return combine_all(jax.tree.map(lambda x: shards.side_by_side(x, axis), part))


def finish(part: Part, temperature: jax.Array) -> Sample:
  before = part.at - (part.top + jnp.log(part.total))
  after = part.at - (part.top + jnp.log(part.kept))
  # A row of NaN keeps nothing: any token is valid.
  token = jnp.where(part.token == NO_TOKEN, 0, part.token)
  return Sample(token, before, jnp.where(temperature > 0, after, 0.0))
