"""The operations of a layer for few rows in Triton; see `products` and `attention`.

Kernels that may run concurrently must not share their `count`.
"""

import jax
import jax.numpy as jnp
import triton

from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.pallas_kernels.few_rows import attention
from tlt_jax.pallas_kernels.few_rows import products
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

TILE = few_rows.TILE
_STEP = 64  # of k
_BLOCK, _SPLIT = 64, 512  # slots
_LOG2E = 1.4426950408889634
# Not fused: the compiler's choice of products to fuse with sums depends on the shapes.
_OPTIONS = dict(num_warps=4, num_stages=6, fused=False)


def padded(rows: int) -> int:
  return max(16, triton.next_power_of_2(rows))


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
  """Projects rows to queries, keys and values, and writes the latter to a cache.

  Takes M = B*J rows, node m % J of request m // J; cos and sin f32[M H/2]; `slot` i32[M] of
  the cache bf16[B K S H], S or more: not written; and `count` i32[heads or more] zeros.
  Returns queries bf16[M N H], and the cache.
  """
  M, D = x.scaled.shape
  B, K, S, H = k.shape
  N, R = w.q.shape[1] // H, padded(M)
  heads = N + 2 * K
  splits = products.splits(D, heads, H)
  shape = jax.ShapeDtypeStruct
  unused = w.q  # of the right type
  _, q, k, v = triton_call.triton_call(
    x.scaled, x.squares, w.q, w.k, w.v, *(w.bias or [unused] * 3),
    *(w.norm or [unused] * 2), cos, sin, slot, count, k, v,
    kernel=products.qkv,
    out_type=[
      shape((heads * splits * R * H,), jnp.float32),
      shape((M, N, H), k.dtype),
      shape(k.shape, k.dtype),
      shape(v.shape, v.dtype),
    ],
    grid=(heads, splits),
    name="qkv",
    aliases={14: 2, 15: 3},
    M=M, J=M // B, D=D, N=N, KV=K, H=H, S=S, TILES=x.squares.shape[0], EPS=eps,
    BIAS=w.bias is not None, NORM=w.norm is not None, R=R, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )  # fmt: skip
  return q, k, v


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: seen_lib.Seen, count: jax.Array
) -> jax.Array:
  """Attends from bf16[B J N H] to a cache bf16[B K S H]; `count`: i32[B*K] zeros."""
  B, J, N, H = q.shape
  K, S = k.shape[1:3]
  G, splits = N // K, triton.cdiv(S, _SPLIT)
  R = padded(J * G)
  shape = jax.ShapeDtypeStruct
  return triton_call.triton_call(
    q, k, v, seen.start, seen.bits, count,
    kernel=attention.attend,
    out_type=[
      shape((B, K, splits, R, H), jnp.float32),
      shape((B, K, splits, 2, R), jnp.float32),
      shape(q.shape, q.dtype),
    ],
    grid=(splits, B * K),
    name="attend",
    J=J, G=G, K=K, H=H, S=S, SIZE=seen.size, R=R, BLOCK=_BLOCK, SPLIT=_SPLIT,
    SCALE=H**-0.5 * _LOG2E,
    **(_OPTIONS | dict(num_stages=3)),
  )[-1]  # fmt: skip


def project(
  x: jax.Array, w: jax.Array, residual: jax.Array, scale: jax.Array, count: jax.Array
) -> few_rows.Rows:
  """bf16[M F] @ bf16[F D] + bf16[M D]; `scale` bf16[D] of the next norm.

  `count`: i32[D/TILE or more] zeros.
  """
  (M, F), D = x.shape, w.shape[1]
  R, tiles = padded(M), D // TILE
  splits = products.splits(F, tiles, TILE)
  shape = jax.ShapeDtypeStruct
  _, *rows = triton_call.triton_call(
    x, w, residual, scale, count,
    kernel=products.project,
    out_type=[
      shape((tiles * splits * R * TILE,), jnp.float32),
      shape((M, D), x.dtype),
      shape((M, D), x.dtype),
      shape((tiles, M), jnp.float32),
    ],
    grid=(tiles, splits),
    name="project",
    M=M, F=F, D=D, R=R, BN=TILE, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )  # fmt: skip
  return few_rows.Rows(*rows)


def gate_up(
  x: few_rows.Rows, gate: jax.Array, up: jax.Array, count: jax.Array, eps: float
) -> jax.Array:
  """silu(x @ gate) * (x @ up): bf16[M F]; `count`: i32[F/TILE or more] zeros."""
  M, (D, F) = len(x.scaled), gate.shape
  R, tiles = padded(M), F // TILE
  splits = products.splits(D, tiles, 2 * TILE)
  shape = jax.ShapeDtypeStruct
  _, out = triton_call.triton_call(
    x.scaled, x.squares, gate, up, count,
    kernel=products.gate_up,
    out_type=[
      shape((tiles * 2 * splits * R * TILE,), jnp.float32),
      shape((M, F), gate.dtype),
    ],
    grid=(tiles, splits),
    name="gate_up",
    M=M, D=D, F=F, TILES=x.squares.shape[0], EPS=eps,
    R=R, BN=TILE, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )  # fmt: skip
  return out
