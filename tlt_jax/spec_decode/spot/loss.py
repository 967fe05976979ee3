"""The drafter's loss on packed sequences, with the target's features given.

Pair t, the feature of token t with token t+1, predicts the target's next feature and its
distribution of token t+2. Several drafting steps are trained at once, each on the output
of the one before, so that the drafter learns from its own mistakes:

    sum_k DECAY^k * mean(distribution loss + REGRESSION * smooth_L1(feature))

Distribution losses, between target p and drafter q at the sampling temperature:
soft cross-entropy (EAGLE, https://arxiv.org/abs/2401.15077), or total variation,
which determines acceptance (https://arxiv.org/abs/2606.12370). Where q is far from p the
gradient of total variation is small: a drafter of random weights learns faster if its
first updates train cross-entropy (`Loss.cross_entropy_updates`).

A drafter that knows U of the V tokens learns p renormalised within them, at the positions
where the token drawn by the target is one of them: on average over draws, that weights a
position by p's mass within. So it needs the target's logits of U tokens; the code of
EAGLE-3 (https://arxiv.org/abs/2503.01840), which leaves out positions whose likeliest
token the drafter lacks, needs all V.
"""

from collections.abc import Callable
import functools
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import packing
from tlt_jax import ranges
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import features as features_lib

DISTANCES = ("cross_entropy", "total_variation")

DECAY = 0.8  # weight of a drafting step relative to the one before
REGRESSION = 0.1  # weight of the feature loss, for drafters that predict features

_BLOCK = 2**23  # logits computed at a time, 32 MB; a few such arrays coexist


@ranges.options
class Settings:
  """A run's choices of a drafter's objective; for the defaults see `spot.Options`."""

  steps: ranges.Count = ranges.field(2, "drafting steps unrolled in training")
  distance: Literal[DISTANCES] = ranges.field(
    "total_variation", "distance between the target's and the drafter's distributions"
  )
  cross_entropy_updates: ranges.CountOrZero = ranges.field(
    400, "first updates of a drafter, which train cross-entropy whatever `distance` says"
  )


@ranges.options
class Loss(Settings):
  temperature: ranges.Positive = ranges.field(1.0, "temperature of the distributions")

  @property
  def metrics(self) -> list[str]:
    by_step = [f"{x}_{k + 1}" for x in ("loss", "agreement") for k in range(self.steps)]
    return ["tokens", *by_step]

  def agreement(self, metrics: dict[str, jax.Array]) -> jax.Array:
    total = sum(metrics[f"agreement_{k + 1}"] for k in range(self.steps))
    return total / (self.steps * jnp.maximum(metrics["tokens"], 1.0))


def loss(
  options: Loss,
  drafter: drafter_lib.DrafterConfig,
  config: config_lib.ModelConfig,
  draft_params,
  target_params,
  packed: packing.Packed,
  kept: features_lib.Kept,
  rotations: layers.Rotation | None = None,
  updates: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch, a sum over tokens.

  Rows [rows T] are independent; `updates` i32[] counts those made so far, None: more than
  `cross_entropy_updates`.
  Returns the sum, and sums {"tokens", "loss_k", "agreement_k"}: agreement is 1 - total
  variation, the acceptance probability of an optimal coupling; 0 where the drafter lacks
  the token that was drawn.
  """
  chex.assert_rank(packed.tokens, 2)
  chex.assert_shape(kept.final, (*packed.tokens.shape, config.width))
  chex.assert_equal_shape_prefix((packed.tokens, kept.drafter_input), 2)
  module = drafter_lib.Drafter(drafter)
  apply = functools.partial(module.apply, {"params": draft_params})
  frozen = jax.lax.stop_gradient(target_params)
  drafter_input, final = jax.lax.stop_gradient(kept)
  mask = packing.segment_mask(packed.segments, packed.positions)
  by = layers.rotation(drafter.layer, packed.positions, rotations)
  unroll = functools.partial(apply, method=drafter_lib.Drafter.unroll)
  outputs = unroll(frozen, drafter_input, packed.targets, by, mask, options.steps)
  drawn = _ahead(packed.targets)
  goal = _goals(options, drafter, config, frozen, _ahead(final), drawn)
  head = apply(frozen, method=drafter_lib.Drafter.output_head)
  logits = functools.partial(apply, head, method=drafter_lib.Drafter.logits)
  # Pair t is trained where token t+2 is a response token of the same sequence.
  inside = _ahead(packed.mask) & (_ahead(packed.positions) > 0)
  metrics = {"tokens": jnp.sum(inside).astype(jnp.float32)}
  is_new = None
  if updates is not None and options.cross_entropy_updates:
    is_new = updates < options.cross_entropy_updates
  total = 0.0
  for k, h in enumerate(outputs):
    valid = (inside & (packed.positions >= k)).astype(jnp.float32)
    distance, variation = _distances(options, logits, h, goal, is_new)
    share = jnp.sum(distance * valid)
    if drafter.predicts_features:
      error = jnp.abs(h - _ahead(final)).astype(jnp.float32)
      smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5)  # smooth L1
      share += REGRESSION * jnp.sum(jnp.mean(smooth, -1) * valid)
    total += DECAY**k * share
    metrics[f"loss_{k + 1}"] = share
    metrics[f"agreement_{k + 1}"] = jnp.sum((1 - variation) * valid)
  return total, metrics


def _ahead(x: jax.Array) -> jax.Array:
  return jnp.roll(x, -1, 1)


class _Goal(NamedTuple):
  p: jax.Array  # f32[rows T U]  the target's, renormalised within them
  known: jax.Array  # bool[rows T]  whether the drawn token is one of them


def _goals(options, drafter, config, target_params, final, drawn) -> _Goal:
  ids = drafter.target_ids
  some = ids if drafter.vocab else None
  logits = functools.partial(
    target.Target(config).apply,
    {"params": target_params},
    head=target.output_head(config, target_params, some),
    ids=some,
    method=target.Target.logits,
  )
  p = _by_positions(
    lambda final: jax.nn.softmax(logits(final) / options.temperature, -1), len(ids), final
  )
  known = np.zeros(config.vocab_size, bool)
  known[ids] = True
  return _Goal(p, jnp.asarray(known)[drawn])


def _distances(
  options, logits: Callable, h: jax.Array, goal: _Goal, is_new: jax.Array | None
):
  """The trained distance, and total variation: f32[rows T] each, of outputs h f[rows T D].

  `is_new` bool[]: this is one of the `cross_entropy_updates`; None: it is not.
  """
  by_variation = options.distance == "total_variation"

  def distances(of):
    h, (p, known) = of
    logq = jax.nn.log_softmax(logits(h) / options.temperature, -1)
    variation = 0.5 * jnp.sum(jnp.abs(p - jnp.exp(logq)), -1)
    variation = jnp.where(known, variation, 1.0)
    if by_variation and is_new is None:
      return variation, variation
    cross_entropy = jnp.where(known, -jnp.sum(p * logq, -1), 0.0)
    if by_variation:
      return jnp.where(is_new, cross_entropy, variation), variation
    return cross_entropy, variation

  return _by_positions(distances, goal.p.shape[-1], (h, goal))


def _by_positions(f: Callable, width: int, x: Any) -> Any:
  """Computes f of arrays [rows T ...] in blocks of positions that fit `_BLOCK`.

  `width` numbers per row and position are the largest array that f makes.
  """
  rows, T = jax.tree.leaves(x)[0].shape[:2]
  # A power of two: mostly no rest is left, which would be a separate program.
  at_once = 1 << max((_BLOCK // (rows * width)).bit_length() - 1, 0)
  if T <= at_once:
    return f(x)

  def swap_axes(x):
    return jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), x)

  blocks = jax.lax.map(jax.checkpoint(f), swap_axes(x), batch_size=at_once)
  return swap_axes(blocks)
