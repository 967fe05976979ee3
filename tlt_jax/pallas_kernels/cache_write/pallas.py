"""cache_write for TPUs (Mosaic): in place, by whole tiles.

XLA's scatter works on a cache with the slots in front and copies all of it there and
back. Here only the tiles of the written slots are read, changed and written.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from tlt_jax.pallas_kernels import hbm

_BITS = 5
TILE = 1 << _BITS  # slots; whole tiles of memory for every dtype


def _kernel(
  start_ref,  # i32[B]
  pages_ref,  # i32[B length/page]
  before_ref,  # f[K tile H]  the new ones of one tile's size
  these_ref,  # f[K tile H]  and the next
  old_ref,  # f[K tile H]
  out_ref,  # f[K tile H]
  *,
  num_new: int,
  length: int,
  page: int,
  sink: int,
):
  """Writes the program_id(1)-th tile from the one of a row's `start` on."""
  start, step = start_ref[pl.program_id(0)], pl.program_id(1)
  first = ((start >> _BITS) + step) * TILE  # slot of the tile's first
  exists = (first >= 0) & (first < length)
  number = jax.lax.div(jnp.clip(first, 0, length - 1), page)
  is_sink = pages_ref[pl.program_id(0), number] == sink
  exists = exists & ~is_sink

  @pl.when(exists)
  def _():
    # What slot `first + i` gets is number i - start % TILE of `these`, or of `before`.
    both = jnp.concatenate([before_ref[...], these_ref[...]], 1).astype(jnp.float32)
    for bit in range(_BITS):  # a roll by start % TILE
      rolled = jnp.concatenate([both[:, -(1 << bit) :], both[:, : -(1 << bit)]], 1)
      both = jnp.where((start >> bit) & 1 == 1, rolled, both)
    new = both[:, TILE:].astype(out_ref.dtype)
    slot = first + jax.lax.broadcasted_iota(jnp.int32, new.shape, 1)
    written = (slot >= start) & (slot < start + num_new)
    out_ref[...] = jnp.where(written, new, old_ref[...])

  # Later, what an earlier step left in the same tile stays.
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
  """Does what the package's function says; `interpret` runs it on any machine.

  Raises:
    ValueError: the slots of a page are no multiple of 32
  """
  P, K, page, H = cache.shape
  B, J = len(start), new.shape[2]
  if page % TILE:
    raise ValueError(
      f"the TPU kernel writes to pages of a multiple of {TILE} slots, not {page}; choose "
      'other pages, or the implementation "ref"'
    )
  S, of_page = page * pages.shape[1], page // TILE
  tiles = pl.cdiv(J - 1, TILE) + 1  # that J slots may touch
  # A tile before the new ones, and as many as complete the last.
  new = jnp.pad(new.astype(cache.dtype), ((0, 0), (0, 0), (TILE, tiles * TILE - J), (0, 0)))
  block = (None, K, TILE, H)

  def tile_of_cache(b, i, start, pages):
    """That of step i; for one that does not exist the nearest, which the step leaves."""
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
