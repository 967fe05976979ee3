"""Measures how many drafted tokens stand, by strategy and way of verification."""

from collections.abc import Sequence
import logging

from experiments import from_config
from experiments import tables
from tlt_jax.rl import sample
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


def sampler(
  config: dict, models: from_config.Models, strategy: str, verification: str
) -> sample.Sampler:
  """The sampler that drafts for every request alike; see `measure`.

  Raises:
    ValueError: there is no such strategy, or it does not go with the rest
  """
  return from_config.sampler(
    config | {"verification": verification},
    models.model,
    models.mesh,
    drafter=models.drafter,
    selector=selector_lib.always(strategy_lib.parse(strategy)),
  )


def measure(
  config: dict,
  models: from_config.Models,
  *,
  strategies: Sequence[str],
  verifications: Sequence[str],
  records: Sequence[dict],
  samples: int,
  seed: int,
) -> dict:
  """Measures acceptance on prompts, every request drafted for alike.

  Args:
    config: of a run, for its sampling and rollout
    models: its policy, and the drafter
    strategies: as `strategy.parse` reads them
    verifications: of `source.VERIFICATIONS`
    records: the prompts, held-out ones
    samples: responses per prompt
    seed: of the noise
  Returns:
    {verification: {strategy: {"mean_acceptance_length", "acceptance_rate_pos",
    "accuracy"}}}; the first is tokens per target pass and request, the second the
    chance of a draft to stand given that all before it do
  """
  found = {}
  for verification in verifications:
    found[verification] = {}
    for name in strategies:
      scored = sampler(config, models, name, verification)(
        models.params, records, samples, seed=seed, draft_params=models.draft_params
      )
      length = scored.samples.mean_acceptance_length
      found[verification][name] = {
        "mean_acceptance_length": length,
        "acceptance_rate_pos": scored.samples.acceptance_rate,
        "accuracy": float(scored.solved.mean()),
      }
      logging.info("%s, %s: %.2f tokens per pass", verification, name, length)
  return found


def report(found: dict) -> None:
  """Prints what `measure` returned."""
  rows = [
    (
      verification,
      strategy,
      f"{r['mean_acceptance_length']:.2f}",
      " ".join(f"{rate:.2f}" for rate in r["acceptance_rate_pos"]),
      f"{100 * r['accuracy']:.0f}%",
    )
    for verification, by_strategy in found.items()
    for strategy, r in by_strategy.items()
  ]
  tables.show(
    "Acceptance on held-out prompts",
    ["verification", "strategy", "tokens per pass", "accepted, by position", "accuracy"],
    rows,
  )
