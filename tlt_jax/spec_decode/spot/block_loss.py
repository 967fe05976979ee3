"""The loss of drafters that guess blocks, on packed sequences.

A block begins at an anchor: the feature of token t is the last that it reads, and token t+1
is known. Its guess k is compared with the target's distribution of token t+2+k, at the
sampling temperature, by the distances of `loss`:

    sum_k DECAY^k * mean(distance)

Several blocks of a row are computed at once: each sees the context up to its anchor, and
itself. Anchors are drawn by a counter-based hash from the places before response tokens,
others in every update, without replacement (DFlash, https://arxiv.org/abs/2602.06036,
section 3.2: random anchors are better than fixed ones).

Departures from DFlash: distances between distributions in place of cross-entropy with the
drawn token, as in DSpark (https://arxiv.org/abs/2607.05147); blocks see a window.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax import packing
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.spot import loss as loss_lib

# Places of all blocks of a row per token of it. With two an update takes twice as long, and
# teaches less than two updates.
_PLACES = 1


def num_anchors(size: int, row_tokens: int) -> int:
  return max(_PLACES * row_tokens // size, 1)


def loss(
  options: loss_lib.Loss,
  drafter: drafter_lib.DrafterConfig,
  config: config_lib.ModelConfig,
  draft_params,
  target_params,
  packed: packing.Packed,
  kept: features_lib.Kept,
  rotations: layers.Rotation | None = None,
  updates: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch, a sum over anchors; see `loss.loss`.

  "tokens" counts the anchors; "loss_k" and "agreement_k" are the means of guess k, over the
  blocks that have a token there, times "tokens".
  """
  del config
  block, T = drafter.block, packed.tokens.shape[1]
  chex.assert_equal_shape_prefix((packed.tokens, *kept), 2)
  apply = functools.partial(drafter_lib.module(drafter).apply, {"params": draft_params})
  drafter_input, final = jax.lax.stop_gradient(kept)
  count = jnp.int32(0) if updates is None else updates
  anchors, valid = _anchors(packed, num_anchors(block.size, T), count)
  take = functools.partial(jnp.take_along_axis, indices=anchors, axis=1)
  segments = take(packed.segments)
  behind = anchors[..., None] - jnp.arange(T)  # i32[rows M T]
  mask = (packed.segments[:, None] == segments[..., None]) & (behind >= 0)
  mask = jnp.repeat(mask, block.size, 1)
  if block.window is not None:
    behind = behind[:, :, None] + 1 + jnp.arange(block.size)[:, None]  # i32[rows M K T]
    mask &= (behind < block.window).reshape(mask.shape)
  at = take(packed.positions)[..., None] + 1 + jnp.arange(block.size)
  at = at.reshape(len(at), -1)
  by = tuple(layers.rotation(drafter.layer, x, rotations) for x in (packed.positions, at))
  args = target_params, drafter_input, anchors, take(packed.targets), by, mask
  x = apply(*args, method="of_anchors")

  places = anchors[..., None] + 1 + jnp.arange(block.guesses)  # i32[rows M G]
  goal_at = jnp.minimum(places, T - 1).reshape(len(at), -1)

  def at_goals(y):
    return jnp.take_along_axis(y, goal_at.reshape(*goal_at.shape, *[1] * (y.ndim - 2)), 1)

  same = at_goals(packed.segments).reshape(places.shape) == segments[..., None]
  trained = at_goals(packed.mask).reshape(places.shape) & same & (places < T)
  trained &= valid[..., None]
  head = apply(target_params, method="output_head")
  x, first = x.reshape(*goal_at.shape, -1), None
  if block.rank:
    before = jnp.take_along_axis(packed.targets, jnp.maximum(goal_at - 1, 0), 1)
    read, scores = apply(before, method="selector")
    first = head.shape[1]
    x = jnp.concatenate([x, read], -1)
    head = jnp.concatenate([head.astype(scores.dtype), scores], -1)
  comparison = loss_lib.Comparison(options, drafter, block.guesses, first)
  known = loss_lib.knows(drafter, at_goals(packed.targets))
  step = jnp.broadcast_to(jnp.arange(block.guesses), places.shape).reshape(goal_at.shape)
  goals = loss_lib.Goals(at_goals(final), known, step, trained.reshape(goal_at.shape))
  goal = loss_lib.goal_of(options, drafter, target_params, updates)
  total, *sums = loss_lib.compare_with_goals(comparison, x, head, goal, goals)

  tokens = jnp.sum(valid).astype(jnp.float32)
  scale = tokens / jnp.maximum(jnp.sum(trained, (0, 1)), 1)
  metrics = {"tokens": tokens}
  for name, by_step in zip(("loss", "agreement"), sums, strict=True):
    for k, y in enumerate(scale * by_step):
      metrics[f"{name}_{k + 1}"] = y
  return total, metrics


def _anchors(
  packed: packing.Packed, count: int, updates: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Places of anchors i32[rows M], in order, and which of them are any, bool[rows M].

  After an anchor come a token that is known and one that is trained.
  """
  eligible = loss_lib.precede_trained(packed)
  T = packed.tokens.shape[1]
  place = jnp.arange(T, dtype=jnp.int32)
  drawn = noise.mix(noise.mix(updates.astype(jnp.int32) - 0x61C88647) ^ place)
  order = jnp.where(eligible, drawn, jnp.iinfo(jnp.int32).max)
  anchors = jnp.sort(jnp.argsort(order, 1)[:, : min(count, T)], 1)
  return anchors, jnp.take_along_axis(eligible, anchors, 1)
