"""Packing: every sequence is somewhere, whole, and told apart from its neighbours."""

import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np

from tlt_jax import packing

BUCKETS = (packing.Bucket(3, 8), packing.Bucket(2, 20))


def sequences(sizes):
  """Prompts and responses of the given lengths; no two tokens are the same, none is 0."""
  ends = np.cumsum([p + r for p, r in sizes])
  tokens = np.arange(1, (ends[-1] if len(ends) else 0) + 1, dtype=np.int32)
  both = np.split(tokens, ends[:-1]) if len(ends) else []
  prompts = [x[:p] for x, (p, _) in zip(both, sizes, strict=True)]
  responses = [x[p:] for x, (p, _) in zip(both, sizes, strict=True)]
  return prompts, responses


def test_the_worked_row():
  """The one of the module's docstring, letter by letter."""
  a, b, c, x, y, z = range(1, 7)
  (packed,) = packing.pack([[a], [x, y]], [[b, c], [z]], [packing.Bucket(1, 8)])

  def row(name):
    return getattr(packed, name)[0, 0].tolist()

  assert row("tokens") == [a, b, c, x, y, z, 0, 0]
  assert row("segments") == [1, 1, 1, 2, 2, 2, 0, 0]
  assert row("positions") == [0, 1, 2, 0, 1, 2, 0, 0]
  assert row("targets") == [b, c, 0, y, z, 0, 0, 0]
  assert row("mask") == [True, True, False, False, True, False, False, False]
  assert row("sequence_idx") == [0, 0, 0, 1, 1, 1, 0, 0]
  assert packed.count == 1


def test_attention_stays_within_a_segment_and_its_past():
  """The mask of the worked row, as a picture."""
  seen = packing.segment_mask(
    np.array([[1, 1, 1, 2, 2, 2, 0, 0]]), np.array([[0, 1, 2, 0, 1, 2, 0, 0]])
  )
  assert ["".join(map(str, row)) for row in np.asarray(seen)[0].astype(int)] == [
    "10000000",
    "11000000",
    "11100000",
    "00010000",
    "00011000",
    "00011100",
    "00000011",
    "00000011",
  ]


size = st.tuples(st.integers(1, 10), st.integers(0, 10))


@settings(max_examples=150, deadline=None)
@given(st.lists(size, max_size=12))
def test_every_sequence_is_packed_once_and_whole(sizes):
  """With its own positions, targets and mask; the rest is padding."""
  prompts, responses = sequences(sizes)
  packed = packing.pack(prompts, responses, BUCKETS)
  found = []
  for bucket, p in zip(BUCKETS, packed, strict=True):
    rows = [x.reshape(-1, bucket.length) for x in jax.tree.leaves(p) if x.ndim]
    rows = dict(zip([f.name for f in dataclasses.fields(p)], rows, strict=False))
    used = rows["segments"].any(1)
    # What is used comes first, and `count` says how many micro-batches that takes.
    assert p.count == -(-used.sum() // bucket.rows)
    assert not used[used.sum() :].any()
    for r in range(len(used)):
      row = {name: x[r] for name, x in rows.items()}
      last = row["segments"].max()
      ends = np.append(np.flatnonzero(np.diff(row["segments"])) + 1, bucket.length)
      starts = np.append(0, ends)
      for segment in range(1, last + 1):
        start, end = starts[segment - 1], ends[segment - 1]
        assert (row["segments"][start:end] == segment).all()
        (i,) = set(row["sequence_idx"][start:end])
        n, whole = len(prompts[i]), np.concatenate([prompts[i], responses[i]])
        np.testing.assert_array_equal(row["tokens"][start:end], whole)
        np.testing.assert_array_equal(row["positions"][start:end], np.arange(end - start))
        np.testing.assert_array_equal(row["targets"][start : end - 1], whole[1:])
        # The response, and nothing else, is what is predicted under the mask.
        mask = row["mask"][start:end]
        np.testing.assert_array_equal(row["targets"][start:end][mask], responses[i])
        assert not mask[: n - 1].any() and not mask[-1]
        found.append((i, bucket))
      padding = row["segments"] == 0
      assert not any(x[padding].any() for x in row.values())
      assert last == 0 or not padding[: ends[last - 1]].any()
  assert sorted(i for i, _ in found) == list(range(len(sizes)))
  # Each lies in the first bucket that can hold it.
  for i, bucket in found:
    first = next(b for b in BUCKETS if sum(sizes[i]) <= b.length)
    assert bucket == first


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.data())
def test_shapes_depend_on_the_number_of_sequences_alone(count, data):
  """So that one compiled program serves every step."""

  def draw():
    return data.draw(st.lists(size, min_size=count, max_size=count))

  shapes = [
    jax.tree.map(np.shape, packing.pack(*sequences(draw()), BUCKETS)) for _ in range(2)
  ]
  assert shapes[0] == shapes[1]
  dtypes = jax.tree.map(lambda x: x.dtype, packing.pack(*sequences(draw()), BUCKETS))
  for p in dtypes:
    assert p.mask == np.dtype(bool)
    assert p.tokens == p.targets == p.positions == np.dtype(np.int32)


def test_sequences_may_be_left_out():
  """The others keep their index and the arrays their shape; too long ones may go, too."""
  prompts, responses = sequences([(2, 3), (1, 1), (30, 1), (4, 9), (1, 4)])
  chosen = np.array([True, False, False, True, True])
  packed = packing.pack(prompts, responses, BUCKETS, chosen)
  found = [p.sequence_idx[p.segments > 0] for p in packed]
  assert [sorted(set(x)) for x in found] == [[0, 4], [3]]
  whole = packing.pack(
    prompts[3:] * 2 + prompts[:1], responses[3:] * 2 + responses[:1], BUCKETS
  )
  assert jax.tree.map(np.shape, packed) == jax.tree.map(np.shape, whole)
  nothing = packing.pack(prompts, responses, BUCKETS, chosen & False)
  assert [p.count for p in nothing] == [0, 0] and not any(p.mask.any() for p in nothing)


def test_rows_are_filled_with_what_fits():
  """Lengths 5 4 4 3 2 2 fill rows of 10 twice, longest first: 5+4, 4+3+2, 2."""
  prompts, responses = sequences([(1, n - 1) for n in (2, 4, 3, 5, 2, 4)])
  (packed,) = packing.pack(prompts, responses, [packing.Bucket(1, 10)])
  rows = [
    list(dict.fromkeys(r[s > 0]))
    for r, s in zip(packed.sequence_idx[:, 0], packed.segments[:, 0], strict=True)
  ]
  assert rows == [[3, 1], [5, 2, 0], [4], [], [], []]
  assert packed.count == 3
