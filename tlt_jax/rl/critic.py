"""A critic: a separate model that predicts the return after each prefix of a response.

It is initialised from the policy, with a zero value head in place of the head over the
vocabulary. Its targets and loss are the algorithm's (`algorithm.Critic`); it is trained on
the learner's rows, by as many updates per step. The learner's `only` holds for it too,
except for its head.
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
  name = "critic"

  critic: algorithm_lib.Critic

  def abstract_params(self) -> dict:
    head = jax.ShapeDtypeStruct((self.config.width,), jnp.float32)
    head = nn.LogicallyPartitioned(head, ("embed",))
    return target.abstract_params(self.config) | {_HEAD: head}

  def trains(self, path: str) -> bool:
    return path == _HEAD or super().trains(path)

  def per_token(self, params, packed, temperature, rotations):
    del temperature
    outside, features, _ = self.features(params, packed, rotations)
    return jnp.dot(features.astype(jnp.float32), outside[_HEAD])

  def share(self, params, packed, sequences, totals, rotations):
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
  def __init__(self, trainer: ValueTrainer, state: trainer_lib.State):
    self.trainer, self.state = trainer, trainer.offload(state)

  def arrays(self) -> trainer_lib.State:
    return self.state

  def restore(self, state: trainer_lib.State) -> None:
    self.state = self.trainer.offload(state)

  def values(self, batch: batch_lib.Batch) -> np.ndarray:
    return self.trainer.score_responses(self.state.params, batch)

  def train(
    self, batch: batch_lib.Batch, sequences: batch_lib.Sequences, chosen: np.ndarray
  ) -> dict[str, float]:
    """Takes the updates of a step; see `trainer.Trainer.train_on`.

    In `critic/*`, `explained_variance` is the share of the returns' variance predicted.
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
  """The trainer of an algorithm's critic, set up as the learner; None if it has none."""
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
    kernels=learner.kernels,
  )


def make(
  critic: algorithm_lib.Critic | None, learner: trainer_lib.Trainer, params: dict
) -> Critic | None:
  """An algorithm's critic before its first update, from the policy's parameters."""
  trainer = make_trainer(critic, learner)
  if trainer is None:
    return None
  memory.announce("the critic", trainer.abstract_state().params, "algorithm.name, policy")
  body = jax.tree.map(jnp.copy, {k: x for k, x in params.items() if k != "head"})
  return Critic(trainer, trainer.init(body | {_HEAD: jnp.zeros(trainer.config.width)}))
