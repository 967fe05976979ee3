"""Pages of the running requests: the host decides which page is whose (`Pages`).

A request has the same pages in the target's KV, in the drafter's, and in the kept
features; what is computed for a token stays where it is, whichever slot its request has.
Paged like KV in vLLM (Kwon et al. 2023, https://arxiv.org/abs/2309.06180).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np

from tlt_jax.models import cache as cache_lib
from tlt_jax.spec_decode.decoding import slices


class Sizes(NamedTuple):
  pages: int  # of a slice, the sink not counted
  most: int  # of a request
  page: int  # tokens
  # In layers with a window, where a request has its last pages only:
  ring: int = 0  # pages of a request; 0: all
  near: int = 0  # pages of a slice, the sink not counted; 0: such layers have no others

  @property
  def kinds(self) -> tuple["Sizes", ...]:
    """Of layers without a window, and of those with one if they have pages of their own."""
    if not self.near:
      return (self,)
    return self._replace(ring=0, near=0), self._replace(pages=self.near, near=0)

  @property
  def length(self) -> int:
    """Tokens for which a request may have pages."""
    return self.most * self.page

  @property
  def sink(self) -> int:
    """The page that is written where a row has none."""
    return self.pages


def pages_for(tokens: int, page: int) -> int:
  return -(-tokens // page)


def read(features: jax.Array, pages: jax.Array, position: jax.Array) -> jax.Array:
  """Features f[B T E] at positions i32[B T]; anything where a position has no page.

  Takes features f[P L E] and each row's pages i32[B M].
  """
  at = _where(features, pages, position)
  return features.reshape(-1, features.shape[-1]).at[at].get(mode="clip")


def write(
  features: jax.Array, pages: jax.Array, position: jax.Array, new: jax.Array
) -> jax.Array:
  """Keeps features f[B T E] of tokens; those without a page are dropped; see `read`."""
  P, L, E = features.shape
  at = _where(features, pages, position)
  at = jnp.where(at < (P - 1) * L, at, P * L)
  rows = features.reshape(-1, E).at[at].set(new.astype(features.dtype), mode="drop")
  return rows.reshape(features.shape)


def _where(features, pages, position):
  P, L, _ = features.shape
  page = jnp.take_along_axis(pages, position // L, 1, mode="fill", fill_value=P - 1)
  return page * L + position % L


def make_copy(
  mesh: Mesh,
  kv_sharding: NamedSharding,
  features_sharding: NamedSharding | None,
  windowed: tuple[bool, ...],
) -> Callable:
  """(pools, features, source i32[n], goal i32[n], ...) -> pools, features, pages copied.

  Each slice copies its pages source[i] to goal[i], in order; goals behind the last copy are
  the sink. For layers that are `windowed`, if any, there is another source and goal. Pools
  (of the target's layers) and features (or None) are donated.
  """

  def copy_all(pools: tuple[cache_lib.Pool, ...], features, *places):
    by_kind = [
      [pool for pool, is_near in zip(pools, windowed, strict=True) if is_near == kind]
      for kind in (False, True)
    ]
    far, features = copy_in((by_kind[0], features), *places[:2])
    near = copy_in(by_kind[1], *places[2:]) if by_kind[1] else []
    copied = iter(far), iter(near)
    return tuple(next(copied[is_near]) for is_near in windowed), features

  def copy_in(arrays, source, goal):
    if not (leaves := jax.tree.leaves(arrays)):
      return arrays
    sink = leaves[0].shape[0] - 1

    def copy(i, arrays):
      def copy_page(x):
        page = jax.lax.dynamic_slice_in_dim(x, source[i], 1)
        return jax.lax.dynamic_update_slice_in_dim(x, page, goal[i], 0)

      return jax.tree.map(copy_page, arrays)

    return jax.lax.fori_loop(0, jnp.sum(goal < sink), copy, arrays)

  return jax.jit(
    slices.per_slice(mesh, copy_all, slices.ROWS, slices.ROWS),
    donate_argnums=(0, 1),
    out_shardings=(kv_sharding, features_sharding),
  )


class Pages:
  """Which pages each running request has. Host arithmetic, the same on every process.

  A prompt may have pages too, in a row of its slice (`hold`). Requests that begin with it
  share those that it fills, which are not written any more. Of a last page that is not
  full each has a copy. A page is free again when no request and no prompt has it.

  `near` are the pages of layers with a window. There, only the last `ring` pages of a
  request or prompt are its own: when it grows, the one that drops out becomes the new one,
  unless others share it, and the table has it in both places. Each of these pages that is
  in use belongs to a page in use of the other layers, so that those run out first.
  """

  def __init__(self, slices: int, sizes: Sizes, beyond: int = 0):
    """`beyond` counts tokens behind a request's own for which it needs pages, too."""
    (self.sizes, *near), self.slices, self._beyond = sizes.kinds, slices, beyond
    self.near = Pages(slices, near[0], beyond) if near else None
    self.clear()

  def clear(self) -> None:
    if self.near:
      self.near.clear()
    n = self.sizes.pages
    self._free = [list(range(n))[::-1] for _ in range(self.slices)]
    self._users = np.zeros((self.slices, n), np.int32)  # requests and prompts of a page
    self._of: dict[int, tuple[int, list[int]]] = {}  # request -> its slice and pages
    self._held: dict[tuple[int, int], list[int]] = {}  # slice and row -> a prompt's pages

  def __getitem__(self, request: int) -> np.ndarray:
    return self._padded(self._of[request][1])

  @property
  def used(self) -> np.ndarray:
    """i32[slices]: pages in use."""
    return self.sizes.pages - np.array([len(free) for free in self._free])

  def count(self, tokens: int) -> int:
    return pages_for(tokens + self._beyond, self.sizes.page)

  def left(self, owner: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """i32[slices]: pages that are free after `assign`; negative if some are missing."""
    left = self.sizes.pages - self.used
    for s, i in _seated(owner):
      _, pages = self._of.get(i, (s, []))
      left[s] -= max(self.count(int(tokens[i])) - len(pages), 0)
    return left

  def added(self, tokens: int, prompt: int, is_new: bool) -> int:
    """Pages that a request of `tokens`, `prompt` of them held, takes when it begins."""
    page = self.sizes.page
    return self.count(tokens) - prompt // page + is_new * pages_for(prompt, page)

  def where(self, request: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Page (counted over all slices, with sinks) and slot there of its first tokens.

    Up to the end of a page, so that there are few shapes.
    """
    s, pages = self._of[request]
    page = self.sizes.page
    at = np.arange(pages_for(tokens, page) * page)
    return s * (self.sizes.pages + 1) + np.array(pages)[at // page], at % page

  def hold(self, s: int, row: int, tokens: int) -> list[np.ndarray]:
    """Gives a prompt pages, in place of the one that had this row.

    Returns a row of `table`, and one of `near` if there is that.
    """
    self._let_go(s, self._held.pop((s, row), []))
    self._held[s, row] = held = []
    self._grow(s, held, pages_for(tokens, self.sizes.page))
    near = self.near.hold(s, row, tokens) if self.near else []
    return [self._padded(held), *near]

  def share(self, request: int, s: int, row: int, tokens: int) -> list[tuple[int, ...]]:
    """Begins a request with a held prompt.

    Returns (from, to) of a page to copy, if any; with `near`, (from, to, from, to).
    """
    full, held = tokens // self.sizes.page, self._held[s, row]
    shared, rest = held[:full], held[full:]
    self._users[s, self._last(held)[: -len(rest) or None]] += 1
    own = self._take(s, len(rest))
    self._of[request] = s, shared + own
    copies = zip(rest, own, strict=True)
    if not self.near:
      return list(copies)
    near = self.near.share(request, s, row, tokens)
    return [(*far, *other) for far, other in zip(copies, near, strict=True)]

  def take_over(self, request: int, s: int, row: int) -> None:
    """Begins a request with all pages of a held prefix, which is its alone."""
    self._of[request] = s, self._held.pop((s, row))
    if self.near:
      self.near.take_over(request, s, row)

  def keep(self, owner: np.ndarray) -> None:
    """Frees the pages of requests that are in no slot of i32[slices batch]."""
    if self.near:
      self.near.keep(owner)
    seated = set(owner.reshape(-1).tolist())
    for i in [i for i in self._of if i not in seated]:
      self._let_go(*self._of.pop(i))

  def assign(self, owner: np.ndarray, tokens: np.ndarray) -> None:
    """Gives requests in slots i32[slices batch] (-1: free) their pages; frees the rest."""
    self.keep(owner)
    for s, i in _seated(owner):
      _, pages = self._of.setdefault(i, (s, []))
      self._grow(s, pages, self.count(int(tokens[i])))
    if self.near:
      self.near.assign(owner, tokens)

  def table(self, owner: np.ndarray) -> np.ndarray:
    """i32[slices batch most]: the pages of each slot's request, the sink behind them."""
    table = np.full((*owner.shape, self.sizes.most), self.sizes.pages, np.int32)
    for place in zip(*np.nonzero(owner >= 0), strict=True):
      table[place] = self[int(owner[place])]
    return table

  def _take(self, s: int, count: int) -> list[int]:
    taken = [self._free[s].pop() for _ in range(count)]
    self._users[s, taken] += 1
    return taken

  def _grow(self, s: int, pages: list[int], count: int) -> None:
    ring = self.sizes.ring
    while len(pages) < count:
      out = pages[-ring] if 0 < ring <= len(pages) else None
      if out is not None and self._users[s, out] == 1:
        pages.append(out)
        continue
      if out is not None:
        self._users[s, out] -= 1
      pages += self._take(s, 1)

  def _last(self, pages: list[int]) -> list[int]:
    """Those that their owner still has."""
    return pages[-self.sizes.ring :]  # all if it is 0

  def _let_go(self, s: int, pages: list[int]) -> None:
    pages = self._last(pages)
    self._users[s, pages] -= 1
    self._free[s] += [page for page in pages if not self._users[s, page]]

  def _padded(self, pages: list[int]) -> np.ndarray:
    row = np.full(self.sizes.most, self.sizes.pages, np.int32)
    row[: len(pages)] = pages
    return row


def _seated(owner: np.ndarray) -> list[tuple[int, int]]:
  return [(s, int(i)) for s, row in enumerate(owner) for i in row if i >= 0]
