"""Triton kernel: attention of a few nodes of draft trees to a paged cache.

Keys and values are the left operands of the tensor cores, like weights in `products`, so
that 16 to 64 queries run the same instructions in the same order over the same blocks of
slots. A split, `SPLIT` slots, is folded block by block; the last program of a row combines
its splits in order.

Slots are those of plain decoding: behind a row's `start` the tokens of a path. Before it
all nodes see the same slots, and one program serves all of them. A split that reaches
behind it is computed for each path, by a program of its own, for the nodes that own the
path. So a node gets the bits of a plain decoding step.
"""

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def _fold(
  state, q, k_ptr, v_ptr, pages_ptr, path_ptr, last, lo, hi, start, end, length,
  K: tl.constexpr, H: tl.constexpr, L: tl.constexpr, A: tl.constexpr,
  PAGE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
  largest, total, sum = state
  h, i = tl.arange(0, H), tl.arange(0, BLOCK)
  for block in range(lo, hi):
    slot = block * BLOCK + i
    if TAIL:
      own = slot
      if L > 1:
        depth = slot - start
        drafted = (depth >= 0) & (depth < A)
        own = tl.load(path_ptr + depth, mask=drafted, other=0)
        own = tl.where(depth < 0, slot, own)
      # Slots beyond are undefined, and 0 * NaN is NaN.
      exists = (slot < end) & (own < length)
      page = tl.load(pages_ptr + own // PAGE, mask=exists, other=0).to(tl.int64)
      at = (page * K * PAGE + own % PAGE) * H
      k = tl.load(k_ptr + at[:, None] + h[None, :], mask=exists[:, None], other=0.0)
      v = tl.load(v_ptr + at[None, :] + h[:, None], mask=exists[None, :], other=0.0)
    else:
      page = tl.load(pages_ptr + block * BLOCK // PAGE).to(tl.int64)
      at = (page * K * PAGE + block * BLOCK % PAGE) * H
      k = tl.load(k_ptr + at + (i[:, None] * H + h[None, :]))
      v = tl.load(v_ptr + at + (i[None, :] * H + h[:, None]))
    if _INTERPRETED:  # the interpreter multiplies the bits of bfloat16
      q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(k, q, input_precision="ieee") * SCALE
    if TAIL:
      seen = (slot[:, None] <= last[None, :]) & exists[:, None]
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
  return largest, total, sum


@triton.jit
def attend(
  q_ptr,  # bf16[B J K G H]
  k_ptr, v_ptr,  # bf16[P K PAGE H]
  pages_ptr,  # i32[B S/PAGE]
  start_ptr,  # i32[B]
  depth_ptr,  # i32[B J]; this and the next three are not read of chains, where L is 1
  owner_ptr,  # i32[B J]
  path_ptr,  # i32[B L A]
  paths_ptr,  # i32[B]
  count_ptr,  # i32[B K tiles], 0 before and after
  J,
  length,  # S
  sums_ptr,  # f32[B K tiles splits NODES*G H], scratch
  stats_ptr,  # f32[B K tiles splits 2 NODES*G], scratch
  out_ptr,  # bf16[B J K G H]
  G: tl.constexpr, K: tl.constexpr, H: tl.constexpr, L: tl.constexpr, A: tl.constexpr,
  PAGE: tl.constexpr, NODES: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
  SPLIT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Program (split and path, tile of NODES nodes, request and kv head)."""
  split, path = tl.program_id(0) // L, tl.program_id(0) % L
  tile, bk = tl.program_id(1), tl.program_id(2)
  b, head = bk // K, bk % K
  start = tl.load(start_ptr + b)
  end = tl.minimum(start + A, length)
  splits, whole = tl.cdiv(end, SPLIT), start // SPLIT  # whole: before the first path
  paths = 1
  if L > 1:
    paths = tl.load(paths_ptr + b)
  if split >= splits:
    return
  if path >= (1 if split < whole else paths):
    return
  r, h = tl.arange(0, R), tl.arange(0, H)
  node = tile * NODES + r // G
  valid = (r < NODES * G) & (node < J)
  at = ((b * J + node) * K + head) * G + r % G
  q = tl.load(q_ptr + at[None, :] * H + h[:, None], mask=valid[None, :], other=0.0)
  last, owned = start + node, valid
  if L > 1:
    last = start + tl.load(depth_ptr + b * J + node, mask=valid, other=0)
    owned &= tl.load(owner_ptr + b * J + node, mask=valid, other=0) == path
  k_ptr += head * PAGE * H  # this head in the pool's first page
  v_ptr += head * PAGE * H
  pages_ptr += b * (length // PAGE)
  path_ptr += (b * L + path) * A
  lo = split * (SPLIT // BLOCK)
  hi = tl.minimum(lo + SPLIT // BLOCK, tl.cdiv(end, BLOCK))
  tail = tl.maximum(tl.minimum(start // BLOCK, hi), lo)
  state = (
    tl.full((R,), _MASKED, tl.float32),
    tl.zeros((R,), tl.float32),
    tl.zeros((H, R), tl.float32),
  )
  state = _fold(
    state, q, k_ptr, v_ptr, pages_ptr, path_ptr, last, lo, tail, start, end, length,
    K, H, L, A, PAGE, BLOCK, SCALE, False,
  )  # fmt: skip
  largest, total, sum = _fold(
    state, q, k_ptr, v_ptr, pages_ptr, path_ptr, last, tail, hi, start, end, length,
    K, H, L, A, PAGE, BLOCK, SCALE, True,
  )  # fmt: skip
  row = bk * tl.num_programs(1) + tile
  here = row.to(tl.int64) * tl.cdiv(length, SPLIT) + split
  written = owned if split >= whole else valid
  Q: tl.constexpr = NODES * G
  sums_at = sums_ptr + (here * Q + r[None, :]) * H + h[:, None]
  tl.store(sums_at, sum, mask=written[None, :])
  tl.store(stats_ptr + here * 2 * Q + r, largest, mask=written)
  tl.store(stats_ptr + here * 2 * Q + Q + r, total, mask=written)
  tl.debug_barrier()  # all threads' stores come before the one thread's release
  programs = whole + (splits - whole) * paths
  if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") < programs - 1:
    return
  tl.store(count_ptr + row, 0)

  first = row.to(tl.int64) * tl.cdiv(length, SPLIT)
  largest = tl.full((R,), _MASKED, tl.float32)
  total = tl.zeros((R,), tl.float32)
  sums = tl.zeros((R, H), tl.float32)
  for i in range(0, splits):
    stats = stats_ptr + (first + i) * 2 * Q + r
    its = tl.load(stats, mask=valid, other=_MASKED, cache_modifier=".cg")
    new = tl.maximum(largest, its)
    mine, its = tl.exp2(largest - new), tl.exp2(its - new)
    its_total = tl.load(stats + Q, mask=valid, other=0.0, cache_modifier=".cg")
    total = total * mine + its_total * its
    part = sums_ptr + ((first + i) * Q + r[:, None]) * H + h[None, :]
    its_sums = tl.load(part, mask=valid[:, None], other=0.0, cache_modifier=".cg")
    sums = sums * mine[:, None] + its_sums * its[:, None]
    largest = new
  out = tl.where((total > 0)[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
  tl.store(out_ptr + at[:, None] * H + h[None, :], out.to(tl.bfloat16), mask=valid[:, None])
