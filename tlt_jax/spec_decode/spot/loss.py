"""The drafter's loss on packed sequences, with the target's features at hand.

Pair t, the feature of token t with token t+1, predicts the target's next feature and
its distribution of token t+2. Several drafting steps are trained at once, each on
what the one before gave, so that the drafter learns from its own mistakes:

    sum_k decay^k * mean(distribution loss + regression * smooth_L1(feature))

Distribution losses, between target p and drafter q at the sampling temperature:
soft cross-entropy (EAGLE, https://arxiv.org/abs/2401.15077), or total variation,
which is what acceptance depends on (https://arxiv.org/abs/2606.12370).

A drafter with a vocabulary of its own has q = 0 elsewhere. Total variation counts what
p has there; cross-entropy is to p renormalised within it, and zero at positions whose
likeliest token it lacks, as in the code of EAGLE-3 (https://arxiv.org/abs/2503.01840).
"""

import dataclasses
import functools
from typing import Literal

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


@dataclasses.dataclass(frozen=True)
class Loss:
  """The objective of a drafter's training."""

  steps: ranges.Count = 5  # drafting steps unrolled in training
  # weight of a drafting step relative to the one before
  decay: ranges.ShareAboveZero = 0.8
  # distance between the target's and the drafter's distributions
  distance: Literal[DISTANCES] = "cross_entropy"
  # weight of the feature loss, for drafters that predict features
  regression: ranges.NotNegative = 0.1
  temperature: ranges.Positive = 1.0  # temperature of the distributions

  def __post_init__(self):
    ranges.check(Loss, vars(self))

  @property
  def metrics(self) -> list[str]:
    """The names of what `loss` tells."""
    by_step = [f"{x}_{k + 1}" for x in ("loss", "agreement") for k in range(self.steps)]
    return ["tokens", *by_step]


def loss(
  options: Loss,
  drafter: drafter_lib.DrafterConfig,
  config: config_lib.ModelConfig,
  draft_params,
  target_params,
  packed: packing.Packed,
  kept: features_lib.Kept,
  rotations: layers.Rotation | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of one micro-batch, a sum over tokens, to be divided by their count.

  Args:
    options: what is trained for
    drafter, draft_params: what is trained
    config, target_params: of the target, which stays as it is
    packed: [rows T]; all arrays' rows are independent
    kept: of the target's states, final f[rows T D] and what the drafter reads
    rotations: of positions 0, 1, ..., where they are at hand
  Returns:
    the sum, and {"tokens", "loss_k", "agreement_k"} as sums as well; agreement is
    1 - total variation, the chance of acceptance of an optimal coupling
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
  p, goal, outside = _target_distributions(options, drafter, config, frozen, final)
  # Pair t is trained where token t+2 is a response token of the same sequence.
  inside = _ahead(packed.mask) & (_ahead(packed.positions) > 0)
  metrics = {"tokens": jnp.sum(inside).astype(jnp.float32)}
  total = 0.0
  for k, h in enumerate(outputs):
    valid = (inside & (packed.positions >= k)).astype(jnp.float32)
    q = apply(frozen, h, method=drafter_lib.Drafter.logits) / options.temperature
    logq = jax.nn.log_softmax(q, -1)
    variation = 0.5 * (jnp.sum(jnp.abs(p - jnp.exp(logq)), -1) + outside)
    if options.distance == "cross_entropy":
      distance = -jnp.sum(goal * logq, -1)
    else:
      distance = variation
    share = jnp.sum(distance * valid)
    if drafter.predicts_features and options.regression:
      error = jnp.abs(h - _ahead(final)).astype(jnp.float32)
      smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5)  # smooth L1
      share += options.regression * jnp.sum(jnp.mean(smooth, -1) * valid)
    total += options.decay**k * share
    metrics[f"loss_{k + 1}"] = share
    metrics[f"agreement_{k + 1}"] = jnp.sum((1 - variation) * valid)
  return total, metrics


def _ahead(x: jax.Array) -> jax.Array:
  """At every place of [rows T ...] what stands at the next one."""
  return jnp.roll(x, -1, 1)


def _target_distributions(options, drafter, config, target_params, final):
  """The target's p after the next token, as `_within` gives it.

  Args:
    options, drafter, config, target_params: see `loss`
    final: f[rows T D]
  """
  logits = target.Target(config).apply(
    {"params": target_params}, final, method=target.Target.logits
  )
  p = jax.nn.softmax(_ahead(logits) / options.temperature, -1)
  return _within(p, drafter) if drafter.vocab else (p, p, 0.0)


def _within(p: jax.Array, drafter: drafter_lib.DrafterConfig):
  """The target's p f32[... V] as a drafter of U tokens sees it.

  Returns:
    p f32[... U]  of its tokens
    goal f32[... U]  the same, renormalised; zero where the likeliest token is outside
    outside f32[...]  all other p together
  """
  known = jnp.take(drafter.draft_ids, jnp.argmax(p, -1)) < len(drafter.vocab)
  p = jnp.take(p, np.array(drafter.vocab), -1)
  mass = jnp.sum(p, -1)
  divisor = jnp.where(known, mass, jnp.inf)  # the mass may be 0 where it is not
  return p, p / divisor[..., None], 1.0 - mass
