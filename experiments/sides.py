"""The sides of a comparison: ways to roll out the same requests, which differ in time only.

A side is "plain" decoding, "tlt" (speculation, with a drafter that trains in idle slices),
"frozen" (the same drafter, not trained), "ngram" (drafts looked up), a kind of drafter, as
"block" ("tlt" with a new drafter of that kind), or the name of a strategy, such as "3_1_4",
which replaces all that the config would choose from.
"""

from collections.abc import Sequence
import dataclasses
import gc
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import trees
from tlt_jax import axes
from tlt_jax import processes
from tlt_jax import stopwatch
from tlt_jax.models import config as model_lib
from tlt_jax.models import drafters
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import sample
from tlt_jax.rl import trainer
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import spot as spot_lib

SIDES = ("plain", "tlt", "frozen", "ngram")  # kinds of drafters and strategies are more


def trains(side: str) -> bool:
  """Whether the drafter of a side trains."""
  return side == "tlt" or drafters.is_kind(side)


def check(sides: Sequence[str], config: config_lib.RunConfig) -> None:
  """Raises ValueError for sides that cannot be compared with this config."""
  if (sides or [""])[0] != "plain":
    raise ValueError(f"--sides starts with plain, not {[*sides[:1]]}")
  if repeated := [side for i, side in enumerate(sides) if side in sides[:i]]:
    raise ValueError(f"--sides names {repeated[0]} twice; name every side once")
  known = set(sides)
  kinds = set(filter(drafters.is_kind, known))
  arms = {side: strategy.parse(side) for side in known - kinds - set(SIDES)}
  drafting = {side for side, arm in arms.items() if strategy.uses_drafter(arm)}
  drafting |= known & {"tlt", "frozen"}
  if not config.strategies and (others := known - {"plain"}):
    raise ValueError(
      f"side {min(others)!r} has no strategies: give --config.strategies, such as "
      "'up to 16 live: off or 3_1_4'"
    )
  if drafting and not config.drafter:
    raise ValueError(
      f"nothing drafts on side {min(drafting)!r}: the config has no drafter; give "
      "--config.drafter=DIR (or eagle2, a new one), or --sides=plain,ngram"
    )


def settings(side: str, config: config_lib.RunConfig) -> config_lib.RunConfig:
  """The config of a side."""
  known = levels.parse(config.strategies)
  if side == "plain":
    return dataclasses.replace(config, drafter="", strategies="")
  if side == "ngram":
    arms = tuple(map(strategy.parse, ("off", "ngram_3", "ngram_5")))
    known = [level._replace(arms=arms) for level in known]
    return dataclasses.replace(config, drafter="", strategies=levels.write(known))
  if drafters.is_kind(side):
    config = dataclasses.replace(config, drafter=side)
  elif side not in SIDES:
    arm = strategy.parse(side)
    known = [known[-1]._replace(arms=(arm,))]
    if arm is not None and arm.source == strategy.NGRAM:
      config = dataclasses.replace(config, drafter="")
  changes = {"strategies": levels.write(known), "spot.train": trains(side)}
  return trees.change(config, changes)


class Side:
  """A sampler, and its drafter if it has one."""

  def __init__(
    self,
    name: str,
    config: config_lib.RunConfig,
    model: model_lib.ModelConfig,
    mesh: jax.sharding.Mesh,
    records: Sequence[dict] = (),
  ):
    """Makes it; `records` are the run's, see `from_config.drafter_vocab`."""
    self.config = config = settings(name, config)
    vocab = from_config.drafter_vocab(config, model, records)
    self.drafter = from_config.make_drafter(config, model, mesh, vocab)
    self.spot = self.drafter and self.drafter.spot  # None: nothing trains it
    chosen = from_config.make_selector(config)
    self.sampler = from_config.make_sampler(config, model, mesh, self.drafter, chosen)

  def frozen(self) -> spot_lib.Frozen:
    return spot_lib.Frozen(self.drafter.config, self.drafter.params)

  def compile(self, policy: Any) -> None:
    self.sampler.compile(policy)
    gc.collect()
    gc.freeze()  # or every collection goes through all that compiling left

  def rollout(
    self,
    policy: Any,
    records: Sequence[dict],
    first_request: int,
    train: bool = True,
    **options: Any,
  ) -> sample.Scored:
    """Draws and scores responses, see `sample.Sampler`; `train=False` keeps the drafter."""
    gc.collect()  # or it takes half a second of some side's time
    return self.sampler(
      policy,
      records,
      self.config.batch.responses,
      seed=self.config.seed,
      first_request=first_request,
      train=train and self.spot is not None,
      **options,
    )

  def warm_up(self, policy: Any, records: Sequence[dict], first_request: int) -> None:
    """Rolls out once, unmeasured; of the rollout's state only the clock changes."""
    known = self.sampler.rollout.state()
    self.rollout(policy, records, first_request, train=False)
    self.sampler.rollout.restore(known)


class TrainingSide:
  """A side, and the policy that it trains."""

  def __init__(
    self,
    name: str,
    config: config_lib.RunConfig,
    learner: learner_lib.Learner,
    params: Any,
    records: Sequence[dict],
  ):
    self.learner = learner
    self.go_on_from(learner.init(jax.tree.map(jnp.copy, params)))
    self.side = Side(name, config, learner.config, learner.mesh, records)
    self.side.compile(self.policy)

  def go_on_from(self, state: trainer.State) -> None:
    self.state = state
    self.policy = jax.block_until_ready(self.learner.to_rollout(state.params))

  def step(
    self, step: int, records: Sequence[dict], lengths: np.ndarray | None = None
  ) -> tuple[dict[str, float], sample.Scored, str]:
    """An RL step.

    Args:
      lengths: i32[prompts * responses] of a trace; None: the policy's own
    Returns:
      seconds by part; the samples; a hash of their tokens and the new policy
    """
    P, R = self.side.config.batch.prompts, self.side.config.batch.responses
    scored = self.side.rollout(self.policy, records, step * P * R, lengths=lengths)
    watch = stopwatch.Stopwatch()
    state, _ = self.learner.train(self.state, scored.batch(R))
    seconds = {
      "rollout": scored.rollout_s,
      "reward": scored.reward_s,
      "update": watch.lap(),
    }
    self.go_on_from(state)
    seconds["sync"] = watch.lap()
    seconds["step"] = sum(seconds.values())
    return seconds, scored, digest([scored.samples.tokens, self.state.params])


def make_training_sides(
  names: Sequence[str],
  config: config_lib.RunConfig,
  mesh: jax.sharding.Mesh,
  records: Sequence[dict],
) -> dict[str, TrainingSide]:
  """Sides that start from the config's policy and share a learner."""
  model, params = hf.load(config.policy, mesh, axes.TRAIN, dtype="float32")
  algorithm = algorithm_lib.make(**config.algorithm)
  learner = from_config.make_learner(config, model, algorithm, mesh)
  return {name: TrainingSide(name, config, learner, params, records) for name in names}


def free_programs() -> None:
  """Frees the programs of sides that are no longer used, which `compile` froze.

  A process that keeps the programs of several runs has more memory maps than Linux allows:
  "Cannot allocate memory".
  """
  gc.unfreeze()
  gc.collect()


def digest(tree: Any) -> str:
  """A hash of all arrays, to compare sides bit for bit."""
  found = hashlib.sha256()
  for x in jax.tree.leaves(processes.fetch(tree)):
    found.update(np.ascontiguousarray(x))
  return found.hexdigest()
