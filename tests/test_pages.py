"""Pages of the KV cache: whose they are."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np

from tlt_jax.spec_decode.decoding import pages as pages_lib

SLICES, BATCH, ROWS, PAGE, LONGEST, RING = 2, 3, 2, 4, 18, 2
SIZES = pages_lib.Sizes(
  pages=BATCH * 5 + ROWS * 4 + 1, most=5, page=PAGE, ring=RING, near=(BATCH + ROWS) * RING
)


class World:
  """Requests of prompts that are held; they come, grow, and go."""

  def __init__(self):
    self.pages = pages_lib.Pages(SLICES, SIZES, beyond=2)
    self.owner = np.full((SLICES, BATCH), -1)
    self.tokens = np.zeros(1000, int)  # of each request
    self.prompt = np.zeros(1000, int)  # of these, its prompt's
    self.held: dict[tuple[int, int], int] = {}  # slice and row -> tokens of the prompt
    self.prompt_of, self.shared = {}, {}  # prompts of rows, and of requests
    self.written: dict[int, int] = {}  # pages of each request that have been written
    self.next = 0
    # Slice and near page -> whose it is, and which page of that.
    self.near: dict[tuple[int, int], tuple] = {}

  def begin(self, s: int, row: int, prompt: int | None) -> None:
    """A request gets a slot of a slice, and the row's prompt, or a new one of so many."""
    free = np.flatnonzero(self.owner[s] < 0)
    if not len(free) or (prompt is None and (s, row) not in self.held):
      return
    before = self.pages.left(self.owner, self.tokens)[s]
    is_new = prompt is not None
    if is_new:
      self.held[s, row] = prompt
      held, near = self.pages.hold(s, row, prompt)
      assert (held < SIZES.pages).sum() == -(-prompt // PAGE)
      for number, page in enumerate(near[near < SIZES.near].tolist()):
        self.near[s, page] = "prompt", (s, row, self.next), number
      self.prompt_of[s, row] = s, row, self.next
    known, i = self.held[s, row], self.next
    copies = self.pages.share(i, s, row, known)
    assert len(copies) == (known % PAGE > 0)
    assert all(self.pages._users[s, goal] == 1 for _, goal, *_ in copies)
    self.shared[i] = self.prompt_of[s, row]
    for *_, source, goal in copies:
      assert self.near[s, source] == ("prompt", self.shared[i], known // PAGE)
      self.near[s, goal] = "request", i, known // PAGE
    self.written[i] = -(-known // PAGE)
    self.owner[s, free[0]], self.next = i, i + 1
    self.prompt[i], self.tokens[i] = known, known + 1
    added = self.pages.added(known + 1, known, is_new)
    assert self.pages.left(self.owner, self.tokens)[s] >= before - added

  def check(self) -> None:
    """Every page has as many users as say so; only full pages of prompts have several."""
    users = np.zeros_like(self.pages._users)
    shared = set()
    for (s, row), tokens in self.held.items():
      held = self.pages._held[s, row]
      users[s, held] += 1
      shared |= {(s, page) for page in held[: tokens // PAGE]}
    for s, row in enumerate(self.owner):
      for i in row[row >= 0]:
        table = self.pages[int(i)]
        mine = table[table < SIZES.pages]
        assert len(mine) == self.pages.count(self.tokens[i])
        full = self.prompt[i] // PAGE
        users[s, mine] += 1
        shared |= {(s, page) for page in mine[:full]}
        written = {(s, page) for page in mine[full:]}
        assert not written & shared and (users[s, mine[full:]] == 1).all()
    np.testing.assert_array_equal(users, self.pages._users)
    for s, free in enumerate(self.pages._free):
      assert sorted(free) == np.flatnonzero(users[s] == 0).tolist()

  def write(self) -> None:
    """Requests write their new near pages, of which each then has its last ones."""
    seated = [(s, i) for s, row in enumerate(self.owner) for i in row[row >= 0].tolist()]
    rows = {i: self.pages.near[i][: self.pages.count(self.tokens[i])] for _, i in seated}
    for s, i in seated:
      for number in range(self.written[i], len(rows[i])):
        self.near[s, int(rows[i][number])] = "request", i, number
      self.written[i] = len(rows[i])
    for s, i in seated:
      for number in range(len(rows[i]))[-RING:]:
        of_prompt = number < self.prompt[i] // PAGE
        whose = ("prompt", self.shared[i]) if of_prompt else ("request", i)
        assert self.near[s, int(rows[i][number])] == (*whose, number)
    assert (self.pages.near.used <= self.pages.used).all()


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.sampled_from(["end", "grow", "same", "new", "new"]),
      st.integers(0, SLICES - 1),
      st.integers(0, BATCH - 1),
      st.integers(0, 14),
    ),
    max_size=40,
  )
)
def test_no_page_has_two_writers_and_all_come_back(steps):
  """Requests share full pages of prompts alone; once all have gone, every page is free.

  In layers with a window each has its last pages.
  """
  world = World()
  for step in steps:
    what, s, slot, size = step
    if what == "end":
      world.owner[s, slot] = -1
      world.pages.keep(world.owner)
    elif what == "grow" and world.owner[s, slot] >= 0:
      i = world.owner[s, slot]
      world.tokens[i] = min(world.tokens[i] + size, LONGEST)
    elif what in ("same", "new"):
      world.begin(s, slot % ROWS, size if what == "new" else None)
    expected = world.pages.left(world.owner, world.tokens)
    world.pages.assign(world.owner, world.tokens)
    np.testing.assert_array_equal(SIZES.pages - world.pages.used, expected)
    world.check()
    world.write()
  world.pages.keep(np.full_like(world.owner, -1))
  for s, row in world.held:
    world.pages.hold(s, row, 0)
  assert not world.pages.used.any() and not world.pages.near.used.any()
