"""One rollout's spot training, the host's side: how much, on what, and what it took.

What depends on the clock goes through `clock.Decisions`, so that it can be done again
alike. The device's side, and what outlives a rollout, is `spot`.
"""

import numpy as np

from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import batch as batch_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib


class Harvest:
  """Spot training in one rollout."""

  def __init__(
    self,
    spot: spot_lib.Spot,
    batch: batch_lib.Batch,
    schedule: schedule_lib.Schedule,
    samples: samples_lib.Samples,
  ):
    """Begins a rollout.

    Args:
      spot: what is trained, and on what
      batch, schedule: of the rollout
      samples: where the account goes
    """
    self.spot, self.batch, self.samples = spot, batch, samples
    self.schedule, self.clock, self.decide = schedule, schedule.clock, schedule.decide
    self._programs = batch.programs
    self._expected = 0  # steps of the next chunk
    samples.training = []
    spot.buffer.begin_rollout()

  @property
  def ready(self) -> bool:
    """Whether there is a slice to train, and something to train on."""
    live = self.batch.running.live
    return bool(live.any() and not live.all()) and self.spot.buffer.holds_any

  def long_chunk(self) -> tuple[int, float]:
    """Tokens and seconds of a longer chunk than others, while slices can train."""
    if any(self.schedule.queues) or not self.ready:
      return 0, 0.0
    options = self.spot.options
    return options.chunk_tokens, options.min_micro_batches * self.clock.micro_batch_s

  def measure(self, params) -> None:
    """Times a micro-batch alone, the first time that a slice could train."""
    unknown = lambda: not self.clock.micro_batch_s
    if not self.ready or not self.decide("measures", unknown):
      return
    self._train(params, 1)  # the first time is slower
    one, three = self._train(params, 1), self._train(params, 3)
    self.clock.micro_batch_s = max((three - one) / 2, 1e-4)

  def training(self, arm: clock_lib.Arm, steps: int) -> trainer_lib.Training:
    """The training that the next chunk may do.

    Args:
      arm: with which it decodes
      steps: its most
    """
    running = self.batch.running
    left = running.requests.max_tokens[running.seated] - running.drawn[running.seated]
    tokens = min(self.schedule.tokens, int(max(left)))
    expect = lambda: self.clock.expected_steps(running.bucket, arm, steps, tokens)
    self._expected = self.decide("expected", expect)
    if not self.spot.buffer.holds_any:
      return self.spot.training(0, self._expected)
    seconds = self._expected * self.clock.step_s(running.bucket, arm)
    within = lambda: self.clock.micro_batches_within(seconds)
    return self.spot.training(self.decide("micro_batches", within), self._expected)

  def book(
    self, trained: trainer_lib.Trained, steps: int, decoding_s: float, took: float
  ) -> float:
    """Books what a chunk trained.

    Args:
      trained: by the chunk, on the host but for state and pending
      steps: of the busiest slice
      decoding_s: what they took before, 0 if unknown
      took: seconds of the whole chunk
    Returns:
      the seconds of it that decoding took
    """
    self._take(trained)
    if not trained.micro_batches.any() or not decoding_s:
      return took
    # Where the busiest slice ended early the others had too much to train anyhow.
    if steps >= 0.8 * self._expected:
      self.clock.adapt(took > 1.15 * decoding_s)
    return min(took, 1.05 * decoding_s)

  def store(self, ended: list[running_lib.Ended]) -> None:
    """Keeps the features of requests that have ended, as far as there is room.

    Their pages are still theirs: others get them with the next chunk.
    """
    running, spot = self.batch.running, self.spot
    options = self.schedule.options
    most = spot.most_pieces(options.slots, options.max_length)
    num_slices = len(running.owner)
    pieces = np.zeros((num_slices, most, 4 + running.pages.sizes.most), np.int32)
    count = np.zeros((num_slices, 1), np.int32)
    # The longest first: then none makes room for one that follows.
    for e in sorted(ended, key=lambda e: (-running.position[e.request], e.request)):
      prompt = running.requests.prompt(e.request)
      for piece in spot.buffer.add(e.slice, prompt, self.samples.response(e.request)):
        pieces[e.slice, count[e.slice, 0]] = *piece, *e.pages
        count[e.slice] += 1
    if count.any():
      spot.take_features(self.batch.store(spot.features, pieces, count))

  def finish(self, params, rollout_s: float) -> None:
    """Ends the rollout: one slice alone trains for a share of its time.

    And where there is held-out data it is asked whether what was trained may draft.
    """
    spot, began = self.spot, self.clock.now()
    options = spot.options
    alone = len(self.schedule.queues) == 1
    wanted = options.after_rollout_share * rollout_s if alone else 0.0
    if spot.rollouts < options.warm_up_rollouts:
      wanted = max(wanted, options.warm_up_s)
    spot.rollouts += 1
    trained = any(any(chunk.trained) for chunk in self.samples.chunks)
    if trained and options.micro_batches_per_update > 1:
      self._train(params, 1)  # with what no update has been made of
    more = lambda: self.clock.now() - began < wanted
    while spot.buffer.holds_any and self.decide("more", more):
      self._train(params, 1)
    if options.held_out_rows and self.samples.training:
      published, better = self._programs.run(
        "judge", (), params, spot.params, spot.state.params, spot.rows()
      )
      spot.publish(published)
      self.samples.published = bool(better)
    self.samples.training_s = self.clock.now() - began
    self.samples.micro_batch_s = self.clock.micro_batch_s

  def _train(self, params, most: int) -> float:
    """Trains on all slices; returns the seconds that it took."""
    began = self.clock.now()
    training = self.spot.training(most)
    trained = trainer_lib.on_host(self._programs.run("train", (), params, training))
    seconds = self.clock.now() - began
    self._take(trained)
    return seconds

  def _take(self, trained: trainer_lib.Trained) -> None:
    self.spot.take(trained)
    if trained.exchanged:
      self.samples.training.append({k: float(v) for k, v in trained.metrics.items()})
