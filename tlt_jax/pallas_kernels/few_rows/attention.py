"""Triton kernel: attention to a cache for few queries.

Keys and values are the left operands of the tensor cores, like weights in `products`, so
that 16 to 128 queries run the same instructions in the same order over the same blocks of
slots. A node of a chain gets the bits of a plain decoding step. (Nodes of a tree do not:
their slots differ from their positions.) The last program of a row combines the row's
splits.
"""

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def _seen(bits_ptr, valid, offset, SIZE: tl.constexpr):
  bit = tl.zeros((offset.shape[0], valid.shape[0]), tl.int32)
  for i in tl.static_range((SIZE + 31) // 32):
    word = tl.load(bits_ptr + i, mask=valid, other=0).to(tl.uint32, bitcast=True)
    shifted = (word[None, :] >> (offset & 31)[:, None].to(tl.uint32)).to(tl.int32)
    bit = tl.where((offset >> 5 == i)[:, None], shifted & 1, bit)
  return tl.where((offset < 0)[:, None], 1, bit) == 1


@triton.jit
def _fold(
  state, q, k_ptr, v_ptr, bits_ptr, valid, lo, hi, start, end,
  H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
  TAIL: tl.constexpr,
):  # fmt: skip
  largest, total, sum = state
  h, i = tl.arange(0, H), tl.arange(0, BLOCK)
  k_ptrs = k_ptr + lo.to(tl.int64) * BLOCK * H + i[:, None] * H + h[None, :]
  v_ptrs = v_ptr + lo.to(tl.int64) * BLOCK * H + i[None, :] * H + h[:, None]
  for block in range(lo, hi):
    slot = block * BLOCK + i
    exists = slot < end  # slots beyond are undefined, and 0 * NaN is NaN
    if TAIL:
      k = tl.load(k_ptrs, mask=exists[:, None], other=0.0)
      v = tl.load(v_ptrs, mask=exists[None, :], other=0.0)
    else:
      k, v = tl.load(k_ptrs), tl.load(v_ptrs)
    if _INTERPRETED:  # the interpreter multiplies the bits of bfloat16
      q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(k, q, input_precision="ieee") * SCALE
    if TAIL:
      seen = _seen(bits_ptr, valid, slot - start, SIZE) & exists[:, None]
      scores = tl.where(seen, scores, _MASKED)
    new = tl.maximum(largest, tl.max(scores, 0))
    weights = tl.exp2(scores - new[None, :])
    if TAIL:  # `new` is _MASKED while a query has seen nothing
      weights = tl.where(seen, weights, 0.0)
    rescale = tl.exp2(largest - new)
    total = total * rescale + tl.sum(weights, 0)
    weights = weights.to(v.dtype)
    if _INTERPRETED:
      weights, v = weights.to(tl.float32), v.to(tl.float32)
    sum = tl.dot(v, weights, sum * rescale[None, :], input_precision="ieee")
    largest = new
    k_ptrs += BLOCK * H
    v_ptrs += BLOCK * H
  return largest, total, sum


@triton.jit
def attend(
  q_ptr,  # bf16[B J K G H]
  k_ptr, v_ptr,  # bf16[B K S H]
  start_ptr,  # i32[B]
  bits_ptr,  # i32[B J ceil(SIZE/32)]
  count_ptr,  # i32[B K], 0 before and after
  sums_ptr, stats_ptr,  # f32[B K splits R H], f32[B K splits 2 R], scratch
  out_ptr,  # bf16[B J K G H]
  J: tl.constexpr, G: tl.constexpr, K: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
  SIZE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
  SCALE: tl.constexpr,
):  # fmt: skip
  split, bk = tl.program_id(0), tl.program_id(1)
  b, head = bk // K, bk % K
  start = tl.load(start_ptr + b)
  end = tl.minimum(start + SIZE, S)
  splits = tl.cdiv(end, SPLIT)
  if split >= splits:
    return
  r, h = tl.arange(0, R), tl.arange(0, H)
  valid = r < J * G
  at = ((b * J + r // G) * K + head) * G + r % G
  q = tl.load(q_ptr + at[None, :] * H + h[:, None], mask=valid[None, :], other=0.0)
  k_ptr += bk.to(tl.int64) * S * H
  v_ptr += bk.to(tl.int64) * S * H
  bits_ptr += (b * J + r // G) * ((SIZE + 31) // 32)
  lo = split * (SPLIT // BLOCK)
  hi = tl.minimum(lo + SPLIT // BLOCK, tl.cdiv(end, BLOCK))
  tail = tl.maximum(tl.minimum(start // BLOCK, hi), lo)
  state = (
    tl.full((R,), _MASKED, tl.float32),
    tl.zeros((R,), tl.float32),
    tl.zeros((H, R), tl.float32),
  )
  state = _fold(
    state, q, k_ptr, v_ptr, bits_ptr, valid, lo, tail, start, end,
    H, SIZE, BLOCK, SCALE, False,
  )  # fmt: skip
  largest, total, sum = _fold(
    state, q, k_ptr, v_ptr, bits_ptr, valid, tail, hi, start, end,
    H, SIZE, BLOCK, SCALE, True,
  )  # fmt: skip
  here = bk.to(tl.int64) * tl.cdiv(S, SPLIT) + split
  tl.store(sums_ptr + (here * R + r[None, :]) * H + h[:, None], sum)
  tl.store(stats_ptr + here * 2 * R + r, largest)
  tl.store(stats_ptr + here * 2 * R + R + r, total)
  tl.debug_barrier()  # all threads' stores come before the one thread's release
  if tl.atomic_add(count_ptr + bk, 1, sem="acq_rel") < splits - 1:
    return
  tl.store(count_ptr + bk, 0)

  first = bk.to(tl.int64) * tl.cdiv(S, SPLIT)
  largest = tl.full((R,), _MASKED, tl.float32)
  total = tl.zeros((R,), tl.float32)
  sums = tl.zeros((R, H), tl.float32)
  for i in range(0, splits):
    stats = stats_ptr + (first + i) * 2 * R + r
    its = tl.load(stats, cache_modifier=".cg")
    new = tl.maximum(largest, its)
    mine, its = tl.exp2(largest - new), tl.exp2(its - new)
    total = total * mine + tl.load(stats + R, cache_modifier=".cg") * its
    part = sums_ptr + ((first + i) * R + r[:, None]) * H + h[None, :]
    sums = sums * mine[:, None] + tl.load(part, cache_modifier=".cg") * its[:, None]
    largest = new
  out = tl.where((total > 0)[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
  tl.store(out_ptr + at[:, None] * H + h[None, :], out.to(tl.bfloat16), mask=valid[:, None])
