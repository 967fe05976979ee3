"""cache_write for TPUs (Mosaic): in place, by whole tiles.

XLA's scatter copies the whole cache to a layout with the slots first, and back. Here only
the tiles of the written slots are read and written.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from tlt_jax.pallas_kernels import hbm

_BITS = 5
TILE = 1 << _BITS  # slots; a multiple of memory tiles for every dtype


def _kernel(
  start_ref,  # i32[B]
  pages_ref,  # i32[B length/page]
  before_ref,  # f[K tile H]  a tile of the new slots
  these_ref,  # f[K tile H]  the next one
  old_ref,  # f[K tile H]
  out_ref,  # f[K tile H]
  *,
  num_new: int,
  length: int,
  page: int,
  sink: int,
):
  """Writes the program_id(1)-th tile, counted from the tile of a row's `start`."""
  start, step = start_ref[pl.program_id(0)], pl.program_id(1)
  first = ((start >> _BITS) + step) * TILE  # the tile's first slot
  exists = (first >= 0) & (first < length)
  number = jax.lax.div(jnp.clip(first, 0, length - 1), page)
  is_sink = pages_ref[pl.program_id(0), number] == sink
  exists = exists & ~is_sink

  @pl.when(exists)
  def _():
    # Slot `first + i` gets entry i - start % TILE of `these`, or of `before`.
    both = jnp.concatenate([before_ref[...], these_ref[...]], 1).astype(jnp.float32)
    for bit in range(_BITS):  # a roll by start % TILE
      rolled = jnp.concatenate([both[:, -(1 << bit) :], both[:, : -(1 << bit)]], 1)
      both = jnp.where((start >> bit) & 1 == 1, rolled, both)
    new = both[:, TILE:].astype(out_ref.dtype)
    slot = first + jax.lax.broadcasted_iota(jnp.int32, new.shape, 1)
    written = (slot >= start) & (slot < start + num_new)
    out_ref[...] = jnp.where(written, new, old_ref[...])

  # In later steps the tile may already have been written by an earlier one.
  @pl.when(~exists & ((step == 0) | is_sink))
  def _():
    out_ref[...] = old_ref[...]


def cache_write(
  cache: jax.Array,
  new: jax.Array,
  start: jax.Array,
  pages: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """See the package; raises ValueError unless pages have a multiple of 32 slots."""
  P, K, page, H = cache.shape
  B, J = len(start), new.shape[2]
  if page % TILE:
    raise ValueError(
      f"the TPU kernel writes to pages of a multiple of {TILE} slots, not {page}; choose "
      'other pages, or the implementation "ref"'
    )
  S, of_page = page * pages.shape[1], page // TILE
  tiles = pl.cdiv(J - 1, TILE) + 1  # that J slots may touch
  # Padded by a tile before the new slots, and to a whole tile after them.
  new = jnp.pad(new.astype(cache.dtype), ((0, 0), (0, 0), (TILE, tiles * TILE - J), (0, 0)))
  block = (None, K, TILE, H)

  def tile_of_cache(b, i, start, pages):
    """That of step i, clipped to the nearest tile that exists."""
    tile = jnp.clip((start[b] >> _BITS) + i, 0, S // TILE - 1)
    return pages[b, jax.lax.div(tile, of_page)], 0, jax.lax.rem(tile, of_page), 0

  of_cache = pl.BlockSpec(block, tile_of_cache)
  return pl.pallas_call(
    functools.partial(_kernel, num_new=J, length=S, page=page, sink=P - 1),
    out_shape=jax.ShapeDtypeStruct(
      cache.shape, cache.dtype, manual_axis_type=jax.typeof(cache).manual_axis_type
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, tiles),
      in_specs=[
        pl.BlockSpec(block, lambda b, i, *_: (b, 0, i, 0)),
        pl.BlockSpec(block, lambda b, i, *_: (b, 0, i + 1, 0)),
        of_cache,
      ],
      out_specs=of_cache,
    ),
    input_output_aliases={4: 0},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
    interpret=interpret,
    name="cache_write",
  )(start, pages, new, new, cache if interpret else hbm.pinned(cache))
