"""Judges responses: asks verifiers about whole batches, whatever these do.

A response may make a verifier hang, raise, end its process or return NaN. That costs this
response only: it gets a reward that the config names, and is counted. So that this holds,
verifiers run in processes of their own (`worker`), under a limit of CPU time. Prompts and
answers travel there as JSON; what JSON would change, such as a tuple, is refused.
"""

from collections.abc import Sequence
import concurrent.futures
import functools
import json
import logging
import queue
from typing import Any, NamedTuple

import numpy as np

from tlt_jax import ranges
from tlt_jax import worker
from tlt_jax.rl import reward


@ranges.options
class Options:
  """Where verifiers run, and what a failure of one costs."""

  processes: ranges.CountOrZero = ranges.field(
    2,
    "processes that verifiers run in, each on a response at a time; 0: they run in the "
    "run's own process, without any limit of time",
  )
  cpu_s: ranges.Positive = ranges.field(
    10.0, "CPU seconds that the verdict on a response may take"
  )
  wall_s: ranges.Positive = ranges.field(
    120.0,
    "seconds that it may take, for verifiers that wait for something; where this limit "
    "decides, another machine may judge otherwise",
  )
  failed_reward: ranges.Real = ranges.field(
    0.0, "reward of a response that a verifier fails on"
  )
  most_failed: ranges.Share = ranges.field(
    0.5, "share of a rollout's responses that verifiers may fail on; with more the run ends"
  )


class Scores(NamedTuple):
  """What B responses are worth."""

  reward: np.ndarray  # f32[B]
  solved: np.ndarray  # bool[B]
  failure: np.ndarray  # str[B]  what went wrong where a verifier failed, "" elsewhere
  parts: dict[str, np.ndarray]  # f32[B] of each verifier, unweighted; {} of one alone


class Judge:
  """Judges responses by the weighted sum of verifiers that a config names."""

  def __init__(self, text: str, solved_at: float = 1.0, options: Options | None = None):
    """Finds the verifiers; processes start with the first response.

    Args:
      text: names verifiers, see `reward.parse`; "": every response is worth 0
      solved_at: the least reward of a solved response, where a verifier returns a number
        only
      options: where verifiers run, and what a failure costs
    Raises:
      RewardError: see `reward.parse`
    """
    self.terms = reward.parse(text) if text else ()
    self.options = options = options or Options()
    self._text, self._solved_at = text, solved_at
    self._idle: queue.LifoQueue[worker.Worker] = queue.LifoQueue()
    if options.processes:
      limits = dict(cpu_s=options.cpu_s, wall_s=options.wall_s)
      for _ in range(options.processes if self.terms else 0):
        # Imports of a verifier may take seconds, which are not the first response's.
        process = worker.Worker(f"{__name__}.verify", warm_up=((text,),), **limits)
        self._idle.put(process)

  def _at_once(self, term: reward.Term) -> int:
    """Responses that a verifier judges at a time."""
    return self.options.processes or getattr(term.score, "threads", 1)

  def __call__(
    self,
    prompts: Sequence,
    responses: Sequence[str],
    answers: Sequence,
    **given: Sequence[int],
  ) -> Scores:
    """Judges every response; the first verifier says which are solved.

    Args:
      prompts, responses, answers: B of each
      given: `length` and `max_tokens`, B of each, for verifiers that take them
    Raises:
      RewardError: a verifier takes what is not given, a prompt or answer that JSON does
        not give back as it is, or verifiers cannot be called in processes of their own
    """
    for term in self.terms:
      for name in set(reward.wanted(term.score)) - set(given):
        raise reward.RewardError(
          f"reward {term.name} takes {name}, which is not known here: judge with {name}="
          "[...], one of each response"
        )
    if self.options.processes:
      for name, values in (("prompt", prompts), ("answer", answers)):
        for value in {id(value): value for value in values}.values():
          _check_json(name, value)
    B = len(responses)
    more = [{name: int(of[i]) for name, of in given.items()} for i in range(B)]
    samples = list(zip(prompts, responses, answers, more, strict=True))
    verdicts = [self._ask(number, samples) for number in range(len(self.terms))]
    failed_reward = self.options.failed_reward
    total, parts, failure = np.zeros(B), {}, np.full(B, "", object)
    for term, said in zip(self.terms, verdicts, strict=True):
      values = [failed_reward if v.failure else v.reward for v in said]
      parts[term.name] = np.array(values, np.float32)
      total += term.weight * parts[term.name].astype(np.float64)
      named = [f"reward {term.name}: {v.failure}" if v.failure else "" for v in said]
      failure = np.where(failure == "", np.array(named, object), failure)
    too_large = np.abs(total) > np.finfo(np.float32).max
    failure[too_large] = "the weighted sum of rewards exceeds what a float32 can hold"
    total[too_large] = failed_reward
    if count := np.count_nonzero(failure != ""):
      first = failure[np.flatnonzero(failure != "")[0]]
      logging.warning("%d of %d responses are not judged, the first: %s", count, B, first)
    solved = [v.solved for v in verdicts[0]] if verdicts else [False] * B
    is_sum = len(self.terms) > 1 or any(term.weight != 1.0 for term in self.terms)
    return Scores(
      reward=total.astype(np.float32),
      solved=np.array(solved, bool),
      failure=failure,
      parts=parts if is_sum else {},
    )

  def check(self, scores: Scores) -> None:
    """Raises RewardError if verifiers failed on more of a rollout than they may."""
    failed = np.flatnonzero(scores.failure != "")
    B, most = len(scores.failure), self.options.most_failed
    if len(failed) > most * B:
      raise reward.RewardError(
        f"verifiers failed on {len(failed)} of {B} responses, and verifier.most_failed="
        f"{most:g} allows no more than {int(most * B)}; the first: "
        f"{scores.failure[failed[0]]}"
      )

  def close(self) -> None:
    """Ends the processes; the next response starts others."""
    for each in list(self._idle.queue):
      each.close()

  def _ask(self, number: int, samples: list[tuple]) -> list[reward.Verdict]:
    """The verdicts of a verifier, in order."""
    one = lambda sample: self._one(number, sample)
    at_once = self._at_once(self.terms[number])
    if at_once == 1:
      return list(map(one, samples))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
      return list(pool.map(one, samples))

  def _one(self, number: int, sample: tuple) -> reward.Verdict:
    """The verdict of a verifier on a sample: prompt, response, answer, what is given."""
    if not self.options.processes:
      return reward.verify(self.terms[number].score, *sample, self._solved_at)
    process = self._idle.get()
    try:
      return reward.Verdict(*process(self._text, number, sample, self._solved_at))
    except worker.Stopped:
      return reward.Verdict(
        0.0,
        False,
        f"took more than verifier.cpu_s={self.options.cpu_s:g} or verifier.wall_s="
        f"{self.options.wall_s:g}, or ended its process "
        f"(response {reward.shortened(sample[1])}, answer {reward.shortened(sample[2])})",
      )
    except worker.WorkerError as e:
      raise reward.RewardError(
        f"reward {self.terms[number].name} does not run in a process of its own: {e}; its "
        "module must be importable there; verifier.processes=0 runs it in this one"
      ) from e
    finally:
      self._idle.put(process)


def _check_json(name: str, value: Any) -> None:
  """Raises RewardError unless a value comes back from JSON as it is."""
  try:
    is_same = json.loads(json.dumps(value)) == value
    why = "tuples come back as lists, keys that are numbers as texts, NaN equals nothing"
  except (TypeError, ValueError, RecursionError) as e:
    is_same, why = False, e
  if not is_same:
    raise reward.RewardError(
      f"the {name} {reward.shortened(value)} would not reach a verifier's process as it "
      f"is, in JSON: {why}; give texts, numbers, lists, and dicts with texts as keys, or "
      "run verifiers in this process (verifier.processes=0)"
    )


def verify(
  text: str, number: int = 0, sample: list | None = None, solved_at: float = 0.0
) -> reward.Verdict | None:
  """What a verifier says of a sample; for a process of its own, which keeps the verifiers.

  Args:
    text: names the verifiers
    number: of the one that is asked
    sample: see `Judge._one`; None: nothing is asked yet
    solved_at: see `reward.verify`
  """
  terms = _terms(text)
  return sample and reward.verify(terms[number].score, *sample, solved_at)


@functools.cache
def _terms(text: str) -> tuple[reward.Term, ...]:
  return reward.parse(text)


def join(parts: Sequence[Scores]) -> Scores:
  """The scores of all responses, one part behind the other."""
  joined: dict[str, Any] = {
    name: np.concatenate([getattr(scores, name) for scores in parts])
    for name in ("reward", "solved", "failure")
  }
  of_each = {k: np.concatenate([s.parts[k] for s in parts]) for k in parts[0].parts}
  return Scores(**joined, parts=of_each)
