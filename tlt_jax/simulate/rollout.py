"""A rollout without devices: `simulate` runs the real loop on a simulated clock."""

from collections.abc import Mapping
import dataclasses

import jax
import numpy as np

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import devices
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import drafting as drafting_lib
from tlt_jax.spec_decode.rollout import loop as loop_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import parts as parts_lib
from tlt_jax.spec_decode.rollout import programs as programs_lib
from tlt_jax.spec_decode.rollout import ready as ready_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import spot as spot_lib


@dataclasses.dataclass(frozen=True)
class Machine:
  slices: int
  costs: costs_lib.Costs


class Counts(samples_lib.Samples):
  """Samples without tokens: only their numbers."""

  def extend(self, i, start, emitted, row) -> None:
    """Keeps nothing."""


class Loop(loop_lib.Loop):
  def _empty(self, requests) -> samples_lib.Samples:
    samples = vars(super()._empty(requests))
    # Read, for a request's last token, and never written.
    tokens = np.broadcast_to(np.int32(0), samples["tokens"].shape)
    nothing = np.zeros(0, np.float32)
    return Counts(**samples | {"tokens": tokens, "logp": nothing, "logp_filtered": nothing})


@dataclasses.dataclass(frozen=True)
class Parts(parts_lib.Parts):
  def batch(self, requests) -> devices.Batch:
    return devices.Batch(self.programs, requests)


class Ready(ready_lib.Ready):
  """Takes step times from the cost model."""

  def time_step(self, weights, bucket, arm, stops, slices=None, length=None) -> float:
    seen = bucket * (length or self._shapes.options.max_length // 4)
    return self._programs.costs.step_s(bucket, arm, seen)


def simulate(
  machine: Machine,
  config: config_lib.ModelConfig,
  options: options_lib.Options,
  requests: requests_lib.Requests,
  lengths: np.ndarray,
  *,
  selector: selector_lib.Selector | None = None,
  acceptance: acceptance_lib.Acceptance | None = None,
  spot: spot_lib.Options | None = None,
  rollouts: int = 1,
  decide: clock_lib.Decisions | None = None,
) -> samples_lib.Samples:
  """Runs rollouts of the same requests; returns the samples of the last one.

  Args:
    config: of the target
    requests: their `max_tokens` is what the schedule knows
    lengths: i32[B]  tokens of each response, which it does not know
    selector: None: plain decoding
    acceptance: required with a selector
    spot: how idle slices train the drafter; None: they do not
    rollouts: in sequence, with the same selector, clock and training data
    decide: replays the decisions of a real rollout; only for one rollout
  Returns:
    samples without tokens; their seconds are simulated
  Raises:
    ValueError: inconsistent arguments
  """
  _check(requests, lengths, selector, acceptance, spot)
  mesh = jax.sharding.AbstractMesh((machine.slices, 1), (axes.DATA, axes.MODEL))
  strategies = selector.strategies if selector else ()
  drafter = drafter_lib.of_target(config, "eagle3") if spot else None
  shapes = programs_lib.Shapes.of(
    config, mesh, options, drafter, strategies, train=spot is not None
  )
  trains = None
  if spot is not None:
    trainer = devices.Trainer(
      config,
      drafter,
      mesh,
      loss=None,
      optimizer=None,
      longest=options.max_length,
      per_update=spot.micro_batches_per_update,
    )
    # Acceptance is an input: training after a rollout would not change it.
    trains = devices.Spot(trainer, dataclasses.replace(spot, after_rollout_share=0.0))
  timer = devices.Timer()
  row_tokens = trains.row_tokens if trains else 1
  programs = devices.Programs(shapes, machine.costs, timer, row_tokens)
  chunks = devices.Chunks(programs, acceptance, lengths, trains)
  sources = {s.source: devices.make_source(s.source, programs) for s in strategies}
  drafting = drafting_lib.Drafting(selector, sources, clock_lib.Clock(timer.now))
  parts = Parts(programs, chunks, drafting, trains)
  Ready(parts).measure(parts.weights(None, None), 1, options)
  for _ in range(rollouts):
    samples = Loop(
      parts,
      options,
      None,
      None,
      requests,
      train=spot is not None,
      decide=decide or clock_lib.Decisions(),
    ).run()
  return samples


def record(samples: samples_lib.Samples) -> Mapping:
  return {
    "step": 0,
    "length": samples.length.tolist(),
    "live_time_s": [t for t, _ in samples.timeline],
    "live_requests": [sum(live) for _, live in samples.timeline],
    "chunks": [dataclasses.asdict(chunk) for chunk in samples.chunks],
    "micro_batch_s": samples.micro_batch_s,
  }


def _check(requests, lengths, selector, acceptance, spot) -> None:
  if len(lengths) != len(requests):
    raise ValueError(f"{len(lengths)} lengths are given for {len(requests)} requests")
  if not len(lengths) or np.min(lengths) < 1 or np.any(lengths > requests.max_tokens):
    raise ValueError("a response has 1 to max_tokens tokens; correct the lengths")
  if selector is not None and acceptance is None:
    raise ValueError("a selector needs rates of acceptance: give acceptance")
  if spot is not None and selector is None:
    raise ValueError("a drafter that trains needs strategies to draft with")
