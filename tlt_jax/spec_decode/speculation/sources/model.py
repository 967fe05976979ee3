"""Drafts by a drafter with weights: one decoder layer that reads the target's features.

An iteration's accepted tokens go into the drafter's cache with the target's own
features; see `draft`. Switching speculation on needs no pass of the target: the
drafter's cache is filled from the features that were kept.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import draft_tree
from tlt_jax.spec_decode.speculation import source as source_lib

_FILL_BLOCK = 256  # pairs per row and step of a fill


class Model(source_lib.Source):
  """Drafts with a drafter, coupled to the target by its noise."""

  reads_drafter = True
  keeps_state = True

  def __init__(self, setting: source_lib.Setting):
    super().__init__(setting)
    if setting.drafter is None:
      raise ValueError(f"strategy {setting.strategies[0]} needs a drafter")
    known = len(setting.drafter.target_ids)
    for strategy in setting.strategies:
      if strategy.width > known:
        raise ValueError(
          f"strategy {strategy} guesses {strategy.width} tokens side by side, the drafter "
          f"knows {known}; choose a narrower one"
        )
    self.state_shardings = _state_shardings(setting.mesh, setting.drafter)

  @functools.cached_property
  def _fill(self):
    """(weights, Features, following i32[B S], position i32[B]) -> DraftState.

    Fills the drafter's cache from kept features; only keys and values are computed.
    `following[b, t]` is the token after token t.
    """
    setting = self.setting
    room = setting.room

    def fill(weights, features, following, position):
      B, S = following.shape
      draft = self._draft(weights, S)
      length = cache_lib.slots_for(S + room.drafter, setting.kernels)
      cache = drafter_lib.init_cache(setting.drafter, B, length, setting.kernels)
      block = min(_FILL_BLOCK, S)
      read = lambda at: features_lib.whole(features.read(at))

      def step(i, cache):
        start = jnp.minimum(i * block, S - block)
        tokens = jax.lax.dynamic_slice_in_dim(following, start, block, 1)
        at = jnp.broadcast_to(start + jnp.arange(block), (B, block))
        h = draft.features(read(at))
        k, v = draft.keys_values(h, tokens, at)
        put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(
          x, y.astype(x.dtype), start, 2
        )
        return jax.tree.map(put, cache, cache.replace(k=k, v=v))

      blocks = -(-jnp.max(position) // block)
      cache = jax.lax.fori_loop(0, blocks, step, jax.tree.map(slices.varying, cache))
      count = jnp.minimum(position, 1)
      last = (position - count)[:, None]
      # A prompt of one token has no pair yet: what its slot held before is not read.
      lacked = jnp.where(count[:, None, None] > 0, read(last), 0)
      more = (0, room.longest - 1)
      pad = lambda x: jnp.pad(x, ((0, 0), more) + ((0, 0),) * (x.ndim - 2))
      return draft_lib.DraftState(
        cache=cache,
        features=pad(lacked),
        tokens=pad(jnp.take_along_axis(following, last, 1)),
        count=count,
      )

    rows = slices.ROWS
    mapped = slices.per_slice(setting.mesh, fill, (slices.WHOLE, rows, rows, rows), rows)
    return jax.jit(mapped, out_shardings=self.state_shardings)

  def ready(self, key, weights, slots):
    following = slots.position.update(shape=(*slots.position.shape, slots.length))
    args = (weights, slots.features, following, slots.position)
    self.setting.pool.get("fill", key, self._fill, *args)
    state = jax.eval_shape(self._fill, *args)
    over = lambda s, part: jax.tree.map(lambda x: x.update(sharding=s), part)
    return jax.tree.map(over, self.state_shardings, state)

  def prepare(self, key, weights, slots, running):
    following = np.zeros((len(running), len(running[0]), slots.length), np.int32)
    for s, row in enumerate(running):
      for slot, request in enumerate(row):
        if request is not None:
          known = request.tokens
          following[s, slot, : len(known) - 1] = known[1:]
    following = slices.place(self.setting.mesh, following)
    args = (weights, slots.features, following, slots.position)
    return self.setting.pool.run("fill", key, self._fill, *args)

  def _draft(self, weights, length: int) -> draft_lib.Draft:
    s = self.setting
    return draft_lib.Draft(s.drafter, s.layout, weights.target, weights.draft, length)

  def bind(self, strategy, weights, length):
    draft = self._draft(weights, length)

    def propose(slots, state, depth):
      args = draft, state, slots, depth
      if strategy.width == 1:
        drafted = draft_lib.draft_chain(*args, strategy.verify)
      else:
        drafted = draft_tree.draft_tree(
          *args,
          width=strategy.width,
          size=strategy.verify,
          scratch=self.setting.room.drafter,
        )
      return source_lib.Proposal(*drafted)

    def absorb(cache, output):
      return draft_lib.DraftState(
        cache=cache, features=output.features, tokens=output.tokens, count=output.count
      )

    return propose, absorb


def _state_shardings(mesh, drafter) -> draft_lib.DraftState:
  """Those of the state's fields."""
  cache = slots_lib.cache_sharding(mesh, drafter.layer)
  rows = axes.sharding(mesh, axes.DATA)
  return draft_lib.DraftState(cache, rows, rows, rows)


def make(setting: source_lib.Setting) -> Model:
  """See `source.make`."""
  return Model(setting)
