"""Which finished sequences the drafter is trained on: a bounded buffer of packed rows.

Early in a rollout only short responses have finished; the long ones, of which the tail
consists, are from the rollout before (TLT's one-step offset). So a rollout starts with the
newest rows, of each rollout those with the longest sequences, and evicts the oldest one
by one.

Departure from TLT (https://arxiv.org/abs/2511.16665): sequences longer than a row are cut
into pieces; the paper packs whole ones.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
  """The place of tokens `start` to `start + size` of a sequence."""

  row: int  # of the slice's buffer
  offset: int  # in the row
  start: int
  size: int


@dataclasses.dataclass
class Row:
  sizes: list[int] = dataclasses.field(default_factory=list)  # tokens of its pieces
  longest: int = 0  # tokens of their longest sequence
  age: int = 0  # rollouts since it was filled
  uses: int = 0  # times trained on in this rollout

  @property
  def used(self) -> int:
    return sum(self.sizes)


FIELDS = ("targets", "positions", "segments", "mask")  # of `Buffer.table`


class Buffer:
  """Packed rows of every slice: `table` i32[slices m 4 T], see `FIELDS` and `packing`.

  A sequence of T tokens takes T-1 places: its last token has no feature. At most `carried`
  rows per slice are kept for the next rollout; a piece repeats `context` tokens as context
  only, so every token is trained on once.
  """

  def __init__(self, slices: int, rows: int, length: int, carried: int, context: int):
    self.length, self.carried, self.context = length, carried, context
    self.rows = [[Row() for _ in range(rows)] for _ in range(slices)]
    self.table = np.zeros((slices, rows, len(FIELDS), length), np.int32)
    self.version = 0  # incremented with every change of the rows
    self.turn = 0  # incremented when training changes the order

  def filled(self, s: int) -> list[int]:
    """The rows to train on: least used in this rollout first, then newest, then longest."""
    rows = self.rows[s]
    held = [i for i, row in enumerate(rows) if row.sizes]
    return sorted(held, key=lambda i: (rows[i].uses, rows[i].age, -rows[i].longest, i))

  def begin_rollout(self) -> None:
    self.version += 1
    for s, rows in enumerate(self.rows):
      for row in rows:
        row.age, row.uses = row.age + 1, 0
      for i in self.filled(s)[self.carried :]:
        self._clear(s, i)

  def add(self, s: int, prompt: np.ndarray, response: np.ndarray) -> list[Piece]:
    """Places a sequence on slice s, if need be in place of older or shorter ones.

    Pieces without room, where all rows are of longer sequences, are left out.
    """
    targets = np.concatenate([prompt, response])[1:]
    positions, pieces = np.arange(len(targets)), []
    self.version += 1
    for start, stop in self._cut(len(targets)):
      row = self._room(s, stop - start, len(targets))
      if row is None:
        continue
      held = self.rows[s][row]
      piece = Piece(row, held.used, start, stop - start)
      held.sizes.append(piece.size)
      held.longest = max(held.longest, len(targets))
      known = max(len(prompt) - 1, start + self.context if start else 0)
      here = self.table[s, row, :, piece.offset : piece.offset + piece.size]
      at = positions[start:stop]
      here[:] = targets[start:stop], at, np.full_like(at, len(held.sizes)), at >= known
      pieces.append(piece)
    return pieces

  def most_pieces(self, size: int) -> int:
    return len(self._cut(size))

  def _cut(self, size: int) -> list[tuple[int, int]]:
    """The (start, stop) of each piece of a sequence.

    Worked rows, length 8 and context 2:  size 7   (0, 7)
                                          size 12  (0, 8) (6, 12)
    """
    cuts = [(0, min(size, self.length))]
    while cuts[-1][1] < size:
      start = cuts[-1][1] - self.context
      cuts.append((start, min(size, start + self.length)))
    return cuts

  def _room(self, s: int, size: int, sequence: int) -> int | None:
    """The row for a piece of a sequence of `sequence` tokens; None: no room."""
    rows = self.rows[s]
    for i, row in enumerate(rows):
      if row.sizes and not row.age and row.used + size <= self.length:
        return i
    for i, row in enumerate(rows):
      if not row.sizes:
        row.age = 0
        return i
    least = min(range(len(rows)), key=lambda i: (-rows[i].age, rows[i].longest, i))
    if not rows[least].age and rows[least].longest >= sequence:
      return None
    self._clear(s, least)
    return least

  def _clear(self, s: int, row: int) -> None:
    self.rows[s][row] = Row()
    self.table[s, row] = 0

  @property
  def holds_any(self) -> bool:
    return any(row.sizes for rows in self.rows for row in rows)

  def order(self) -> np.ndarray:
    """i32[slices 2+m], see `rows.Rows.order`."""
    order = np.zeros((len(self.rows), 2 + len(self.rows[0])), np.int32)
    for s, rows in enumerate(self.rows):
      held = self.filled(s)
      new = sum(not rows[i].age and not rows[i].uses for i in held)
      order[s, : 2 + len(held)] = [len(held), new, *held]
    return order

  def trained(self, micro_batches: np.ndarray) -> None:
    self.turn += bool(np.any(micro_batches))
    for s, count in enumerate(micro_batches):
      held = self.filled(s)
      for i, row in enumerate(held):
        self.rows[s][row].uses += len(range(i, int(count), len(held)))

  def state(self) -> dict:
    """Its rows as JSON; the table is saved separately."""
    return {"rows": [[dataclasses.asdict(row) for row in rows] for rows in self.rows]}

  def set_state(self, state: dict, table: np.ndarray) -> np.ndarray:
    """Restores rows and their table i32[... 4 T], perhaps of another number of slices.

    Returns the saved row of each row, i32[slices m]; -1: empty.
    """
    saved = [Row(**row) for rows in state["rows"] for row in rows]
    num_slices, each = self.table.shape[:2]
    if len(state["rows"]) == num_slices:
      source = np.arange(len(saved)).reshape(num_slices, each)
    else:
      source = self._deal(saved)
    self.rows = [[saved[i] if i >= 0 else Row() for i in row] for row in source]
    table = np.asarray(table).reshape(-1, *self.table.shape[2:])
    self.table = np.where(source[..., None, None] >= 0, table[source], 0)
    self.version += 1
    return source

  def _deal(self, saved: list[Row]) -> np.ndarray:
    num_slices, each = self.table.shape[:2]
    source = np.full((num_slices, each), -1)
    found = [i for i, row in enumerate(saved) if row.sizes]
    found.sort(key=lambda i: (saved[i].age, -saved[i].longest, i))
    for n, i in enumerate(found[: source.size]):
      source[n % num_slices, n // num_slices] = i
    return source
