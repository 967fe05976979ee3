"""Scenarios of whole RL runs: named overrides of any run's config.

| name | initial drafter | sides |
|---|---|---|
| `cold` | random weights | plain, n-grams, TLT |
| `kinds` | random weights, of two kinds | plain, TLT with EAGLE-2, TLT with a block |
| `elsewhere` | of other problems, or another policy; to be given | all four |
| `drift` | the config's, a good one; the policy moves far from it | all four |

The command line has priority over a scenario, with one exception: `cold` adds n-grams to
every level of TLT's strategies that has none, to draft until the new drafter is better. A
new drafter predicts the whole vocabulary; if that is large, give an untrained drafter of
fewer tokens, as by `train_drafter --config.steps=0 --config.drafter.vocab_size=4096`.

An example of `elsewhere`, with the small policy: the drafter was trained on problems with
three numbers, the run has problems with four.

    python -m experiments.train_drafter --workdir=runs/three --config.steps=300 \\
        --config=experiments/configs/drafter.py:small \\
        --run=experiments/configs/countdown.py:small --run.prompts.four_share=0 \\
        --run.held_out.four_share=0
    python -m benchmarks.run --scenario=elsewhere \\
        --config=experiments/configs/tail.py:8 --config.drafter=runs/three/drafter \\
        --config.prompts.four_share=1 --config.held_out.four_share=1

All but `drift` train drafters by the recipe of `spot.Options`, not the config's, while that
pays.
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
  """Sides, and the dotted keys that are set for a config."""

  sides: tuple[str, ...]
  settings: Callable[[config_lib.RunConfig], dict[str, Any]]
  wants_drafter: str = ""  # the drafter that the command line must give; "": none
  adds_ngrams: bool = False  # to the strategies, even to those of the command line


def _recipe(**loss: Any) -> dict[str, Any]:
  """The settings of the recipe for a drafter that has much to learn."""
  options = vars(spot.Options())
  losses = vars(draft_loss.Loss()) | loss
  names = ("row_tokens", "rows", "min_micro_batches")
  names += ("micro_batches_per_update", "average")
  return {
    **{f"spot.{name}": options[name] for name in names},
    **{
      f"spot.loss.{name}": losses[name]
      for name in ("steps", "distance", "cross_entropy_updates")
    },
    "spot.learning_rate": spot.OPTIMIZER["learning_rate"],
  }


def _cold(config: config_lib.RunConfig) -> dict[str, Any]:
  """The drafter is a new one."""
  kind = config.drafter if drafters.is_kind(config.drafter) else "eagle2"
  return {"steps": 100, "drafter": kind, **_recipe()}


def _elsewhere(config: config_lib.RunConfig) -> dict[str, Any]:
  """The drafter is given on the command line."""
  del config
  return {"steps": 100, **_recipe(cross_entropy_updates=0)}


def _drift(config: config_lib.RunConfig) -> dict[str, Any]:
  """Trains all parameters, for longer, at three times the rate but 1e-4 at most.

  At 3e-4 for all parameters the policies of the repo get worse.
  """
  rate = min(3 * config.optimizer["learning_rate"], 1e-4)
  return {"steps": 200, "learner.only": "", "optimizer.learning_rate": rate}


_ALL = ("plain", "ngram", "frozen", "tlt")
SCENARIOS = {
  "cold": Scenario(("plain", "ngram", "tlt"), _cold, adds_ngrams=True),
  "kinds": Scenario(("plain", "eagle2", "block"), _cold),
  "elsewhere": Scenario(
    _ALL, _elsewhere, "a drafter that was trained for other problems or another policy"
  ),
  "drift": Scenario(_ALL, _drift),
}


def _with_ngrams(strategies: str) -> str:
  """Adds n-grams to every level without n-grams."""
  known = list(levels.parse(strategies))
  for i, level in enumerate(known):
    if not any(arm is not None and arm.source == strategy.NGRAM for arm in level.arms):
      arms = (*level.arms, strategy.parse("ngram_3"))
      known[i] = level._replace(arms=arms)
  return levels.write(known)


def get(name: str) -> Scenario:
  if name not in SCENARIOS:
    raise ValueError(
      f"--scenario={name}: there are {', '.join(SCENARIOS)}{named.nearest(name, SCENARIOS)}"
    )
  return SCENARIOS[name]


def apply(
  name: str, config: config_lib.RunConfig, given: Container[str]
) -> config_lib.RunConfig:
  """The config of a scenario, with a learning-rate schedule over the whole run.

  Args:
    given: dotted keys of the command line, which stay
  Raises:
    ValueError: there is no such scenario, or its drafter is not given
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
