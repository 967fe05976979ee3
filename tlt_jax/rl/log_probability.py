"""Log-probabilities and entropies of tokens, a block of the vocabulary at a time.

Online softmax over blocks, and a gradient that computes the logits of each block again
(Wijmans et al. 2024, https://arxiv.org/abs/2411.09009): those of `_TOKENS` tokens and
`_VOCABULARY` entries exist at a time, in the gradient as well. Sums are in float32.
"""

from collections.abc import Callable
import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels import shards
from tlt_jax.pallas_kernels import varying

_MASKED = -1e30  # finite: no NaN in a block none of whose tokens can be drawn
_TOKENS, _VOCABULARY = 2048, 4096  # of a block, about
_ALIGNED = 128  # blocks of the vocabulary have multiples of it


def scores(
  config: config_lib.ModelConfig,
  features: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """log p(target) and the entropy of p, f32[N] each.

  p has the logits f[N D] @ f[V D].T / f32[N], without tokens that the tokenizer lacks.
  The temperature has no gradient. A head that is split over `model` is not gathered.
  """
  N = len(targets)
  chex.assert_shape(features, (N, config.width))
  chex.assert_shape(head, (config.vocab_size, config.width))
  chex.assert_shape([targets, temperature], (N,))
  least = -(-N // _TOKENS)
  count = next((n for n in range(least, 2 * least) if N % n == 0), least)

  def cut(x, padding=0):
    widths = [(0, -N % count)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, widths, constant_values=padding)
    return x.reshape(count, -1, *x.shape[1:])

  of_tokens = cut(features), cut(targets), cut(temperature, 1)
  with jax.default_matmul_precision(target.matmul_precision(config.dtype)):
    found = _scores(config, head, *of_tokens)
  return tuple(x.reshape(-1)[:N] for x in found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(config, head, features, targets, temperature):
  """Of f[V D] and blocks of tokens f[n T D], i32[n T], f32[n T]: f32[n T] each."""
  return _forward(config, head, features, targets, temperature)[:2]


class _Head:
  """The head, or this device's part of it, in blocks."""

  def __init__(self, config, part: jax.Array, axis: str | None):
    self._config, self.part = config, part
    V = len(part)
    self.count = -(-V // _VOCABULARY)
    self._size = min(-(-V // (self.count * _ALIGNED)) * _ALIGNED, V)
    self._first = 0 if axis is None else jax.lax.axis_index(axis) * V

  def rows(self, i: jax.Array) -> jax.Array:
    """Where block i begins; the last one overlaps with the one before."""
    return jnp.minimum(i * self._size, len(self.part) - self._size)

  def take(self, x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, self.rows(i), self._size)

  def put(self, x: jax.Array, i: jax.Array, block: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, self.rows(i), 0)

  def logits(self, i, w, features, targets, temperature):
    """Of block i, f[T D] and f32[T]: f32[T block]; and which of them are the targets'."""
    token = self.rows(i) + jnp.arange(self._size)
    is_new = token >= i * self._size
    token += self._first
    logits = layers.linear(features, w, jnp.float32) / temperature[:, None]
    logits = layers.mask_unused(logits, self._config, token)
    is_target = is_new & (token == targets[:, None])
    return jnp.where(is_new, logits, _MASKED), is_target


def _forward(config, head, *of_tokens):
  """The scores, and the log of the sum of a token's exponentials."""

  def of_part(axis, part, features, targets, temperature):
    blocks = _Head(config, part, axis)

    def add_block(i, known):
      w = blocks.take(part, i).astype(features.dtype)

      def add(arrays):
        tokens, (largest, total, weighted, at_target) = arrays
        logits, is_target = blocks.logits(i, w, *tokens)
        new = jnp.maximum(largest, jnp.max(logits, -1))
        below, shrink = logits - new[:, None], jnp.exp(largest - new)
        weights = jnp.exp(below)
        weighted = (weighted + total * (largest - new)) * shrink
        weighted += jnp.sum(weights * below, -1)
        total = total * shrink + jnp.sum(weights, -1)
        at_target += jnp.sum(jnp.where(is_target, logits, 0), -1)
        return new, total, weighted, at_target

      return jax.lax.map(add, ((features, targets, temperature), known))

    zero = varying.like(jnp.zeros_like(temperature), part, features)
    start = zero + _MASKED, zero, zero, zero
    known = jax.lax.fori_loop(0, blocks.count, add_block, start)
    part_largest, total, weighted, at_target = known
    largest = shards.largest(part_largest, axis)
    below = part_largest - largest
    weighted = shards.add((weighted + total * below) * jnp.exp(below), axis)
    total = shards.add(total * jnp.exp(below), axis)
    at_target = shards.add(at_target, axis)
    log_total = jnp.log(total)
    entropy = log_total - weighted / total
    return at_target - largest - log_total, entropy, largest + log_total

  return _over_parts(of_part, PartitionSpec(), head, *of_tokens)


def _forward_saved(config, *args):
  trained = [() if x.perturbed else None for x in args[:2]]  # a tree keeps which
  args = [x.value for x in args]
  logp, entropy, log_sum = _forward(config, *args)
  return (logp, entropy), (trained, args, entropy, log_sum)


def _backward(config, saved, d_scores):
  (of_head, of_features), args, entropy, log_sum = saved
  d_logp, d_entropy = (
    jnp.zeros_like(entropy) if isinstance(d, jax.custom_derivatives.SymbolicZero) else d
    for d in d_scores
  )

  def of_part(axis, part, *of_tokens):
    blocks = _Head(config, part, axis)
    features = of_tokens[0]

    def add_block(i, gradient):
      d_part, d_features = gradient
      w = blocks.take(part, i).astype(features.dtype)

      def add(j, gradient):
        d_w, d_features = gradient
        *tokens, entropy, log_sum, d_logp, d_entropy = (x[j] for x in of_tokens)
        logits, is_target = blocks.logits(i, w, *tokens)
        logp = logits - log_sum[:, None]
        d_z = d_entropy[:, None] * (logp + entropy[:, None]) + d_logp[:, None]
        is_target &= logits > _MASKED  # else its logit is a constant
        d_z = jnp.where(is_target, d_logp[:, None], 0) - jnp.exp(logp) * d_z
        d_z = (d_z / tokens[2][:, None]).astype(w.dtype)
        if d_w is not None:
          d_w += _product("tv,td->vd", d_z, features[j])
        if d_features is not None:
          d_features = d_features.at[j].add(_product("tv,vd->td", d_z, w))
        return d_w, d_features

      d_w = None if d_part is None else blocks.take(d_part, i)
      start = d_w, d_features
      d_w, d_features = jax.lax.fori_loop(0, len(features), add, start)
      return None if d_part is None else blocks.put(d_part, i, d_w), d_features

    def zeros(wanted, x):
      return None if wanted is None else varying.like(jnp.zeros(x.shape), part, features)

    start = zeros(of_head, part), zeros(of_features, features)
    d_part, d_features = jax.lax.fori_loop(0, blocks.count, add_block, start)
    if axis is not None and d_features is not None:
      d_features = jax.lax.psum(d_features, axis)
    return d_part, d_features

  of_tokens = *args[1:], entropy, log_sum, d_logp, d_entropy
  specs = PartitionSpec(axes.MODEL), PartitionSpec()
  with jax.default_matmul_precision(target.matmul_precision(config.dtype)):
    made = _over_parts(of_part, specs, args[0], *of_tokens)
  made = [d if d is None else d.astype(x.dtype) for d, x in zip(made, args, strict=False)]
  return *made, None, None


_scores.defvjp(_forward_saved, _backward, symbolic_zeros=True)


def _product(how: str, x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.einsum(how, x, y, preferred_element_type=jnp.float32)


def _over_parts(f: Callable, out_specs, head: jax.Array, *args: jax.Array):
  """Calls f(axis, part of the head, *args); axis None: the head is not split."""
  mesh = axes.mesh_of_compiler()
  if mesh is None or axes.model_if_divides(mesh, len(head)) is None:
    return f(None, head, *args)
  return jax.shard_map(
    functools.partial(f, axes.MODEL),
    in_specs=(PartitionSpec(axes.MODEL), *(PartitionSpec() for _ in args)),
    out_specs=out_specs,
    axis_names={axes.MODEL},
  )(head, *args)
