"""The clock of a rollout: what steps take, and the decisions that follow from it.

The time of a step is a product: the strategy's own time, and the level of the machine,
which follows the last chunks whatever ran in them. Strategies are compared only by chunks
that ran one after the other: one chunk of another between two that took equally long; at
first any two, since steps that were timed alone are known less well.

All processes book the seconds of the first one (`processes.agree`), and so decide the same.
What depends on them goes through `Decisions`, so that a rollout can be replayed.
"""

from collections.abc import Callable, Iterable
import logging
import time

import numpy as np

from tlt_jax.spec_decode.speculation import strategy as strategy_lib

Arm = strategy_lib.Strategy | None  # None: plain decoding

_LEVEL_CHUNKS = 3  # chunks: the level of the machine in a bucket is their median
_EQUAL_LOG_S = 0.2  # difference of ln(seconds) below which two times of a step are equal
_MAX_COMPARISONS = 4  # comparisons that agree: the most that a strategy's time averages
# Difference of ln(seconds): how much faster a step may be that was timed, never compared.
_UNCOMPARED_LOG_S = float(np.log(2.0))
_CHUNKS_WITHOUT_ROOM = 64  # chunks without a micro-batch, until one is measured again
_RECENT_CHUNKS = 3  # chunks of this rollout that predict the time of the next
_TRAINED_SHARE = 0.95  # share (0..1) of the others' decoding time that idle slices train
_TRAINED_CHUNKS = 5  # chunks with a slice that only trained: a micro-batch is their median


class Clock:
  def __init__(self, now: Callable[[], float] = time.perf_counter):
    self.now = now
    # Of a step, by bucket and strategy: the logarithm of its seconds at level 0, and the
    # comparisons that this comes from; none if it was only timed on its own.
    self._own_log_s: dict[tuple[int, Arm], tuple[float, int]] = {}
    # The last chunks of a bucket: strategy, and the logarithm of a step's seconds.
    self._recent: dict[int, list[tuple[Arm, float]]] = {}
    # By how much the last comparisons of an arm differed from what was known.
    self._errors: dict[tuple[int, Arm], list[float]] = {}
    # The lowest level of the machine since a strategy was last compared, or timed.
    self._compared: dict[tuple[int, Arm], float] = {}
    # Seconds of a step in the chunks of this rollout; before them that of the first chunk
    # of the last rollout that ran so.
    self._recent_step_s: dict[tuple[int, Arm], list[float]] = {}
    self._step_tokens: dict[tuple[int, Arm], float] = {}
    self._arm_tokens: dict[Arm, float] = {}  # the same, in the last bucket of each arm
    self.micro_batch_s = 0.0  # of a micro-batch, while others decode; 0: not known yet
    self._micro_batches_s: list[float] = []  # of late chunks, whose median that is
    self._without_room = 0  # chunks in a row in which no micro-batch seemed to fit
    self.exchange_s = 0.0  # of an exchange of drafters, the last that was timed; 0: none
    self.begin_rollout()

  def begin_rollout(self) -> None:
    self.seconds = 0.0  # of chunks so far
    self.tokens = 0  # that were drawn in them
    self._last: tuple[int, Arm] | None = None
    late = self._recent_step_s.items()
    self._recent_step_s = {key: times[1:2] or times for key, times in late}

  def measured(self, bucket: int, arm: Arm, seconds: float) -> None:
    """Books a step that was timed alone, in place of what was known."""
    level = self._level(bucket)
    self._own_log_s[bucket, arm] = float(np.log(seconds)) - level, 0
    self._compared[bucket, arm] = level

  def book(
    self, bucket: int, arm: Arm, *, steps: int, tokens: int, longest: int, seconds: float
  ) -> None:
    """Books a chunk: steps of the busiest slice, tokens of all slots and of the fullest."""
    self._last = key = bucket, arm
    step_s = seconds / max(steps, 1)
    self._learn(bucket, arm, float(np.log(max(step_s, 1e-9))))
    self._recent_step_s.setdefault(key, [step_s]).append(step_s)
    tokens_of_step = longest / max(steps, 1)
    before = self._step_tokens.get(key, tokens_of_step)
    self._step_tokens[key] = self._arm_tokens[arm] = (3 * before + tokens_of_step) / 4
    self.seconds += seconds
    self.tokens += tokens

  def _learn(self, bucket: int, arm: Arm, log_s: float) -> None:
    """Updates the machine's level with a chunk, and compares if that is possible."""
    if (bucket, arm) not in self._own_log_s:
      self.measured(bucket, arm, float(np.exp(log_s)))
    recent = self._recent.setdefault(bucket, [])
    if recent and recent[-1][0] != arm and not self._own_log_s[bucket, arm][1]:
      before, before_s = recent[-1]
      self._compare(bucket, before, arm, log_s - before_s)
    recent.append((arm, log_s))
    del recent[:-_LEVEL_CHUNKS]
    if len(recent) == 3:
      (before, before_s), (other, other_s), _ = recent
      if before == arm != other:
        around_s = np.logaddexp(before_s, log_s) - np.log(2)
        self._compare(bucket, arm, other, float(other_s - around_s))
    level = self._level(bucket)
    for key in self._compared:
      if key[0] == bucket:
        self._compared[key] = min(self._compared[key], level)

  def _compare(self, bucket: int, running: Arm, other: Arm, apart: float) -> None:
    """Books by how much a chunk of another arm took longer than those around it.

    What contradicts what was known may be due to a pause of the machine: it is believed if
    two comparisons agree, or else on average; and at once of an arm that was only timed
    alone. Then one of the two arms has changed: the one that is further from the machine's
    level when they were last compared. `apart` is a difference of logarithms.
    """
    key = bucket, other
    (own, _), (others, count) = self._own_log_s[bucket, running], self._own_log_s[key]
    found = self._errors.setdefault(key, [])
    found.append(apart - (others - own))
    agree = len(found) > 1 and abs(found[-1] - found[-2]) < _EQUAL_LOG_S
    confirms = abs(found[0]) < _EQUAL_LOG_S
    if len(found) == 1 and (confirms or not count):
      count = min(max(count, 1) + 1, _MAX_COMPARISONS) if confirms else 1
      wrong = found[0] / count
    elif agree or len(found) == _MAX_COMPARISONS:
      wrong, count = float(np.log(np.mean(np.exp(found[-2:] if agree else found)))), 1
    else:
      return
    risen = self._level(bucket) - self._compared[key]
    if abs(risen + wrong) < abs(risen):
      self._own_log_s[bucket, running] = own - wrong, count
      self._own_log_s[key] = others, max(self._own_log_s[key][1], 1)
    else:
      self._own_log_s[key] = others + wrong, count
    level = self._level(bucket)
    for known in ((bucket, running), key):
      self._compared[known] = level
      self._errors.pop(known, None)

  def _level(self, bucket: int) -> float:
    """How slow the machine is of late in a bucket: a logarithm; 0 before any chunk."""
    recent = self._recent.get(bucket, ())
    late = sorted(log_s - self._own_log_s[bucket, arm][0] for arm, log_s in recent)
    return (late[len(late) // 2] + late[(len(late) - 1) // 2]) / 2 if late else 0.0

  def step_s(self, bucket: int, arm: Arm) -> float:
    """Seconds of a step, as the machine is now; 0 if unknown."""
    own = self._own_log_s.get((bucket, arm))
    return float(np.exp(own[0] + self._level(bucket))) if own else 0.0

  def doubt(self, bucket: int, arm: Arm) -> float:
    """Logarithm of the factor by which a step may be faster than `step_s`.

    By as much as steps became slower since the arm was last compared, which may be due to
    the machine or to the arm that ran; as much as it was faster in a comparison not yet
    confirmed; by 2 if it was only timed alone.
    """
    key = bucket, arm
    if key not in self._own_log_s:
      return 0.0
    found = self._errors.get(key, [0.0])
    doubt = self._level(bucket) - self._compared[key] + max(-found[-1], 0.0)
    return doubt if self._own_log_s[key][1] else doubt + _UNCOMPARED_LOG_S

  def decoding_s(self, bucket: int, arm: Arm, steps: int) -> float:
    """Seconds that so many steps of the next chunk take, rather too few.

    As in the last chunk, or in most of the last few if these were faster; in a rollout's
    first as in the first of the last rollout. 0 before: steps that were timed alone had
    full caches, which may cost many times what nearly empty ones do.
    """
    late = self._recent_step_s.get((bucket, arm), [])[-_RECENT_CHUNKS:]
    return steps * float(min(late[-1], np.median(late))) if late else 0.0

  def tokens_of_step(self, bucket: int, arm: Arm) -> float:
    """Tokens that the fullest slot draws in a step, on average of late.

    If unknown, those of the strategy in another bucket, or else the most that it draws.
    """
    most = 1.0 if arm is None else arm.depth + 1.0
    known = self._step_tokens.get((bucket, arm), self._arm_tokens.get(arm, most))
    return max(known, 1.0)

  def token_s(self, bucket: int) -> float:
    """Seconds of a token of the fullest slot, as the bucket runs now; 0 if unknown."""
    arm = self._last[1] if self._last and self._last[0] == bucket else None
    return self.step_s(bucket, arm) / self.tokens_of_step(bucket, arm)

  def expected_steps(self, bucket: int, arm: Arm, most: int, tokens: int) -> int:
    """Steps of a chunk, which ends after `most` of them or `tokens` in a slot."""
    return int(min(most, np.ceil(tokens / self.tokens_of_step(bucket, arm))))

  def micro_batches_within(self, bucket: int, arm: Arm, steps: int) -> int:
    """Micro-batches that idle slices train while others decode so many steps.

    They fill most of the expected time, not all: others would wait. Where none has fitted
    for long, one is measured again: the machine may have paused.
    """
    one = self.micro_batch_s
    decoding_s = self.decoding_s(bucket, arm, steps)
    most = _TRAINED_SHARE * decoding_s / one if one else 0.0
    fits = int(most + 0.25)  # few are not rounded to less
    self._without_room = 0 if fits else self._without_room + 1
    if self._without_room > _CHUNKS_WITHOUT_ROOM:
      self.micro_batch_s, self._without_room = 0.0, 0
      self._micro_batches_s.clear()
    return fits

  def trained(self, micro_batch_s: float) -> None:
    late = self._micro_batches_s
    late.append(micro_batch_s)
    del late[:-_TRAINED_CHUNKS]
    self.micro_batch_s = float(np.median(late))

  def exchanged(self, seconds: float) -> None:
    self.exchange_s = seconds


class Decisions:
  """The decisions of a rollout by the clock, in order; another rollout can repeat them.

  In float32 no decision changes a token, but the data and order of the drafter's training
  depend on them.
  """

  def __init__(
    self,
    replay: Iterable[tuple[str, int]] | None = None,
    strict: bool = True,
    source: str = "the schedule to replay",
  ):
    """Follows `replay`, another rollout's `log`, instead of the clock.

    If the log is of another rollout that is an error (`strict`), or the clock decides from
    there on. `source` names it in messages.
    """
    self.log: list[tuple[str, int]] = []
    self._replay = None if replay is None else iter(replay)
    self._strict = strict
    self._source = source

  def __call__(self, name: str, decide: Callable[[], int]) -> int:
    """The decision of that name, now; ValueError: the log is of another rollout.

    `decide` is called in a replay as well: a rule that learns by choosing then knows what
    it would know without one.
    """
    value = int(decide())
    if self._replay is not None:
      logged, followed = next(self._replay, ("nothing", 0))
      if logged != name:
        self._differs(logged, name)
      else:
        value = followed
    self.log.append((name, value))
    return value

  def finish(self) -> None:
    """Ends the rollout; decisions left to replay are an error as well."""
    if self._replay is not None and (left := next(self._replay, None)):
      self._differs(left[0], "nothing")

  def _differs(self, logged: str, name: str) -> None:
    message = (
      f"{self._source} has {logged!r} where {name!r} is decided (decision "
      f"{len(self.log)}): it is of a run with other settings, prompts or weights"
    )
    if self._strict:
      raise ValueError(message)
    logging.warning("%s; the clock decides from here on", message)
    self._replay = None
