"""The operations of a decoder for few rows in Triton; see `products` and `attention`.

Kernels that may run concurrently must not share their `count`. A number of rows M is not
compiled in: one kernel serves all batches with the same `padded(M)`.
"""

import jax
import jax.numpy as jnp
import triton

from tlt_jax.pallas_kernels import few_rows
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.pallas_kernels.few_rows import attention
from tlt_jax.pallas_kernels.few_rows import products

TILE = few_rows.TILE
_STEP = 64  # of k
_BLOCK, _SPLIT = 64, 512  # slots
_QUERIES = 64  # of a program, at most: more would spill registers
_LOG2E = 1.4426950408889634
# Not fused: the compiler's choice of products to fuse with sums depends on the shapes.
_OPTIONS = dict(num_warps=4, num_stages=6, fused=False)


def padded(rows: int) -> int:
  return max(16, triton.next_power_of_2(rows))


def _rows(M: int, D: int) -> list[jax.ShapeDtypeStruct]:
  wide = jax.ShapeDtypeStruct((M, D), jnp.bfloat16)
  return [wide, wide, jax.ShapeDtypeStruct((D // TILE, M), jnp.float32)]


def _squares(x: few_rows.Rows) -> tuple[jax.Array, int]:
  """The squares and their tiles; without a norm no tile of what is not read."""
  return (x.scaled, 0) if x.squares is None else (x.squares, len(x.squares))


def enter(
  tokens: jax.Array, embedding: jax.Array, scale: jax.Array, counts: int
) -> tuple[few_rows.Rows, jax.Array]:
  """The embeddings bf16[V D] of tokens i32[M]; `scale` bf16[D] of the first norm.

  Also makes the zeros i32[counts] in which the other kernels of a pass count.
  """
  (M,), D = tokens.shape, embedding.shape[1]
  *rows, count = triton_call.triton_call(
    tokens, embedding, scale, M,
    kernel=products.enter,
    out_type=[*_rows(M, D), jax.ShapeDtypeStruct((counts,), jnp.int32)],
    grid=(D // TILE,),
    name="enter",
    D=D, R=padded(M), BN=TILE, COUNT=counts,
    **_OPTIONS,
  )  # fmt: skip
  return few_rows.Rows(*rows), count


def qkv(
  x: few_rows.Rows,
  w: few_rows.Projections,
  at: few_rows.Places,
  count: jax.Array,
  k: jax.Array,
  v: jax.Array,
  eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Projects rows to queries, keys and values, and writes the latter to pools.

  Takes M rows, pools bf16[P K L H], and `count` i32[heads or more] zeros. Returns queries
  bf16[M N H], and the pools.
  """
  (M, D), (squares, tiles) = x.scaled.shape, _squares(x)
  P, K, page, H = k.shape
  J, S = M // len(at.start), page * at.pages.shape[1]
  N, R = w.q.shape[0] // H, padded(M)
  heads = N + 2 * K
  splits = products.splits(D, heads, H)
  shape = jax.ShapeDtypeStruct
  unused = w.q  # of the right type
  _, q, k, v = triton_call.triton_call(
    x.scaled, squares, w.q, w.k, w.v, *(w.bias or [unused] * 3),
    *(w.norm or [unused] * 2), *at, count, k, v, M, J, S,
    kernel=products.qkv,
    out_type=[
      shape((heads * splits, M, H), jnp.float32),
      shape((M, N, H), k.dtype),
      shape(k.shape, k.dtype),
      shape(v.shape, v.dtype),
    ],
    grid=(heads, splits),
    name="qkv",
    aliases={16: 2, 17: 3},
    D=D, N=N, KV=K, SINK=P - 1, H=H, PAGE=page, TILES=tiles, EPS=eps,
    BIAS=w.bias is not None, NORM=w.norm is not None, R=R, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )  # fmt: skip
  return q, k, v


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  nodes: few_rows.Nodes,
  pages: jax.Array,
  count: jax.Array,
) -> jax.Array:
  """Attends from bf16[B J N H] to pools bf16[P K L H] with a page table i32[B S/L].

  `count`: i32[B*K*J or more] zeros.
  """
  B, J, N, H = q.shape
  K, page = k.shape[1:3]
  L, A = nodes.path.shape[1:]
  if L == 1:  # a chain: what nodes see follows from their number
    nodes = few_rows.Nodes(*[nodes.start] * len(nodes))
  G, S = N // K, page * pages.shape[1]
  most = max(_QUERIES // G, 1)
  at_once = triton.cdiv(J, triton.cdiv(J, most))
  tiles, splits, R = triton.cdiv(J, at_once), triton.cdiv(S, _SPLIT), padded(at_once * G)
  shape = jax.ShapeDtypeStruct
  return triton_call.triton_call(
    q, k, v, pages, *nodes, count, J, S,
    kernel=attention.attend,
    out_type=[
      shape((B, K, tiles, splits, at_once * G, H), jnp.float32),
      shape((B, K, tiles, splits, 2, at_once * G), jnp.float32),
      shape(q.shape, q.dtype),
    ],
    grid=(splits * L, tiles, B * K),
    name="attend",
    G=G, K=K, H=H, L=L, A=A, PAGE=page, NODES=at_once, R=R, BLOCK=_BLOCK,
    SPLIT=_SPLIT, SCALE=H**-0.5 * _LOG2E,
    **(_OPTIONS | dict(num_stages=3)),
  )[-1]  # fmt: skip


def project(
  x: jax.Array, w: jax.Array, residual: jax.Array, scale: jax.Array, count: jax.Array
) -> few_rows.Rows:
  """bf16[M F] @ bf16[D F].T + bf16[M D], or [1 D]; `scale` bf16[D] of the next norm.

  `count`: i32[D/TILE or more] zeros.
  """
  (M, F), D = x.shape, w.shape[0]
  R, tiles = padded(M), D // TILE
  splits = products.splits(F, tiles, TILE)
  _, *rows = triton_call.triton_call(
    x, w, residual, scale, count, M,
    kernel=products.project,
    out_type=[
      jax.ShapeDtypeStruct((tiles * splits, M, TILE), jnp.float32),
      *_rows(M, D),
    ],
    grid=(tiles, splits),
    name="project",
    F=F, D=D, STRIDE=D if len(residual) == M else 0, R=R, BN=TILE, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )  # fmt: skip
  return few_rows.Rows(*rows)


def gate_up(
  x: few_rows.Rows, gate: jax.Array, up: jax.Array, count: jax.Array, eps: float
) -> jax.Array:
  """silu(x @ gate.T) * (x @ up.T): bf16[M F]; `count`: i32[F/TILE or more] zeros."""
  M, (F, D) = len(x.scaled), gate.shape
  R, tiles = padded(M), F // TILE
  splits = products.splits(D, tiles, 2 * TILE)
  shape = jax.ShapeDtypeStruct
  _, out = triton_call.triton_call(
    x.scaled, x.squares, gate, up, count, M,
    kernel=products.gate_up,
    out_type=[
      shape((tiles * 2 * splits, M, TILE) if splits > 1 else (1,), jnp.float32),
      shape((M, F), gate.dtype),
    ],
    grid=(tiles, splits),
    name="gate_up",
    D=D, F=F, TILES=x.squares.shape[0], EPS=eps,
    R=R, BN=TILE, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )  # fmt: skip
  return out


def head(x: few_rows.Rows, w: jax.Array, eps: float) -> jax.Array:
  """The logits f32[M V] of rows, normed, by bf16[V D]; V is at least `TILE`."""
  M, (V, D), (squares, tiles) = len(x.scaled), w.shape, _squares(x)
  return triton_call.triton_call(
    x.scaled, squares, w, M,
    kernel=products.head,
    out_type=jax.ShapeDtypeStruct((M, V), jnp.float32),
    grid=(triton.cdiv(V, TILE),),
    name="head",
    D=D, V=V, TILES=tiles, EPS=eps, R=padded(M), BN=TILE, BK=_STEP,
    **_OPTIONS,
  )  # fmt: skip


def product(x: jax.Array, w: jax.Array, count: jax.Array) -> jax.Array:
  """bf16[M F] @ bf16[D F].T: f32[M D]; `count`: i32[D/TILE or more] zeros."""
  (M, F), D = x.shape, w.shape[0]
  R, tiles = padded(M), D // TILE
  splits = products.splits(F, tiles, TILE)
  return triton_call.triton_call(
    x, w, count, M,
    kernel=products.product,
    out_type=[
      jax.ShapeDtypeStruct((tiles * splits, M, TILE), jnp.float32),
      jax.ShapeDtypeStruct((M, D), jnp.float32),
    ],
    grid=(tiles, splits),
    name="product",
    F=F, D=D, R=R, BN=TILE, BK=_STEP, SPLITS=splits,
    **_OPTIONS,
  )[-1]  # fmt: skip


def join(parts: jax.Array, residual: jax.Array, scale: jax.Array) -> few_rows.Rows:
  """f[parts M D], added in order, + bf16[M D]; `scale` bf16[D] of the next norm."""
  n, M, D = parts.shape
  made = triton_call.triton_call(
    parts, residual, scale, M,
    kernel=products.join,
    out_type=_rows(M, D),
    grid=(D // TILE,),
    name="join",
    PARTS=n, D=D, R=padded(M), BN=TILE,
    **_OPTIONS,
  )  # fmt: skip
  return few_rows.Rows(*made)
