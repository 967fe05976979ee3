"""The operations of `triton` in jax.numpy, with the same roundings.

Sums are XLA's: bits may depend on the rows.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import few_rows


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
  return jnp.dot(x, w.T, preferred_element_type=jnp.float32)


def _rows(x: jax.Array, scale: jax.Array) -> few_rows.Rows:
  wide = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(wide).reshape(len(x), -1, few_rows.TILE), -1).T
  return few_rows.Rows(x, (wide * scale.astype(jnp.float32)).astype(x.dtype), squares)


def enter(
  tokens: jax.Array, embedding: jax.Array, scale: jax.Array, counts: int
) -> tuple[few_rows.Rows, jax.Array]:
  return _rows(embedding[tokens], scale), jnp.zeros(counts, jnp.int32)


def qkv(
  x: few_rows.Rows,
  w: few_rows.Projections,
  at: few_rows.Places,
  count: jax.Array,
  k: jax.Array,
  v: jax.Array,
  eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  del count
  P, K, page, H = k.shape
  by, made = x.inverse_rms(eps), []
  cos, sin = at.cos[at.position], at.sin[at.position]
  for i, weights in enumerate((w.q, w.k, w.v)):
    y = _product(x.scaled, weights) * by
    if w.bias is not None:
      y += w.bias[i].astype(jnp.float32)
    y = y.reshape(len(cos), -1, H)
    if i < 2:
      if w.norm is not None:
        y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
        y *= w.norm[i].astype(jnp.float32)
      a, b = jnp.split(y, 2, -1)
      c, s = cos[:, None], sin[:, None]
      y = jnp.concatenate([a * c - b * s, b * c + a * s], -1)
    made.append(y.astype(k.dtype))
  J = len(cos) // len(at.start)
  slots = (at.start[:, None] + jnp.arange(J)).reshape(-1)
  request = jnp.arange(len(slots)) // J
  number = at.pages.at[request, slots // page].get(mode="fill", fill_value=P - 1)
  number = jnp.where(number == P - 1, P, number)  # of the sink page: not written

  def put(pool, new):
    return pool.at[number, :, slots % page].set(new, mode="drop")

  return made[0], put(k, made[1]), put(v, made[2])


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  nodes: few_rows.Nodes,
  pages: jax.Array,
  count: jax.Array,
) -> jax.Array:
  del count
  B, J, N, H = q.shape
  K, page = k.shape[1:3]
  S, A = page * pages.shape[1], nodes.path.shape[2]
  slot = jnp.arange(S)
  depth = jnp.clip(slot - nodes.start[:, None], 0, A - 1)[:, None]
  drafted = jnp.take_along_axis(nodes.path, depth, -1)  # i32[B L S]
  own = jnp.where(slot < nodes.start[:, None, None], slot, drafted)
  own = jnp.take_along_axis(own, nodes.owner[..., None], 1)  # i32[B J S]
  at = jnp.take_along_axis(pages[:, None], own // page, 2) * K * page + own % page
  at = at[..., None] + jnp.arange(K) * page  # i32[B J S K]
  keys, values = (x.reshape(-1, H)[at].astype(jnp.float32) for x in (k, v))
  seen = slot <= (nodes.start[:, None] + nodes.depth)[..., None]  # bool[B J S]
  values = jnp.where(seen[..., None, None], values, 0.0)
  grouped = q.reshape(B, J, K, -1, H).astype(jnp.float32)
  scores = jnp.einsum("bjkgh,bjskh->bjkgs", grouped, keys) * H**-0.5
  weights = jax.nn.softmax(jnp.where(seen[:, :, None, None], scores, -jnp.inf), -1)
  return jnp.einsum("bjkgs,bjskh->bjkgh", weights, values).reshape(q.shape).astype(q.dtype)


def project(
  x: jax.Array, w: jax.Array, residual: jax.Array, scale: jax.Array, count: jax.Array
) -> few_rows.Rows:
  del count
  total = _product(x, w) + residual.astype(jnp.float32)
  return _rows(total.astype(x.dtype), scale)


def gate_up(
  x: few_rows.Rows, gate: jax.Array, up: jax.Array, count: jax.Array, eps: float
) -> jax.Array:
  del count
  by = x.inverse_rms(eps)
  g, u = _product(x.scaled, gate) * by, _product(x.scaled, up) * by
  return (jax.nn.silu(g) * u).astype(gate.dtype)


def head(x: few_rows.Rows, w: jax.Array, eps: float) -> jax.Array:
  return _product(x.scaled, w) * x.inverse_rms(eps)


def product(x: jax.Array, w: jax.Array, count: jax.Array) -> jax.Array:
  del count
  return _product(x, w)


def join(parts: jax.Array, residual: jax.Array, scale: jax.Array) -> few_rows.Rows:
  total = functools.reduce(operator.add, [*parts.astype(jnp.float32), residual])
  return _rows(total.astype(residual.dtype), scale)
