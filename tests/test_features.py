"""Pages: whose they are, and that what is written into them is read again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax.spec_decode.decoding import pages as features_lib

SLICES, BATCH, WIDTH = 2, 3, 4
SIZES = features_lib.Sizes(pages=9, most=3)  # all slots at their longest
LONGEST = SIZES.most * features_lib.PAGE


def check(pages: features_lib.Pages, owner, tokens):
  """No page is two requests', and each has enough for its tokens."""
  table = pages.table(owner)
  for s, row in enumerate(owner):
    of = [p for p in table[s].reshape(-1) if p < SIZES.pages]
    assert len(of) == len(set(of))
    for slot, i in enumerate(row):
      have = int((table[s, slot] < SIZES.pages).sum())
      assert have == (0 if i < 0 else features_lib.pages_for(tokens[i])), (s, slot)
      if i >= 0:
        assert pages[i][0] == s


class World:
  """Requests that come, grow, change their slots and slices, and go."""

  def __init__(self, seed: int):
    self.rng = np.random.default_rng(seed)
    self.owner = np.full((SLICES, BATCH), -1)
    self.tokens = np.ones(1000, int)
    self.next = 0

  def step(self):
    rng, flat = self.rng, self.owner.reshape(-1)
    flat[rng.random(flat.size) < 0.2] = -1
    for i in flat[flat >= 0]:
      self.tokens[i] = min(self.tokens[i] + rng.integers(0, 100), LONGEST)
    for slot in np.flatnonzero(flat < 0):
      if rng.random() < 0.4:
        flat[slot], self.next = self.next, self.next + 1
        self.tokens[flat[slot]] = rng.integers(1, 200)
    for row in self.owner:
      rng.shuffle(row)
    fuller = int(np.argmax((self.owner >= 0).sum(1)))
    live = np.flatnonzero(self.owner[fuller] >= 0)
    free = np.flatnonzero(self.owner[1 - fuller] < 0)
    if len(live) and len(free) and rng.random() < 0.5:  # to the other slice
      self.owner[1 - fuller, free[0]] = self.owner[fuller, live[0]]
      self.owner[fuller, live[0]] = -1


@pytest.mark.parametrize("seed", range(3))
def test_each_request_has_pages_of_its_own(seed):
  world, pages, moved = World(seed), features_lib.Pages(SLICES, SIZES), 0
  for _ in range(200):
    world.step()
    moved += len(pages.assign(world.owner, world.tokens))
    check(pages, world.owner, world.tokens)
  assert moved > 20


def test_what_is_written_is_read_wherever_the_request_runs():
  mesh, world = tiny.mesh(SLICES), World(0)
  pages, known = features_lib.Pages(SLICES, SIZES), {}
  shapes = features_lib.abstract(mesh, WIDTH, jnp.bfloat16, BATCH, SIZES)
  place = lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding)
  data = place(np.full(shapes.data.shape, np.nan, shapes.data.dtype), shapes.data)
  move = features_lib.make_move(mesh, WIDTH)
  over = jax.sharding.PartitionSpec(axes.DATA)
  mapped = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=over, out_specs=over))
  write = mapped(lambda features, at, x: features.write(at, x).data)
  read = mapped(lambda features, at: features.read(at))
  at = np.broadcast_to(np.arange(LONGEST, dtype=np.int32), (SLICES * BATCH, LONGEST))
  for step in range(15):
    world.step()
    for source, goal in pages.assign(world.owner, world.tokens):
      data = move(data, source, goal)
    features = features_lib.Features(data, place(pages.table(world.owner), shapes.page))
    found = np.asarray(read(features, at))
    live = [(slot, i) for slot, i in enumerate(world.owner.reshape(-1)) if i >= 0]
    for slot, i in live:
      if i in known:
        np.testing.assert_array_equal(found[slot, : len(known[i])], known[i])
        where = pages.where(i, len(known[i]))[: len(known[i])]
        np.testing.assert_array_equal(np.asarray(data)[where], known[i])
    states = np.random.default_rng(step).normal(size=(*at.shape, WIDTH))
    states = states.astype(jnp.bfloat16)
    data = write(features, at, states)  # beyond a request's pages too: dropped
    for slot, i in live:
      known[i] = states[slot, : world.tokens[i]]
