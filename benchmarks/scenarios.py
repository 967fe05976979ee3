"""Scenarios of whole RL runs: named overrides of any run's config.

| name | the drafter at first | compared are |
|---|---|---|
| `cold` | none exists: random weights | plain, n-grams, TLT |
| `elsewhere` | of other problems, or another policy; to be named | all four sides |
| `drift` | the config's, a good one; the policy moves far from it | all four sides |

What the command line says of a key goes before what a scenario says. One thing is added to
both: in `cold` n-grams are among TLT's strategies, in every level that names none, and
draft while they are worth more than the new drafter. A new drafter guesses every token; for
a large vocabulary name an untrained one of fewer tokens, as
`train_drafter --config.steps=0 --config.drafter.vocab_size=4096` writes it.

A drafter from elsewhere, for the small policy: one that has seen problems with three
numbers only, for a run on problems with four.

    python -m experiments.train_drafter --workdir=runs/three --config.steps=300 \\
        --config=experiments/configs/drafter.py:small \\
        --run=experiments/configs/countdown.py:small --run.prompts.four_share=0 \\
        --run.held_out.four_share=0
    python -m benchmarks.run --scenario=elsewhere \\
        --config=experiments/configs/tail.py:8 --config.drafter=runs/three/drafter \\
        --config.prompts.four_share=1 --config.held_out.four_share=1

Both are trained by the recipe of `spot.Options`, whatever the config says, for as long as
that pays.
"""

from collections.abc import Callable, Container
import dataclasses
from typing import Any

from experiments import config as config_lib
from experiments import trees
from tlt_jax import named
from tlt_jax.models import drafters
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import strategy
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot


@dataclasses.dataclass(frozen=True)
class Scenario:
  """What is compared, and the dotted keys that are set, given the config."""

  sides: tuple[str, ...]
  settings: Callable[[config_lib.RunConfig], dict[str, Any]]
  wants_drafter: str = ""  # what the command line must name as drafter; "": nothing
  adds_ngrams: bool = False  # to the strategies, whoever has named these


def _recipe(**loss: Any) -> dict[str, Any]:
  """The settings of the recipe for a drafter that has much to learn."""
  of = lambda section, options, names: {f"spot.{section}{k}": options[k] for k in names}
  options, losses = vars(spot.Options()), vars(draft_loss.Loss()) | loss
  return {
    **of("", options, ("row_tokens", "rows")),
    **of("", options, ("min_micro_batches", "micro_batches_per_update", "average")),
    **of("loss.", losses, ("steps", "distance", "cross_entropy_updates")),
    **of("", spot.OPTIMIZER, ("learning_rate",)),
  }


def _cold(config: config_lib.RunConfig) -> dict[str, Any]:
  """The drafter is a new one."""
  kind = config.drafter if drafters.is_kind(config.drafter) else "eagle2"
  return {"steps": 100, "drafter": kind, **_recipe()}


def _elsewhere(config: config_lib.RunConfig) -> dict[str, Any]:
  """The drafter is named on the command line."""
  del config
  return {"steps": 100, **_recipe(cross_entropy_updates=0)}


def _drift(config: config_lib.RunConfig) -> dict[str, Any]:
  """All parameters are trained, for longer and three times as fast, at 1e-4 at most.

  At 3e-4 for all parameters the policies of the repo unlearn what they can.
  """
  rate = min(3 * config.optimizer["learning_rate"], 1e-4)
  return {"steps": 200, "learner.only": "", "optimizer.learning_rate": rate}


_ALL = ("plain", "ngram", "frozen", "tlt")
SCENARIOS = {
  "cold": Scenario(("plain", "ngram", "tlt"), _cold, adds_ngrams=True),
  "elsewhere": Scenario(
    _ALL, _elsewhere, "a drafter that was trained for other problems or another policy"
  ),
  "drift": Scenario(_ALL, _drift),
}


def _with_ngrams(strategies: str) -> str:
  """Adds n-grams to every level that names none."""
  is_ngrams = lambda arm: arm is not None and arm.source == strategy.NGRAM
  more = strategy.parse("ngram_3")
  return levels.write(
    level if any(map(is_ngrams, level.arms)) else level._replace(arms=(*level.arms, more))
    for level in levels.parse(strategies)
  )


def get(name: str) -> Scenario:
  """The scenario of that name.

  Raises:
    ValueError: there is none
  """
  if name not in SCENARIOS:
    raise ValueError(
      f"--scenario={name}: there are {', '.join(SCENARIOS)}{named.nearest(name, SCENARIOS)}"
    )
  return SCENARIOS[name]


def apply(
  name: str, config: config_lib.RunConfig, given: Container[str]
) -> config_lib.RunConfig:
  """The config as a scenario wants it.

  The policy's learning rate falls over the whole run, if it falls at all.

  Args:
    name: of the scenario
    config: of a run
    given: dotted keys that the command line has set, which stay
  Raises:
    ValueError: there is no such scenario, or what it wants is not given
  """
  scenario = get(name)
  if scenario.wants_drafter and "drafter" not in given:
    raise ValueError(
      f"--scenario={name} takes {scenario.wants_drafter}: give --config.drafter=DIR, a "
      "folder that experiments.train_drafter wrote"
    )
  settings = scenario.settings(config)
  if total := config.optimizer.get("total"):
    steps = config.steps if "steps" in given else settings["steps"]
    settings["optimizer.total"] = max(total, steps)
  changes = {key: value for key, value in settings.items() if key not in given}
  if scenario.adds_ngrams:
    changes["strategies"] = _with_ngrams(config.strategies)
  return trees.change(config, changes)
