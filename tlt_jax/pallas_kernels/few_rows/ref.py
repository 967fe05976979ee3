"""The operations of `triton` in jax.numpy, with the same roundings.

Sums are XLA's: bits may depend on the rows.
"""

import functools

import jax
import jax.numpy as jnp

from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels.tree_attention import ref as attention_ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def _inverse_rms(x: few_rows.Rows, eps: float) -> jax.Array:
  mean = jnp.sum(x.squares, 0) / x.sums.shape[-1]
  return jax.lax.rsqrt(mean + eps)[:, None]


def qkv(
  x: few_rows.Rows,
  w: few_rows.Projections,
  cos: jax.Array,
  sin: jax.Array,
  slot: jax.Array,
  count: jax.Array,
  k: jax.Array,
  v: jax.Array,
  eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  del count
  M, (B, _, _, H) = len(slot), k.shape
  by, made = _inverse_rms(x, eps), []
  for i, weights in enumerate((w.q, w.k, w.v)):
    y = _product(x.scaled, weights) * by
    if w.bias is not None:
      y += w.bias[i].astype(jnp.float32)
    y = y.reshape(M, -1, H)
    if i < 2:
      if w.norm is not None:
        y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
        y *= w.norm[i].astype(jnp.float32)
      a, b = jnp.split(y, 2, -1)
      c, s = cos[:, None], sin[:, None]
      y = jnp.concatenate([a * c - b * s, b * c + a * s], -1)
    made.append(y.astype(k.dtype))
  request = jnp.arange(M) // (M // B)
  k = k.at[request, :, slot].set(made[1], mode="drop")
  v = v.at[request, :, slot].set(made[2], mode="drop")
  return made[0], k, v


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: seen_lib.Seen, count: jax.Array
) -> jax.Array:
  del count
  pages = jnp.arange(len(q))[:, None]  # one page per row
  return attention_ref.tree_attention(q, k, v, seen, pages)


def project(
  x: jax.Array, w: jax.Array, residual: jax.Array, scale: jax.Array, count: jax.Array
) -> few_rows.Rows:
  del count
  total = _product(x, w) + residual.astype(jnp.float32)
  return few_rows.enter(total.astype(x.dtype), scale)


def gate_up(
  x: few_rows.Rows, gate: jax.Array, up: jax.Array, count: jax.Array, eps: float
) -> jax.Array:
  del count
  by = _inverse_rms(x, eps)
  g, u = _product(x.scaled, gate) * by, _product(x.scaled, up) * by
  return (jax.nn.silu(g) * u).astype(gate.dtype)
