"""Draws tokens: temperature, top-k, top-p and min-p, then argmax under Gumbel noise."""

from typing import NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax.pallas_kernels import find_cut
from tlt_jax.pallas_kernels import shards
from tlt_jax.pallas_kernels import verify_sample
from tlt_jax.pallas_kernels.verify_sample import parts


@flax.struct.dataclass
class Sampling:
  """The sampling parameters of each request; arrays, so that none is compiled in."""

  seed: jax.Array  # u32[B]
  request: jax.Array  # u32[B]  unique over the whole run
  temperature: jax.Array  # f32[B]  0 takes the likeliest token
  # Filters; all None where no request may have any, and programs need not look.
  top_k: jax.Array | None  # i32[B]  0 is off
  top_p: jax.Array | None  # f32[B]  1 is off
  min_p: jax.Array | None  # f32[B]  0 is off; relative to the likeliest token

  def without_filters(self) -> "Sampling":
    return self.replace(top_k=None, top_p=None, min_p=None)


class Draw(NamedTuple):
  """One drawn token per row, how likely it was, and how far from another."""

  token: jax.Array  # i32[B]
  logp: jax.Array  # f32[B]  log_softmax(logits / T), before filters; T=1 if T=0
  logp_filtered: jax.Array  # f32[B]  of the distribution it was drawn from
  margin: jax.Array  # f32[B]  how far the draw is from another outcome


def scale(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """Divides logits f32[B V] by each row's temperature; by 1 at temperature 0."""
  t = sampling.temperature
  return logits / jnp.where(t > 0, t, 1.0)[:, None]


def threshold(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """The least logit f32[B] of f32[B V] that each row's filters keep; -inf: all."""
  if sampling.top_k is None:
    return jnp.full_like(logits[:, 0], -jnp.inf)
  filters = sampling.top_k, sampling.top_p, sampling.min_p
  return find_cut.find_cut(logits, sampling.temperature, *filters)


def _slack(logits, cut, sampling) -> jax.Array:
  """The least distance of a filter's bound from one token more or less: f32[B].

  In logits over temperature or in probability; 0.15 in the worked row of `find_cut`.
  """
  only_top_k = sampling.replace(
    top_p=jnp.ones_like(sampling.top_p), min_p=jnp.zeros_like(sampling.min_p)
  )
  scaled = scale(logits, sampling)
  weight = jnp.exp(scaled - jnp.max(scaled, -1, keepdims=True))
  weight = jnp.where(logits >= threshold(logits, only_top_k)[:, None], weight, 0.0)
  total = jnp.sum(weight, -1)
  kept = logits >= cut[:, None]
  last = jnp.min(jnp.where(kept, scaled, jnp.inf), -1)
  following = jnp.max(jnp.where(kept, -jnp.inf, scaled), -1)
  most = jnp.max(scaled, -1)

  def distance(x):
    """Distance f32[B] of the bounds from scaled logit x; infinite from the likeliest."""
    above = jnp.sum(jnp.where(scaled > x[:, None], weight, 0.0), -1) / total
    own = jnp.max(jnp.where(scaled == x[:, None], weight, 0.0), -1) / total
    near = jnp.minimum(
      jnp.where(sampling.top_p < 1, jnp.abs(above - sampling.top_p), jnp.inf),
      jnp.where(sampling.min_p > 0, jnp.abs(own - sampling.min_p / total), jnp.inf),
    )
    return jnp.where((x < most) & jnp.isfinite(x), near, jnp.inf)

  # Those two may also swap places, whichever filter drew the line between them.
  swap = last - following
  return jnp.minimum(jnp.minimum(distance(last), distance(following)), swap)


def argmax(x: jax.Array) -> jax.Array:
  """The first index i32[B] of the maximum of f32[B V], by two plain reductions.

  XLA's own argmax reduces pairs, which its CPU backend does not vectorise: four times
  slower here, a quarter of a decoding step.
  """
  V = x.shape[-1]
  best = x == jnp.max(x, -1, keepdims=True)
  first = jnp.min(jnp.where(best, jnp.arange(V, dtype=jnp.int32), V), -1)
  return jnp.minimum(first, V - 1)  # of a row of NaN, any


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` largest of f32[B V]: log-softmax f32[B W] and tokens i32[B W], in order.

  No array of log-probabilities is made. Where the vocabulary is split over devices, each
  offers its own largest, and `count` numbers of each are exchanged.
  """

  def find(axis, logits):
    largest = shards.largest(jnp.max(logits, -1), axis)[:, None]
    own = jnp.sum(jnp.exp(logits - largest), -1)
    value, token = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    if axis is not None:
      token = token + jax.lax.axis_index(axis) * logits.shape[-1]
      values, tokens = (
        jnp.concatenate([*shards.side_by_side(x, axis)], -1) for x in (value, token)
      )
      value, at = jax.lax.top_k(values, count)
      token = jnp.take_along_axis(tokens, at, -1)
    logp = value - largest - jnp.log(shards.add(own, axis))[:, None]
    return logp, token.astype(jnp.int32)

  return shards.over_vocabulary(find, logits)


def repeat(sampling: Sampling, count: int) -> Sampling:
  """Repeats each row `count` times, a row's copies side by side."""
  return jax.tree.map(lambda x: jnp.repeat(x, count, 0), sampling)


def contest(
  logits: jax.Array, sampling: Sampling, position: jax.Array, ids: jax.Array | None = None
) -> jax.Array:
  """The perturbed logits whose argmax is drawn: f32[B V], -inf where filtered out.

  `ids` i32[V] are the tokens of the logits, if not all.
  """
  _check_rows(logits, position)
  kept = logits >= threshold(logits, sampling)[:, None]
  scaled = scale(logits, sampling)
  return jnp.where(kept, _perturb(scaled, sampling, position, ids), -jnp.inf)


def _check_rows(logits: jax.Array, position: jax.Array) -> None:
  chex.assert_rank(logits, 2)
  chex.assert_shape(position, (logits.shape[0],))
  chex.assert_type([logits, position], [float, int])


def _perturb(scaled, sampling, position, ids=None):
  key = noise.row_key(sampling.seed, sampling.request, position)
  g = noise.gumbel(key, jnp.arange(scaled.shape[-1]) if ids is None else ids)
  return scaled + jnp.where((sampling.temperature > 0)[:, None], g, 0.0)


def sample(
  logits: jax.Array, sampling: Sampling, position: jax.Array, impl: str | None = None
) -> parts.Sample:
  """Draws the token of each row f32[B V], for index `position` i32[B] of its sequence.

  A pure function of the row's own logits, sampling parameters and position.
  """
  _check_rows(logits, position)
  key = noise.row_key(sampling.seed, sampling.request, position)
  cut = None if sampling.top_k is None else threshold(logits, sampling)
  return verify_sample.verify_sample(logits, key, sampling.temperature, cut, impl=impl)


def draw(logits: jax.Array, sampling: Sampling, position: jax.Array) -> Draw:
  """Draws what `sample` does, with the margin: for comparisons."""
  _check_rows(logits, position)
  scaled = scale(logits, sampling)
  cut = threshold(logits, sampling)
  kept = logits >= cut[:, None]
  filtered = jnp.where(kept, scaled, -jnp.inf)
  perturbed = _perturb(scaled, sampling, position)
  runners = jnp.where(kept, perturbed, -jnp.inf)
  token = argmax(runners)

  def at(x):
    return jnp.take_along_axis(x, token[:, None], -1)[:, 0]

  won = at(runners)
  others = jnp.arange(logits.shape[-1]) != token[:, None]
  gap = won - jnp.max(jnp.where(others, runners, -jnp.inf), -1)
  # A filter's bound matters if the winner is the last one kept, or if the best of
  # those cut off would have won.
  edge = (at(logits) <= cut) | (jnp.max(jnp.where(kept, -jnp.inf, perturbed), -1) > won)
  margin = jnp.minimum(gap, jnp.where(edge, _slack(logits, cut, sampling), jnp.inf))
  logp_filtered = at(filtered) - jax.nn.logsumexp(filtered, -1)
  return Draw(
    token=token,
    logp=at(scaled) - jax.nn.logsumexp(scaled, -1),
    logp_filtered=jnp.where(sampling.temperature > 0, logp_filtered, 0.0),
    margin=margin,
  )
