"""One rollout's spot training, the host's side: how much, on what, and what it took.

What depends on the clock goes through `schedule.Decisions`, so that it can be done
again alike. The device's side, and what outlives a rollout, is `spot`.
"""

from collections.abc import Callable
import time

import jax
import numpy as np

from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.spot import spot as spot_lib


class Harvest:
  """Spot training in one rollout."""

  def __init__(
    self,
    spot: spot_lib.Spot,
    schedule: schedule_lib.Schedule,
    samples: requests_lib.Samples,
    run: Callable,
    place: Callable,
  ):
    """`run` and `place` are those of `rollout.Rollout`."""
    self.spot, self.schedule, self.samples = spot, schedule, samples
    self._run, self._place = run, place
    self._expected = 0  # steps of the next chunk
    samples.training = []
    spot.begin_rollout()

  @property
  def ready(self) -> bool:
    """Whether there is a slice to train, and something to train on."""
    live = self.schedule.live
    return bool(live.any() and not live.all()) and self.spot.buffer.holds_any

  def long_chunk(self) -> tuple[int, float]:
    """Tokens and seconds of a longer chunk than others, while slices can train."""
    if any(self.schedule.queues) or not self.ready:
      return 0, 0.0
    options = self.spot.options
    return options.chunk, options.least * self.spot.micro_batch_s

  def measure(self, params) -> None:
    """Times a micro-batch alone, the first time that a slice could train."""
    spot = self.spot
    if not self.ready or not self.schedule.decide(
      "measures", lambda: not spot.micro_batch_s
    ):
      return
    self._train(params, 1)  # the first time is slower
    one, three = self._train(params, 1), self._train(params, 3)
    spot.micro_batch_s = max((three - one) / 2, 1e-4)

  def quota(self, bucket, strategy, steps: int) -> tuple[int, int]:
    """Most micro-batches of a slice in the next chunk, and its expected steps.

    Args:
      steps: its most
    """
    schedule, costs = self.schedule, self.schedule.costs
    running = schedule.owner[schedule.owner >= 0]
    left = schedule.requests.max_tokens[running] - schedule.drawn[running]
    tokens = min(schedule.tokens, int(max(left)))
    expect = lambda: costs.expected_steps(bucket, strategy, steps, tokens)
    expected = self._expected = schedule.decide("expected", expect)
    if not self.spot.buffer.holds_any:
      return 0, expected
    seconds = expected * costs.seconds_of_step(bucket, strategy)
    within = self.spot.micro_batches_within
    return schedule.decide("micro_batches", lambda: within(seconds)), expected

  def book(self, trained, steps: int, decoding_s: float, took: float) -> float:
    """Books what a chunk trained; returns the seconds that decoding took of it.

    Args:
      trained: `spot.Trained`
      steps: of the busiest slice
      decoding_s: what they took before, 0 if unknown
      took: seconds of the whole chunk
    """
    self._add(trained)
    if not trained.micro_batches.any() or not decoding_s:
      return took
    # Where the busiest slice ended early the others had too much to train anyhow.
    if steps >= 0.8 * self._expected:
      self.spot.adapt(took > 1.15 * decoding_s)
    return min(took, 1.05 * decoding_s)

  def store(self, slots: decode.Slots, finished: list[int]) -> None:
    """Keeps the features of requests that have finished, as far as there is room."""
    schedule, samples, spot = self.schedule, self.samples, self.spot
    options, pages, slices = schedule.options, schedule.pages, len(schedule.queues)
    most = spot.most_pieces(options.slots, options.max_length)
    pieces = np.zeros((slices, most, 4 + pages.sizes.most), np.int32)
    count = np.zeros((slices, 1), np.int32)
    # The longest first: then none makes room for one that follows.
    for i in sorted(finished, key=lambda i: (-schedule.position[i], i)):
      s, of_request = pages[i]
      for piece in spot.add(s, schedule.requests.prompt(i), samples.response(i)):
        pieces[s, count[s, 0]] = *piece, *of_request
        count[s] += 1
    if count.any():
      args = (spot.features, slots.features.data, *map(self._place, (pieces, count)))
      spot.features = self._run("store", (), *args)

  def finish(self, params, rollout_s: float) -> None:
    """When the rollout is over: one slice alone trains for a share of its time.

    And where there is held-out data it is asked whether what was trained may draft.
    """
    spot, began = self.spot, time.perf_counter()
    share = spot.options.share if len(self.schedule.queues) == 1 else 0.0
    wanted = share * rollout_s
    if spot.rollouts < spot.options.cold_rollouts:
      wanted = max(wanted, spot.options.cold_s)
    spot.rollouts += 1
    trained = any(any(chunk.trained) for chunk in self.samples.chunks)
    if trained and spot.options.per_update > 1:
      self._train(params, 1)  # with what no update has been made of
    more = lambda: time.perf_counter() - began < wanted
    while spot.buffer.holds_any and self.schedule.decide("more", more):
      self._train(params, 1)
    if spot.trainer.shadow and self.samples.training:
      args = (params, spot.published, spot.state.params, spot.rows())
      spot.published, better = self._run("judge", (), *args)
      self.samples.published = bool(better)
    self.samples.training_s = time.perf_counter() - began
    self.samples.micro_batch_s = spot.micro_batch_s

  def _train(self, params, most: int) -> float:
    """All slices train; returns the seconds that it took."""
    spot = self.spot
    args = (params, spot.state, spot.pending, spot.rows(), np.int32(most))
    began = time.perf_counter()
    spot.state, spot.pending, trained = self._run("train", (), *args)
    trained = jax.device_get(trained)
    seconds = time.perf_counter() - began
    self._add(trained)
    return seconds

  def _add(self, trained: spot_lib.Trained) -> None:
    self.spot.count(trained.micro_batches)
    if trained.exchanged:
      self.samples.training.append({k: float(v) for k, v in trained.metrics.items()})
