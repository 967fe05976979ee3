"""Drafts without a model: what is looked up, and what is remembered."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from tests import tiny
from tlt_jax import axes
from tlt_jax.spec_decode.decoding import slices as slices_lib
from tlt_jax.spec_decode.speculation import ngram
from tlt_jax.spec_decode.speculation import verify

_propose = jax.jit(ngram.propose, static_argnames="size")
_append = jax.jit(ngram.append)


def _corpus(rows, length: int, count: int | None = None):
  """From (group, tokens) pairs."""
  rows = [(group, np.asarray(tokens, np.int32)) for group, tokens in rows]
  return ngram.make_rows(rows, count or len(rows), length)


def _pending(corpus, batch: int):
  """The last token of each own row that has one."""
  at = np.clip(corpus.length[:batch] - 1, 0, corpus.tokens.shape[1] - 1)
  return corpus.tokens[np.arange(batch), at]


def _drafts(tree):
  """The valid tokens below each root."""
  tokens, valid = np.asarray(tree.tokens), np.asarray(tree.valid)
  return [row[1:][ok[1:]].tolist() for row, ok in zip(tokens, valid, strict=True)]


def _reference(corpus, b: int, depth: int) -> list[int]:
  """The draft of slot b, word for word as `propose` promises it."""
  C, S = corpus.tokens.shape
  own, known = corpus.tokens[b], np.minimum(corpus.length, S)
  if corpus.group[b] < 0 or not 0 < corpus.length[b] <= S:
    return []
  best, found = [], 0
  for c in [b, *(c for c in range(C) if c != b)]:
    if corpus.group[c] != corpus.group[b]:
      continue
    row = corpus.tokens[c]
    for end in reversed(range(known[c] - 1)):
      n = 0
      while (
        n < min(ngram.LONGEST_MATCH, end + 1, known[b])
        and row[end - n] == own[known[b] - 1 - n]
      ):
        n += 1
      if n > found:
        best, found = row[end + 1 : known[c]][:depth].tolist(), n
  return best


def test_hand_number():
  """The slot ends in 7 8.

  Its own row has "7 8" once, followed by 9 4 7 8; a sibling has "9 7 8", which is
  longer than what its own row agrees on if the slot ends in 9 7 8.
  """
  sibling = (5, [1, 9, 7, 8, 2, 3])
  shorter = _corpus([(5, [7, 8, 9, 4, 7, 8]), sibling], 8)
  assert _drafts(_propose(shorter, np.array([8]), 3, 5)) == [[9, 4, 7]]
  longer = _corpus([(5, [7, 8, 4, 9, 7, 8]), sibling], 8)
  tree = _propose(longer, np.array([8]), 3, 5)
  np.testing.assert_array_equal(tree.tokens, [[8, 2, 3, 0, 0]])
  np.testing.assert_array_equal(tree.valid, [[True, True, True, False, False]])
  np.testing.assert_array_equal(tree.parent, [[0, 0, 1, 2, 3]])
  np.testing.assert_array_equal(tree.depth, [[0, 1, 2, 3, 4]])


def test_agrees_with_a_slow_reference():
  """Random rows of two letters: unequal, cut off, empty and of several groups."""
  B, C, S, J = 3, 6, 24, 6
  drafted = 0
  for seed in range(300):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, S + 4, C)
    rows = [(rng.integers(-1, 2), rng.integers(0, 2, n)) for n in lengths]
    corpus, depth = _corpus(rows, S), int(rng.integers(0, J))
    tree = _propose(corpus, _pending(corpus, B), np.int32(depth), J)
    expected = [_reference(corpus, b, depth) for b in range(B)]
    assert _drafts(tree) == expected, f"seed {seed}"
    drafted += sum(map(len, expected))
  assert drafted > 500


def test_append_continues_the_own_rows():
  """As if the rows had been uploaded longer; what exceeds S is dropped."""
  rows = [(0, [1, 2, 3]), (1, [4, 5, 6, 7]), (0, [1, 2]), (0, [9, 9])]
  tokens, count = np.array([[5, 6], [7, 8], [3, 4]]), np.array([2, 1, 0])
  grown = _append(_corpus(rows, 6), tokens, count)
  rows[:2] = [(0, [1, 2, 3, 5, 6]), (1, [4, 5, 6, 7, 7])]
  jax.tree.map(np.testing.assert_array_equal, grown, _corpus(rows, 6))

  count = np.array([2, 1, 2])
  full = _append(grown, tokens, count)
  rows[:3] = [(0, [1, 2, 3, 5, 6, 5, 6]), (1, [4, 5, 6, 7, 7, 7]), (0, [1, 2, 3, 4])]
  jax.tree.map(np.testing.assert_array_equal, full, _corpus(rows, 6))
  # Row 0's end is not held: no draft, although its sibling would have one.
  assert _drafts(_propose(full, np.array([6, 7, 4]), 2, 3)) == [[], [7], []]


def test_drafts_in_a_loop_per_slice():
  """Eight slices draw given sequences to their end, whatever is drafted.

  Of a slice's two slots the second repeats another row of its prompt, so that all its
  drafts stand; what the first draws only a row of another prompt has.
  """
  slices, B, C, S, J = 8, 2, 4, 48, 5
  mesh = tiny.mesh(slices)
  rng = np.random.default_rng(0)
  truth = np.stack([rng.permutation(100)[:S] for _ in range(slices * B)]).astype(np.int32)
  parts = []
  for s in range(slices):
    first, second = truth[2 * s], truth[2 * s + 1]
    parts.append(_corpus([(0, first[:3]), (1, second[:3]), (1, second), (2, first)], S))
  flat = jax.tree.map(lambda *x: np.concatenate(x), *parts)

  def local(corpus, truth, depth):
    def running(carry):
      return jnp.any(carry[0].length[:B] < S)

    def step(carry):
      corpus, drawn, passes = carry
      last = corpus.length[:B, None] - 1
      pending = jnp.take_along_axis(truth, last, 1)[:, 0]
      tree = ngram.propose(corpus, pending, depth, J)
      tokens = jnp.take_along_axis(truth, jnp.minimum(last + tree.depth + 1, S - 1), 1)
      _, accepted = verify.walk_chain(tree, tokens, J)
      count = jnp.minimum(accepted + 1, S - 1 - last[:, 0])
      return ngram.append(corpus, tokens, count), drawn + count, passes + (count > 0)

    zero = jnp.zeros_like(corpus.length[:B])
    return jax.lax.while_loop(running, step, (corpus, zero, zero))

  specs = (slices_lib.ROWS, slices_lib.ROWS, slices_lib.WHOLE)
  run = jax.jit(slices_lib.per_slice(mesh, local, specs, slices_lib.ROWS))

  def put(x):
    return jax.device_put(x, axes.sharding(mesh, axes.DATA))

  grown, drawn, passes = run(jax.tree.map(put, flat), put(truth), np.int32(4))
  assert grown.tokens.sharding.spec == PartitionSpec(axes.DATA)
  own = np.asarray(grown.tokens).reshape(slices, C, S)[:, :B]
  np.testing.assert_array_equal(own.reshape(-1, S), truth)
  mean = (np.asarray(drawn) / np.asarray(passes)).reshape(slices, B)
  np.testing.assert_array_equal(mean, [[1.0, 5.0]] * slices)


def _lists(memory, prompt):
  return [response.tolist() for response in memory.responses(np.array(prompt))]


def test_memory_is_bounded():
  """The oldest responses go, of whatever prompt, and prompts without any with them."""
  memory = ngram.Memory(12)
  memory.add([1, 2], [5, 5, 5])
  memory.add([3], [6, 6, 6])
  memory.add([1, 2], [7, 7])
  assert memory.tokens == 11
  assert _lists(memory, [1, 2]) == [[7, 7], [5, 5, 5]]
  memory.add([3], [8, 8])
  assert memory.tokens == 10
  assert _lists(memory, [1, 2]) == [[7, 7]]
  memory.add([4], [9] * 6)
  assert memory.tokens == 10
  assert _lists(memory, [1, 2]) == [] and _lists(memory, [3]) == [[8, 8]]
  memory.add([4], [9] * 12)  # larger than the memory
  assert memory.tokens == 0


def test_a_repeated_response_is_kept_once():
  """It counts as the latest."""
  memory = ngram.Memory(7)
  memory.add([1], [2, 2])
  memory.add([1], [3, 3])
  memory.add([1], [2, 2])
  assert _lists(memory, [1]) == [[2, 2], [3, 3]]
  memory.add([1], [4, 4, 4])
  assert _lists(memory, [1]) == [[4, 4, 4], [2, 2]]
  assert memory.tokens == 6


def test_rows_for_live_prompts():
  """Prompts take turns, the latest response first; a row begins with the prompt's end."""
  memory = ngram.Memory(1000)
  long, short = np.arange(20, 40), np.array([1])
  for response in ([5, 6], [7], [8, 9, 9]):
    memory.add(long, response)
  memory.add(short, [4, 4])
  prompts = {3: long, 8: np.array([99]), 2: short}
  end = long[-ngram.LONGEST_MATCH :].tolist()
  rows = memory.rows_for(prompts, 3, 10)
  np.testing.assert_array_equal(rows.group, [3, 2, 3])
  np.testing.assert_array_equal(rows.length, [11, 3, 9])
  assert rows.tokens[0].tolist() == [*end, 8, 9]
  assert rows.tokens[1, :3].tolist() == [1, 4, 4]
  assert rows.tokens[2, :9].tolist() == [*end, 7]
  rows = memory.rows_for(prompts, 6, 10)
  np.testing.assert_array_equal(rows.group, [3, 2, 3, 3, -1, -1])
  np.testing.assert_array_equal(rows.length[4:], 0)
  assert memory.rows_for({}, 2, 10).group.tolist() == [-1, -1]


def test_state_roundtrip():
  """A memory that takes over a state goes on like the one that it is of."""
  rng, memory = np.random.default_rng(1), ngram.Memory(50)

  def draw():
    return (rng.integers(0, 2, 2), rng.integers(0, 3, rng.integers(1, 6)))

  for _ in range(40):
    memory.add(*draw())
  state = json.loads(json.dumps(memory.state()))
  other = ngram.Memory(50)
  other.add([9], [9, 9])
  other.restore(state)
  for _ in range(10):
    assert other.tokens == memory.tokens
    assert other.state() == memory.state()
    drawn = draw()
    memory.add(*drawn)
    other.add(*drawn)
  smaller = ngram.Memory(20)
  smaller.restore(memory.state())
  assert 0 < smaller.tokens <= 20
