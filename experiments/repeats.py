"""Repeats some rollouts of a run without TLT, to measure its gain.

A repeated rollout runs right after the run's own, with the same requests, policy and noise:
plainly and, if the drafter trains, also with the run's initial drafter, frozen. Its tokens
must be the same; nothing is trained on them. Compare `plain/seconds_s`
and `frozen/seconds_s` with `rollout/seconds_s` less `drafter/training_s` of the step.
"""

import dataclasses
from typing import Any

import jax

from experiments import config as config_lib
from experiments import from_config
from experiments import launch
from tlt_jax import progress
from tlt_jax import stopwatch
from tlt_jax.models import config as model_lib
from tlt_jax.rl import sample
from tlt_jax.spec_decode.rollout import compare

SIDES = ("plain", "frozen")


@dataclasses.dataclass(frozen=True)
class Repeats:
  """Repeats every n-th rollout; see `make`."""

  every: int  # n; 0: none is repeated
  sides: dict[str, sample.Sampler]  # of `SIDES`

  def __call__(self, step: int, params: Any, scored: sample.Scored) -> dict[str, float]:
    """Metrics of the repeated rollouts, {} if the step has none or drew nothing.

    Args:
      params: the policy's in the run's own rollout
      scored: that rollout
    """
    if not self.every or (step + 1) % self.every or not scored.samples.chunks:
      return {}
    metrics = {}
    for name, sampler in self.sides.items():
      if not sampler.rollout.programs.are_compiled:
        sampler.compile(params)
      launch.release_freed_memory()  # as before the run's own
      rollout, drawn = sampler.rollout, scored.drawn
      watch = stopwatch.Stopwatch()
      with progress.shown(f"repeating the rollout ({name})"):
        samples = drawn.again(rollout, params)
      seconds = watch.lap()
      with progress.shown(f"comparing with the repeated rollout ({name})"):
        asked, first = drawn.requests, drawn.samples
        found = compare.compare(rollout.config, params, asked, first, samples)
      metrics |= {
        f"{name}/seconds_s": seconds,
        f"{name}/mean_acceptance_length": samples.mean_acceptance_length,
        f"{name}/tokens": found.total_tokens,
        f"{name}/differing_tokens": found.differing_tokens,
        f"{name}/near_ties": found.near_ties,
      }
    return metrics

  def state(self) -> dict:
    """The state of its rollouts, as JSON types."""
    return {name: sampler.rollout.state() for name, sampler in self.sides.items()}

  def restore(self, state: dict | None, same_drafter: bool) -> None:
    """Restores a `state`, of which sides may be missing; see `Engine.restore`."""
    for name, sampler in self.sides.items():
      sampler.rollout.restore((state or {}).get(name), same_drafter)


def make(
  run: config_lib.RunConfig,
  model: model_lib.ModelConfig,
  mesh: jax.sharding.Mesh,
  sampler: sample.Sampler,
) -> Repeats:
  """The repeats of a run; a run that drafts nothing has none.

  Args:
    sampler: of the run; its programs are shared with the frozen drafter
  """
  every = run.compare.every
  if not every or from_config.make_selector(run) is None:
    return Repeats(0, {})
  sides = {"plain": from_config.make_sampler(run, model, mesh)}
  if (spot := sampler.rollout.spot) is not None:
    drafter = from_config.load_drafter(run, model, mesh, spot.config.vocab)
    drafter = dataclasses.replace(drafter, spot=spot)
    selector = from_config.make_selector(run)
    sides["frozen"] = from_config.make_sampler(
      run, model, mesh, drafter, selector, like=sampler
    )
  return Repeats(every, sides)
