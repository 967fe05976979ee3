"""Drafts without a model: what followed the last tokens where they occurred before.

A request often repeats its prompt, itself, a sibling (another response to the same
prompt) or a response of an earlier epoch. The last tokens of a slot are looked up in all
of these, and the continuation of the longest match is the draft (prompt lookup, Saxena
2023, https://github.com/apoorvumang/prompt-lookup-decoding; over earlier responses too,
SuffixDecoding, Oliaro et al. 2024, https://arxiv.org/abs/2411.04975).

Departures from the papers: no suffix tree, but a comparison with every position, in one
vectorised pass; and a single best match, no statistics over matches.
"""

import base64
from collections import OrderedDict
from collections.abc import Iterable, Mapping
import itertools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.spec_decode.speculation import tree as tree_lib

# Tokens before a position that are compared. On Countdown 4, 8 and 12 give an
# acceptance length of 2.60, 2.78 and 2.79 at depth 7, with eight earlier responses.
LONGEST_MATCH = 8

_BEFORE, _UNKNOWN = -2, -1  # no token, and not each other


@flax.struct.dataclass
class Corpus:
  """The known sequences of a slice; rows 0..B-1 are the slots' own, prompt included.

  A slot's own row ends in its pending token: its length is position + 1.
  """

  tokens: jax.Array  # i32[C S]
  length: jax.Array  # i32[C]  of the sequence; tokens beyond S are dropped
  group: jax.Array  # i32[C]  its prompt; matches are within a group; -1: none


def match_length(corpus: Corpus, batch: int) -> jax.Array:
  """Counts the tokens up to each position that agree with the end of each slot's row.

  Worked row, own row 7 8 9 7 8, LONGEST_MATCH >= 2:    7 8 9 7 8
                                                        0 2 0 0 0
  The last position counts 0: no token follows it.

  Returns:
    i32[B C S]; 0 where no known token follows, or the row is of another group
  """
  S = corpus.tokens.shape[1]
  n = LONGEST_MATCH
  shifted = jnp.pad(corpus.tokens, ((0, 0), (n, 0)), constant_values=_BEFORE)
  at = corpus.length[:batch, None] - 1 - jnp.arange(n)
  end = jnp.take_along_axis(corpus.tokens[:batch], jnp.clip(at, 0, S - 1), 1)
  end = jnp.where((at >= 0) & (at < S), end, _UNKNOWN)
  found = jnp.int32(0)
  for back in reversed(range(n)):
    agrees = shifted[:, n - back : n - back + S] == end[:, back, None, None]
    found = jnp.where(agrees, found + 1, 0)
  follows = jnp.arange(1, S + 1) < jnp.minimum(corpus.length, S)[:, None]
  own = corpus.group[:batch, None]
  related = (own == corpus.group) & (own >= 0)
  return jnp.where(related[..., None] & follows, found, 0)


def propose(
  corpus: Corpus, pending: jax.Array, depth: jax.Array, size: int
) -> tree_lib.Tree:
  """Guesses up to `depth` i32[] <= size - 1 tokens in a row, fewer where fewer are known.

  The longest match wins; among equals one in the slot's own row, then the first row; in a
  row the latest. `pending` i32[B] is each slot's last known token.
  """
  (B,), (C, S) = pending.shape, corpus.tokens.shape
  chex.assert_shape([corpus.length, corpus.group], (C,))
  chex.assert_type([corpus.tokens, pending], int)
  if (LONGEST_MATCH + 1) * (C + 1) * S >= 2**31:
    raise ValueError(f"a corpus of {C} rows of {S} tokens is too large to look up")
  # One integer ranks a position: by match length, row, and place in the row.
  slot, row = jnp.arange(B), jnp.arange(C)
  turn = jnp.where(row == slot[:, None], 0, row + 1)  # rows of lower turn are preferred
  found = match_length(corpus, B)
  rank = (found * (C + 1) + (C - turn)[..., None]) * S + jnp.arange(S)
  best = jnp.max(jnp.where(found > 0, rank, 0), (1, 2))
  at, turn = best % S, C - best // S % (C + 1)
  row = jnp.where(turn == 0, slot, turn - 1)

  known = jnp.minimum(corpus.length[row], S) - 1 - at
  known = jnp.where(best > 0, known, 0)
  ahead = jnp.arange(1, size)
  guess = corpus.tokens[row[:, None], jnp.minimum(at[:, None] + ahead, S - 1)]
  guess = jnp.where(ahead <= known[:, None], guess, 0)
  tokens = jnp.concatenate([pending[:, None], guess], 1)
  return tree_lib.chain(tokens, jnp.minimum(depth, known))


def append(corpus: Corpus, tokens: jax.Array, count: jax.Array) -> Corpus:
  """Appends `count` i32[B] of `tokens` i32[B A] to the slots' own rows."""
  (B, A), S = tokens.shape, corpus.tokens.shape[1]
  chex.assert_shape(count, (B,))
  a = jnp.arange(A)
  at = jnp.where(a < count[:, None], corpus.length[:B, None] + a, S)
  b = jnp.arange(B)[:, None]
  return corpus.replace(
    tokens=corpus.tokens.at[b, at].set(tokens, mode="drop"),
    length=corpus.length.at[:B].add(count),
  )


def make_rows(
  sequences: Iterable[tuple[int, np.ndarray]], count: int, length: int
) -> Corpus:
  rows = Corpus(
    tokens=np.zeros((count, length), np.int32),
    length=np.zeros(count, np.int32),
    group=np.full(count, -1, np.int32),
  )
  for i, (group, tokens) in enumerate(sequences):
    held = tokens[:length]
    rows.tokens[i, : len(held)] = held
    rows.length[i], rows.group[i] = len(tokens), group
  return rows


class Memory:
  """Remembers the latest responses per prompt, over rollouts, up to `capacity` tokens.

  The oldest go first; a repeated response is kept once, as the latest.
  """

  def __init__(self, capacity: int):
    if capacity < 1:
      raise ValueError(f"a memory needs room for at least one token, got {capacity}")
    self.capacity = capacity
    self.tokens = 0  # held
    # By prompt, and by (prompt, response), as bytes; the oldest first.
    self._responses: dict[bytes, OrderedDict[bytes, None]] = {}
    self._by_age: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

  def add(self, prompt: np.ndarray, response: np.ndarray) -> None:
    key, value = _to_bytes(prompt), _to_bytes(response)
    if not key or not value:
      raise ValueError("a memory takes no empty prompt and no empty response")
    if key not in self._responses:
      self._responses[key] = OrderedDict()
      self.tokens += _size(key)
    if value not in self._responses[key]:
      self.tokens += _size(value)
    self._responses[key][value] = None
    self._by_age[key, value] = None
    self._responses[key].move_to_end(value)
    self._by_age.move_to_end((key, value))
    while self.tokens > self.capacity:
      self._forget()

  def _forget(self) -> None:
    (key, value), _ = self._by_age.popitem(last=False)
    del self._responses[key][value]
    self.tokens -= _size(value)
    if not self._responses[key]:
      del self._responses[key]
      self.tokens -= _size(key)

  def responses(self, prompt: np.ndarray) -> list[np.ndarray]:
    held = self._responses.get(_to_bytes(prompt), {})
    return [np.frombuffer(value, np.int32) for value in reversed(held)]

  def rows_for(self, prompts: Mapping[int, np.ndarray], count: int, length: int) -> Corpus:
    """Picks the `count` rows to upload for a slice's live prompts, i32[...] by group.

    Prompts take turns, each with its next latest response, until the rows are full. A row
    starts with as much of the prompt as a match can span, and is cut to `length`.
    """
    held = {group: self.responses(prompt) for group, prompt in prompts.items()}
    deepest = max(map(len, held.values()), default=0)
    turns = (
      (group, np.append(prompts[group][-LONGEST_MATCH:], responses[i]))
      for i in range(deepest)
      for group, responses in held.items()
      if i < len(responses)
    )
    return make_rows(itertools.islice(turns, count), count, length)

  def state(self) -> dict:
    pairs = [[base64.b64encode(x).decode() for x in pair] for pair in self._by_age]
    return {"responses": pairs}

  def restore(self, state: dict) -> None:
    self._responses.clear()
    self._by_age.clear()
    self.tokens = 0
    for pair in state["responses"]:
      prompt, response = (np.frombuffer(base64.b64decode(x), np.int32) for x in pair)
      self.add(prompt, response)


def _to_bytes(tokens) -> bytes:
  return np.asarray(tokens, np.int32).tobytes()


def _size(sequence: bytes) -> int:
  return len(sequence) // 4
