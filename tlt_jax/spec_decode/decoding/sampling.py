"""Draws tokens: temperature, top-k, top-p and min-p, then argmax under Gumbel noise.

The filters act in the order of Hugging Face's processors: temperature, top-k,
top-p on what top-k left (renormalised), min-p. Each keeps a prefix of the
tokens sorted by logit, so together they keep the shortest of the prefixes, which
is one threshold per row.
"""

from typing import NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax import noise


@flax.struct.dataclass
class Sampling:
  """The sampling parameters of each request; arrays, so that none is compiled in."""

  seed: jax.Array  # u32[B]
  request: jax.Array  # u32[B]  unique over the whole run
  temperature: jax.Array  # f32[B]  0 takes the likeliest token
  top_k: jax.Array  # i32[B]  0 is off
  top_p: jax.Array  # f32[B]  1 is off
  min_p: jax.Array  # f32[B]  0 is off; relative to the likeliest token


class Draw(NamedTuple):
  """One drawn token per row, and how likely and how certain it was."""

  token: jax.Array  # i32[B]
  logp: jax.Array  # f32[B]  log_softmax(logits / T), before filters; T=1 if T=0
  logp_filtered: jax.Array  # f32[B]  of the distribution it was drawn from
  margin: jax.Array  # f32[B]  how far the draw is from another outcome


def scale(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """Divides logits f32[B V] by each row's temperature; by 1 at temperature 0."""
  t = sampling.temperature
  return logits / jnp.where(t > 0, t, 1.0)[:, None]


def num_kept(ordered: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
  """Counts the top tokens that the filters leave.

  Worked row, top_p = 0.65 of p = 0.5 0.3 0.2: the mass before each is 0 0.5 0.8, so that
  two are kept; the bound would have to move by 0.15 to keep one more or less.

  Args:
    ordered: f32[B V]  scaled logits, descending
    sampling: of each row
  Returns:
    i32[B] in [1, V]; and f32[B], how little a filter's bound would have to move
    (in logits or in probability) to keep one token more or less
  """
  V = ordered.shape[-1]
  rank = jnp.arange(V)
  k = jnp.where(sampling.top_k > 0, sampling.top_k, V)[:, None]
  k = jnp.minimum(k, V)
  p = jax.nn.softmax(jnp.where(rank < k, ordered, -jnp.inf), -1)
  before = jnp.cumsum(p, -1) - p  # mass of the better tokens
  top_p = sampling.top_p[:, None]
  min_p = sampling.min_p[:, None]
  kept = (rank < k) & ((before < top_p) | (top_p >= 1)) & (p >= min_p * p[:, :1])
  count = jnp.maximum(jnp.sum(kept, -1), 1)

  last = jnp.take_along_axis(ordered, count[:, None] - 1, -1)
  following = jnp.take_along_axis(ordered, jnp.minimum(count, V - 1)[:, None], -1)
  # The last kept and the first that is not; the likeliest is kept in any case.
  near = (jnp.abs(rank - count[:, None] + 0.5) < 1) & (rank > 0)
  slack = jnp.minimum(
    jnp.where(top_p < 1, jnp.abs(before - top_p), jnp.inf),
    jnp.where(min_p > 0, jnp.abs(p - min_p * p[:, :1]), jnp.inf),
  )
  slack = jnp.min(jnp.where(near, slack, jnp.inf), -1)
  # Those two may also swap places, whichever filter drew the line between them.
  swap = jnp.where(count < V, (last - following)[:, 0], jnp.inf)
  return count, jnp.minimum(slack, swap)


def threshold(scaled: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
  """The least scaled logit that the filters leave, and the slack of `num_kept`.

  The vocabulary is sorted only if some row filters.

  Args:
    scaled: f32[B V]
    sampling: of each row
  Returns:
    f32[B], -inf where nothing filters; and f32[B]
  """

  def cut(scaled):
    ordered = -jnp.sort(-scaled, -1)
    count, slack = num_kept(ordered, sampling)
    return jnp.take_along_axis(ordered, count[:, None] - 1, -1)[:, 0], slack

  def keep_all(scaled):
    low = jnp.min(scaled, -1)
    return jnp.full_like(low, -jnp.inf), jnp.full_like(low, jnp.inf)

  filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
  return jax.lax.cond(jnp.any(filters), cut, keep_all, scaled)


def argmax(x: jax.Array) -> jax.Array:
  """The first index i32[B] of the maximum of f32[B V], by two plain reductions.

  XLA's own argmax reduces pairs, which its CPU backend does not vectorise: four
  times slower here, a quarter of a decoding step.
  """
  V = x.shape[-1]
  best = x == jnp.max(x, -1, keepdims=True)
  first = jnp.min(jnp.where(best, jnp.arange(V, dtype=jnp.int32), V), -1)
  return jnp.minimum(first, V - 1)  # of a row of NaN, any


def repeat(sampling: Sampling, count: int) -> Sampling:
  """Repeats each row `count` times: B -> B * count rows, a row's side by side."""
  return jax.tree.map(lambda x: jnp.repeat(x, count, 0), sampling)


def contest(
  logits: jax.Array,
  sampling: Sampling,
  position: jax.Array,
  ids: jax.Array | None = None,
) -> jax.Array:
  """The perturbed logits whose argmax `draw` takes: f32[B V], -inf where filtered out.

  Args:
    logits, sampling, position: as for `draw`
    ids: i32[V], whose noise each logit gets, where logits are of some tokens only
  """
  _check_rows(logits, position)
  scaled = scale(logits, sampling)
  cut, _ = threshold(scaled, sampling)
  return jnp.where(
    scaled >= cut[:, None], _perturb(scaled, sampling, position, ids), -jnp.inf
  )


def _check_rows(logits: jax.Array, position: jax.Array) -> None:
  chex.assert_rank(logits, 2)
  chex.assert_shape(position, (logits.shape[0],))
  chex.assert_type([logits, position], [float, int])


def _perturb(scaled, sampling, position, ids=None):
  """Adds each row's noise, where it is drawn at all: f32[B V]."""
  key = noise.row_key(sampling.seed, sampling.request, position)
  g = noise.gumbel(key, jnp.arange(scaled.shape[-1]) if ids is None else ids)
  return scaled + jnp.where((sampling.temperature > 0)[:, None], g, 0.0)


def draw(logits: jax.Array, sampling: Sampling, position: jax.Array) -> Draw:
  """Draws the token of each row at `position`.

  A pure function of the row's own logits, sampling parameters and position.

  Args:
    logits: f32[B V]
    sampling: of each row
    position: i32[B]  index in the sequence of the token that is drawn
  """
  _check_rows(logits, position)
  scaled = scale(logits, sampling)
  cut, slack = threshold(scaled, sampling)
  kept = scaled >= cut[:, None]
  filtered = jnp.where(kept, scaled, -jnp.inf)
  perturbed = _perturb(scaled, sampling, position)
  runners = jnp.where(kept, perturbed, -jnp.inf)
  token = argmax(runners)

  at = lambda x: jnp.take_along_axis(x, token[:, None], -1)[:, 0]
  won = at(runners)
  others = jnp.arange(logits.shape[-1]) != token[:, None]
  gap = won - jnp.max(jnp.where(others, runners, -jnp.inf), -1)
  # A filter's bound matters if the winner is the last one kept, or if the best of
  # those cut off would have won.
  edge = (at(scaled) <= cut) | (
    jnp.max(jnp.where(kept, -jnp.inf, perturbed), -1) > won
  )
  margin = jnp.minimum(gap, jnp.where(edge, slack, jnp.inf))
  logp_filtered = at(filtered) - jax.nn.logsumexp(filtered, -1)
  return Draw(
    token=token,
    logp=at(scaled) - jax.nn.logsumexp(scaled, -1),
    logp_filtered=jnp.where(sampling.temperature > 0, logp_filtered, 0.0),
    margin=margin,
  )
