"""Compares two rollouts of the same requests, and separates near-ties from bugs.

A program of another shape rounds differently: logits differ in their last bits, and once
in some 100,000 tokens that flips a draw. So at a row's first difference the margin of the
draw is computed from scratch: the distance of the best perturbed logit from the second,
or of a filter's bound from what it decided. Below the tolerance it is a near-tie and the
row is compared no further; above, it is a bug.

Exact rollouts (`backend.Shapes.exact`) have the same bits in all programs: there every
difference is a bug.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import processes
from tlt_jax.models import config as config_lib
from tlt_jax.models import target
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib

TOLERANCE = 1e-4  # float32


@dataclasses.dataclass(frozen=True)
class Comparison:
  total_tokens: int  # compared, up to the first difference of each row
  differing_tokens: int  # first differences that are no near-ties
  near_ties: int
  where: list[tuple[int, int, float]]  # request, response token, margin


def tolerance_of(*sides: samples_lib.Samples) -> float:
  """Below which margin a difference between rollouts is a near-tie; 0: none is."""
  return 0.0 if all(side.exact for side in sides) else TOLERANCE


def redraw(
  config: config_lib.ModelConfig,
  params,
  requests: requests_lib.Requests,
  samples: samples_lib.Samples,
) -> sampling_lib.Draw:
  """Draws, by plain sampling, after each prefix of the responses: numpy arrays [B T].

  One forward pass without a cache over each whole sequence, which shares no code
  with a rollout's loop but the model, the noise and the filters.
  """
  B, T = samples.tokens.shape
  P = max(len(p) for p in requests.prompts)
  tokens = np.zeros((B, P + T), np.int32)
  starts = np.zeros(B, np.int32)
  for b in range(B):
    prompt = requests.prompt(b)
    starts[b] = len(prompt)
    tokens[b, : len(prompt)] = prompt
    tokens[b, len(prompt) : len(prompt) + T] = samples.tokens[b]
  sampling = sampling_lib.Sampling(
    **{f.name: getattr(requests, f.name) for f in dataclasses.fields(sampling_lib.Sampling)}
  )
  run = jax.jit(functools.partial(_redraw_row, config, T))
  rows = [
    run(params, tokens[b], starts[b], jax.tree.map(lambda x, b=b: x[b], sampling))
    for b in range(B)
  ]
  rows = processes.fetch(rows)
  return sampling_lib.Draw(*(np.stack(x) for x in zip(*rows, strict=True)))


def _redraw_row(config, T, params, tokens, start, sampling) -> sampling_lib.Draw:
  model = target.Target(config)
  positions = jnp.arange(tokens.shape[0])[None]
  features, _ = model.apply({"params": params}, tokens[None], positions)
  used = jax.lax.dynamic_slice_in_dim(features[0], start - 1, T, 0)
  logits = model.apply({"params": params}, used, method=target.Target.logits)
  every = jax.tree.map(lambda x: jnp.broadcast_to(x, (T,)), sampling)
  return sampling_lib.draw(logits, every, start + jnp.arange(T))


def compare(
  config: config_lib.ModelConfig,
  params,
  requests: requests_lib.Requests,
  a: samples_lib.Samples,
  b: samples_lib.Samples,
  tolerance: float | None = None,
) -> Comparison:
  """Compares the responses token by token.

  Args:
    tolerance: margins below are near-ties; None: `tolerance_of` the samples
  """
  tolerance = tolerance_of(a, b) if tolerance is None else tolerance
  total, where = 0, []
  for i in range(len(requests)):
    begun = int(requests.begun_length[i])
    x, y = a.response(i), b.response(i)
    n = min(len(x), len(y))
    different = np.flatnonzero(x[:n] != y[:n])
    if len(different):
      where.append((i, int(different[0])))
      total += int(different[0]) + 1 - begun
    else:
      total += n - begun
      shorter = a if len(x) < len(y) else b
      paused = shorter.finish_reason[i] == samples_lib.UNFINISHED  # as others ended it
      if len(x) != len(y) and not paused:  # one response went on: never a tie
        where.append((i, n))
  margins = []
  if where:
    rows = np.array([i for i, _ in where])
    differing = dataclasses.replace(a, tokens=a.tokens[rows])
    margin = redraw(config, params, requests.subset(rows), differing).margin
    margins = [
      float(margin[row, t]) if t < min(a.length[i], b.length[i]) else np.inf
      for row, (i, t) in enumerate(where)
    ]
  near = sum(m < tolerance for m in margins)
  return Comparison(
    total_tokens=total,
    differing_tokens=len(where) - near,
    near_ties=near,
    where=[(i, t, m) for (i, t), m in zip(where, margins, strict=True)],
  )
