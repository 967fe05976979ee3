from collections.abc import Mapping
import dataclasses

import jax
import numpy as np

from tlt_jax import axes
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import devices as devices_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import engine as engine_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import spot as spot_lib


@dataclasses.dataclass(frozen=True)
class Machine:
  slices: int
  costs: costs_lib.Costs


class Rollouts:
  """Rollouts on one simulated machine; its engine learns from one to the next."""

  def __init__(
    self,
    machine: Machine,
    config: config_lib.ModelConfig,
    options: options_lib.Options,
    *,
    drafter: drafter_lib.DrafterConfig | None = None,
    selector: selector_lib.Selector | None = None,
    acceptance: acceptance_lib.Acceptance | None = None,
    spot: spot_lib.Options | None = None,
  ):
    """With a selector `acceptance` is required; the `drafter` is EAGLE-3's if not given."""
    _check(selector, acceptance, spot)
    mesh = jax.sharding.AbstractMesh((machine.slices, 1), (axes.DATA, axes.MODEL))
    if selector is not None and drafter is None:
      drafter = drafter_lib.of_target(config, "eagle3")
    shapes = backend_lib.Shapes.of(
      config, mesh, options, selector, drafter, spot.chunk_tokens if spot else 0
    )
    trainer, trains, row_tokens = None, None, 1
    if spot is not None:
      trainer = devices_lib.Trainer(
        config,
        drafter,
        mesh,
        loss=None,
        optimizer=None,
        longest=options.max_length,
        per_update=spot.micro_batches_per_update,
      )
      # Acceptance is an input: training after a rollout would not change it.
      within = dataclasses.replace(spot, after_rollout_share=0.0)
      trains = spot_lib.Spot(trainer, within, params=None)
      row_tokens = trains.row_tokens
    self.timer = devices_lib.Timer()
    self._devices = devices_lib.Devices(
      shapes, machine.costs, self.timer, acceptance, trainer, row_tokens
    )
    clock = clock_lib.Clock(self.timer.now)
    self._engine = engine_lib.Engine(self._devices, selector, trains, clock)
    self._engine.measure(None, stop_tokens=1)

  def __call__(
    self,
    requests: requests_lib.Requests,
    lengths: np.ndarray,
    decide: clock_lib.Decisions | None = None,
    until: samples_lib.Until | None = None,
  ) -> samples_lib.Samples:
    """Simulates a rollout; the samples have no tokens, and simulated seconds.

    The schedule knows the requests' `max_tokens`, not the `lengths` i32[B] of responses.
    `decide` replays the decisions of a real rollout; `until` is that of the engine.
    """
    _check_lengths(requests, lengths)
    self._devices.lengths = lengths
    train = self._engine.spot is not None
    return self._engine(None, requests, train=train, decide=decide, until=until)


def simulate(
  machine: Machine,
  config: config_lib.ModelConfig,
  options: options_lib.Options,
  requests: requests_lib.Requests,
  lengths: np.ndarray,
  *,
  rollouts: int = 1,
  decide: clock_lib.Decisions | None = None,
  **drafting,
) -> samples_lib.Samples:
  """Runs rollouts of the same requests; returns the samples of the last one.

  `drafting` are the arguments of `Rollouts`.
  """
  run = Rollouts(machine, config, options, **drafting)
  for _ in range(rollouts):
    samples = run(requests, lengths, decide)
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


def _check(selector, acceptance, spot) -> None:
  if selector is not None and acceptance is None:
    raise ValueError("a selector needs rates of acceptance: give acceptance")
  if spot is not None and selector is None:
    raise ValueError("a drafter that trains needs strategies to draft with")


def _check_lengths(requests: requests_lib.Requests, lengths: np.ndarray) -> None:
  if len(lengths) != len(requests):
    raise ValueError(f"{len(lengths)} lengths are given for {len(requests)} requests")
  if not len(lengths) or np.min(lengths) < 1 or np.any(lengths > requests.max_tokens):
    raise ValueError("a response has 1 to max_tokens tokens; correct the lengths")
  if np.any(lengths <= requests.begun_length):
    raise ValueError("a response that has begun is longer than that; correct the lengths")
