"""Packs sequences of unequal length into rows of few fixed shapes.

Several sequences share a row, told apart by segment ids; positions start again
at 0 in each. Worked row, sequences `abc` (prompt a) and `xyz` (prompt x y),
length 8:

    tokens     a b c x y z . .
    segments   1 1 1 2 2 2 0 0
    positions  0 1 2 0 1 2 0 0
    targets    b c . y z . . .
    mask       1 1 0 0 1 0 0 0     True where the target is a response token
"""

from collections.abc import Sequence
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes


@dataclasses.dataclass(frozen=True)
class Bucket:
  """The shape of a micro-batch: `rows` rows of `length` tokens."""

  rows: int
  length: int


def over_slices(buckets: Sequence[tuple[int, int]], slices: int) -> tuple[Bucket, ...]:
  """Buckets of (rows, length), their rows rounded up to a multiple of the slices."""
  return tuple(Bucket(-(-R // slices) * slices, L) for R, L in buckets)


@flax.struct.dataclass
class Packed:
  """Micro-batches [M R L] of one bucket; only the first `count` hold anything.

  M depends on the number of sequences alone, so that the same program serves
  every step.
  """

  tokens: jax.Array  # i32[M R L]
  targets: jax.Array  # i32[M R L]  the next token of the same sequence
  positions: jax.Array  # i32[M R L]  within the sequence
  segments: jax.Array  # i32[M R L]  0 is padding
  sequence_idx: jax.Array  # i32[M R L]  into the packed list; 0 at padding
  mask: jax.Array  # bool[M R L]  targets that belong to a response
  count: jax.Array  # i32[]

  def micro_batch(self, i: jax.Array) -> "Packed":
    """The i-th one, [R L]."""
    fields = {
      f.name: getattr(self, f.name)[i]
      for f in dataclasses.fields(self)
      if f.name != "count"
    }
    return Packed(count=jnp.int32(1), **fields)


def place(packed: Sequence[Packed], mesh: jax.sharding.Mesh) -> tuple[Packed, ...]:
  """Moves packed micro-batches to the devices, rows over `data`."""
  rows, whole = axes.sharding(mesh, None, axes.DATA), axes.sharding(mesh)
  put = lambda x: jax.device_put(x, rows if x.ndim else whole)
  return jax.tree.map(put, tuple(packed))


def segment_mask(segments: jax.Array, positions: jax.Array) -> jax.Array:
  """Causal within a segment: bool[R L L]; padding sees only padding."""
  same = segments[:, :, None] == segments[:, None, :]
  return same & (positions[:, :, None] >= positions[:, None, :])


def pack(
  prompts: Sequence[np.ndarray],
  responses: Sequence[np.ndarray],
  buckets: Sequence[Bucket],
  chosen: np.ndarray | None = None,
) -> list[Packed]:
  """Puts each sequence in the first bucket whose rows can hold it.

  Within a bucket: longest first, into the first row with room.

  Args:
    prompts, responses: i32[...] each, one pair per sequence
    buckets: by increasing length
    chosen: bool[B], the sequences to pack; all by default
  Returns:
    one `Packed` of numpy arrays per bucket
  Raises:
    ValueError: a sequence is longer than the longest bucket
  """
  by_bucket: list[list[int]] = [[] for _ in buckets]
  sizes = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
  for i, size in enumerate(sizes):
    if chosen is not None and not chosen[i]:
      continue
    fit = next((b for b, bucket in enumerate(buckets) if size <= bucket.length), None)
    if fit is None:
      raise ValueError(
        f"sequence {i} has {size} tokens; the longest training row holds "
        f"{buckets[-1].length}"
      )
    by_bucket[fit].append(i)
  return [
    _pack_bucket(prompts, responses, sizes, members, bucket)
    for members, bucket in zip(by_bucket, buckets, strict=True)
  ]


def _pack_bucket(prompts, responses, sizes, members, bucket) -> Packed:
  rows: list[list[int]] = []
  room: list[int] = []
  for i in sorted(members, key=lambda i: (-sizes[i], i)):
    row = next((r for r, free in enumerate(room) if free >= sizes[i]), None)
    if row is None:
      rows.append([])
      room.append(bucket.length)
      row = len(rows) - 1
    rows[row].append(i)
    room[row] -= sizes[i]

  R, L = bucket.rows, bucket.length
  M = -(-len(sizes) // R)
  fields = {
    name: np.zeros((M * R, L), np.int32)
    for name in ("tokens", "targets", "positions", "segments", "sequence_idx")
  }
  mask = np.zeros((M * R, L), bool)
  for row, members_of_row in enumerate(rows):
    start = 0
    for segment, i in enumerate(members_of_row, 1):
      tokens = np.concatenate([prompts[i], responses[i]])
      stop = start + len(tokens)
      fields["tokens"][row, start:stop] = tokens
      fields["targets"][row, start : stop - 1] = tokens[1:]
      fields["positions"][row, start:stop] = np.arange(len(tokens))
      fields["segments"][row, start:stop] = segment
      fields["sequence_idx"][row, start:stop] = i
      mask[row, start + len(prompts[i]) - 1 : stop - 1] = True
      start = stop
  shaped = {name: x.reshape(M, R, L) for name, x in fields.items()}
  return Packed(
    mask=mask.reshape(M, R, L),
    count=np.int32(-(-len(rows) // R)),
    **shaped,
  )
