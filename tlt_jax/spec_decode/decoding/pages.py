"""Pages that the running requests own: of kept features, and of the KV if that is paged.

Slots get fewer and their caches longer while a rollout drains. What lies in pages stays
where it is, and a request keeps its pages in whichever slot it runs. So one buffer serves
the programs of all buckets. Paged like KV in vLLM (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180); which page is whose is the host's to know: `Pages`. The
features are here too, the KV is in `models.paged_cache`.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from tlt_jax import axes
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices

PAGE = 128  # tokens of a page of features


class Sizes(NamedTuple):
  """How many pages there are, the same on all slices, and how large each is."""

  pages: int  # of a slice
  most: int  # of a request
  page: int = PAGE  # tokens


def pages_for(tokens: int, page: int | None = None) -> int:
  """How many pages so many tokens take; of features, unless a page's tokens are given."""
  return -(-tokens // (page or PAGE))


@flax.struct.dataclass
class Features:
  """The features of the requests in slots; a slice has `Sizes.pages` pages of PAGE rows."""

  data: jax.Array  # f[pages*PAGE E]
  # i32[B most]  where slot b has its tokens from p * PAGE on; `Sizes.pages`: nowhere
  page: jax.Array

  def read(self, position: jax.Array) -> jax.Array:
    """i32[B T], positions in the slots' sequences -> f[B T E]; anything without a page."""
    return self.data.at[self._where(position)].get(mode="clip")

  def write(self, position: jax.Array, features: jax.Array) -> "Features":
    """With f[B T E] at these positions; nothing happens where there is no page."""
    new = features.astype(self.data.dtype)
    return self.replace(data=self.data.at[self._where(position)].set(new, mode="drop"))

  def _where(self, position):
    none = self.data.shape[0] // PAGE
    at = dict(mode="fill", fill_value=none)
    page = jnp.take_along_axis(self.page, position // PAGE, 1, **at)
    return page * PAGE + position % PAGE


def abstract(mesh: Mesh, size: int, dtype, batch: int, sizes: Sizes) -> Features:
  """Shapes and shardings of features.

  Args:
    size: E, numbers per token
    batch: slots per slice
    sizes: of the pages
  """
  return Features(
    data=features_lib.abstract(mesh, sizes.pages * PAGE, dtype, size),
    page=slices.abstract(mesh, batch, jnp.int32, sizes.most),
  )


def make_move(mesh: Mesh, size: int) -> Callable:
  """(data f[pages*PAGE E], source i32[m], goal i32[m]) -> data, pages copied across slices.

  Pages are counted over all slices; where `goal` is -1 nothing is copied. Data is donated.
  `size` is E, the numbers per token.
  """

  def local(data, source, goal):
    paged = data.reshape(-1, PAGE, data.shape[-1])
    n = paged.shape[0]
    start = jax.lax.axis_index(axes.DATA) * n
    source, goal = source - start, goal - start
    mine = (source >= 0) & (source < n)
    read = paged.at[source].get(mode="clip")
    read = slices.handed_out(read, mine[:, None, None])
    goal = jnp.where(goal >= 0, goal, n)  # others' lie beyond either end
    return paged.at[goal].set(read, mode="drop").reshape(data.shape)

  into = (slices.ROWS, slices.WHOLE, slices.WHOLE)
  mapped = slices.per_slice(mesh, local, into, slices.ROWS)
  over = features_lib.sharding(mesh, 2, size)
  return jax.jit(mapped, donate_argnums=0, out_shardings=over)


class Pages:
  """Which pages each running request has. Host arithmetic, the same on every process.

  A request that is no longer in a slot keeps its pages until the next `keep` or `assign`.

  A prompt may have pages too, in a row of its slice (`hold`). Requests that begin with it
  share those that it fills: nobody writes there any more. Of the last page, if it is not
  full, each has one of its own. A page is free again when nobody has it.
  """

  def __init__(self, slices: int, sizes: Sizes, beyond: int = 0):
    """All pages are free.

    Args:
      sizes: of the pages
      beyond: tokens behind those of each request for which it needs pages, too
    """
    self.sizes, self._slices, self._beyond = sizes, slices, beyond
    self.clear()

  def clear(self) -> None:
    """Takes all pages away."""
    n = self.sizes.pages
    self._free = [list(range(n))[::-1] for _ in range(self._slices)]
    self._users = np.zeros((self._slices, n), np.int32)  # requests and prompts of a page
    self._of: dict[int, tuple[int, list[int]]] = {}  # request -> its slice and pages
    self._held: dict[tuple[int, int], list[int]] = {}  # slice and row -> a prompt's pages

  def __getitem__(self, request: int) -> tuple[int, np.ndarray]:
    """The slice of a running request, and its pages there; as a row of `table`."""
    s, pages = self._of[request]
    return s, self._padded(pages)

  @property
  def used(self) -> np.ndarray:
    """i32[slices]: pages that somebody has."""
    return self.sizes.pages - np.array([len(free) for free in self._free])

  def count(self, tokens: int) -> int:
    """Pages of a request with so many tokens."""
    return pages_for(tokens + self._beyond, self.sizes.page)

  def left(self, owner: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """i32[slices]: pages that are free after `assign`; negative if some are missing.

    Args:
      owner, tokens: as for `assign`; each request is on its slice already
    """
    left = self.sizes.pages - self.used
    for s, i in ((s, int(i)) for s, row in enumerate(owner) for i in row if i >= 0):
      _, pages = self._of.get(i, (s, []))
      left[s] -= max(self.count(int(tokens[i])) - len(pages), 0)
    return left

  def added(self, tokens: int, prompt: int, is_new: bool) -> int:
    """Pages that a request takes when it begins.

    Args:
      tokens: that it will have
      prompt: of these, tokens of a prompt that is held
      is_new: whether the prompt is yet to be held
    """
    page = self.sizes.page
    return self.count(tokens) - prompt // page + is_new * pages_for(prompt, page)

  def where(self, request: int, tokens: int) -> np.ndarray:
    """i32[n]: where its first tokens are, up to the end of a page; over all slices."""
    s, row = self[request]
    page = self.sizes.page
    at = np.arange(pages_for(tokens, page) * page)
    return (s * self.sizes.pages + row[at // page]) * page + at % page

  def hold(self, s: int, row: int, tokens: int) -> np.ndarray:
    """Gives a prompt the pages of its tokens, as a row of `table`.

    The prompt that had this row of the slice before loses its pages.
    """
    self._let_go(s, self._held.pop((s, row), []))
    self._held[s, row] = self._take(s, pages_for(tokens, self.sizes.page))
    return self._padded(self._held[s, row])

  def share(self, request: int, s: int, row: int, tokens: int) -> list[tuple[int, int]]:
    """Lets a request begin with a prompt that is held, of so many tokens.

    Returns:
      which page is to be copied to which: the prompt's last if it is not full, or none
    """
    full = tokens // self.sizes.page
    shared, rest = self._held[s, row][:full], self._held[s, row][full:]
    self._users[s, shared] += 1
    own = self._take(s, len(rest))
    self._of[request] = s, shared + own
    return list(zip(rest, own, strict=True))

  def keep(self, owner: np.ndarray) -> None:
    """Takes their pages from the requests that are in no slot i32[slices batch]."""
    seated = set(owner.reshape(-1).tolist())
    for i in [i for i in self._of if i not in seated]:
      self._let_go(*self._of.pop(i))

  def assign(self, owner: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    """Gives the requests in slots the pages of their first tokens; others lose theirs.

    Args:
      owner: i32[slices batch]  request in each slot, -1 if free
      tokens: i32[B]  of every request
    Returns:
      what to copy, for each request that changed its slice: i32[2 most], pages and where
      they go, counted over all slices, -1 behind them
    """
    self.keep(owner)
    moves, left = [], []
    for i, s in ((int(i), s) for s, row in enumerate(owner) for i in row if i >= 0):
      was, pages = self._of.get(i, (s, []))
      if was != s:
        new = self._take(s, len(pages))
        move = np.full((2, self.sizes.most), -1, np.int32)
        move[:, : len(pages)] = np.array([pages, new]) + self.sizes.pages * np.c_[[was, s]]
        moves.append(move)
        left.append((was, pages))
        pages = new
      pages += self._take(s, self.count(int(tokens[i])) - len(pages))
      self._of[i] = s, pages
    for s, pages in left:
      self._let_go(s, pages)
    return moves

  def table(self, owner: np.ndarray) -> np.ndarray:
    """i32[slices batch most]: the pages of who is in a slot, `Sizes.pages` behind them."""
    table = np.full((*owner.shape, self.sizes.most), self.sizes.pages, np.int32)
    for place in zip(*np.nonzero(owner >= 0), strict=True):
      table[place] = self[int(owner[place])][1]
    return table

  def _take(self, s: int, count: int) -> list[int]:
    """Free pages of a slice, as many as are asked; they are somebody's from now on."""
    taken = [self._free[s].pop() for _ in range(count)]
    self._users[s, taken] += 1
    return taken

  def _let_go(self, s: int, pages: list[int]) -> None:
    """Somebody has these pages of a slice no longer."""
    self._users[s, pages] -= 1
    self._free[s] += [page for page in pages if not self._users[s, page]]

  def _padded(self, pages: list[int]) -> np.ndarray:
    row = np.full(self.sizes.most, self.sizes.pages, np.int32)
    row[: len(pages)] = pages
    return row
