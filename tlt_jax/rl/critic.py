"""A critic: a model of its own that says what each prefix of a response is worth.

It has the policy's shape and starts as the policy, with a value head, zero at first, in
place of the head over the vocabulary. An algorithm that asks for one says what it is to
predict and by which loss (`algorithm.Critic`); it is trained in the learner's rows, by as
many updates per step, and only where the learner's `only` lets it, beside its head.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import memory
from tlt_jax.models import target
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import trainer as trainer_lib

_HEAD = "value_head"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueTrainer(trainer_lib.Trainer):
  """Computes values of packed tokens, and trains the model that does; see `make`."""

  name = "critic"

  critic: algorithm_lib.Critic

  def abstract_params(self) -> dict:
    """The decoder's, which has no head over the vocabulary, and f32[D] of the value's."""
    head = jax.ShapeDtypeStruct((self.config.width,), jnp.float32)
    head = nn.LogicallyPartitioned(head, ("embed",))
    return target.abstract_params(self.config) | {_HEAD: head}

  def trains(self, path: str) -> bool:
    """See `trainer.Trainer.trains`."""
    return path == _HEAD or super().trains(path)

  def per_token(self, params, packed, temperature, rotations):
    """See `trainer.Trainer.per_token`: the values before the targets."""
    del temperature
    outside, features = self.features(params, packed, rotations)
    return jnp.dot(features.astype(jnp.float32), outside[_HEAD])

  def share(self, params, packed, sequences, totals, rotations):
    """See `trainer.Trainer.share`."""
    value = self.per_token(params, packed, sequences.temperature, rotations)
    values = algorithm_lib.Values(
      value=value,
      old_value=sequences.at_targets("value", packed),
      return_=sequences.at_targets("return_", packed),
      mask=packed.mask,
      total_tokens=totals.tokens,
    )
    return self.critic.loss(values)


class Critic:
  """A critic in training."""

  def __init__(self, trainer: ValueTrainer, state: trainer_lib.State):
    """Goes on from a state."""
    self.trainer, self.state = trainer, trainer.offload(state)

  def arrays(self) -> trainer_lib.State:
    """What a checkpoint holds of it."""
    return self.state

  def restore(self, state: trainer_lib.State) -> None:
    """Goes on from what a checkpoint held."""
    self.state = self.trainer.offload(state)

  def values(self, batch: batch_lib.Batch) -> np.ndarray:
    """The value before each token of the responses: f32[P R T]."""
    return self.trainer.score_responses(self.state.params, batch)

  def train(
    self, batch: batch_lib.Batch, sequences: batch_lib.Sequences, chosen: np.ndarray
  ) -> dict[str, float]:
    """Takes the updates of a step; see `trainer.Trainer.train_on`.

    Returns:
      `critic/*`, among them the share of the returns' variance that was predicted
    """
    state, metrics = self.trainer.train_on(self.state, batch, sequences, chosen)
    self.state = self.trainer.offload(state)
    tokens = np.arange(sequences.value.shape[1]) < sequences.length[:, None]
    error = (sequences.return_ - sequences.value)[tokens]
    variance = np.var(sequences.return_[tokens])
    explained = 1 - np.var(error) / variance if variance > 0 else 0.0
    return metrics | {"critic/explained_variance": float(explained)}


def make_trainer(
  critic: algorithm_lib.Critic | None, learner: trainer_lib.Trainer
) -> ValueTrainer | None:
  """What trains an algorithm's critic; None if it has none.

  Args:
    critic: of the algorithm
    learner: whose model, mesh, rows and number of updates the critic has as well
  """
  if critic is None:
    return None
  return ValueTrainer(
    config=dataclasses.replace(learner.config, tie_embeddings=True),  # no head of tokens
    critic=critic,
    optimizer=critic.optimizer,
    mesh=learner.mesh,
    buckets=learner.buckets,
    updates=learner.updates,
    remat=learner.remat,
    only=learner.only,
    offloads=learner.offloads,
  )


def make(
  critic: algorithm_lib.Critic | None, learner: trainer_lib.Trainer, params: dict
) -> Critic | None:
  """An algorithm's critic before its first update; None if it has none.

  Args:
    critic: of the algorithm
    learner: of the policy
    params: the policy's, which are copied
  """
  made = make_trainer(critic, learner)
  if made is None:
    return None
  memory.announce("the critic", made.abstract_state().params, "algorithm.name, policy")
  body = jax.tree.map(jnp.copy, {k: x for k, x in params.items() if k != "head"})
  return Critic(made, made.init(body | {_HEAD: jnp.zeros(made.config.width)}))
