"""Drafts by a drafter with weights, which reads the target's features.

The drafter's cache is filled from kept features: no pass of the target is needed.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import draft_block
from tlt_jax.spec_decode.speculation import draft_tree
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


@flax.struct.dataclass
class Entry:
  """A chunk's state before and after: the drafter's KV, and each row's last tokens."""

  pools: tuple[cache_lib.Pool, ...]  # of each layer
  tokens: jax.Array  # i32[B A]
  count: jax.Array  # i32[B]  valid tokens, as many as the pool lacks pairs


class Model(source_lib.Source):
  reads_drafter = True

  def __init__(self, setting: source_lib.Setting):
    super().__init__(setting)
    if setting.drafter is None:
      raise ValueError(f"strategy {setting.strategies[0]} needs a drafter")
    known = len(setting.drafter.target_ids)
    for strategy in setting.strategies:
      if strategy.width > known:
        raise ValueError(
          f"strategy {strategy} guesses {strategy.width} tokens per node, the drafter "
          f"knows {known}; choose a narrower one"
        )
    strategy_lib.check_depths(setting.strategies, setting.drafter.block)
    rows = axes.sharding(setting.mesh, axes.DATA)
    self._over = slots_lib.pool_sharding(setting.mesh, setting.drafter.layer)
    self.state_shardings = Entry(self._over, rows, rows)
    self.reset()

  @functools.cached_property
  def _fill(self):
    """(weights, pools, features, pages i32[R M], tokens i32[R T], start i32[R]) -> pools.

    Writes pairs from `start` on, of R rows a slice, to the drafter's pools (donated);
    token j of a row is the one after position start + j.
    """
    setting = self.setting

    def fill(weights, pools, features, pages, tokens, start):
      at = start[:, None] + jnp.arange(tokens.shape[1])
      read = features_lib.whole(pages_lib.read(features, pages, at))
      return self._draft(weights).fill(pools, read, tokens, start, pages)

    specs = (slices.WHOLE, *(slices.ROWS,) * 5)
    mapped = slices.per_slice(setting.mesh, fill, specs, slices.ROWS, setting.kernels)
    return jax.jit(mapped, donate_argnums=1, out_shardings=self._over)

  def ready(self, weights, slots):
    setting = self.setting
    rows = functools.partial(slices.abstract, setting.mesh)
    R, T = setting.fill_rows, setting.fill_block
    pages = rows(R, jnp.int32, setting.pages.most)
    tokens, start = rows(R, jnp.int32, T), rows(R, jnp.int32)
    args = weights, self._abstract_pools, slots.features, pages, tokens, start
    setting.pool.get("fill", (), self._fill, *args)
    batch = slots.pending.shape[0] // setting.mesh.shape[axes.DATA]
    tokens = rows(batch, jnp.int32, setting.room.longest)
    return Entry(self._abstract_pools, tokens, rows(batch, jnp.int32))

  def prepare(self, weights, slots, running):
    if self._pools is None:
      self._pools = slices.zeros(self._abstract_pools)
    self._fill_missing(weights, slots, running)
    A = self.setting.room.longest
    tokens = np.zeros((len(running), len(running[0]), A), np.int32)
    count = np.zeros(tokens.shape[:2], np.int32)
    for s, row in enumerate(running):
      for slot, request in enumerate(row):
        if request is not None:
          known = request.tokens
          n = min(len(known) - 1, A)
          count[s, slot] = n
          tokens[s, slot, :n] = known[len(known) - n :]
    pools, self._pools = self._pools, None
    return Entry(pools, *(slices.place(self.setting.mesh, x) for x in (tokens, count)))

  def release(self, state, known):
    self._pools = state.pools
    self._filled = {request: self.setting.room.filled(n) for request, n in known.items()}

  def reset(self):
    self._pools, self._filled = None, {}

  def _fill_missing(self, weights, slots, running) -> None:
    R, T = self.setting.fill_rows, self.setting.fill_block
    for blocks in self._missing(running):
      for first in range(0, max(map(len, blocks)), R):
        shape = len(running), R
        sizes = self.setting.pages
        pages = np.full((*shape, sizes.most), sizes.sink, np.int32)
        tokens, start = np.zeros((*shape, T), np.int32), np.zeros(shape, np.int32)
        for s, of_slice in enumerate(blocks):
          for j, (request, at) in enumerate(of_slice[first : first + R]):
            following = request.tokens[at + 1 : at + 1 + T]
            pages[s, j], start[s, j] = request.pages, at
            tokens[s, j, : len(following)] = following
        placed = (slices.place(self.setting.mesh, x) for x in (pages, tokens, start))
        args = self._pools, slots.features, *placed
        self._pools = self.setting.pool.run("fill", (), self._fill, weights, *args)

  def _missing(self, running):
    """Yields, per slice, (request, first pair) of blocks to compute, one per request.

    Of a drafter that reads a window, however long the request is: no more than that.
    """
    T, block = self.setting.fill_block, self.setting.drafter.block

    def of(request):
      end = self.setting.room.filled(len(request.tokens))
      least = end - block.window if block and block.window else 0
      return [request, max(self._filled.get(request.request, 0), least), end]

    todo = [[of(r) for r in row if r] for row in running]
    while any(todo := [[x for x in row if x[1] < x[2]] for row in todo]):
      yield [[(r, at) for r, at, _ in row] for row in todo]
      for row in todo:
        for x in row:
          x[1] += T

  def begin(self, slots, state):
    at = slots.position[:, None] - state.count[:, None] + jnp.arange(state.tokens.shape[1])
    read = pages_lib.read(slots.features, slots.kv.pages, jnp.maximum(at, 0))
    return draft_lib.DraftState(
      state.pools, features_lib.whole(read), state.tokens, state.count
    )

  def end(self, state):
    return Entry(state.pools, state.tokens, state.count)

  @property
  def _abstract_pools(self) -> tuple[cache_lib.Pool, ...]:
    s, layer = self.setting, self.setting.drafter.layer
    return (slots_lib.abstract_pool(s.mesh, layer, s.pages),) * layer.num_layers

  def _draft(self, weights) -> draft_lib.Draft | draft_block.BlockDraft:
    s, w = self.setting, weights
    args = s.drafter, s.layout, w.target, w.draft, w.draft_rotations, s.kernels
    return (draft_block.BlockDraft if s.drafter.block else draft_lib.Draft)(*args)

  def bind(self, strategy, weights, length):
    draft = self._draft(weights)
    # Not its depth: strategies of several depths share a program.
    shape = dict(width=strategy.width, size=strategy.verify)
    scratch = self.setting.room.drafter

    def of_blocks(*args):
      if strategy.width == 1:
        return draft_block.chain(draft, *args, strategy.verify)
      return draft_block.tree(draft, *args, **shape)

    def of_steps(*args):
      if strategy.width == 1:
        tree, cache = draft_lib.draft_chain(draft, *args, strategy.verify)
      else:
        tree, cache = draft_tree.draft_tree(draft, *args, **shape, scratch=scratch)
      return tree, (cache.pool,)

    guess = of_blocks if self.setting.drafter.block else of_steps

    def propose(slots, state, depth):
      with jax.named_scope("draft"):  # for profilers, and counts of programs
        return source_lib.Proposal(*guess(state, slots, depth))

    def absorb(pools, output):
      return draft_lib.DraftState(pools, output.features, output.tokens, output.count)

    return propose, absorb


def make(setting: source_lib.Setting) -> Model:
  return Model(setting)
