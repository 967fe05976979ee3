"""Kept features of the running requests, in pages that requests own.

Slots get fewer and their caches longer while a rollout drains. Features are seldom read:
they stay where they are, and a request keeps its pages in whichever slot it runs. So one
buffer serves the programs of all buckets. Paged like KV in vLLM (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180); which page is whose is the host's to know.
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

PAGE = 128  # tokens


class Sizes(NamedTuple):
  """How many pages there are, the same on all slices."""

  pages: int  # of a slice
  most: int  # of a request


def pages_for(tokens: int) -> int:
  """How many pages so many tokens take."""
  return -(-tokens // PAGE)


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

  A request that is no longer in a slot keeps its pages until the next `assign`.
  """

  def __init__(self, slices: int, sizes: Sizes):
    self.sizes = sizes
    self._free = [list(range(sizes.pages))[::-1] for _ in range(slices)]
    self._of: dict[int, tuple[int, list[int]]] = {}  # request -> its slice and pages

  def __getitem__(self, request: int) -> tuple[int, np.ndarray]:
    """The slice of a running request, and its pages there; as a row of `table`."""
    s, pages = self._of[request]
    row = np.full(self.sizes.most, self.sizes.pages, np.int32)
    row[: len(pages)] = pages
    return s, row

  def where(self, request: int, tokens: int) -> np.ndarray:
    """i32[n]: where its first tokens are, up to the end of a page; over all slices."""
    s, row = self[request]
    at = np.arange(pages_for(tokens) * PAGE)
    return (s * self.sizes.pages + row[at // PAGE]) * PAGE + at % PAGE

  def assign(self, owner: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    """Gives the requests in slots the pages of their first tokens; others lose theirs.

    Args:
      owner: i32[slices batch]  request in each slot, -1 if free
      tokens: i32[B]  of every request
    Returns:
      what to copy, for each request that changed its slice: i32[2 most], pages and where
      they go, counted over all slices, -1 behind them
    """
    lives = {int(i): s for s, row in enumerate(owner) for i in row if i >= 0}
    for i in [i for i in self._of if i not in lives]:
      s, pages = self._of.pop(i)
      self._free[s] += pages
    moves, left = [], []
    for i, s in lives.items():
      was, pages = self._of.get(i, (s, []))
      if was != s:
        new = [self._free[s].pop() for _ in pages]
        move = np.full((2, self.sizes.most), -1, np.int32)
        move[:, : len(pages)] = np.array([pages, new]) + self.sizes.pages * np.c_[[was, s]]
        moves.append(move)
        left.append((was, pages))
        pages = new
      while len(pages) < pages_for(int(tokens[i])):
        pages.append(self._free[s].pop())
      self._of[i] = s, pages
    for s, pages in left:
      self._free[s] += pages
    return moves

  def table(self, owner: np.ndarray) -> np.ndarray:
    """i32[slices batch most]: `Features.page`."""
    table = np.full((*owner.shape, self.sizes.most), self.sizes.pages, np.int32)
    for place in zip(*np.nonzero(owner >= 0), strict=True):
      table[place] = self[int(owner[place])][1]
    return table
