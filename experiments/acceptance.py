"""Measures how many drafted tokens are accepted: by strategy and temperature."""

from collections.abc import Sequence
import dataclasses
import itertools
import logging

from experiments import config as config_lib
from experiments import from_config
from experiments import tables
from tlt_jax import progress
from tlt_jax.rl import sample
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


def sampler(
  run: config_lib.RunConfig, models: from_config.Models, strategy: str
) -> sample.Sampler:
  """A sampler that drafts with one strategy at every live batch.

  Raises:
    ValueError: there is no such strategy, or it does not go with the rest
  """
  return from_config.make_sampler(
    run,
    models.model,
    models.mesh,
    drafter=models.drafter,
    selector=selector_lib.always(strategy_lib.parse(strategy)),
  )


def at_temperatures(usual: float, given: Sequence[float]) -> tuple[float, ...]:
  """The temperatures given, each once; without any, the usual one."""
  return tuple(dict.fromkeys(given)) or (usual,)


def samples_at(temperature: float, samples: int) -> int:
  """Responses per prompt to draw: one at temperature 0, where all are equal."""
  return samples if temperature > 0 else 1


def measure(
  run: config_lib.RunConfig,
  models: from_config.Models,
  *,
  strategies: Sequence[str],
  records: Sequence[dict],
  samples: int,
  seed: int,
  temperatures: Sequence[float] = (),
) -> list[dict]:
  """Measures acceptance on prompts, by strategy and temperature.

  Cases share nothing: n-grams learn only from the responses of their own case.

  Args:
    strategies: names, see `strategy.parse`
    records: the prompts
    samples: responses per prompt, see `samples_at`
    temperatures: none: that of the config
  Returns:
    for each case {"strategy", "temperature", "mean_acceptance_length",
    "acceptance_rate_pos", "accuracy"}; the length is tokens per target pass and request,
    the rates are the shares of passes that accept the first, second, ... draft
  """
  found = []
  cases = itertools.product(
    strategies, at_temperatures(run.sampling.temperature, temperatures)
  )
  for name, temperature in cases:
    sampling = dataclasses.replace(run.sampling, temperature=temperature)
    at = dataclasses.replace(run, sampling=sampling)
    with progress.shown(f"measuring acceptance of {name}"):
      scored = sampler(at, models, name)(
        models.params, records, samples_at(temperature, samples), seed=seed
      )
    length = scored.samples.mean_acceptance_length
    case = {"strategy": name, "temperature": temperature}
    result = {
      "mean_acceptance_length": length,
      "acceptance_rate_pos": scored.samples.acceptance_rate,
      "accuracy": float(scored.solved.mean()),
    }
    found.append(case | result)
    logging.info("%s, T = %g: %.2f tokens per pass", name, temperature, length)
  return found


def report(found: list[dict]) -> None:
  """Prints the result of `measure`."""
  tables.show(
    "Acceptance on held-out prompts",
    ["strategy", "temperature", "tokens per pass", "accepted, by position", "accuracy"],
    [
      (
        case["strategy"],
        f"{case['temperature']:g}",
        f"{case['mean_acceptance_length']:.2f}",
        " ".join(f"{rate:.2f}" for rate in case["acceptance_rate_pos"]),
        f"{100 * case['accuracy']:.0f}%",
      )
      for case in found
    ],
  )
