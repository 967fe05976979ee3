"""One rollout's spot training, the host's side: how much, on what, and what it took.

What depends on the clock goes through `clock.Decisions`, so that it can be done again
alike. The device's side, and what outlives a rollout, is `spot`.
"""

import functools

import numpy as np

from tlt_jax import processes
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import batch as batch_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_SURE = 0.85  # where training took no more of a chunk, the chunk lasted as it decoded
_GROWS = 1.1  # times as long as the one before is what a filled chunk may seem to decode
_WAITED = 1.3  # times the time of decoding: a chunk that took longer waited for training


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
    self._probes = False  # whether it is to show what decoding takes
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
    pairs = [(self._train(params, 1), self._train(params, 3)) for _ in range(3)]
    seconds = float(np.median([three - one for one, three in pairs])) / 2
    seconds = processes.of_first(seconds)
    per_update = self.spot.options.micro_batches_per_update
    self.clock.micro_batch_s = max(seconds, 1e-4) / per_update

  def training(self, arm: clock_lib.Arm, steps: int) -> trainer_lib.Training:
    """The training that the next chunk may do.

    Args:
      arm: with which it decodes
      steps: its most
    """
    running, clock = self.batch.running, self.clock
    self._probes = clock.probes(running.bucket, arm)
    left = running.requests.max_tokens[running.seated] - running.drawn[running.seated]
    tokens = min(self.schedule.tokens, int(max(left)))
    expect = lambda: clock.expected_steps(running.bucket, arm, steps, tokens)
    self._expected = self.decide("expected", expect)
    if not self.spot.buffer.holds_any:
      return self.spot.training(0, self._expected)
    within = lambda: clock.micro_batches_within(running.bucket, arm, self._expected)
    most = self.decide("micro_batches", within)
    # Where a single slice decodes, nobody waits for anything once that has run dry.
    several = np.count_nonzero(running.live) > 1
    return self.spot.training(most, self._expected, later=most if several else 0)

  def book(
    self, arm: clock_lib.Arm, trained: trainer_lib.Account, steps: np.ndarray, took: float
  ) -> tuple[float, bool]:
    """Books what a chunk trained.

    Args:
      arm: with which it decoded
      trained: by the chunk
      steps: i32[slices]  that it decoded
      took: seconds of the whole chunk
    Returns:
      the seconds of it that decoding took, as far as one knows; and whether one does
    """
    self._take(trained)
    clock, bucket, busiest = self.clock, self.batch.running.bucket, int(steps.max())
    before_s = clock.decoding_s(bucket, arm, busiest)
    if not trained.micro_batches.any() or not before_s:
      clock.doubt(bucket, arm, False)
      return took, True
    own = [
      (before_s * n / busiest, count)
      for n, count in zip(steps, trained.micro_batches, strict=True)
      if count
    ]
    until_s = max(alone + clock.micro_batches_s(count) for alone, count in own)
    is_known = until_s < _SURE * took or took < before_s
    if busiest < 0.8 * self._expected:  # it ended early: others had too much to train
      if took > _WAITED * before_s:
        clock.waited(min((took - alone) / count for alone, count in own))
    elif self._probes:
      clock.doubt(bucket, arm, not is_known)
    if not is_known:
      return before_s, False
    return (took if self._probes else min(took, _GROWS * before_s)), True

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
    rollout_s = self.clock.rollout_took(rollout_s)
    wanted = options.after_rollout_share * rollout_s if alone else 0.0
    if spot.rollouts < options.warm_up_rollouts:
      wanted = max(wanted, options.warm_up_s)
    spot.rollouts += 1
    done = 0

    def more():
      took = self.clock.training_took(done, self.clock.now() - began)
      return processes.of_first(wanted - took) > 0

    while spot.buffer.holds_any and self.decide("more", more):
      self._train(params, 1)
      done += options.micro_batches_per_update
      self.exchange()
    self.exchange(least=1)
    if options.held_out_rows and self.samples.training:
      drafting = spot.state.drafting
      args = params, spot.params, drafting, spot.rows()
      published, better = self._programs.run("judge", (), *args)
      spot.publish(published)
      self.samples.published = bool(better)
    self.samples.training_s = self.clock.now() - began
    self.samples.micro_batch_s = self.clock.micro_batch_s

  def exchange(self, least: int | None = None) -> None:
    """Lets slices exchange what they have learnt, if they have made updates enough.

    Args:
      least: updates, of all slices; None: as the options say
    """
    least = least or self.spot.options.updates_per_exchange
    if self.spot.updates.sum() >= least:
      self.spot.exchange(functools.partial(self._programs.run, "exchange", ()))

  def _train(self, params, updates: int) -> float:
    """Trains on all slices; returns the seconds that it took."""
    began = self.clock.now()
    training = self.spot.training(updates * self.spot.options.micro_batches_per_update)
    trained = self._programs.run("train", (), params, training)
    account = self.spot.trainer.account(trained)
    seconds = self.clock.now() - began
    self._take(account)
    return seconds

  def _take(self, trained: trainer_lib.Account) -> None:
    self.spot.take(trained)
    updates = int(trained.updates.sum())
    if updates or trained.skipped:
      told = {"updates": updates, "skipped": trained.skipped, **trained.metrics}
      self.samples.training.append(told)
