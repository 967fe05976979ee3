"""The drafter's loss on packed sequences, with the target's features given.

For drafters that guess token by token; `block_loss` has that of the others. Pair t, the
feature of token t with token t+1, predicts the target's next feature and its distribution
of token t+2. Several drafting steps are trained at once, each on the output
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

  steps: ranges.Count = ranges.field(
    2, "drafting steps unrolled in training; drafters of blocks train all of a block"
  )
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
  final = _ahead(final)
  inside = precede_trained(packed)
  metrics = {"tokens": jnp.sum(inside).astype(jnp.float32)}
  known = knows(drafter, _ahead(packed.targets))
  goal = goal_of(options, drafter, target_params, updates)
  first = 0 if drafter.has_own_head else None
  compare = functools.partial(compare_with_goals, Comparison(options, drafter, 1, first))
  total = 0.0
  for k, h in enumerate(outputs):
    valid = inside & (packed.positions >= k)
    x = apply(h, method=drafter_lib.Drafter.before_head)
    goals = Goals(final, known, jnp.zeros_like(packed.positions), valid)
    share, *sums = compare(x, head, goal, goals)
    if drafter.predicts_features:
      error = jnp.abs(h - final).astype(jnp.float32)
      smooth = jnp.where(error < 1, 0.5 * error**2, error - 0.5)  # smooth L1
      share += REGRESSION * jnp.sum(jnp.mean(smooth, -1) * valid)
    total += DECAY**k * share
    metrics[f"loss_{k + 1}"] = share
    metrics[f"agreement_{k + 1}"] = sums[1][0]
  return total, metrics


def precede_trained(packed: packing.Packed) -> jax.Array:
  """Pairs t for which token t+2 is a response token of the same sequence: bool[rows T]."""
  return _ahead(packed.mask) & (_ahead(packed.positions) > 0)


def _ahead(x: jax.Array) -> jax.Array:
  return jnp.roll(x, -1, 1)


class Goal(NamedTuple):
  head: jax.Array  # f[U D]  the target's, of the drafter's tokens
  is_new: jax.Array | None  # bool[]  whether cross-entropy is trained; None: no


class Goals(NamedTuple):
  final: jax.Array  # f[rows T D]  the target's state, from which the token was drawn
  known: jax.Array  # bool[rows T]  whether the drafter has that token
  step: jax.Array  # i32[rows T]  of drafting, from 0
  valid: jax.Array  # bool[rows T]  whether it is trained


def goal_of(
  options: Loss,
  drafter: drafter_lib.DrafterConfig,
  target_params,
  updates: jax.Array | None,
) -> Goal:
  is_new = None
  if updates is not None and options.cross_entropy_updates:
    is_new = updates < options.cross_entropy_updates
  return Goal(drafter_lib.shared_head(drafter, target_params), is_new)


def knows(drafter: drafter_lib.DrafterConfig, tokens: jax.Array) -> jax.Array:
  """Whether a drafter may predict tokens i32[...]."""
  has = np.zeros(drafter.layer.vocab_size, bool)
  has[drafter.target_ids] = True
  return jnp.asarray(has)[tokens]


@dataclasses.dataclass(frozen=True)
class Comparison:
  options: Loss
  drafter: drafter_lib.DrafterConfig
  steps: int  # of drafting; the distance of step k is weighted by DECAY^k
  first: int | None  # column of the head, from which on it is trained; None: it is frozen

  def of_block(self, x, head, goal: Goal, goals: Goals):
    """The results of `compare_with_goals`, and the gradient by x and by the head."""
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
    valid = goals.valid.astype(jnp.float32)
    weight = valid * DECAY ** goals.step.astype(jnp.float32)
    by_step = valid[..., None] * jax.nn.one_hot(goals.step, self.steps)
    sums = (
      jnp.sum(distance * weight),
      jnp.einsum("bt,bts->s", distance, by_step),
      jnp.einsum("bt,bts->s", 1 - variation, by_step),
    )
    each = weight * known / self.options.temperature
    by_z = (each[..., None] * by_z).astype(x.dtype)
    by_x = jax.lax.dot_general(by_z, head.astype(x.dtype), (((2,), (0,)), ((), ())))
    by_head = None
    if self.first is not None:
      rows = ((0, 1), (0, 1)), ((), ())
      read = x[..., self.first :]
      by_head = jax.lax.dot_general(by_z, read, rows, preferred_element_type=jnp.float32)
    return sums, by_x, by_head

  def _log_softmax(self, z: jax.Array) -> jax.Array:
    ids = self.drafter.target_ids if self.drafter.vocab else None
    z = layers.mask_unused(z, self.drafter.layer, ids)
    return jax.nn.log_softmax(z / self.options.temperature, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def compare_with_goals(
  comparison: Comparison, x: jax.Array, head: jax.Array, goal: Goal, goals: Goals
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The weighted sum of the trained distance, which alone has a gradient, f32[].

  And the sums of distance and agreement by step, f32[steps] each. Of x f[rows T D] and the
  head f[U D]. The gradient is computed at once, block by block of positions, so that no
  logits are kept or computed twice; by the logits it is rounded to the dtype of x before it
  is multiplied.
  """
  return _compare_and_derive(comparison, x, head, goal, goals)[0]


def _compare_and_derive(comparison, x, head, goal, goals):
  rows, T, _ = x.shape
  at_once = max(max(_LOGITS // len(head), _POSITIONS) // rows, 1)
  count = -(-T // at_once)
  size = -(-T // count)
  first = comparison.first

  def cut(y):  # the positions after the last are not valid
    y = jnp.pad(y, [(0, 0), (0, count * size - T)] + [(0, 0)] * (y.ndim - 2))
    return y.reshape(rows, count, size, *y.shape[2:]).swapaxes(0, 1)

  def add(by_head, block):
    x, goals = block
    found, by_x, more = comparison.of_block(x, head, goal, goals)
    return None if more is None else by_head + more, (found, by_x)

  def of_all_columns(by_head):
    return None if by_head is None else jnp.pad(by_head, ((0, 0), (first, 0)))

  with jax.default_matmul_precision(target.matmul_precision(x.dtype.name)):
    if count == 1:
      found, by_x, by_head = comparison.of_block(x, head, goal, goals)
      return found, (by_x, of_all_columns(by_head))
    zeros = None if first is None else jnp.zeros_like(head[:, first:], jnp.float32)
    by_head, (found, by_x) = jax.lax.scan(add, zeros, jax.tree.map(cut, (x, goals)))
  by_x = by_x.swapaxes(0, 1).reshape(rows, count * size, *x.shape[2:])[:, :T]
  found = jax.tree.map(lambda y: jnp.sum(y, 0), found)
  return found, (by_x, of_all_columns(by_head))


def _multiply(comparison, derived, cotangents):
  of_distance, *_ = cotangents
  by_x, by_head = jax.tree.map(lambda y: (of_distance * y).astype(y.dtype), derived)
  return by_x, by_head, None, None


compare_with_goals.defvjp(_compare_and_derive, _multiply)
