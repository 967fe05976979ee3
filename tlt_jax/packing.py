"""Packs sequences of unequal length into rows of few fixed shapes.

Several sequences share a row, separated by segment ids; positions restart at 0 in each.
Worked row, sequences `abc` (prompt a) and `xyz` (prompt x y),
length 8:

    tokens     a b c x y z . .
    segments   1 1 1 2 2 2 0 0
    positions  0 1 2 0 1 2 0 0
    targets    b c . y z . . .
    mask       1 1 0 0 1 0 0 0     True where the target is a response token
"""

from collections.abc import Sequence
import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax import processes


@dataclasses.dataclass(frozen=True)
class Bucket:
  rows: int
  length: int


def over_slices(buckets: Sequence[tuple[int, int]], slices: int) -> tuple[Bucket, ...]:
  """Buckets of (rows, length); rows are rounded up to a multiple of the slices.

  Raises:
    ValueError: no bucket, or not by increasing length
  """
  lengths = [length for _, length in buckets]
  if not lengths or lengths != sorted(set(lengths)):
    raise ValueError(
      f"learner.buckets={buckets}: takes one (rows, length) or more, by increasing length"
    )
  return tuple(Bucket(-(-rows // slices) * slices, length) for rows, length in buckets)


@flax.struct.dataclass
class Packed:
  """Micro-batches [M rows T] of one bucket; those after the first `count` are empty.

  M depends on the number of sequences alone, so that one program serves every step.
  """

  tokens: jax.Array  # i32[M rows T]
  targets: jax.Array  # i32[M rows T]  the next token of the same sequence
  positions: jax.Array  # i32[M rows T]  within the sequence
  segments: jax.Array  # i32[M rows T]  0 is padding
  sequence_idx: jax.Array  # i32[M rows T]  into the packed list; 0 at padding
  mask: jax.Array  # bool[M rows T]  targets that belong to a response
  count: jax.Array  # i32[]

  def micro_batch(self, i: jax.Array) -> "Packed":
    arrays = jax.tree.map(lambda x: x[i] if x.ndim else x, self)
    return arrays.replace(count=jnp.int32(1))


def place(packed: Sequence[Packed], mesh: jax.sharding.Mesh) -> tuple[Packed, ...]:
  rows, whole = axes.sharding(mesh, None, axes.DATA), axes.sharding(mesh)
  return jax.tree.map(
    lambda x: processes.place(x, rows if x.ndim else whole), tuple(packed)
  )


def segment_mask(segments: jax.Array, positions: jax.Array) -> jax.Array:
  """bool[rows T T]: causal within a segment i32[rows T]; padding sees only padding."""
  chex.assert_rank(segments, 2)
  chex.assert_equal_shape([segments, positions])
  same = segments[:, :, None] == segments[:, None, :]
  return same & (positions[:, :, None] >= positions[:, None, :])


def pack(
  prompts: Sequence[np.ndarray],
  responses: Sequence[np.ndarray],
  buckets: Sequence[Bucket],
  chosen: np.ndarray | None = None,
) -> list[Packed]:
  """Packs each sequence into the first bucket whose rows can hold it.

  Within a bucket: longest first, into the first row with room. Of numpy arrays.

  Raises:
    ValueError: a sequence is longer than the longest bucket
  """
  if chosen is not None:
    chex.assert_shape(chosen, (len(responses),))
    chex.assert_type(chosen, bool)
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


def _pack_bucket(prompts, responses, sizes, members, bucket: Bucket) -> Packed:
  rows, T = bucket.rows, bucket.length
  members_by_row = _first_fit_decreasing(members, sizes, T)
  M = -(-len(sizes) // rows)
  integers = ("tokens", "targets", "positions", "segments", "sequence_idx")
  fields = {name: np.zeros((M * rows, T), np.int32) for name in integers}
  fields["mask"] = np.zeros((M * rows, T), bool)
  for row, members_of_row in enumerate(members_by_row):
    start = 0
    for segment, i in enumerate(members_of_row, 1):
      tokens = np.concatenate([prompts[i], responses[i]])
      stop = start + len(tokens)
      fields["tokens"][row, start:stop] = tokens
      fields["targets"][row, start : stop - 1] = tokens[1:]
      fields["positions"][row, start:stop] = np.arange(len(tokens))
      fields["segments"][row, start:stop] = segment
      fields["sequence_idx"][row, start:stop] = i
      fields["mask"][row, start + len(prompts[i]) - 1 : stop - 1] = True
      start = stop
  shaped = {name: x.reshape(M, rows, T) for name, x in fields.items()}
  return Packed(count=np.int32(-(-len(members_by_row) // rows)), **shaped)


def _first_fit_decreasing(
  members: Sequence[int], sizes: Sequence[int], length: int
) -> list[list[int]]:
  rows: list[list[int]] = []
  room: list[int] = []
  for i in sorted(members, key=lambda i: (-sizes[i], i)):
    row = next((r for r, free in enumerate(room) if free >= sizes[i]), None)
    if row is None:
      rows.append([])
      room.append(length)
      row = len(rows) - 1
    rows[row].append(i)
    room[row] -= sizes[i]
  return rows
