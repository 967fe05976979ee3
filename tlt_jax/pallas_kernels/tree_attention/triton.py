"""tree_attention for CUDA (Triton): flash decoding with the heads of a group in one tile.

`_attend` folds the blocks of one split of a row's cache into an online softmax, in units
of log2; `_combine` combines a row's splits (Flash-Decoding, Dao et al. 2023,
https://pytorch.org/blog/flash-decoding). Node j and head g of a kv head's group are row
j*G + g of its queries; a program has a tile of them.

Splits depend on the slots alone, and are combined in order: a row's result depends neither
on the batch nor on the length of the cache. But few short rows do not fill the GPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from tlt_jax.pallas_kernels import triton_call
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_UNSPLIT = 2**30  # slots of a split: more than any cache has
_LOG2E = 1.4426950408889634
_MASKED = tl.constexpr(-1e30)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _seen(bits_ptr, valid, offset, SIZE: tl.constexpr):
  bit = tl.zeros((valid.shape[0], offset.shape[0]), tl.int32)
  for i in tl.static_range((SIZE + 31) // 32):
    word = tl.load(bits_ptr + i, mask=valid, other=0).to(tl.uint32, bitcast=True)
    shifted = (word[:, None] >> (offset & 31)[None, :].to(tl.uint32)).to(tl.int32)
    bit = tl.where((offset >> 5 == i)[None, :], shifted & 1, bit)
  return tl.where((offset < 0)[None, :], 1, bit) == 1


@triton.jit
def _fold(
  state, q, k_ptr, v_ptr, bits_ptr, pages_ptr, valid, lo, hi, start, length,
  K: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
  SCALE: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
  largest, total, sum = state
  h, i = tl.arange(0, H), tl.arange(0, BLOCK)
  end = tl.minimum(start + SIZE, length)
  for block in range(lo, hi):
    slot = block * BLOCK + i
    exists = slot < end  # slots beyond are undefined, and 0 * NaN is NaN
    page = tl.load(pages_ptr + block * BLOCK // PAGE).to(tl.int64)
    # An int64 base, and int32 offsets that are the same for every block.
    at = (page * K * PAGE + block * BLOCK % PAGE) * H
    v_ptrs = v_ptr + at + (i[:, None] * H + h[None, :])
    k_ptrs = k_ptr + at + (h[:, None] + i[None, :] * H)
    if TAIL:
      k = tl.load(k_ptrs, mask=exists[None, :], other=0.0)
      v = tl.load(v_ptrs, mask=exists[:, None], other=0.0)
    else:
      k, v = tl.load(k_ptrs), tl.load(v_ptrs)
    if _INTERPRETED:  # the interpreter multiplies the bits of bfloat16
      q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * SCALE
    if TAIL:
      seen = _seen(bits_ptr, valid, slot - start, SIZE) & exists[None, :]
      scores = tl.where(seen, scores, _MASKED)
    new = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    if TAIL:  # `new` is _MASKED while a query has seen nothing
      weights = tl.where(seen, weights, 0.0)
    rescale = tl.exp2(largest - new)
    total = total * rescale + tl.sum(weights, 1)
    weights = weights.to(v.dtype)
    if _INTERPRETED:
      weights, v = weights.to(tl.float32), v.to(tl.float32)
    sum = tl.dot(weights, v, sum * rescale[:, None], input_precision="ieee")
    largest = new
  return largest, total, sum


@triton.jit
def _divide(sum, total):
  return tl.where((total > 0)[:, None], sum / tl.where(total > 0, total, 1.0)[:, None], 0.0)


@triton.jit
def _attend(
  q_ptr,  # [B J K G H]
  k_ptr,  # [P K PAGE H]
  v_ptr,  # as k_ptr
  start_ptr,  # i32[B]
  bits_ptr,  # i32[B J ceil(SIZE/32)]
  pages_ptr,  # i32[B S/PAGE]
  length,  # S
  sum_ptr,  # f32[B K splits J*G H], or if DIRECT the result, f[B J K G H]
  largest_ptr,  # f32[B K splits J*G]; not written if DIRECT
  total_ptr,  # as largest_ptr
  J: tl.constexpr, G: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
  SIZE: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
  SPLIT: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
  """Attends to one split: program (tile of rows, split, batch row and kv head).

  Splits beyond a row's length are not written.
  """
  tile, split, bk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
  b, head = bk // K, bk % K
  start = tl.load(start_ptr + b)
  end = tl.minimum(start + SIZE, length)
  lo = split * (SPLIT // BLOCK)
  hi = tl.minimum(lo + SPLIT // BLOCK, tl.cdiv(end, BLOCK))
  if lo >= hi:
    return
  row, h = tl.arange(0, ROWS), tl.arange(0, H)
  valid = (row < NODES * G) & (tile * NODES + row // G < J)
  # Offset of the tile's first row, and of the others relative to it.
  first = ((b.to(tl.int64) * J + tile * NODES) * K + head) * G
  at = (row // G * (K * G) + row % G)[:, None] * H + h[None, :]
  q = tl.load(q_ptr + first * H + at, mask=valid[:, None], other=0.0)
  k_ptr += head * PAGE * H  # this head in the pool's first page
  v_ptr += head * PAGE * H
  pages_ptr += b * (length // PAGE)
  bits_ptr += (b * J + tile * NODES + row // G) * ((SIZE + 31) // 32)
  state = (
    tl.full((ROWS,), _MASKED, tl.float32),
    tl.zeros((ROWS,), tl.float32),
    tl.zeros((ROWS, H), tl.float32),
  )
  tail = tl.minimum(hi, tl.maximum(lo, start // BLOCK))  # blocks before are seen whole
  state = _fold(
    state, q, k_ptr, v_ptr, bits_ptr, pages_ptr, valid, lo, tail, start, length,
    K, H, SIZE, BLOCK, SCALE, PAGE, TAIL=False,
  )  # fmt: skip
  largest, total, sum = _fold(
    state, q, k_ptr, v_ptr, bits_ptr, pages_ptr, valid, tail, hi, start, length,
    K, H, SIZE, BLOCK, SCALE, PAGE, TAIL=True,
  )  # fmt: skip
  if DIRECT:
    out = _divide(sum, total).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + first * H + at, out, mask=valid[:, None])
  else:
    first = (bk.to(tl.int64) * tl.num_programs(1) + split) * (J * G) + tile * NODES * G
    sum_ptrs = sum_ptr + first * H + (row[:, None] * H + h[None, :])
    tl.store(sum_ptrs, sum, mask=valid[:, None])
    tl.store(largest_ptr + first + row, largest, mask=valid)
    tl.store(total_ptr + first + row, total, mask=valid)


@triton.jit
def _combine(
  sum_ptr, largest_ptr, total_ptr,  # of `_attend`
  start_ptr,  # i32[B]
  length,  # S
  out_ptr,  # f[B J K G H]
  J: tl.constexpr, G: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
  SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
  """Combines a row's splits in order: program (tile of rows, row and head)."""
  tile, bk = tl.program_id(0), tl.program_id(1)
  b, head = bk // K, bk % K
  row, h = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, H)
  valid = row < J * G
  end = tl.minimum(tl.load(start_ptr + b) + SIZE, length)
  largest = tl.full((ROWS,), _MASKED, tl.float32)
  total = tl.zeros((ROWS,), tl.float32)
  sum = tl.zeros((ROWS, H), tl.float32)
  for split in range(0, tl.cdiv(end, SPLIT)):
    at = (bk.to(tl.int64) * tl.cdiv(length, SPLIT) + split) * (J * G) + row
    its_largest = tl.load(largest_ptr + at, mask=valid, other=_MASKED)
    its_sum = tl.load(
      sum_ptr + at[:, None] * H + h[None, :], mask=valid[:, None], other=0.0
    )
    new = tl.maximum(largest, its_largest)
    mine, its = tl.exp2(largest - new), tl.exp2(its_largest - new)
    total = total * mine + tl.load(total_ptr + at, mask=valid, other=0.0) * its
    sum = sum * mine[:, None] + its_sum * its[:, None]
    largest = new
  at = ((b.to(tl.int64) * J + row // G) * K + head) * G + row % G
  out = _divide(sum, total).to(out_ptr.dtype.element_ty)
  tl.store(out_ptr + at[:, None] * H + h[None, :], out, mask=valid[:, None])


class Tiles(NamedTuple):
  """Block sizes, which depend on the shapes of one row and head, not on the batch."""

  nodes: int  # of a program of `_attend`
  rows: int  # of it; a power of two, at least nodes * G
  block: int  # slots
  split: int  # slots
  warps: int
  stages: int

  @classmethod
  def of(cls, J: int, G: int, dtype) -> "Tiles":
    wide = jnp.dtype(dtype) == jnp.float32
    most = max((32 if wide else 128) // G, 1)
    nodes = triton.cdiv(J, triton.cdiv(J, most))
    rows = max(triton.next_power_of_2(nodes * G), 16)
    if wide:  # not by tensor cores, which round: what many rows need would spill
      return cls(nodes, rows, block=32, split=512, warps=8, stages=1)
    # With more rows, a split's partial result costs more relative to its keys and values.
    split, warps = (512, 4) if rows <= 64 else (1024, 8)
    if J > 4 * nodes:  # a prompt, whose tiles fill the GPU
      split = _UNSPLIT
    stages = 4 if rows <= 32 else 3
    return cls(nodes, rows, block=64, split=split, warps=warps, stages=stages)


def tree_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: seen_lib.Seen, pages: jax.Array
) -> jax.Array:
  """ValueError unless H is a power of two of at least 16."""
  B, J, N, H = q.shape
  K, page = v.shape[1:3]
  S = page * pages.shape[1]
  G = N // K
  if H < 16 or H & (H - 1):
    raise ValueError(
      f"the Triton kernel needs a head_dim of 16, 32, 64, ..., not {H}; choose the "
      'implementation "ref"'
    )
  cut = Tiles.of(J, G, q.dtype)
  splits = triton.cdiv(S, cut.split)
  shapes = dict(J=J, G=G, K=K, H=H, SIZE=seen.size, SPLIT=cut.split)
  out = jax.ShapeDtypeStruct(q.shape, q.dtype)
  unused = jax.ShapeDtypeStruct((1,), jnp.float32)
  sums = jax.ShapeDtypeStruct((B, K, splits, J * G, H), jnp.float32)
  stats = jax.ShapeDtypeStruct((B, K, splits, J * G), jnp.float32)
  attended = triton_call.triton_call(
    q, k, v, seen.start, seen.bits, pages, S,
    kernel=_attend,
    out_type=[sums, stats, stats] if splits > 1 else [out, unused, unused],
    grid=(triton.cdiv(J, cut.nodes), splits, B * K),
    name="tree_attention",
    num_warps=cut.warps,
    num_stages=cut.stages,
    NODES=cut.nodes,
    ROWS=cut.rows,
    BLOCK=cut.block,
    SCALE=H**-0.5 * _LOG2E,
    PAGE=page,
    DIRECT=splits == 1,
    **shapes,
  )  # fmt: skip
  if splits == 1:
    return attended[0]
  return triton_call.triton_call(
    *attended, seen.start, S,
    kernel=_combine,
    out_type=out,
    grid=(triton.cdiv(J * G, 16), B * K),
    name="tree_attention_combine",
    num_warps=4,
    num_stages=2,
    ROWS=16,
    **shapes,
  )  # fmt: skip
