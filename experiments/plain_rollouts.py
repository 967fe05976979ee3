"""Repeats some rollouts of a run plainly, which says what TLT gained in this very run.

A repeated rollout answers the same requests with the same policy and the same noise, by
an engine without drafts and without training, right after the run's own. Nothing is
learnt from it. Its tokens must be those of the run. `plain/seconds_s` is to be compared
with `rollout/seconds_s` of the same step.
"""

import dataclasses
import time
from typing import Any

import jax

from experiments import from_config
from experiments import launch
from tlt_jax.models import config as config_lib
from tlt_jax.rl import sample
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import source


@dataclasses.dataclass(frozen=True)
class PlainRollouts:
  """Repeats every n-th rollout; see `make`."""

  every: int  # n; 0: none is repeated
  sampler: sample.Sampler | None  # that decodes plainly

  def __call__(self, step: int, params: Any, scored: sample.Scored) -> dict[str, float]:
    """Returns the metrics of a repeated rollout; none where it is not repeated.

    Args:
      step: of the run
      params: the policy's, as they were in the run's own rollout
      scored: what that gave
    """
    if not self.every or (step + 1) % self.every:
      return {}
    launch.release_freed_memory()  # as before the run's own
    rollout, requests = self.sampler.rollout, scored.requests
    began = time.perf_counter()
    samples = rollout(params, requests)
    seconds = time.perf_counter() - began
    found = compare.compare(rollout.config, params, requests, scored.samples, samples)
    return {
      "plain/seconds_s": seconds,
      "plain/tokens": found.total_tokens,
      "plain/differing_tokens": found.differing_tokens,
      "plain/near_ties": found.near_ties,
    }


def make(
  config: dict, model: config_lib.ModelConfig, mesh: jax.sharding.Mesh, params: Any
) -> PlainRollouts:
  """What repeats the rollouts of a run, with its programs ready.

  Nothing is repeated where the config does not ask for it, or where it drafts nothing.

  Args:
    config: of the run
    model: the policy's
    mesh: of the run
    params: the policy's, in the layout of rollouts
  Raises:
    ValueError: the run's drafts change tokens, so that there is nothing to compare
  """
  every = config["compare"]["every"]
  if not every or from_config.selector(config) is None:
    return PlainRollouts(0, None)
  if config["verification"] == source.REJECTION:
    raise ValueError(
      "compare.every: with verification='rejection' a plain rollout draws other tokens, "
      "and its time tells nothing; set compare.every=0, or verification='coupled'"
    )
  sampler = from_config.sampler(config, model, mesh)
  sampler.compile(params)
  return PlainRollouts(every, sampler)
