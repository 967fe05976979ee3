"""An RL algorithm is two pure functions; one file per algorithm.

`make("grpo", clip_low=0.2)` imports `tlt_jax.rl.grpo` and calls its `make`; a dotted name
is imported as given, from any package. Algorithms see rewards, log-probabilities,
advantages and masks; never the model.
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
  """The scored responses of one RL step. Optional fields are None where unknown."""

  reward: jax.Array  # f32[P R]
  length: jax.Array  # i32[P R]  tokens
  max_tokens: jax.Array | None = None  # i32[P R]  the limit of the response
  truncated: jax.Array | None = None  # bool[P R]  ended at that limit
  solved: jax.Array | None = None  # bool[P R]
  # f32[P R T] each, of the tokens of a response, zero beyond it:
  logp: jax.Array | None = None  # as sampled, at the temperature and before filters
  reference_logp: jax.Array | None = None  # under the frozen reference
  value: jax.Array | None = None  # the critic's, before the token


@flax.struct.dataclass
class Tokens:
  """One micro-batch of packed tokens [rows T], as a loss sees it.

  A loss returns its share, normalised by the totals of the whole batch: shares add up.
  """

  logp: jax.Array  # f32[rows T]  of the target, under the trained policy
  entropy: jax.Array  # f32[rows T]  of the policy at this position, in nats
  old_logp: jax.Array  # f32[rows T]  before the step's first update, by the learner
  sampler_logp: jax.Array  # f32[rows T]  under the policy that drew it, by the rollout
  reference_logp: jax.Array  # f32[rows T]  under the frozen reference
  mask: jax.Array  # bool[rows T]  True where the target is a response token
  advantage: jax.Array  # f32[rows T]  of the target, or of its whole sequence
  length: jax.Array  # f32[rows T]  response tokens of the sequence
  sequence_idx: jax.Array  # i32[rows T]  in [0, num_sequences)
  total_tokens: jax.Array  # f32[]  response tokens in the whole batch
  packed_tokens: jax.Array  # f32[]  those that are computed (for metrics)
  total_sequences: jax.Array  # f32[]  sequences in the whole batch
  total_max_tokens: jax.Array  # f32[]  sum of the limits of the responses


@flax.struct.dataclass
class Values:
  value: jax.Array  # f32[rows T]  before the target
  old_value: jax.Array  # f32[rows T]  the same before the step's first update
  return_: jax.Array  # f32[rows T]  to be predicted
  mask: jax.Array  # bool[rows T]  True where the target is a response token
  total_tokens: jax.Array  # f32[]  response tokens in the whole batch


class Critic(NamedTuple):
  """A model of the returns, trained alongside the policy.

  returns: Responses -> f32[P R T], the targets of the values
  loss: Values -> (f32[] share of the loss, {"critic/name": f32[] share})
  """

  returns: Callable[[Responses], jax.Array]
  loss: Callable[[Values], tuple[jax.Array, dict[str, jax.Array]]]
  optimizer: optax.GradientTransformation


class Algorithm(NamedTuple):
  """What distinguishes one policy-gradient method from another.

  advantages: Responses -> f32[P R], or f32[P R T] for each token of a response, zero
    beyond it
  loss: Tokens -> (f32[] share of the loss, {"policy/name": f32[] share})
  uses_reference: whether either of them reads `reference_logp`
  skips_zero_advantage: whether a sequence of advantage 0 has no gradient, so that it
    need not be computed; it still counts in the totals
  keeps: Responses -> bool[P], the prompts that are trained on; the others have no
    gradient and do not count in the totals; None: all
  """

  advantages: Callable[[Responses], jax.Array]
  loss: Callable[[Tokens], tuple[jax.Array, dict[str, jax.Array]]]
  uses_reference: bool = False
  skips_zero_advantage: bool = False
  keeps: Callable[[Responses], jax.Array] | None = None
  critic: Critic | None = None


def make(name: str, **args) -> Algorithm:
  """Makes an algorithm whose functions check the shapes of their inputs and outputs.

  Raises:
    ValueError: no such module, or an argument that it does not have
  """
  factory = find(name)
  known = inspect.signature(factory).parameters
  unknown = sorted(set(args) - set(known))
  if unknown:
    raise ValueError(
      f"{factory.__module__}.make has no argument {unknown[0]!r}; it takes "
      f"{', '.join(known)}" + named.nearest(unknown[0], known)
    )
  return _checked(factory(**args))


def find(name: str) -> Callable[..., Algorithm]:
  try:
    return named.module(name, __package__, "make").make
  except named.NameNotFound as e:
    raise ValueError(f"no RL algorithm {name!r}: {e}") from e


def _checked(made: Algorithm) -> Algorithm:
  """The same algorithm; an array of a wrong shape raises instead of being broadcast."""

  def advantages(responses: Responses) -> jax.Array:
    _check(responses)
    result = made.advantages(responses)
    chex.assert_rank(result, {2, 3})
    chex.assert_shape(result, (*responses.reward.shape, *result.shape[2:]))
    return result

  def keeps(responses: Responses) -> jax.Array:
    result = made.keeps(responses)
    chex.assert_shape(result, (responses.reward.shape[0],))
    return result

  def returns(responses: Responses) -> jax.Array:
    result = made.critic.returns(responses)
    chex.assert_shape(result, responses.value.shape)
    return result

  critic = made.critic
  if critic is not None:
    critic = critic._replace(returns=returns, loss=_scalar(critic.loss))
  return made._replace(
    advantages=advantages,
    loss=_scalar(made.loss),
    keeps=None if made.keeps is None else keeps,
    critic=critic,
  )


def _check(responses: Responses) -> None:
  chex.assert_rank(responses.reward, 2)
  shape = responses.reward.shape
  for name in ("length", "max_tokens", "truncated", "solved"):
    if getattr(responses, name) is not None:
      chex.assert_equal_shape([responses.reward, getattr(responses, name)])
  by_token = [responses.logp, responses.reference_logp, responses.value]
  by_token = [x for x in by_token if x is not None]
  if by_token:
    chex.assert_shape(by_token, (*shape, by_token[0].shape[-1]))


def _scalar(loss: Callable) -> Callable:
  def checked(tokens):
    share, metrics = loss(tokens)
    chex.assert_shape([share, *metrics.values()], ())
    return share, metrics

  return checked
