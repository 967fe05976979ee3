"""The sides of a benchmark: ways to roll out the same requests, which differ in time only.

"tlt" speculates, and trains its drafter in idle slices; "frozen" keeps the drafter as it
is; "ngram" looks drafts up; "plain" decodes; and a strategy such as "3_1_4" drafts so
wherever the config would choose.
"""

from collections.abc import Sequence
import dataclasses
import gc
import hashlib
from typing import Any

import jax
import numpy as np

from experiments import config as config_lib
from experiments import from_config
from experiments import trees
from tlt_jax import processes
from tlt_jax.models import config as model_lib
from tlt_jax.rl import sample
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import spot as spot_lib

SIDES = ("plain", "tlt", "frozen", "ngram")


def check(sides: Sequence[str], config: config_lib.RunConfig) -> None:
  """Raises ValueError for sides that cannot be compared with this config.

  Args:
    sides: their names, those of `SIDES` or strategies
    config: of a run
  """
  if (sides or [""])[0] != "plain":
    raise ValueError(f"--sides starts with plain, not {[*sides[:1]]}")
  if repeated := [side for i, side in enumerate(sides) if side in sides[:i]]:
    raise ValueError(f"--sides names {repeated[0]} twice; name every side once")
  known = set(sides)
  arms = {side: strategy.parse(side) for side in known - set(SIDES)}
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


def settings(side: str, config: config_lib.RunConfig) -> dict:
  """The config of a side."""
  known = levels.parse(config.strategies)
  if side == "plain":
    return dataclasses.replace(config, drafter="", strategies="")
  if side == "ngram":
    arms = tuple(map(strategy.parse, ("off", "ngram_3", "ngram_5")))
    known = [level._replace(arms=arms) for level in known]
    return dataclasses.replace(config, drafter="", strategies=levels.write(known))
  if side not in SIDES:
    arm = strategy.parse(side)
    known = [known[-1]._replace(arms=(arm,))]
    if arm is not None and arm.source == strategy.NGRAM:
      config = dataclasses.replace(config, drafter="")
  changes = {"strategies": levels.write(known), "spot.train": side == "tlt"}
  return trees.change(config, changes)


class Side:
  """One way to roll out: its sampler, and its drafter if it has one."""

  def __init__(
    self,
    name: str,
    config: config_lib.RunConfig,
    model: model_lib.ModelConfig,
    mesh: jax.sharding.Mesh,
  ):
    """Makes sampler and drafter; `sampler.compile` makes them ready.

    Args:
      name: of the side
      config: of the run
      model: the policy's
      mesh: of the run
    """
    self.config = config = settings(name, config)
    self.drafter = from_config.make_drafter(config, model, mesh)
    self.spot = self.drafter and self.drafter.spot  # None: nothing trains it
    chosen = from_config.make_selector(config)
    self.sampler = from_config.make_sampler(config, model, mesh, self.drafter, chosen)

  def frozen(self) -> spot_lib.Frozen:
    """Its drafter as it is now."""
    return spot_lib.Frozen(self.drafter.config, self.drafter.params)

  def compile(self, policy: Any) -> None:
    """Makes every program ready, see `sample.Sampler.compile`."""
    self.sampler.compile(policy)
    gc.collect()
    gc.freeze()  # see `let_go`: or every collection goes through all that compiling left

  def rollout(
    self,
    policy: Any,
    records: Sequence[dict],
    first_request: int,
    train: bool = True,
    **options: Any,
  ) -> sample.Scored:
    """Answers and scores, see `sample.Sampler`.

    Args:
      policy: parameters, in the layout of rollouts
      records: the prompts
      first_request: number of the first response in the run
      train: whether a drafter that trains does so in this rollout
      options: further arguments of the sampler
    """
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
    """Rolls out once, so that everything has run; only the clock learns by it."""
    known = self.sampler.rollout.state()
    self.rollout(policy, records, first_request, train=False)
    self.sampler.rollout.restore(known)


def let_go() -> None:
  """Frees what sides have compiled that nobody holds any more, although it was frozen.

  A process that keeps the programs of several runs has more memory maps than Linux allows:
  "Cannot allocate memory".
  """
  gc.unfreeze()
  gc.collect()


def digest(tree: Any) -> str:
  """A hash of all arrays, to compare what sides have drawn or trained bit for bit."""
  found = hashlib.sha256()
  for x in jax.tree.leaves(processes.fetch(tree)):
    found.update(np.ascontiguousarray(x))
  return found.hexdigest()
