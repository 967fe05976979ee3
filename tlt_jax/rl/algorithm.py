"""An RL algorithm is two pure functions; one file per algorithm.

`make("grpo", clip_low=0.2)` imports `tlt_jax.rl.grpo` and calls its `make`. A
name with a dot is imported as it stands, so an algorithm may live in any
package. Algorithms see rewards, log-probabilities, advantages and masks; never
the model.
"""

from collections.abc import Callable
import inspect
from typing import NamedTuple

import chex
import flax.struct
import jax
import optax

from tlt_jax import named


@flax.struct.dataclass
class Responses:
  """The scored responses of one RL step; the R of a prompt side by side.

  `max_tokens` and what stands below it may be None where nobody knows it: supervised
  training has rewards and lengths only.
  """

  reward: jax.Array  # f32[P R]
  length: jax.Array  # i32[P R]  tokens
  max_tokens: jax.Array | None = None  # i32[P R]  that the response might have had
  truncated: jax.Array | None = None  # bool[P R]  whether it ended at that limit
  solved: jax.Array | None = None  # bool[P R]  whether it solves its prompt
  # f32[P R T] each, of the tokens of a response, zero beyond it:
  logp: jax.Array | None = None  # as sampled, at the temperature and before filters
  reference_logp: jax.Array | None = None  # under the frozen reference, if there is one
  value: jax.Array | None = None  # the critic's, before the token; None without critic


@flax.struct.dataclass
class Tokens:
  """One micro-batch of packed tokens [rows T], as a loss sees it.

  A loss returns this micro-batch's *share*: shares add up to the loss of the
  whole batch. For that the totals of the batch are here.
  """

  logp: jax.Array  # f32[rows T]  of the target, under the policy that is trained
  entropy: jax.Array  # f32[rows T]  of the policy at this position, in nats
  old_logp: jax.Array  # f32[rows T]  under the policy that sampled, by the learner
  sampler_logp: jax.Array  # f32[rows T]  the same as the rollout computed it
  reference_logp: jax.Array  # f32[rows T]  under the frozen reference
  mask: jax.Array  # bool[rows T]  True where the target is a response token
  advantage: jax.Array  # f32[rows T]  of the target, or of its whole sequence
  length: jax.Array  # f32[rows T]  response tokens of the sequence
  sequence_idx: jax.Array  # i32[rows T]  in [0, num_sequences)
  total_tokens: jax.Array  # f32[]  response tokens in the whole batch
  packed_tokens: jax.Array  # f32[]  those of them that are seen (for metrics)
  total_sequences: jax.Array  # f32[]  sequences in the whole batch
  total_max_tokens: jax.Array  # f32[]  response tokens that the batch might have had


@flax.struct.dataclass
class Values:
  """One micro-batch of packed tokens [rows T], as a critic's loss sees it."""

  value: jax.Array  # f32[rows T]  before the target, of the critic that is trained
  old_value: jax.Array  # f32[rows T]  the same before the step's first update
  return_: jax.Array  # f32[rows T]  that it is to predict
  mask: jax.Array  # bool[rows T]  True where the target is a response token
  total_tokens: jax.Array  # f32[]  response tokens in the whole batch


class Critic(NamedTuple):
  """A model of what a response will be worth, trained beside the policy.

  returns: Responses -> f32[P R T], what the values of each token should have been
  loss: Values -> (f32[] share of the loss, {"critic/name": f32[] share})
  optimizer: of the critic's parameters
  """

  returns: Callable[[Responses], jax.Array]
  loss: Callable[[Values], tuple[jax.Array, dict[str, jax.Array]]]
  optimizer: optax.GradientTransformation


class Algorithm(NamedTuple):
  """The parts in which one policy-gradient method differs from another.

  advantages: Responses -> f32[P R], or f32[P R T] for each token of a response, zero
    beyond it
  loss: Tokens -> (f32[] share of the loss, {"policy/name": f32[] share})
  uses_reference: whether either of them reads `reference_logp`
  skips_zero_advantage: whether a sequence of advantage 0 has no gradient at all, so
    that it need not be computed; it still counts in the totals
  keeps: Responses -> bool[P], the prompts whose responses say something; those of the
    others have no gradient and do not count in the totals; None: all of them do
  critic: trained beside the policy; None: no critic is made
  """

  advantages: Callable[[Responses], jax.Array]
  loss: Callable[[Tokens], tuple[jax.Array, dict[str, jax.Array]]]
  uses_reference: bool = False
  skips_zero_advantage: bool = False
  keeps: Callable[[Responses], jax.Array] | None = None
  critic: Critic | None = None


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

  def advantages(responses: Responses) -> jax.Array:
    _check(responses)
    shape = responses.reward.shape
    found = made.advantages(responses)
    chex.assert_rank(found, {2, 3})
    chex.assert_shape(found, (*shape, *found.shape[2:]))
    return found

  def keeps(responses: Responses) -> jax.Array:
    found = made.keeps(responses)
    chex.assert_shape(found, (responses.reward.shape[0],))
    return found

  def returns(responses: Responses) -> jax.Array:
    found = made.critic.returns(responses)
    chex.assert_shape(found, responses.value.shape)
    return found

  return made._replace(
    advantages=advantages,
    loss=_sharing(made.loss),
    keeps=made.keeps and keeps,
    critic=made.critic
    and made.critic._replace(returns=returns, loss=_sharing(made.critic.loss)),
  )


def _check(responses: Responses) -> None:
  """Raises unless the arrays that are known have the shapes that they should have."""
  chex.assert_rank(responses.reward, 2)
  shape = responses.reward.shape
  for name in ("length", "max_tokens", "truncated", "solved"):
    if getattr(responses, name) is not None:
      chex.assert_equal_shape([responses.reward, getattr(responses, name)])
  by_token = [responses.logp, responses.reference_logp, responses.value]
  by_token = [x for x in by_token if x is not None]
  if by_token:
    chex.assert_shape(by_token, (*shape, by_token[0].shape[-1]))


def _sharing(loss: Callable) -> Callable:
  """The same loss; what is not one number each is named."""

  def checked(tokens):
    share, metrics = loss(tokens)
    chex.assert_shape([share, *metrics.values()], ())
    return share, metrics

  return checked
