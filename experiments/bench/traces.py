"""Rollouts of lengths drawn beforehand, scheduled and in a static batch."""

import dataclasses

import numpy as np

from experiments import from_config
from experiments.bench import interleave
from tlt_jax import axes
from tlt_jax.simulate import scenario
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare

# How lengths are drawn, see `scenario.draw_lengths`; and the longest.
_TRACES = {
  "geometric": ({"geometric": {"mean": 64}}, 512),
  "log-normal": ({"log_normal": {"median": 100, "sigma": 1.0}}, 2000),
}
NAMES = tuple(_TRACES)


def draw(name: str, count: int) -> np.ndarray:
  """Response lengths i32[count] of a synthetic trace."""
  what, most = _TRACES[name]
  return scenario.draw_lengths(what, count, most)


def measure(
  lengths: np.ndarray, config: dict, models: from_config.Models, repeats: int
) -> tuple[dict, compare.Comparison]:
  """Measures rollouts of such lengths, scheduled and in a static batch.

  Args:
    lengths: i32[requests] of the responses
    config: of a run
    models: the policy
    repeats: of either side
  Returns:
    what is reported of both sides, and their tokens compared
  """
  cap = int(lengths.max())
  requests = requests_lib.make_requests(
    [np.arange(1, 17)] * len(lengths), max_tokens=lengths, seed=1
  )
  slots = min(config["rollout"]["slots"], 32)
  length = config["rollout"]["max_prompt"] + cap
  sizes = {"slots": slots, "max_length": length, "budget": {}}
  sizes["buckets"] = rollout.ladder(slots, length)
  options = rollout.Options(**config["rollout"] | sizes)
  whole = dataclasses.replace(options, buckets=())
  scheduled, static = (
    rollout.make(models.model, models.mesh, chosen) for chosen in (options, whole)
  )
  at_a_time = slots * models.mesh.shape[axes.DATA]
  sides = {
    "scheduled": lambda _: scheduled(models.params, requests),
    "static": lambda _: in_groups(static, models.params, requests, at_a_time),
  }
  measured = list(interleave.turns(sides, repeats))
  seconds, last = interleave.seconds(measured), measured[-1]
  samples = {side: last[side].result for side in sides}
  compared = compare.compare(
    models.model, models.params, requests, samples["scheduled"], samples["static"]
  )
  total = int(lengths.sum())
  found = {
    "requests": len(lengths),
    "total_tokens": total,
    **interleave.median_ratio(seconds["static"], seconds["scheduled"]),
    "tokens_per_s": {side: total / float(np.median(s)) for side, s in seconds.items()},
    "useful_share": {side: s.useful_share for side, s in samples.items()},
    "programs": len(scheduled.pool),
    "compile_s": scheduled.pool.seconds,
  }
  return found, compared


def in_groups(
  engine: rollout.Rollout, params, requests: requests_lib.Requests, size: int
) -> samples_lib.Samples:
  """Rolls out as a static batch does, `size` requests at a time until the last ends."""
  groups = np.array_split(np.arange(len(requests)), range(size, len(requests), size))
  parts = [engine(params, requests.subset(group)) for group in groups]
  T = max(p.tokens.shape[1] for p in parts)
  widen = lambda x: np.pad(x, ((0, 0), (0, T - x.shape[1])))
  return dataclasses.replace(
    parts[0],
    tokens=np.concatenate([widen(p.tokens) for p in parts]),
    length=np.concatenate([p.length for p in parts]),
    computed_tokens=sum(p.computed_tokens for p in parts),
  )
