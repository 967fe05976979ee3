"""Says in the log when rewards teach nothing, as all responses of a prompt have the same.

Algorithms that compare the responses of a prompt then have no gradient, and the run goes on
for nothing.
"""

from collections.abc import Mapping, Sequence
import logging

import numpy as np

from experiments import config as config_lib
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax.rl import algorithm as algorithm_lib

STEPS = 5  # in a row, after which it is said


def taught_nothing(record: Mapping[str, float]) -> bool:
  return record.get("policy/no_signal", record.get("policy/equal_groups", 0.0)) == 1.0


class Watch:
  """Follows the records of a run; says at once what makes all rewards equal anyway."""

  def __init__(self, config: config_lib.RunConfig, algorithm: algorithm_lib.Algorithm):
    self._config, self._in_a_row = config, 0
    if config.batch.responses == 1 and _compares(algorithm):
      self._in_a_row = STEPS  # it is said now
      _warn(f"rewards will teach nothing: {self._one_response()}")

  def update(self, record: Mapping[str, float]) -> None:
    """Warns when it has been so for `STEPS` steps, once until rewards differ again."""
    self._in_a_row = self._in_a_row + 1 if taught_nothing(record) else 0
    if self._in_a_row == STEPS:
      _warn(
        f"nothing was learnt in the last {STEPS} steps, as the responses of every prompt "
        f"had equal rewards: {self._cause(record)}"
      )

  def _one_response(self) -> str:
    name = self._config.algorithm["name"]
    return (
      f"batch.responses is 1, and {name} compares the responses to a prompt; set "
      "batch.responses to 4 or more, or algorithm.name to reinforce_pp or ppo"
    )

  def _cause(self, record: Mapping[str, float]) -> str:
    config = self._config
    if record.get("reward/failed") == 1:
      return "the reward failed on every response; the log says how"
    if record.get("rollout/truncated") == 1:
      return (
        "every response was cut off unsolved after sampling.max_tokens="
        f"{config.sampling.max_tokens} tokens; raise it, or give easier prompts"
      )
    if config.sampling.temperature == 0:
      return (
        "sampling.temperature is 0, so they are the same response; set it to 1, for example"
      )
    if record.get("reward/solved") == 1:
      return "every response was solved; give harder prompts"
    mean = record.get("reward/mean", 0.0)
    if record.get("reward/solved") == 0:
      return (
        f"none was solved, the mean reward is {mean:.3g}; give easier prompts, a policy "
        "that solves some of them, more batch.responses, or a reward with steps between"
      )
    return (
      f"the mean reward is {mean:.3g}; give prompts that are solved sometimes, or more "
      "batch.responses"
    )


def in_summary(records: Sequence[Mapping[str, float]]) -> str | None:
  """A sentence on such steps; None if there were none."""
  steps = metrics.steps(records)
  equal = sum(map(taught_nothing, steps))
  if not equal:
    return None
  return (
    f"In {equal} of {len(steps)} steps the responses of every prompt had equal rewards: "
    "nothing was learnt in them."
  )


def _compares(algorithm: algorithm_lib.Algorithm) -> bool:
  """Whether a prompt's single response has no advantage, whatever its reward."""
  prompts, tokens = 2, 2
  shape = (prompts, 1)
  by_token = np.zeros((*shape, tokens), np.float32)
  advantages = algorithm.advantages(
    algorithm_lib.Responses(
      reward=np.array([[0.0], [1.0]], np.float32),
      length=np.full(shape, tokens, np.int32),
      max_tokens=np.full(shape, tokens + 1, np.int32),
      truncated=np.zeros(shape, bool),
      solved=np.array([[False], [True]]),
      logp=by_token,
      reference_logp=by_token,
      value=by_token,
    )
  )
  return not np.any(advantages)


def _warn(text: str) -> None:
  if processes.is_first():
    logging.warning(text)
