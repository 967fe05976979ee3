from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax import packing
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import slices


@flax.struct.dataclass
class Rows:
  """Training data on the devices: m rows (micro-batches) of T tokens per slice."""

  features: jax.Array  # f[m T E]  of the target
  table: jax.Array  # i32[m 4 T]  `buffer.FIELDS`
  # i32[slices (2+m)]  The number of rows to train on; how many of these are new, which
  # come first; and their indices in order.
  order: jax.Array

  @property
  def filled(self) -> jax.Array:
    return self.order[0]

  def is_new(self, i: jax.Array) -> jax.Array:
    """Whether a slice's i-th row in order was never trained on."""
    return i < self.order[1]

  def micro_batch(self, i: jax.Array) -> tuple[packing.Packed, jax.Array]:
    return self.row(self.order[2 + i % jnp.maximum(self.filled, 1)])

  def row(self, row: jax.Array) -> tuple[packing.Packed, jax.Array]:
    """A row of the slice as a micro-batch [1 T], and its features f[1 T E]."""
    targets, positions, segments, mask = self.table[row][:, None]
    packed = packing.Packed(
      tokens=targets,  # unused: the features replace them
      targets=targets,
      positions=positions,
      segments=segments,
      sequence_idx=segments,
      mask=mask > 0,
      count=jnp.int32(1),
    )
    return packed, features_lib.whole(self.features[row][None])


def make_store(mesh: Mesh, size: int) -> Callable:
  """(rows f[m T E], features f[P L E], i32[p 4+M], count i32[slices]) -> rows.

  Copies pieces of sequences into the rows (donated): each a `buffer.Piece` and the pages of
  the sequence's features; the first `count` of p. `size` is E.
  """

  def store(kept, data, pieces, count):
    at = jnp.arange(kept.shape[1])

    def put(i, kept):
      row, offset, start, size = pieces[i, :4]
      new = pages_lib.read(data, pieces[i, None, 4:], (at - offset + start)[None])[0]
      inside = (at >= offset) & (at < offset + size)
      return kept.at[row].set(jnp.where(inside[:, None], new, kept[row]))

    return jax.lax.fori_loop(0, count[0], put, kept)

  mapped = slices.per_slice(mesh, store, slices.ROWS, slices.ROWS)
  over = features_lib.sharding(mesh, 3, size)
  return jax.jit(mapped, donate_argnums=0, out_shardings=over)
