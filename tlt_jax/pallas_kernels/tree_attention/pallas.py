"""tree_attention for TPUs (Mosaic): one pass over the blocks below each row's length.

A program folds the blocks of one kv head into an online softmax (Milakov & Gimelshein
2018; FlashAttention, https://arxiv.org/abs/2205.14135). The queries of a kv head are the
rows of one matrix, so that the cache is read once for all of them: node j and head g of
the group are row j*G + g.

The size of blocks is fixed, and they are folded in order: a row's result depends neither on
the other rows of the batch nor on the length of the cache.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from tlt_jax.pallas_kernels import hbm
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

BLOCK = 512  # slots of a block, or a page if it has fewer
ROWS = 512  # rows of a program, at most; more would not fit into VMEM
_MASKED = -1e30
_LANES = 128
_SUBLANES = 16  # of bfloat16; 8 of float32


def _bits(bits_ref, offset: jax.Array) -> jax.Array:
  """Bit `offset` i32[rows slots] of each row; 0 before and after the words."""
  bit = jnp.zeros_like(offset)
  for i in range(bits_ref.shape[1]):
    word = jnp.broadcast_to(bits_ref[:, i : i + 1], offset.shape)
    shifted = jax.lax.shift_right_logical(word, offset & 31)
    bit = jnp.where(offset >> 5 == i, shifted & 1, bit)
  return bit


def _kernel(
  start_ref,  # i32[B]
  q_ref,  # f[rows H]  scaled
  bits_ref,  # i32[rows words]
  k_ref,  # f[block H]
  v_ref,  # f[block H]
  o_ref,  # f[rows H]
  largest_ref,  # f32[rows lanes]  of the scores so far; all lanes are equal
  total_ref,  # f32[rows lanes]  of their exponentials, relative to the largest
  sum_ref,  # f32[rows H]  of the values, weighted by them
  *,
  size: int,
  length: int,
):
  block, step = v_ref.shape[0], pl.program_id(3)
  start, first = start_ref[pl.program_id(0)], step * block
  precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
  dot = functools.partial(
    jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32
  )

  @pl.when(step == 0)
  def _():
    largest_ref[...] = jnp.full_like(largest_ref, _MASKED)
    total_ref[...] = jnp.zeros_like(total_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)

  def fold(masked: bool):
    v = v_ref[...]
    scores = dot(q_ref[...], k_ref[...], (((1,), (1,)), ((), ())))  # f32[rows block]
    if masked:
      offset = first - start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
      seen = (offset < 0) | (_bits(bits_ref, offset) == 1)
      scores = jnp.where(seen, scores, _MASKED)
      # Slots that no node sees are undefined, and 0 * NaN is NaN.
      slot = first + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
      v = jnp.where(slot < jnp.minimum(start + size, length), v, jnp.zeros_like(v))
    before = largest_ref[...]
    largest = jnp.maximum(before, jnp.max(scores, -1, keepdims=True))
    weights = jnp.exp(scores - largest[:, :1])
    if masked:  # `largest` is _MASKED while a row has seen nothing
      weights = jnp.where(seen, weights, 0.0)
    rescale = jnp.exp(before - largest)
    total_ref[...] = total_ref[...] * rescale + jnp.sum(weights, -1, keepdims=True)
    weighted = dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    sum_ref[...] = sum_ref[...] * rescale[:, :1] + weighted
    largest_ref[...] = largest

  pl.when(first + block <= start)(lambda: fold(masked=False))
  pl.when((first + block > start) & (first < start + size))(lambda: fold(masked=True))

  @pl.when(step == pl.num_programs(3) - 1)
  def _():
    total = total_ref[:, :1]
    out = jnp.where(total > 0, sum_ref[...] / total, 0.0)  # 0 where it sees nothing
    o_ref[...] = out.astype(o_ref.dtype)


def _specs(rows: int, words: int, H: int, size: int, length: int, page: int) -> list:
  block = min(BLOCK, page)

  def seen(b, step, start):
    """The step's block, or the last that is seen, which is not read again."""
    last = jax.lax.div(jnp.minimum(start[b] + size, length) - 1, block)
    return jnp.minimum(step, last)

  def of_values(b, h, t, s, start, pages):
    number, per_page = seen(b, s, start), page // block
    return pages[b, jax.lax.div(number, per_page)], h, jax.lax.rem(number, per_page), 0

  values = pl.BlockSpec((None, None, block, H), of_values)
  return [
    pl.BlockSpec((None, None, rows, H), lambda b, h, t, s, *_: (b, h, t, 0)),
    pl.BlockSpec((None, rows, words), lambda b, h, t, s, *_: (b, t, 0)),
    values,
    values,
  ]


def tree_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen: seen_lib.Seen,
  pages: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  B, J, N, H = q.shape
  K, page = v.shape[1:3]
  S = page * pages.shape[1]
  G = N // K
  tiles = pl.cdiv(J * G, ROWS)
  rows = pl.cdiv(pl.cdiv(J * G, tiles), _SUBLANES) * _SUBLANES
  missing = tiles * rows - J * G

  def padded(x):
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, missing), (0, 0)))

  queries = (q * H**-0.5).reshape(B, J, K, G, H).transpose(0, 2, 1, 3, 4)
  queries = padded(queries.reshape(B, K, J * G, H))
  bits = padded(jnp.repeat(seen.bits, G, 1))  # i32[B rows words]
  if not interpret:
    k, v = hbm.pinned(k), hbm.pinned(v)
  specs = _specs(rows, bits.shape[-1], H, seen.size, S, page)
  kernel = functools.partial(_kernel, size=seen.size, length=S)
  out = pl.pallas_call(
    lambda start_ref, pages_ref, *refs: kernel(start_ref, *refs),
    out_shape=jax.ShapeDtypeStruct(
      queries.shape, v.dtype, manual_axis_type=jax.typeof(v).manual_axis_type
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, K, tiles, pl.cdiv(S, min(BLOCK, page))),
      in_specs=specs,
      out_specs=specs[0],
      scratch_shapes=[pltpu.VMEM((rows, w), jnp.float32) for w in (_LANES, _LANES, H)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
    ),
    interpret=interpret,
    name="tree_attention",
  )(seen.start, pages, queries, bits, k, v)
  out = out[:, :, : J * G].reshape(B, K, J, G, H)
  return out.transpose(0, 2, 1, 3, 4).reshape(B, J, N, H)
