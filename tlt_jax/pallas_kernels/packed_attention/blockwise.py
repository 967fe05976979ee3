"""packed_attention in plain jax.numpy, a block of queries and a block of keys at a time.

Online softmax, and its gradient from the log-sum-exp of each row: Dao et al. 2022,
https://arxiv.org/abs/2205.14135, algorithms 1 and 4. Only the scores of one pair of blocks
exist at a time. Blocks of keys after the queries, or before all of their segments and
windows, are skipped.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import varying

_MASKED = -1e30  # finite: no NaN in a fully masked row of a block
_BLOCK = 512  # tokens, about


def packed_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array,
  window: int | None = None,
) -> jax.Array:
  T = q.shape[1]
  count = max(round(T / _BLOCK), 1)
  size = -(-T // count)

  def pad(x, axis):
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, count * size - T
    return jnp.pad(x, widths)

  args = pad(q, 1), pad(k, 2), pad(v, 2), pad(segments, 1)
  return _attend(*args, size, window)[:, :T]


class _Blocks(NamedTuple):
  size: int
  segments: jax.Array  # i32[B T]
  window: int | None

  @property
  def count(self) -> int:
    return self.segments.shape[1] // self.size

  def take(self, x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

  def add(self, x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, self.take(x, i, 2) + y, i * self.size, 2)

  def queries(self, x: jax.Array, i: jax.Array, num_kv_heads: int) -> jax.Array:
    x = self.take(x, i, 1)
    x = x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[3]).transpose(0, 2, 3, 1, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[4])

  def of_queries(self, x: jax.Array) -> jax.Array:
    """Undoes `queries` for all blocks: f[count B K G*size *] -> f[B T N *]."""
    n, B, K, _, H = x.shape
    x = x.reshape(n, B, K, -1, self.size, H).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, n * self.size, -1, H)

  def first(self) -> jax.Array:
    """The first block of keys that each block of queries attends to: i32[count]."""
    starts = jnp.diff(self.segments, axis=1, prepend=-1) != 0
    at = jnp.where(starts, jnp.arange(starts.shape[1]), 0)
    at = jax.lax.cummax(at, axis=1)[:, :: self.size]  # start of a block's first segment
    first = jnp.min(at, 0)
    if self.window is not None:
      start = jnp.arange(self.count) * self.size
      first = jnp.maximum(first, start - self.window + 1)
    return first // self.size

  def scores(self, q_i: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    same = (
      self.take(self.segments, i, 1)[:, :, None] == self.take(self.segments, j, 1)[:, None]
    )
    token = jnp.arange(self.size)
    behind = (i - j) * self.size + token[:, None] - token
    mask = same & (behind >= 0)
    if self.window is not None:
      mask &= behind < self.window
    mask = jnp.tile(mask, (1, q_i.shape[2] // self.size, 1))[:, None]
    found = _product("bkqh,bksh->bkqs", q_i, self.take(k, j, 2))
    return jnp.where(mask, found, _MASKED)

  def over_keys(self, i: jax.Array, first: jax.Array, step, start):
    """Folds `step` over the blocks of keys that block i of queries attends to."""
    if self.count == 1:
      return step(0, start)
    return jax.lax.fori_loop(first[i], i + 1, step, start)


def _product(how: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """A product with float32 sums, and without rounding float32 inputs."""
  precision = "highest" if y.dtype == jnp.float32 else None
  return jnp.einsum(how, x, y, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, segments, size, window):
  return _forward(q, k, v, segments, size, window)[0]


def _forward(q, k, v, segments, size, window):
  blocks = _Blocks(size, segments, window)
  first, K, H = blocks.first(), k.shape[1], q.shape[3]

  def attend(_, i):
    q_i = blocks.queries(q, i, K) * H**-0.5
    zeros = varying.like(jnp.zeros((*q_i.shape[:3], H), jnp.float32), q)
    zero = zeros[..., :1]

    def add(j, carry):
      largest, total, out = carry
      scores = blocks.scores(q_i, k, i, j)
      new = jnp.maximum(largest, jnp.max(scores, -1, keepdims=True))
      weights, shrink = jnp.exp(scores - new), jnp.exp(largest - new)
      total = total * shrink + jnp.sum(weights, -1, keepdims=True)
      v_j = blocks.take(v, j, 2)
      seen = _product("bkqs,bksh->bkqh", weights.astype(v.dtype), v_j)
      return new, total, out * shrink + seen

    start = zero + _MASKED, zero, zeros
    largest, total, out = blocks.over_keys(i, first, add, start)
    return None, ((out / total).astype(q.dtype), largest + jnp.log(total))

  _, (out, log_sum) = jax.lax.scan(attend, None, jnp.arange(blocks.count))
  out = blocks.of_queries(out)
  return out, (q, k, v, segments, out, blocks.of_queries(log_sum))


def _backward(size, window, known, d_out):
  q, k, v, segments, out, log_sum = known
  blocks = _Blocks(size, segments, window)
  first, K, H = blocks.first(), k.shape[1], q.shape[3]
  delta = d_out.astype(jnp.float32) * out.astype(jnp.float32)
  delta = jnp.sum(delta, -1, keepdims=True)

  def attend(carry, i):
    q_i, d_out_i, log_sum_i, delta_i = (
      blocks.queries(x, i, K) for x in (q, d_out, log_sum, delta)
    )
    q_i = q_i * H**-0.5

    def add(j, carry):
      dq, dk, dv = carry
      weights = jnp.exp(blocks.scores(q_i, k, i, j) - log_sum_i)
      d_weights = _product("bkqh,bksh->bkqs", d_out_i, blocks.take(v, j, 2))
      d_scores = (weights * (d_weights - delta_i)).astype(q.dtype)
      dq += _product("bkqs,bksh->bkqh", d_scores, blocks.take(k, j, 2))
      dk = blocks.add(dk, j, _product("bkqs,bkqh->bksh", d_scores, q_i))
      dv = blocks.add(dv, j, _product("bkqs,bkqh->bksh", weights.astype(q.dtype), d_out_i))
      return dq, dk, dv

    dq = varying.like(jnp.zeros(q_i.shape, jnp.float32), q)
    dq, dk, dv = blocks.over_keys(i, first, add, (dq, *carry))
    return (dk, dv), (dq * H**-0.5).astype(q.dtype)

  zeros = varying.like(jnp.zeros(k.shape, jnp.float32), q)
  (dk, dv), dq = jax.lax.scan(attend, (zeros, zeros), jnp.arange(blocks.count))
  return blocks.of_queries(dq), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
