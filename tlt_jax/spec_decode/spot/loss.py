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

import dataclasses
import functools
from typing import Literal, NamedTuple

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

# Logits computed at a time, 32 MB, or those of so many positions: a product of fewer waits
# for the head, which is read three times a block. A few such arrays coexist.
_LOGITS, _POSITIONS = 2**23, 256


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
  head = apply(frozen, method=drafter_lib.Drafter.output_head)
  ids = drafter.target_ids if drafter.vocab else None
  goal_head = target.output_head(config, frozen, ids)
  final = _ahead(final)
  # Pair t is trained where token t+2 is a response token of the same sequence.
  inside = _ahead(packed.mask) & (_ahead(packed.positions) > 0)
  metrics = {"tokens": jnp.sum(inside).astype(jnp.float32)}
  is_new = None
  if updates is not None and options.cross_entropy_updates:
    is_new = updates < options.cross_entropy_updates
  has = np.zeros(config.vocab_size, bool)
  has[drafter.target_ids] = True
  known = jnp.asarray(has)[_ahead(packed.targets)]
  compare = functools.partial(_compare, _Comparison(options, drafter))
  total = 0.0
  for k, h in enumerate(outputs):
    valid = (inside & (packed.positions >= k)).astype(jnp.float32)
    x = apply(h, method=drafter_lib.Drafter.before_head)
    goal = _Goal(goal_head, is_new), _Goals(final, known, valid)
    share, agreed = compare(x, head, *goal)
    if drafter.predicts_features:
      error = jnp.abs(h - final).astype(jnp.float32)
      smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5)  # smooth L1
      share += REGRESSION * jnp.sum(jnp.mean(smooth, -1) * valid)
    total += DECAY**k * share
    metrics[f"loss_{k + 1}"] = share
    metrics[f"agreement_{k + 1}"] = agreed
  return total, metrics


def _ahead(x: jax.Array) -> jax.Array:
  return jnp.roll(x, -1, 1)


class _Goal(NamedTuple):
  head: jax.Array  # f[U D]  the target's, of the drafter's tokens
  is_new: jax.Array | None  # bool[]  whether cross-entropy is trained; None: no


class _Goals(NamedTuple):
  final: jax.Array  # f[rows T D]  the target's state, from which the token was drawn
  known: jax.Array  # bool[rows T]  whether the drafter has that token
  valid: jax.Array  # f32[rows T]  whether it is trained


@dataclasses.dataclass(frozen=True)
class _Comparison:
  options: Loss
  drafter: drafter_lib.DrafterConfig

  def of_block(self, x, head, goal: _Goal, goals: _Goals):
    """The results of `_compare`, and the gradient by x and by a head that is trained."""
    p = jnp.exp(self._log_softmax(layers.linear(goals.final, goal.head, jnp.float32)))
    logq = self._log_softmax(layers.linear(x, head, jnp.float32))
    q, known = jnp.exp(logq), goals.known
    variation = jnp.where(known, 0.5 * jnp.sum(jnp.abs(p - q), -1), 1.0)
    cross_entropy = jnp.where(known, -jnp.sum(p * logq, -1), 0.0)
    by_variation = 0.5 * jnp.sign(q - p) * q
    by_variation -= q * jnp.sum(by_variation, -1, keepdims=True)
    pairs = (cross_entropy, q - p), (variation, by_variation)
    if self.options.distance == "cross_entropy":
      distance, by_z = pairs[0]
    elif goal.is_new is None:
      distance, by_z = pairs[1]
    else:
      distance, by_z = (jnp.where(goal.is_new, *of) for of in zip(*pairs, strict=True))
    sums = jnp.sum(distance * goals.valid), jnp.sum((1 - variation) * goals.valid)
    each = goals.valid * known / self.options.temperature
    by_z = (each[..., None] * by_z).astype(x.dtype)
    by_x = jax.lax.dot_general(by_z, head.astype(x.dtype), (((2,), (0,)), ((), ())))
    by_head = None
    if self.drafter.has_own_head:
      rows = ((0, 1), (0, 1)), ((), ())
      by_head = jax.lax.dot_general(by_z, x, rows, preferred_element_type=jnp.float32)
    return sums, by_x, by_head

  def _log_softmax(self, z: jax.Array) -> jax.Array:
    ids = self.drafter.target_ids if self.drafter.vocab else None
    z = layers.mask_unused(z, self.drafter.layer, ids)
    return jax.nn.log_softmax(z / self.options.temperature, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compare(
  comparison: _Comparison, x: jax.Array, head: jax.Array, goal: _Goal, goals: _Goals
) -> tuple[jax.Array, jax.Array]:
  """The sums of the trained distance, which alone has a gradient, and of agreement.

  Of x f[rows T D] and the head f[U D]. The gradient is computed at once, block by block
  of positions, so that no logits are kept or computed twice; by the logits it is rounded
  to the dtype of x before it is multiplied.
  """
  return _compare_and_derive(comparison, x, head, goal, goals)[0]


def _compare_and_derive(comparison, x, head, goal, goals):
  rows, T, _ = x.shape
  at_once = max(max(_LOGITS // len(head), _POSITIONS) // rows, 1)
  count = -(-T // at_once)
  size = -(-T // count)

  def cut(y):  # the positions after the last are not valid
    y = jnp.pad(y, [(0, 0), (0, count * size - T)] + [(0, 0)] * (y.ndim - 2))
    return y.reshape(rows, count, size, *y.shape[2:]).swapaxes(0, 1)

  def add(by_head, block):
    x, goals = block
    found, by_x, more = comparison.of_block(x, head, goal, goals)
    return None if more is None else by_head + more, (found, by_x)

  with jax.default_matmul_precision(target.matmul_precision(x.dtype.name)):
    if count == 1:
      found, *derived = comparison.of_block(x, head, goal, goals)
      return found, derived
    zeros = jnp.zeros_like(head, jnp.float32) if comparison.drafter.has_own_head else None
    by_head, (found, by_x) = jax.lax.scan(add, zeros, jax.tree.map(cut, (x, goals)))
  by_x = by_x.swapaxes(0, 1).reshape(rows, count * size, *x.shape[2:])[:, :T]
  return jax.tree.map(lambda y: jnp.sum(y, 0), found), (by_x, by_head)


def _multiply(comparison, derived, cotangents):
  of_distance, _ = cotangents
  by_x, by_head = jax.tree.map(lambda y: (of_distance * y).astype(y.dtype), derived)
  return by_x, by_head, None, None


_compare.defvjp(_compare_and_derive, _multiply)
