"""Judges batches of responses by verifiers, in a pool of processes.

A response may make a verifier hang, raise, end its process, exhaust memory or return NaN.
That costs this response only: it gets `failed_reward`, and is counted. The processes
(`pebble`) have limits of CPU time, wall time and memory. They are spawned, not forked, as
JAX has threads, and see the CPU only.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import process
import functools
import json
import logging
from multiprocessing import context
import os
import resource
import signal
import sys
import threading
import time
import types
from typing import NamedTuple, NoReturn
import weakref

import numpy as np
import pebble

from tlt_jax import ranges
from tlt_jax.rl import reward

_MOST_FAILED = 0.5  # share of a rollout's responses; with more the run ends
_ATTEMPTS = 3  # per response, if the pool breaks without a known cause
_SIGNALS = signal.SIGTERM, signal.SIGINT


@ranges.options
class Options:
  processes: ranges.CountOrZero = ranges.field(
    2,
    "processes that verifiers run in, each on a response at a time; 0: they run in the "
    "run's own process, without any limit",
  )
  cpu_s: ranges.Positive = ranges.field(
    10.0, "CPU seconds that the verdict on a response may take"
  )
  wall_s: ranges.Positive = ranges.field(
    120.0,
    "seconds that it may take, for verifiers that wait for something; where this limit "
    "decides, another machine may judge otherwise",
  )
  memory_mb: ranges.Count = ranges.field(4096, "memory of each process, in MiB")
  failed_reward: ranges.Real = ranges.field(
    0.0, "reward of a response that a verifier fails on"
  )


class Scores(NamedTuple):
  reward: np.ndarray  # f32[B]
  solved: np.ndarray  # bool[B]
  failure: np.ndarray  # str[B]  the error of a verifier that failed, "" elsewhere
  parts: dict[str, np.ndarray]  # f32[B] of each verifier, unweighted; {} of a single one


class Judge:
  """Judges responses by verifiers, for which see `reward.parse` and `reward.verify`."""

  def __init__(self, text: str, solved_at: float = 1.0, options: Options | None = None):
    self.terms = reward.parse(text) if text else ()
    self.options = options or Options()
    self._text, self._solved_at = text, solved_at
    self._pool: pebble.ProcessPool | None = None  # started by the first response
    self._lock = threading.Lock()  # of the pool

  def __call__(
    self,
    prompts: Sequence,
    responses: Sequence[str],
    answers: Sequence,
    **given: Sequence[int],
  ) -> Scores:
    """Judges every response; the first verifier decides which are solved.

    `given`: `length` and `max_tokens`, B of each, for verifiers that take them.

    Raises:
      RewardError: a verifier takes what is not given, or cannot be called in a process, or
        a prompt or answer cannot be sent there
    """
    for term in self.terms:
      for name in set(reward.wanted(term.score)) - set(given):
        raise reward.RewardError(
          f"reward {term.name} takes {name}, which is not known here: judge with {name}="
          "[...], one of each response"
        )
    B = len(responses)
    extra = [{name: int(x[i]) for name, x in given.items()} for i in range(B)]
    samples = list(zip(prompts, responses, answers, extra, strict=True))
    verdicts = self.ask(samples) if self.terms else [reward.Verdict((), False)] * B
    failure = np.array([v.failure for v in verdicts], object)
    failed = failure != ""
    values = np.full((len(self.terms), B), self.options.failed_reward)
    for i in np.flatnonzero(~failed):
      values[:, i] = verdicts[i].rewards
    total = np.array([term.weight for term in self.terms]) @ values
    total[failed] = self.options.failed_reward
    too_large = np.abs(total) > np.finfo(np.float32).max
    failure[too_large] = "the weighted sum of rewards exceeds what a float32 can hold"
    total[too_large] = self.options.failed_reward
    if count := np.count_nonzero(failure != ""):
      first = failure[np.flatnonzero(failure != "")[0]]
      logging.warning(
        "the reward failed on %d of %d responses, which get %g; the first: %s",
        count,
        B,
        self.options.failed_reward,
        first,
      )
    is_sum = len(self.terms) > 1 or any(term.weight != 1.0 for term in self.terms)
    names = [term.name for term in self.terms] if is_sum else []
    return Scores(
      reward=total.astype(np.float32),
      solved=np.array([v.solved for v in verdicts], bool),
      failure=failure,
      parts=dict(zip(names, values.astype(np.float32), strict=False)),
    )

  def check(self, scores: Scores) -> None:
    """Raises RewardError if verifiers failed on more of a rollout than they may."""
    failed = np.flatnonzero(scores.failure != "")
    B = len(scores.failure)
    if len(failed) > _MOST_FAILED * B:
      raise reward.RewardError(
        f"the reward failed on {len(failed)} of {B} responses, and a run ends above "
        f"{_MOST_FAILED:.0%}; the first: {scores.failure[failed[0]]}"
      )

  def close(self) -> None:
    if self._pool is not None:
      self._end()
      self._pool = None

  def check_sendable(self, prompt: object, answer: object) -> None:
    """Raises RewardError for a prompt or answer that reaches no verifier as it is."""
    if self.options.processes:
      _as_json((prompt, "", answer))

  def ask(
    self, samples: list[tuple], wall_s: float | None = None
  ) -> list[reward.Verdict]:
    """Judges samples: the arguments of `reward.verify` from `prompt` on; logs nothing.

    `wall_s`: a limit for each, if less than that of the options.
    """
    limit = min(self.options.wall_s, wall_s or self.options.wall_s)
    with self._lock:  # prompts are tried in another thread while responses are judged
      return self._ask(samples, limit)

  def _ask(self, samples: list[tuple], wall_s: float) -> list[reward.Verdict]:
    if not self.options.processes:
      return [reward.verify(self.terms, self._solved_at, *sample) for sample in samples]
    sent = list(map(_as_json, samples))
    found: dict[int, reward.Verdict] = {}
    for _ in range(_ATTEMPTS):
      left = [i for i in range(len(sent)) if i not in found]
      tasks = {i: self._schedule(sent[i], wall_s) for i in left}
      for i, task in tasks.items():
        if (verdict := self._verdict(task, samples[i], wall_s)) is not None:
          found[i] = verdict
      if len(found) == len(sent):
        break
      self.close()  # the pool broke: it noticed the end of a process, but not of which task
    lost = reward.Verdict((), False, "ended its process")
    return [found.get(i, lost) for i in range(len(sent))]

  def _schedule(self, sample: str, wall_s: float) -> pebble.ProcessFuture:
    if self._pool is None:
      self._pool = pebble.ProcessPool(
        self.options.processes,
        initializer=_start,
        initargs=(os.getpid(), self.options.memory_mb * 2**20),
        context=_Context(),
      )
      self._end = weakref.finalize(self, _end, self._pool)  # at exit, too
    args = (self._text, self._solved_at, self.options.cpu_s, sample)
    return self._pool.schedule(_judge, args=args, timeout=wall_s)

  def _verdict(
    self, task: pebble.ProcessFuture, sample: tuple, wall_s: float
  ) -> reward.Verdict | None:
    try:
      return task.result()
    except process.BrokenProcessPool:
      return None
    except futures.TimeoutError:
      what = f"took more than verifier.wall_s={wall_s:g}"
      if wall_s < self.options.wall_s:
        what = f"took more than {wall_s:g} s"
    except pebble.ProcessExpired as e:
      what = f"ended its process (status {e.exitcode})"
      if e.exitcode == -signal.SIGPROF:
        what = f"took more than verifier.cpu_s={self.options.cpu_s:g}"
    except reward.RewardError as e:
      raise reward.RewardError(
        f"{e}; its module must be importable in another process; "
        "verifier.processes=0 runs it in this one"
      ) from e
    return reward.Verdict((), False, f"{what} {reward.place(*sample[1:3])}")


def _as_json(sample: tuple) -> str:
  """Raises RewardError for a prompt or answer that does not survive JSON."""
  try:
    text, why = json.dumps(sample), "tuples come back as lists, numbers of keys as texts"
    back, sent = json.loads(text), list(sample)
    is_same = back == sent or repr(back) == repr(sent)  # NaN equals nothing
  except (TypeError, ValueError, RecursionError) as e:
    is_same, why = False, e
  if not is_same:
    raise reward.RewardError(
      f"prompt {reward.shortened(sample[0])} and answer {reward.shortened(sample[2])} "
      f"reach no verifier's process as they are, in JSON: {why}; give texts, numbers, "
      "lists and dicts, or run verifiers in this process (verifier.processes=0)"
    )
  return text


class _Process(context.SpawnProcess):
  """Does not import the parent's `__main__`: verifiers are found by their names."""

  def start(self):
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until `_start`
    try:
      super().start()
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, held)
      sys.modules["__main__"] = main


class _Context(context.SpawnContext):
  Process = _Process


def _end(pool: pebble.ProcessPool) -> None:
  pool.stop()
  pool.join()


def _start(parent: int, memory: int) -> None:
  """Prepares a process of the pool, which ends with the run.

  SIGTERM and SIGINT, which often reach all processes of a job, do not end it: a run that
  stops still waits for its verdicts.
  """

  def watch():
    while os.getppid() == parent:
      time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)

  os.setsid()
  for number in _SIGNALS:
    signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs inherit
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  threading.Thread(target=watch, daemon=True).start()
  resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.dup2(2, 1)  # verifiers must not print to the run's stdout
  os._exit = functools.partial(_exit, os._exit)


def _exit(end: Callable[[int], NoReturn], status: int) -> NoReturn:
  """Ends the process; not by 0, which the pool would take for no end of a task."""
  end(status or 1)


def _judge(text: str, solved_at: float, cpu_s: float, sample: str) -> reward.Verdict:
  terms = _terms(text)
  prompt, response, answer, given = json.loads(sample)
  # The kernel ends the process at this limit, even inside C code.
  signal.setitimer(signal.ITIMER_PROF, cpu_s)
  try:
    return reward.verify(terms, solved_at, prompt, response, answer, given, True)
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0.0)


@functools.cache
def _terms(text: str) -> tuple[reward.Term, ...]:
  return reward.parse(text)


def join(parts: Sequence[Scores]) -> Scores:
  rewards, solved, failure = map(np.concatenate, zip(*(s[:3] for s in parts), strict=True))
  by_name = {k: np.concatenate([s.parts[k] for s in parts]) for k in parts[0].parts}
  return Scores(rewards, solved, failure, by_name)
