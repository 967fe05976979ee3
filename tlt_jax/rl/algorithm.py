"""An RL algorithm is two pure functions; one file per algorithm.

`make("grpo", clip_low=0.2)` imports `tlt_jax.rl.grpo` and calls its `make`. A
name with a dot is imported as it stands, so an algorithm may live in any
package. Algorithms see log-probabilities, advantages and masks; never the
model.
"""

from collections.abc import Callable
import inspect
from typing import NamedTuple

import chex
import flax.struct
import jax

from tlt_jax import named


@flax.struct.dataclass
class Tokens:
  """One micro-batch of packed tokens [rows T], as a loss sees it.

  A loss returns this micro-batch's *share*: shares add up to the loss of the
  whole batch. For that the totals of the batch are here.
  """

  logp: jax.Array  # f32[rows T]  of the target, under the policy that is trained
  entropy: jax.Array  # f32[rows T]  of the policy at this position, in nats
  old_logp: jax.Array  # f32[rows T]  under the policy that sampled
  reference_logp: jax.Array  # f32[rows T]  under the frozen reference
  mask: jax.Array  # bool[rows T]  True where the target is a response token
  advantage: jax.Array  # f32[rows T]  of the target, or of its whole sequence
  length: jax.Array  # f32[rows T]  response tokens of the sequence
  sequence_idx: jax.Array  # i32[rows T]  in [0, num_sequences)
  total_tokens: jax.Array  # f32[]  response tokens in the whole batch
  packed_tokens: jax.Array  # f32[]  those of them that are seen (for metrics)
  total_sequences: jax.Array  # f32[]  sequences in the whole batch


class Algorithm(NamedTuple):
  """The parts in which one policy-gradient method differs from another.

  advantages: rewards f32[P R], response lengths i32[P R] -> f32[P R], or f32[P R T] for
    each token of a response, zero beyond it
  loss: Tokens -> (f32[] share of the loss, {"policy/name": f32[] share})
  uses_reference: whether the loss reads `reference_logp`
  skips_zero_advantage: whether a sequence of advantage 0 has no gradient at all, so
    that it need not be computed; it still counts in the totals
  """

  advantages: Callable[[jax.Array, jax.Array], jax.Array]
  loss: Callable[[Tokens], tuple[jax.Array, dict[str, jax.Array]]]
  uses_reference: bool = False
  skips_zero_advantage: bool = False


def make(name: str, **args) -> Algorithm:
  """Makes the algorithm of that name with its own arguments.

  Its two functions check the shapes of what they are given and of what they return.

  Raises:
    ValueError: no such module, or an argument that it does not have
  """
  found = find(name)
  known = inspect.signature(found).parameters
  unknown = sorted(set(args) - set(known))
  if unknown:
    raise ValueError(
      f"{found.__module__}.make has no argument {unknown[0]!r}; it takes "
      f"{', '.join(known)}" + named.nearest(unknown[0], known)
    )
  return _checked(found(**args))


def find(name: str) -> Callable[..., Algorithm]:
  """The `make` of the module of that name.

  Raises:
    ValueError: no such module, or nothing of that name in it
  """
  try:
    return named.module(name, __package__, "make").make
  except named.NameNotFound as e:
    raise ValueError(f"no RL algorithm {name!r}: {e}") from e


def _checked(made: Algorithm) -> Algorithm:
  """The same algorithm; an array of a wrong shape is named, not broadcast."""

  def advantages(rewards: jax.Array, lengths: jax.Array) -> jax.Array:
    chex.assert_rank(rewards, 2)
    chex.assert_equal_shape([rewards, lengths])
    found = made.advantages(rewards, lengths)
    chex.assert_rank(found, {2, 3})
    chex.assert_shape(found, (*rewards.shape, *found.shape[2:]))
    return found

  def loss(tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
    share, metrics = made.loss(tokens)
    chex.assert_shape([share, *metrics.values()], ())
    return share, metrics

  return made._replace(advantages=advantages, loss=loss)
