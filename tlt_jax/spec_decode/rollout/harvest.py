"""The host's side of one rollout's spot training: how much, on what, and what it took."""

from collections.abc import Callable
import functools

import jax
import numpy as np

from tlt_jax import processes
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import backend as backend_lib
from tlt_jax.spec_decode.rollout import chooser as chooser_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.spot import investment as investment_lib
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import trainer as trainer_lib

_AT_ONCE_S = 0.05  # of training after a rollout by one program: the host waits for each
_EXCHANGING = 0.01  # share of the time that slices which decode wait for exchanges
_DECODING = 0.05  # least share of a chunk's time that a slice which decoded decoded


class Harvest:
  def __init__(
    self, spot: spot_lib.Spot, backend: backend_lib.Backend, schedule: schedule_lib.Schedule
  ):
    self.spot, self.backend = spot, backend
    self.schedule, self.clock, self.decide = schedule, schedule.clock, schedule.decide
    self.running, self.samples = schedule.running, schedule.running.samples
    self._exchanged_s = 0.0  # seconds of chunks before the last exchange
    self.samples.training = []
    spot.buffer.begin_rollout()
    spot.investment.begin_rollout()
    self._trains = bool(self.decide("train", lambda: spot.investment.in_idle_slices))

  @property
  def ready(self) -> bool:
    live = self.running.live
    idle = bool(live.any() and not live.all())
    return self._trains and idle and self.spot.buffer.holds_any

  def long_chunk(self) -> tuple[int, float]:
    """Tokens and seconds of a longer chunk than others, while slices can train."""
    if any(self.schedule.queues) or not self.ready:
      return 0, 0.0
    options = self.spot.options
    return options.chunk_tokens, options.min_micro_batches * self.clock.micro_batch_s

  def training(self, arm: clock_lib.Arm, steps: int, tried: bool) -> trainer_lib.Training:
    """What the next chunk trains; nothing in a program that has not been `tried`."""
    running, clock = self.running, self.clock
    left = running.requests.max_tokens[running.seated] - running.drawn[running.seated]
    tokens = min(self.schedule.tokens, int(max(left)))
    expected = self.decide(
      "expected",
      functools.partial(clock.expected_steps, running.bucket, arm, steps, tokens),
    )
    if not self._trains or not self.spot.buffer.holds_any:
      return self.spot.training(0, expected)

    def within():
      if not tried:
        return 0
      if not clock.micro_batch_s:  # the first one says what it takes
        return 1
      return clock.micro_batches_within(running.bucket, arm, expected)

    most = self.decide("micro_batches", within)
    # Where a single slice decodes, no other waits once that has run dry.
    several = np.count_nonzero(running.live) > 1
    return self.spot.training(most, expected, most if several else 0)

  def book(self, result: backend_lib.ChunkResult) -> float:
    """Books what a chunk trained; returns the seconds of decoding in it."""
    self._take(result.trained)
    micro_batches, decoded = result.trained.micro_batches, result.emitted.steps > 0
    only = (micro_batches > 0) & ~decoded
    if only.any():
      self.clock.trained(float(max(result.slice_s[only] / micro_batches[only])))
    decoding_s = result.slice_s - micro_batches * self.clock.micro_batch_s
    least = _DECODING * result.slice_s  # what micro-batches take is only an estimate
    return float(max(np.maximum(decoding_s, least)[decoded], default=0.0))

  def observe(self, seen: selector_lib.Observation, chooser: chooser_lib.Chooser) -> None:
    arms = chooser.selector.arms(seen.live) if chooser.selector else ()
    self.spot.investment.observe(seen, arms, chooser.step_s(seen.bucket))

  def store(self, ended: list[running_lib.Ended]) -> None:
    """Keeps features of ended requests, whose pages are theirs until the next chunk."""
    running, spot = self.running, self.spot
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
      self.backend.store(spot, pieces, count)

  def finish(
    self, params, rollout_s: float, scoring: Callable[[], bool] | None = None
  ) -> None:
    """Trains for as long as that pays, and exchanges what is left.

    `scoring`: whether rewards are still computed, and training costs no time.
    """
    spot, began, samples = self.spot, self.clock.now(), self.samples
    options, investment = spot.options, spot.investment
    in_rollout = len(samples.training)
    samples.micro_batch_s = self.clock.micro_batch_s
    held = sum(bool(row.sizes) for rows in spot.buffer.rows for row in rows)
    wanted = investment.end_rollout(
      processes.of_first(rollout_s),  # all decide the same
      self._progress(samples.training),
      samples.harvested_s,
      held / options.micro_batches_per_update,
    )

    def elapsed_s():
      return self.clock.now() - began

    def more() -> int:
      """Updates of each slice by the next program; 0: training ends."""
      took_s = processes.of_first(elapsed_s())
      made = sum(program["updates"] for program in samples.training[in_rollout:])
      if took_s < wanted.seconds and made < wanted.updates:
        within = min(_AT_ONCE_S, wanted.seconds - took_s) * made / max(took_s, 1e-9)
        at_once = min(within, wanted.updates - made) / len(spot.buffer.rows)
        return max(int(at_once), 1)
      free = scoring and investment.in_idle_slices
      return int(bool(free) and processes.of_first(float(scoring())) > 0)

    has_trained = False
    while spot.buffer.holds_any and (updates := self.decide("more", more)):
      training = spot.training(updates * options.micro_batches_per_update)
      self._take(self.backend.train(params, training))
      has_trained = True
      if self._learnt(options.updates_per_exchange):
        self._exchange()
    if has_trained:
      progress = self._progress(samples.training[in_rollout:])
      investment.trained(progress, processes.of_first(elapsed_s()))
    if spot.apart:
      self._exchange_timed()
    samples.training_s = elapsed_s()
    samples.invested_s, samples.saved_s = investment.invested_s, investment.saved_s

  def exchange_if_due(self) -> None:
    """Averages the slices' drafters if there are enough updates.

    Decoding slices wait for it: it may take a small share of the time since the last one.
    """
    if not self._learnt(self.spot.options.updates_per_exchange):
      return
    seconds = self.clock.seconds

    def is_due() -> bool:
      return self.clock.exchange_s <= _EXCHANGING * (seconds - self._exchanged_s)

    if self.decide("exchange", is_due):
      if not self.clock.exchange_s:  # not known yet
        self._exchange_timed()
      else:
        self._exchange()
      self._exchanged_s = seconds

  def abandon(self) -> None:
    """Ends a rollout that is cut short; the drafter keeps its updates."""
    if self.spot.apart:
      self._exchange()

  def _learnt(self, least: int) -> bool:
    """Whether slices have made so many updates together since the last exchange."""
    return self.spot.updates.sum() >= least

  def _exchange(self) -> None:
    self.spot.exchange(self.backend.exchange)

  def _exchange_timed(self) -> None:
    jax.block_until_ready(self.spot.states)
    began = self.clock.now()
    self._exchange()
    jax.block_until_ready(self.spot.states)
    self.clock.exchanged(processes.of_first(self.clock.now() - began))

  def _take(self, trained: trainer_lib.Account) -> None:
    self.spot.take(trained)
    updates = int(trained.updates.sum())
    if updates or trained.skipped:
      counts = {"updates": updates, "skipped": trained.skipped}
      self.samples.training.append(counts | trained.metrics)

  def _progress(self, training: list[dict]) -> investment_lib.Progress:
    each = self.spot.options.micro_batches_per_update
    return investment_lib.Progress(
      updates=sum(program["updates"] for program in training),
      on_new=sum(program["new_rows"] for program in training) // each,
      agreement=samples_lib.training_means(training).get("new_agreement"),
    )
