"""How many drafted tokens stand, by strategy and way of verification."""

import logging

import rich.console
import rich.table

from experiments import setup
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


def measure(
  config: dict,
  model,
  params,
  drafter,
  draft_params,
  mesh,
  *,
  strategies,
  verifications,
  prompts: int,
  samples: int,
  seed: int,
) -> dict:
  """Acceptance on held-out prompts, every request drafted for alike.

  Args:
    config: of a run, for its prompts, sampling and rollout
    strategies: as `strategy.parse` reads them
    verifications: of `speculate.VERIFICATIONS`
  Returns:
    {verification: {strategy: {"mean_acceptance_length", "acceptance_rate_pos",
    "accuracy"}}}; the first is tokens per target pass and request, the second the
    chance of a draft to stand given that all before it do
  """
  records = list(setup.build(config["held_out"] | {"size": prompts}))
  found = {}
  for verification in verifications:
    found[verification] = {}
    for name in strategies:
      always = strategy_lib.always(strategy_lib.parse(name))
      run = config | {"verification": verification}
      sampler = setup.sampler(run, model, mesh, drafter, always)
      scored = sampler(params, records, samples, seed, 0, draft_params)
      found[verification][name] = {
        "mean_acceptance_length": scored.samples.mean_acceptance_length,
        "acceptance_rate_pos": scored.samples.acceptance_rate,
        "accuracy": float(scored.reward.mean()),
      }
      length = scored.samples.mean_acceptance_length
      logging.info("%s, %s: %.2f tokens per pass", verification, name, length)
  return found


def report(found: dict) -> None:
  """Prints what `measure` returned."""
  table = rich.table.Table(
    *("verification", "strategy", "tokens per pass", "accepted, by position", "accuracy"),
    title="Acceptance on held-out prompts",
    title_justify="left",
  )
  for verification, by_strategy in found.items():
    for name, r in by_strategy.items():
      rates = " ".join(f"{x:.2f}" for x in r["acceptance_rate_pos"])
      length, accuracy = r["mean_acceptance_length"], r["accuracy"]
      table.add_row(verification, name, f"{length:.2f}", rates, f"{100 * accuracy:.0f}%")
  rich.console.Console(width=100).print(table)
