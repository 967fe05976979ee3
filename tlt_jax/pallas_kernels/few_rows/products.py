"""Triton kernels: the matrix products of a decoder for few rows.

    enter    embeddings, and what the first RMSNorm needs of them
    qkv      RMSNorm, the three projections, bias, QK-norm, RoPE, the write to the cache
    project  a product, the residual, and what the next RMSNorm needs of the sum
    gate_up  RMSNorm, two products, SiLU
    head     RMSNorm, the product with the head
    product  a product, of a part of the columns
    join     such products of several devices, the residual, and what the RMSNorm needs

A tile is BN outputs of all rows. The weights are the left operand and the rows, padded to
R, the right one: a tensor core's M is never padded, and every R runs the same instruction
over the same k in the same order, so that a row's bits do not depend on the other rows.
A tile's k is split into SPLITS parts, by the shape of the weights alone. The last program
of a tile adds up the parts in order and applies the epilogue.

RMSNorm is split between two kernels. The kernel that makes a row x writes x * scale,
rounded, and the sum of squares of x per tile. The kernel that reads it multiplies by the
inverse root in its epilogue, so that its loop only loads and multiplies.

`count` is zeros, in which a kernel counts its programs; it is zeros again afterwards.
`enter` makes it, so that no other kernel has to.
"""

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def splits(k: int, tiles: int, wide: int = 64, bk: int = 64, programs: int = 120) -> int:
  """Splits of k, so that programs fill 132 SMs and read at most 320 KB each.

  Of a product with so many `tiles`, each of `wide` columns of weights; `bk` is a step of k.
  Where the next divisor of the steps would make far more programs, there are fewer.
  """
  steps = k // bk
  fitting = [
    s for s in range(1, steps + 1) if steps % s == 0 and k // s * wide * 2 <= 320 * 1024
  ]
  enough = [s for s in fitting if tiles * s >= programs]
  fewer = [s for s in fitting if tiles * s < programs]
  if enough and (not fewer or tiles * enough[0] <= 4 * programs):
    return enough[0]
  return fewer[-1]


@triton.jit
def _multiply(
  w_ptr, x_ptr, first, M, K: tl.constexpr,
  BN: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
  """f32[BN R]: w[BN K][:, first:] @ x[:, first:].T over STEPS * BK of k, in order."""
  n, r, k = tl.arange(0, BN), tl.arange(0, R), tl.arange(0, BK)
  w_ptrs = w_ptr + n[:, None] * K + (first + k)[None, :]
  x_ptrs = x_ptr + (first + k)[:, None] + r[None, :] * K
  acc = tl.zeros((BN, R), tl.float32)
  for _ in range(STEPS):
    w = tl.load(w_ptrs)
    x = tl.load(x_ptrs, mask=(r < M)[None, :], other=0.0)
    if _INTERPRETED:  # the interpreter multiplies the bits of bfloat16
      w, x = w.to(tl.float32), x.to(tl.float32)
    acc = tl.dot(w, x, acc, input_precision="ieee")
    w_ptrs += BK
    x_ptrs += BK
  return acc


@triton.jit
def _write_part(
  acc, part_ptr, tile, split, M, BN: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr
):
  n, r = tl.arange(0, BN), tl.arange(0, R)
  at = (tile * SPLITS + split) * M * BN + r[None, :] * BN + n[:, None]
  tl.store(part_ptr + at, acc, mask=(r < M)[None, :])


@triton.jit
def _make_part(
  w_ptr, x_ptr, part_ptr, tile, split, M, K: tl.constexpr,
  BN: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
  """Writes the part of a tile, w[BN K] @ x.T, that a split of k adds to it."""
  STEPS: tl.constexpr = K // SPLITS // BK
  first = split * (K // SPLITS)
  acc = _multiply(w_ptr, x_ptr, first, M, K, BN, R, BK, STEPS)
  _write_part(acc, part_ptr, tile, split, M, BN, R, SPLITS)


@triton.jit
def _is_last(count_ptr, tile, SPLITS: tl.constexpr):
  """Counts a program that has written its part; whether it is the tile's last."""
  tl.debug_barrier()  # all threads' stores come before the one thread's release
  last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
  if last:
    tl.store(count_ptr + tile, 0)
  return last


@triton.jit
def _add_up(
  part_ptr, tile, first, M, BN: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
  SPLITS: tl.constexpr,
):  # fmt: skip
  """f32[R WIDE]: outputs first..first+WIDE-1 of a tile, its parts added in order."""
  n, r = tl.arange(0, WIDE), tl.arange(0, R)
  at = tile * SPLITS * M * BN + r[:, None] * BN + first + n[None, :]
  valid = (r < M)[:, None]
  sum = tl.load(part_ptr + at, mask=valid, other=0.0, cache_modifier=".cg")
  for split in range(1, SPLITS):
    part = part_ptr + at + split * M * BN
    sum += tl.load(part, mask=valid, other=0.0, cache_modifier=".cg")
  return sum


@triton.jit
def _inverse_rms(
  squares_ptr, r, M, K: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr
):  # fmt: skip
  if TILES == 0:
    return tl.full(r.shape, 1.0, tl.float32)
  sum = tl.zeros(r.shape, tl.float32)
  for tile in range(TILES):
    sum += tl.load(squares_ptr + tile * M + r, mask=r < M, other=0.0)
  return tl.rsqrt(sum / K + EPS)


@triton.jit
def _write_rows(
  sum, scale_ptr, r, at, tile, M, sum_ptr, scaled_ptr, squares_ptr, BN: tl.constexpr
):
  """Writes a tile of residual sums f32[R BN], and the inputs of the next norm."""
  valid = (r < M)[:, None]
  sum = sum.to(tl.bfloat16)
  tl.store(sum_ptr + at, sum, mask=valid)
  sum = sum.to(tl.float32)
  scale = tl.load(scale_ptr + tile * BN + tl.arange(0, BN)).to(tl.float32)[None, :]
  tl.store(scaled_ptr + at, (sum * scale).to(tl.bfloat16), mask=valid)
  tl.store(squares_ptr + tile * M + r, tl.sum(sum * sum, 1), mask=r < M)


@triton.jit
def enter(
  token_ptr,  # i32[M]
  embedding_ptr,  # bf16[V D]
  scale_ptr,  # bf16[D], of the first RMSNorm
  M,
  sum_ptr,  # bf16[M D]
  scaled_ptr,  # bf16[M D]
  squares_ptr,  # f32[D/BN M]
  count_ptr,  # i32[COUNT], 0 afterwards
  D: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
  tile = tl.program_id(0)
  for first in range(tile * BN, COUNT, D):
    at = first + tl.arange(0, BN)
    tl.store(count_ptr + at, tl.zeros((BN,), tl.int32), mask=at < COUNT)
  r, n = tl.arange(0, R), tl.arange(0, BN)
  token = tl.load(token_ptr + r, mask=r < M, other=0).to(tl.int64)
  from_ptr = embedding_ptr + token[:, None] * D + tile * BN + n[None, :]
  x = tl.load(from_ptr, mask=(r < M)[:, None], other=0.0).to(tl.float32)
  at = r[:, None] * D + tile * BN + n[None, :]
  _write_rows(x, scale_ptr, r, at, tile, M, sum_ptr, scaled_ptr, squares_ptr, BN)


@triton.jit
def qkv(
  x_ptr,  # bf16[M D], times the norm's scale
  squares_ptr,  # f32[TILES M], of x; no TILES: no norm
  q_ptr, k_ptr, v_ptr,  # bf16[N*H D], bf16[K*H D] twice
  q_bias_ptr, k_bias_ptr, v_bias_ptr,  # bf16[heads*H]; not read without BIAS
  q_norm_ptr, k_norm_ptr,  # bf16[H]; not read without NORM
  cos_ptr, sin_ptr,  # f32[S or more, H/2]
  position_ptr,  # i32[M]
  start_ptr,  # i32[B], the slot of each request's first row
  pages_ptr,  # i32[B S/PAGE]
  count_ptr,  # i32[heads], 0 before and after
  k_was_ptr, v_was_ptr,  # the pools, which are written in place
  M, J, length,  # J rows of each request; S
  part_ptr,  # f32[heads SPLITS M H], scratch
  q_out_ptr,  # bf16[M N H]
  k_pool_ptr, v_pool_ptr,  # bf16[P K PAGE H]
  D: tl.constexpr, N: tl.constexpr, KV: tl.constexpr, SINK: tl.constexpr,
  H: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr,
  BIAS: tl.constexpr, NORM: tl.constexpr,
  R: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
  """Program (head, split): a head of q, k or v.

  Keys and values of row j of a request are written to slot start + j, unless that has no
  page, or page SINK.
  """
  head, split = tl.program_id(0), tl.program_id(1)
  own = head if head < N else (head - N) % KV
  w_ptr = q_ptr if head < N else (k_ptr if head < N + KV else v_ptr)
  w_ptr += own * H * D  # one loop for all three, for less shared memory
  _make_part(w_ptr, x_ptr, part_ptr, head, split, M, D, H, R, BK, SPLITS)
  if not _is_last(count_ptr, head, SPLITS):
    return

  HALF: tl.constexpr = H // 2
  r, h = tl.arange(0, R), tl.arange(0, HALF)
  valid = (r < M)[:, None]
  by = _inverse_rms(squares_ptr, r, M, D, TILES, EPS)[:, None]
  a = _add_up(part_ptr, head, 0, M, H, R, HALF, SPLITS) * by
  b = _add_up(part_ptr, head, HALF, M, H, R, HALF, SPLITS) * by
  if BIAS:
    bias_ptr = q_bias_ptr if head < N else (k_bias_ptr if head < N + KV else v_bias_ptr)
    a += tl.load(bias_ptr + own * H + h).to(tl.float32)[None, :]
    b += tl.load(bias_ptr + own * H + HALF + h).to(tl.float32)[None, :]
  request = r // J
  slot = tl.load(start_ptr + request, mask=r < M, other=0) + r % J
  exists = (r < M) & (slot < length)
  page_at = pages_ptr + request * (length // PAGE) + slot // PAGE
  page = tl.load(page_at, mask=exists, other=SINK)
  row = (page.to(tl.int64) * KV + own) * PAGE + slot % PAGE
  kept = (page != SINK)[:, None]
  if head >= N + KV:
    out = v_pool_ptr + row[:, None] * H + h[None, :]
    tl.store(out, a.to(tl.bfloat16), mask=kept)
    tl.store(out + HALF, b.to(tl.bfloat16), mask=kept)
    return
  if NORM:
    norm_ptr = q_norm_ptr if head < N else k_norm_ptr
    rms = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / H + EPS)[:, None]
    a *= rms * tl.load(norm_ptr + h).to(tl.float32)[None, :]
    b *= rms * tl.load(norm_ptr + HALF + h).to(tl.float32)[None, :]
  # Beyond the table are only rows that have no slot.
  position = tl.minimum(tl.load(position_ptr + r, mask=r < M, other=0), length - 1)
  at = position[:, None] * HALF + h[None, :]
  cos = tl.load(cos_ptr + at, mask=valid, other=0.0)
  sin = tl.load(sin_ptr + at, mask=valid, other=0.0)
  c, d = a * cos - b * sin, b * cos + a * sin
  if head < N:
    out = q_out_ptr + (r[:, None] * N + head) * H + h[None, :]
    kept = valid
  else:
    out = k_pool_ptr + row[:, None] * H + h[None, :]
  tl.store(out, c.to(tl.bfloat16), mask=kept)
  tl.store(out + HALF, d.to(tl.bfloat16), mask=kept)


@triton.jit
def project(
  x_ptr,  # bf16[M F]
  w_ptr,  # bf16[D F]
  residual_ptr,  # bf16[M D]; or bf16[1 D] for all rows, with STRIDE 0
  scale_ptr,  # bf16[D], of the next RMSNorm
  count_ptr,  # i32[D/BN], 0 before and after
  M,
  part_ptr,  # f32[D/BN SPLITS M BN], scratch
  sum_ptr,  # bf16[M D]
  scaled_ptr,  # bf16[M D]
  squares_ptr,  # f32[D/BN M]
  F: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr,
  R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
  """Program (tile, split): sum = residual + x @ w, and the inputs of the next norm."""
  tile, split = tl.program_id(0), tl.program_id(1)
  w_ptr += tile * BN * F
  _make_part(w_ptr, x_ptr, part_ptr, tile, split, M, F, BN, R, BK, SPLITS)
  if not _is_last(count_ptr, tile, SPLITS):
    return
  r, n = tl.arange(0, R), tl.arange(0, BN)
  valid = (r < M)[:, None]
  column = tile * BN + n[None, :]
  at = r[:, None] * D + column
  sum = _add_up(part_ptr, tile, 0, M, BN, R, BN, SPLITS)
  residual_ptr += r[:, None] * STRIDE + column
  sum += tl.load(residual_ptr, mask=valid, other=0.0).to(tl.float32)
  _write_rows(sum, scale_ptr, r, at, tile, M, sum_ptr, scaled_ptr, squares_ptr, BN)


@triton.jit
def gate_up(
  x_ptr,  # bf16[M D], times the norm's scale
  squares_ptr,  # f32[TILES M], of x
  gate_ptr, up_ptr,  # bf16[F D]
  count_ptr,  # i32[F/BN], 0 before and after
  M,
  part_ptr,  # f32[F/BN 2 SPLITS M BN], scratch; not written if there is one part
  out_ptr,  # bf16[M F]
  D: tl.constexpr, F: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr,
  R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
  tile, split = tl.program_id(0), tl.program_id(1)
  n, r, k = tl.arange(0, BN), tl.arange(0, R), tl.arange(0, BK)
  at = (tile * BN + n)[:, None] * D + (split * (D // SPLITS) + k)[None, :]
  gate_ptrs, up_ptrs = gate_ptr + at, up_ptr + at
  x_ptrs = x_ptr + (split * (D // SPLITS) + k)[:, None] + r[None, :] * D
  gate, up = tl.zeros((BN, R), tl.float32), tl.zeros((BN, R), tl.float32)
  for _ in range(D // SPLITS // BK):  # not `_multiply` twice, for less shared memory
    g, u = tl.load(gate_ptrs), tl.load(up_ptrs)
    x = tl.load(x_ptrs, mask=(r < M)[None, :], other=0.0)
    if _INTERPRETED:
      g, u, x = g.to(tl.float32), u.to(tl.float32), x.to(tl.float32)
    gate = tl.dot(g, x, gate, input_precision="ieee")
    up = tl.dot(u, x, up, input_precision="ieee")
    gate_ptrs += BK
    up_ptrs += BK
    x_ptrs += BK
  if SPLITS == 1:
    by = _inverse_rms(squares_ptr, r, M, D, TILES, EPS)[None, :]
    gate, up = gate * by, up * by
    out = gate / (1.0 + tl.exp(-gate)) * up
    at = r[None, :] * F + tile * BN + n[:, None]
    tl.store(out_ptr + at, out.to(tl.bfloat16), mask=(r < M)[None, :])
    return
  _write_part(gate, part_ptr, 2 * tile, split, M, BN, R, SPLITS)
  _write_part(up, part_ptr, 2 * tile + 1, split, M, BN, R, SPLITS)
  if not _is_last(count_ptr, tile, SPLITS):
    return
  by = _inverse_rms(squares_ptr, r, M, D, TILES, EPS)[:, None]
  g = _add_up(part_ptr, 2 * tile, 0, M, BN, R, BN, SPLITS) * by
  u = _add_up(part_ptr, 2 * tile + 1, 0, M, BN, R, BN, SPLITS) * by
  out = g / (1.0 + tl.exp(-g)) * u
  at = r[:, None] * F + tile * BN + n[None, :]
  tl.store(out_ptr + at, out.to(tl.bfloat16), mask=(r < M)[:, None])


@triton.jit
def head(
  x_ptr,  # bf16[M D], times the final norm's scale
  squares_ptr,  # f32[TILES M], of x; no TILES: no norm
  w_ptr,  # bf16[V D]
  M,
  out_ptr,  # f32[M V]
  D: tl.constexpr, V: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr,
  R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
  """Program (tile); there are enough tiles not to split k."""
  first = tl.program_id(0) * BN
  n, r = tl.arange(0, BN), tl.arange(0, R)
  valid = (r < M)[None, :]
  if V % BN:  # the last tile is moved to the left, and writes only what is its own
    own = tl.minimum(first, V - BN)
    valid &= (own + n >= first)[:, None]
    first = own
  acc = _multiply(w_ptr + first.to(tl.int64) * D, x_ptr, 0, M, D, BN, R, BK, D // BK)
  by = _inverse_rms(squares_ptr, r, M, D, TILES, EPS)[None, :]
  out = out_ptr + r[None, :].to(tl.int64) * V + first + n[:, None]
  tl.store(out, acc * by, mask=valid)


@triton.jit
def product(
  x_ptr,  # bf16[M F]
  w_ptr,  # bf16[D F]
  count_ptr,  # i32[D/BN], 0 before and after
  M,
  part_ptr,  # f32[D/BN SPLITS M BN], scratch
  out_ptr,  # f32[M D]
  F: tl.constexpr, D: tl.constexpr,
  R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
  """Program (tile, split): x @ w."""
  tile, split = tl.program_id(0), tl.program_id(1)
  w_ptr += tile * BN * F
  _make_part(w_ptr, x_ptr, part_ptr, tile, split, M, F, BN, R, BK, SPLITS)
  if not _is_last(count_ptr, tile, SPLITS):
    return
  r, n = tl.arange(0, R), tl.arange(0, BN)
  at = r[:, None] * D + tile * BN + n[None, :]
  sum = _add_up(part_ptr, tile, 0, M, BN, R, BN, SPLITS)
  tl.store(out_ptr + at, sum, mask=(r < M)[:, None])


@triton.jit
def join(
  product_ptr,  # f32 or bf16[PARTS M D], of the devices in order
  residual_ptr,  # bf16[M D]
  scale_ptr,  # bf16[D], of the next RMSNorm
  M,
  sum_ptr,  # bf16[M D]
  scaled_ptr,  # bf16[M D]
  squares_ptr,  # f32[D/BN M]
  PARTS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
  tile = tl.program_id(0)
  r, n = tl.arange(0, R), tl.arange(0, BN)
  valid = (r < M)[:, None]
  at = r[:, None] * D + tile * BN + n[None, :]
  sum = tl.load(product_ptr + at, mask=valid, other=0.0).to(tl.float32)
  for part in range(1, PARTS):
    its = tl.load(product_ptr + part * M * D + at, mask=valid, other=0.0)
    sum += its.to(tl.float32)
  sum += tl.load(residual_ptr + at, mask=valid, other=0.0).to(tl.float32)
  _write_rows(sum, scale_ptr, r, at, tile, M, sum_ptr, scaled_ptr, squares_ptr, BN)
