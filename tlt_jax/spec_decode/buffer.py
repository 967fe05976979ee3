"""Which finished sequences the drafter is trained on: a bounded buffer of packed rows.

Host arithmetic alone: what is where. The features lie on the devices (see `spot`), each
slice's own; tokens and segments are here, the same on every process.

Early in a rollout only short responses have finished; the long ones, which the tail
consists of, are those of the rollout before (TLT's one-step offset). So at the start of
a rollout the rows with the longest sequences stay, and make room one by one.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
  row: int  # of the slice's buffer
  offset: int  # in the row


@dataclasses.dataclass
class Row:
  """What one row holds."""

  lengths: list[int] = dataclasses.field(default_factory=list)  # of its sequences
  old: bool = False  # of the rollout before

  @property
  def used(self) -> int:
    return sum(self.lengths)

  @property
  def longest(self) -> int:
    return max(self.lengths, default=0)


_ARRAYS = ("targets", "positions", "segments", "mask")


class Buffer:
  """Packed rows of every slice: `arrays` i32[slices M L], as in `packing.Packed`.

  A sequence of T tokens takes T-1 places: its last token has no feature.
  """

  def __init__(self, slices: int, rows: int, length: int, carried: int):
    """`rows` M and their `length` L per slice; at most `carried` outlive a rollout."""
    self.length, self.carried = length, carried
    self.rows = [[Row() for _ in range(rows)] for _ in range(slices)]
    shape = (slices, rows, length)
    self.arrays = {name: np.zeros(shape, np.int32) for name in _ARRAYS}
    self.cursor = [0] * slices  # how many rows each slice has trained on
    self.evicted = 0  # sequences that had to go, or found no room

  def filled(self, s: int) -> list[int]:
    """The rows of a slice that hold something, the longest sequences first."""
    rows = self.rows[s]
    held = [i for i, row in enumerate(rows) if row.lengths]
    return sorted(held, key=lambda i: (-rows[i].longest, i))

  def begin_rollout(self) -> None:
    """What is here is old from now on; only the rows of the longest sequences stay."""
    for s, rows in enumerate(self.rows):
      for i in self.filled(s)[self.carried :]:
        self._clear(s, i)
      for row in rows:
        row.old = True

  def add(self, s: int, prompt: np.ndarray, response: np.ndarray) -> Place | None:
    """Finds room for a sequence, if need be at the cost of older or shorter ones.

    Returns:
      where its features belong; None if it is shorter than all that is here
    """
    size = len(prompt) + len(response) - 1
    row = self._room(s, size)
    if row is None:
      self.evicted += 1
      return None
    offset = self.rows[s][row].used
    self.rows[s][row].lengths.append(size)
    here = (s, row, slice(offset, offset + size))
    self.arrays["targets"][here] = np.concatenate([prompt, response])[1:]
    self.arrays["positions"][here] = np.arange(size)
    self.arrays["segments"][here] = len(self.rows[s][row].lengths)
    self.arrays["mask"][here] = np.arange(size) >= len(prompt) - 1
    return Place(row, offset)

  def _room(self, s: int, size: int) -> int | None:
    rows = self.rows[s]
    if size > self.length:
      return None
    fits = lambda row: not row.old and row.used + size <= self.length
    begun = [i for i, row in enumerate(rows) if row.lengths and fits(row)]
    if begun:
      return begun[0]
    empty = [i for i, row in enumerate(rows) if not row.lengths]
    if empty:
      rows[empty[0]].old = False
      return empty[0]
    least = min(range(len(rows)), key=lambda i: (not rows[i].old, rows[i].longest, i))
    if not rows[least].old and rows[least].longest >= size:
      return None
    self._clear(s, least)
    return least

  def _clear(self, s: int, row: int) -> None:
    self.evicted += len(self.rows[s][row].lengths)
    self.rows[s][row] = Row()
    for x in self.arrays.values():
      x[s, row] = 0

  def order(self) -> np.ndarray:
    """i32[slices M]: the filled rows in the order in which each slice trains on them."""
    order = np.zeros((len(self.rows), len(self.rows[0])), np.int32)
    for s in range(len(self.rows)):
      held = self.filled(s)
      start = self.cursor[s] % max(len(held), 1)
      order[s, : len(held)] = held[start:] + held[:start]
    return order

  def trained(self, micro_batches) -> None:
    """Counts what each slice has trained on."""
    for s, count in enumerate(micro_batches):
      self.cursor[s] += int(count)

  def state(self) -> dict:
    """What JSON can hold of it; the arrays are saved beside."""
    rows = [[dataclasses.asdict(row) for row in rows] for rows in self.rows]
    return {"rows": rows, "cursor": list(self.cursor), "evicted": self.evicted}

  def set_state(self, state: dict, arrays: dict[str, np.ndarray]) -> None:
    """Goes on from a saved state, of a buffer of the same shape."""
    self.rows = [[Row(**row) for row in rows] for rows in state["rows"]]
    self.cursor, self.evicted = list(state["cursor"]), state["evicted"]
    self.arrays = {name: np.array(arrays[name], np.int32) for name in _ARRAYS}
