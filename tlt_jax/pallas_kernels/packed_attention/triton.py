"""packed_attention for CUDA (Triton), with its gradients.

Online softmax in units of log2, and gradients from the log-sum-exp of each query:
FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691. A program of `_attend` and of
`_query_gradients` has a block of queries of one head, and one of `_key_gradients` a block
of keys and, one after the other, the heads of its group: no sum depends on the order in
which programs run.

A program finds the blocks that it needs by the segments of their first or last tokens, as
segments are contiguous. It computes masks only for blocks in which some query does not see
some key.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from tlt_jax.pallas_kernels import heads
from tlt_jax.pallas_kernels import triton_call

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load(
  ptr, stride, first, T, ROWS: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
  MASKED: tl.constexpr,
):  # fmt: skip
  """f[ROWS WIDE]: rows from `first` on, with zeros beyond H and, if MASKED, beyond T."""
  row, h = tl.arange(0, ROWS), tl.arange(0, WIDE)
  ptrs = ptr + first.to(tl.int64) * stride + (row[:, None] * stride + h[None, :])
  if MASKED:
    return tl.load(ptrs, mask=(first + row < T)[:, None] & (h < H)[None, :], other=0.0)
  if WIDE != H:
    return tl.load(ptrs, mask=(h < H)[None, :], other=0.0)
  return tl.load(ptrs)


@triton.jit
def _store(
  ptr, x, stride, first, T, ROWS: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr
):
  row, h = tl.arange(0, ROWS), tl.arange(0, WIDE)
  ptrs = ptr + first.to(tl.int64) * stride + (row[:, None] * stride + h[None, :])
  mask = (first + row < T)[:, None] & (h < H)[None, :]
  tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _product(x, y):
  if _INTERPRETED:  # the interpreter multiplies the bits of bfloat16
    x, y = x.to(tl.float32), y.to(tl.float32)
  # Of float32: about as exact as without tensor cores, for which registers would spill.
  return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _add_product(x, y, sum):
  x = x.to(y.dtype)
  if _INTERPRETED:
    x, y = x.to(tl.float32), y.to(tl.float32)
  return tl.dot(x, y, sum, input_precision="tf32x3")


@triton.jit
def _seen(query, of_query, key, of_key, WINDOW: tl.constexpr):
  """By positions and segments, of which one side has [:, None], the other [None, :]."""
  seen = (of_query == of_key) & (of_query != 0) & (query >= key)
  if WINDOW:
    seen &= query - key < WINDOW
  return seen


@triton.jit
def _keys(
  ids_ptr, first, T, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
  BLOCKS: tl.constexpr,
):  # fmt: skip
  """The blocks of keys of a block of queries: lo <= whole_lo <= whole_hi <= hi.

  Every query sees all keys of the blocks from `whole_lo` to before `whole_hi`.
  """
  last = tl.minimum(first + ROWS, T) - 1
  segment, block = tl.load(ids_ptr + first), tl.arange(0, BLOCKS)
  end = block * BLOCK + BLOCK - 1
  reaches = (end < first) & (segment != 0)
  reaches &= tl.load(ids_ptr + end, mask=reaches, other=0) == segment
  lo = tl.min(tl.where(reaches, block, first // BLOCK), 0)
  if WINDOW:
    lo = tl.maximum(lo, tl.maximum(first - WINDOW + 1, 0) // BLOCK)
  row = first + tl.arange(0, ROWS)
  filled = tl.load(ids_ptr + row, mask=row < T, other=0) != 0
  hi = tl.where(tl.max(filled.to(tl.int32), 0) == 1, last // BLOCK + 1, lo)
  whole_lo = tl.where(tl.load(ids_ptr + lo * BLOCK) == segment, lo, lo + 1)
  if WINDOW:
    whole_lo = tl.maximum(whole_lo, tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK))
  whole_lo = tl.minimum(whole_lo, hi)
  one = (segment != 0) & (tl.load(ids_ptr + last) == segment)
  whole_hi = tl.where(one, tl.maximum((first + 1) // BLOCK, whole_lo), whole_lo)
  return lo, whole_lo, whole_hi, hi


@triton.jit
def _queries(
  ids_ptr, first, T, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
  BLOCKS: tl.constexpr,
):  # fmt: skip
  """The blocks of queries of a block of keys, as `_keys` has them."""
  last = tl.minimum(first + ROWS, T) - 1
  segment, block = tl.load(ids_ptr + last), tl.arange(0, BLOCKS)
  start = block * BLOCK
  reaches = (start > last) & (start < T) & (segment != 0)
  reaches &= tl.load(ids_ptr + start, mask=reaches, other=0) == segment
  hi = tl.max(tl.where(reaches, block, last // BLOCK), 0) + 1
  if WINDOW:
    hi = tl.minimum(hi, tl.minimum(last + WINDOW - 1, T - 1) // BLOCK + 1)
  lo = first // BLOCK
  row = first + tl.arange(0, ROWS)
  filled = tl.load(ids_ptr + row, mask=row < T, other=0) != 0
  hi = tl.where(tl.max(filled.to(tl.int32), 0) == 1, hi, lo)
  end = hi * BLOCK - 1
  ends = tl.load(ids_ptr + end, mask=(end >= first) & (end < T), other=0) == segment
  whole_hi = tl.where(ends, hi, hi - 1)
  if WINDOW:
    whole_hi = tl.minimum(whole_hi, (first + WINDOW) // BLOCK)
  whole_lo = tl.minimum(tl.cdiv(last, BLOCK), hi)
  one = (segment != 0) & (tl.load(ids_ptr + first) == segment)
  whole_hi = tl.where(one, tl.maximum(whole_hi, whole_lo), whole_lo)
  return lo, whole_lo, whole_hi, hi


@triton.jit
def _attend_to(
  state, q, query, segment, k_ptr, v_ptr, ids_ptr, T, lo, hi, skip, skipped,
  H: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
  SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
  """Folds blocks `lo` to `hi` of keys; from `skip` on, those `skipped` further."""
  largest, total, sum = state
  for i in range(lo, hi):
    first = tl.where(i < skip, i, i + skipped) * KEYS
    k = _load(k_ptr, H, first, T, KEYS, H, WIDE, MASKED)
    v = _load(v_ptr, H, first, T, KEYS, H, WIDE, MASKED)
    scores = _product(q, tl.trans(k)) * SCALE
    if MASKED:
      key = first + tl.arange(0, KEYS)
      of_key = tl.load(ids_ptr + key, mask=key < T, other=0)
      seen = _seen(query[:, None], segment[:, None], key[None, :], of_key[None, :], WINDOW)
      scores = tl.where(seen, scores, _MASKED)
    new = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    if MASKED:  # `new` is _MASKED while a query has seen nothing
      weights = tl.where(seen, weights, 0.0)
    shrink = tl.exp2(largest - new)
    total = total * shrink + tl.sum(weights, 1)
    sum = _add_product(weights, v, sum * shrink[:, None])
    largest = new
  return largest, total, sum


@triton.jit
def _attend(
  q_ptr,  # [B T N H]
  k_ptr, v_ptr,  # [B K T H]
  ids_ptr,  # i32[B T]
  T,
  out_ptr,  # [B T N H]
  log_sum_ptr,  # f32[B N T], in units of log2
  N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
  QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
  WINDOW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Program (block of queries, the last first; row and head)."""
  first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
  bn = tl.program_id(1)
  b, n = (bn // N).to(tl.int64), bn % N
  of_queries, of_keys = (b * T * N + n) * H, (b * K + n // (N // K)) * T * H
  q_ptr += of_queries
  k_ptr += of_keys
  v_ptr += of_keys
  ids_ptr += b * T
  q = _load(q_ptr, N * H, first, T, QUERIES, H, WIDE, True)
  query = first + tl.arange(0, QUERIES)
  segment = tl.load(ids_ptr + query, mask=query < T, other=0)
  lo, whole_lo, whole_hi, hi = _keys(ids_ptr, first, T, QUERIES, KEYS, WINDOW, BLOCKS)
  state = (
    tl.full((QUERIES,), _MASKED, tl.float32),
    tl.zeros((QUERIES,), tl.float32),
    tl.zeros((QUERIES, WIDE), tl.float32),
  )
  state = _attend_to(
    state, q, query, segment, k_ptr, v_ptr, ids_ptr, T, whole_lo, whole_hi, whole_hi, 0,
    H, WIDE, KEYS, WINDOW, SCALE, False,
  )  # fmt: skip
  whole = whole_hi - whole_lo
  largest, total, sum = _attend_to(
    state, q, query, segment, k_ptr, v_ptr, ids_ptr, T, lo, hi - whole, whole_lo, whole,
    H, WIDE, KEYS, WINDOW, SCALE, True,
  )  # fmt: skip
  some = total > 0  # not of padding
  total = tl.where(some, total, 1.0)
  _store(out_ptr + of_queries, sum / total[:, None], N * H, first, T, QUERIES, H, WIDE)
  log_sum = tl.where(some, largest + tl.log2(total), 0.0)
  log_sum_ptr += bn.to(tl.int64) * T
  tl.store(log_sum_ptr + query, log_sum, mask=query < T)


@triton.jit
def _add_query_gradients(
  dq, q, d_out, log_sum, delta, query, segment, k_ptr, v_ptr, ids_ptr, T,
  lo, hi, skip, skipped, H: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
  WINDOW: tl.constexpr, SCALE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
  """Over blocks of keys as in `_attend_to`."""
  for i in range(lo, hi):
    first = tl.where(i < skip, i, i + skipped) * KEYS
    k = _load(k_ptr, H, first, T, KEYS, H, WIDE, MASKED)
    v = _load(v_ptr, H, first, T, KEYS, H, WIDE, MASKED)
    weights = tl.exp2(_product(q, tl.trans(k)) * SCALE - log_sum[:, None])
    if MASKED:
      key = first + tl.arange(0, KEYS)
      of_key = tl.load(ids_ptr + key, mask=key < T, other=0)
      seen = _seen(query[:, None], segment[:, None], key[None, :], of_key[None, :], WINDOW)
      weights = tl.where(seen, weights, 0.0)
    d_weights = _product(d_out, tl.trans(v))
    dq = _add_product(weights * (d_weights - delta[:, None]), k, dq)
  return dq


@triton.jit
def _query_gradients(
  q_ptr, k_ptr, v_ptr, ids_ptr,  # as of `_attend`
  out_ptr, d_out_ptr,  # [B T N H]
  log_sum_ptr,  # f32[B N T]
  T,
  dq_ptr,  # [B T N H]
  delta_ptr,  # f32[B N T]  sum of out * d_out, for `_key_gradients`
  N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
  QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
  WINDOW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Programs as of `_attend`."""
  first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
  bn = tl.program_id(1)
  b, n = (bn // N).to(tl.int64), bn % N
  of_queries, of_keys = (b * T * N + n) * H, (b * K + n // (N // K)) * T * H
  k_ptr += of_keys
  v_ptr += of_keys
  ids_ptr += b * T
  of_row = bn.to(tl.int64) * T
  query = first + tl.arange(0, QUERIES)
  segment = tl.load(ids_ptr + query, mask=query < T, other=0)
  out = _load(out_ptr + of_queries, N * H, first, T, QUERIES, H, WIDE, True)
  d_out = _load(d_out_ptr + of_queries, N * H, first, T, QUERIES, H, WIDE, True)
  delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
  tl.store(delta_ptr + of_row + query, delta, mask=query < T)
  q = _load(q_ptr + of_queries, N * H, first, T, QUERIES, H, WIDE, True)
  log_sum = tl.load(log_sum_ptr + of_row + query, mask=query < T, other=0.0)
  lo, whole_lo, whole_hi, hi = _keys(ids_ptr, first, T, QUERIES, KEYS, WINDOW, BLOCKS)
  dq = tl.zeros((QUERIES, WIDE), tl.float32)
  dq = _add_query_gradients(
    dq, q, d_out, log_sum, delta, query, segment, k_ptr, v_ptr, ids_ptr, T,
    whole_lo, whole_hi, whole_hi, 0, H, WIDE, KEYS, WINDOW, SCALE, False,
  )  # fmt: skip
  whole = whole_hi - whole_lo
  dq = _add_query_gradients(
    dq, q, d_out, log_sum, delta, query, segment, k_ptr, v_ptr, ids_ptr, T,
    lo, hi - whole, whole_lo, whole, H, WIDE, KEYS, WINDOW, SCALE, True,
  )  # fmt: skip
  dq *= SCALE / _LOG2E
  _store(dq_ptr + of_queries, dq, N * H, first, T, QUERIES, H, WIDE)


@triton.jit
def _add_key_gradients(
  state, k, v, key, segment, q_ptr, d_out_ptr, log_sum_ptr, delta_ptr, ids_ptr, T,
  lo, count, skip, skipped, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
  WIDE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
  MASKED: tl.constexpr,
):  # fmt: skip
  """Over `count` blocks of queries of each head, as `_attend_to` over those of keys."""
  dk, dv = state
  for j in range(0, G * count):
    head, i = j // count, lo + j % count
    first = tl.where(i < skip, i, i + skipped) * QUERIES
    q = _load(q_ptr + head * H, N * H, first, T, QUERIES, H, WIDE, MASKED)
    d_out = _load(d_out_ptr + head * H, N * H, first, T, QUERIES, H, WIDE, MASKED)
    query = first + tl.arange(0, QUERIES)
    at = head.to(tl.int64) * T + query
    exists = query < T
    log_sum = tl.load(log_sum_ptr + at, mask=exists, other=0.0)
    delta = tl.load(delta_ptr + at, mask=exists, other=0.0)
    weights = tl.exp2(_product(k, tl.trans(q)) * SCALE - log_sum[None, :])
    if MASKED:
      of_query = tl.load(ids_ptr + query, mask=exists, other=0)
      seen = _seen(
        query[None, :], of_query[None, :], key[:, None], segment[:, None], WINDOW
      )
      weights = tl.where(seen, weights, 0.0)
    dv = _add_product(weights, d_out, dv)
    d_weights = _product(v, tl.trans(d_out))
    dk = _add_product(weights * (d_weights - delta[None, :]), q, dk)
  return dk, dv


@triton.jit
def _key_gradients(
  q_ptr, k_ptr, v_ptr, ids_ptr,  # as of `_attend`
  d_out_ptr,  # [B T N H]
  log_sum_ptr, delta_ptr,  # f32[B N T]
  T,
  dk_ptr, dv_ptr,  # [B K T H]
  N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,
  QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
  WINDOW: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
  """Program (block of keys, row and kv head)."""
  first, bk = tl.program_id(0) * KEYS, tl.program_id(1)
  b, head = (bk // K).to(tl.int64), bk % K
  G: tl.constexpr = N // K
  of_queries, of_keys = (b * T * N + head * G) * H, bk.to(tl.int64) * T * H
  q_ptr += of_queries
  d_out_ptr += of_queries
  log_sum_ptr += (b * N + head * G) * T
  delta_ptr += (b * N + head * G) * T
  ids_ptr += b * T
  key = first + tl.arange(0, KEYS)
  segment = tl.load(ids_ptr + key, mask=key < T, other=0)
  k = _load(k_ptr + of_keys, H, first, T, KEYS, H, WIDE, True)
  v = _load(v_ptr + of_keys, H, first, T, KEYS, H, WIDE, True)
  lo, whole_lo, whole_hi, hi = _queries(ids_ptr, first, T, KEYS, QUERIES, WINDOW, BLOCKS)
  whole = whole_hi - whole_lo
  state = tl.zeros((KEYS, WIDE), tl.float32), tl.zeros((KEYS, WIDE), tl.float32)
  state = _add_key_gradients(
    state, k, v, key, segment, q_ptr, d_out_ptr, log_sum_ptr, delta_ptr, ids_ptr, T,
    whole_lo, whole, whole_hi, 0, N, G, H, WIDE, QUERIES, WINDOW, SCALE, False,
  )  # fmt: skip
  dk, dv = _add_key_gradients(
    state, k, v, key, segment, q_ptr, d_out_ptr, log_sum_ptr, delta_ptr, ids_ptr, T,
    lo, hi - lo - whole, whole_lo, whole, N, G, H, WIDE, QUERIES, WINDOW, SCALE, True,
  )  # fmt: skip
  dk *= SCALE / _LOG2E
  _store(dk_ptr + of_keys, dk, H, first, T, KEYS, H, WIDE)
  _store(dv_ptr + of_keys, dv, H, first, T, KEYS, H, WIDE)


class Tiles(NamedTuple):
  queries: int
  keys: int
  warps: int
  stages: int

  @classmethod
  def of(cls, kernel: str, wide: int, dtype) -> "Tiles":
    """For 99 KB of shared memory, which every GPU from compute capability 8.0 on has."""
    is_first, of_queries = kernel == "attend", kernel == "query_gradients"
    if jnp.dtype(dtype) == jnp.float32:
      if wide > 64 and not is_first:
        return cls(16 if of_queries else 32, 16, warps=8, stages=1)
      return cls(32, 32, warps=8, stages=2)
    if wide == 256:
      return cls(64 if is_first else 32, 32, warps=8, stages=2)
    if is_first:
      return cls(128, 64, warps=8, stages=2)
    if wide == 128:
      return cls(64, 32, 4, 3) if of_queries else cls(32, 64, 4, 2)
    return cls(64, 64, warps=4, stages=2)


def fits(head_dim: int, dtype) -> bool:
  """Whether a block and its sums fit into the registers."""
  return head_dim <= (128 if jnp.dtype(dtype) == jnp.float32 else 256)


def _call(name, kernel, args, out_type, H: int, N: int, K: int, window: int | None):
  ids = args[3]
  B, T = ids.shape
  wide = max(triton.next_power_of_2(H), 16)
  cut = Tiles.of(name, wide, args[0].dtype)
  own, other = cut.queries, cut.keys
  if name == "key_gradients":
    own, other = other, own
  return triton_call.triton_call(
    *args, T,
    kernel=kernel,
    out_type=out_type,
    grid=(triton.cdiv(T, own), B * (K if name == "key_gradients" else N)),
    name=f"packed_attention_{name}",
    num_warps=cut.warps,
    num_stages=cut.stages,
    N=N,
    K=K,
    H=H,
    WIDE=wide,
    QUERIES=cut.queries,
    KEYS=cut.keys,
    BLOCKS=triton.next_power_of_2(triton.cdiv(T, other)),
    WINDOW=window or 0,
    SCALE=H**-0.5 * _LOG2E.value,
  )  # fmt: skip


def _forward_of_shard(q, k, v, ids, window: int | None):
  B, T, N, H = q.shape
  out = jax.ShapeDtypeStruct(q.shape, q.dtype)
  log_sum = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
  args = q, k, v, ids
  return tuple(_call("attend", _attend, args, [out, log_sum], H, N, k.shape[1], window))


def _backward_of_shard(q, k, v, ids, out, log_sum, d_out, window: int | None):
  N, H, K = *q.shape[2:], k.shape[1]
  like_q, like_k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
  delta = jax.ShapeDtypeStruct(log_sum.shape, jnp.float32)
  args = q, k, v, ids, out, d_out, log_sum
  made = [like_q, delta]
  dq, delta = _call("query_gradients", _query_gradients, args, made, H, N, K, window)
  args = q, k, v, ids, d_out, log_sum, delta
  made = [like_k, like_k]
  return dq, *_call("key_gradients", _key_gradients, args, made, H, N, K, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed_attention(
  q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int | None
) -> jax.Array:
  """Padding gets zeros."""
  return _forward(q, k, v, segments, window)[0]


def _forward(q, k, v, segments, window):
  run = functools.partial(_forward_of_shard, window=window)
  args = q, k, v, segments
  out, log_sum = heads.over_heads(run, k.shape[1], args, (2, 1, 1, None), (2, 1))
  return out, (*args, out, log_sum)


def _backward(window, known, d_out):
  run = functools.partial(_backward_of_shard, window=window)
  args = *known, d_out
  axes = 2, 1, 1, None, 2, 1, 2
  return *heads.over_heads(run, known[1].shape[1], args, axes, (2, 1, 1)), None


packed_attention.defvjp(_forward, _backward)
