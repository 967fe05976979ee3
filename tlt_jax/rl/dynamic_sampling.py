"""Dynamic sampling: uninformative prompts are replaced while others run.

Yu et al. 2025 (DAPO, https://arxiv.org/abs/2503.14476, section 3.2). A step is to train on
P prompts that `Algorithm.keeps`. As soon as all responses to a prompt have ended they are
scored; each prompt that is not kept is replaced by the next one of the `Queue`.

The order in which responses end does not matter. At any time P + (prompts found useless so
far) prompts have been asked; in the end the least n with n = P + (useless among the first
n). That number depends on weights and seed alone; so do the kept prompts and the position
of the queue.

Departures from the paper:
- The paper samples whole batches until one is full, and may find more prompts than it
  needs. Here a prompt is asked only when one is missing: no stale response is kept.
- There is a budget. Once it is spent the batch is filled with the first useless prompts, so
  that shapes do not change; the learner leaves them out, as it does without replacement.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
from typing import NamedTuple

import numpy as np

from tlt_jax import processes
from tlt_jax import stopwatch
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import judge as judge_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib


class Rule(NamedTuple):
  keeps: Callable[[algorithm_lib.Responses], np.ndarray]  # as in `algorithm.Algorithm`
  prompts: int  # P, wanted per step


def make(
  algorithm: algorithm_lib.Algorithm, prompts: int, most_prompts: int
) -> Rule | None:
  """The rule of a run; None if no prompt is replaced.

  `keeps` must judge each prompt by its responses alone; `most_prompts` 0 is P.

  Raises:
    ValueError: fewer than P, or an algorithm that keeps every prompt
  """
  if most_prompts in (0, prompts):
    return None
  if most_prompts < prompts:
    raise ValueError(
      f"batch.most_prompts={most_prompts} is less than batch.prompts={prompts}; give 0 to "
      "replace no prompt"
    )
  if algorithm.keeps is None:
    raise ValueError(
      f"batch.most_prompts={most_prompts}: this algorithm keeps every prompt, so that none "
      "is replaced; give 0, or an algorithm with `keeps`, such as dapo"
    )
  return Rule(algorithm.keeps, prompts)


class Judged(NamedTuple):
  text: list[str]
  scores: judge_lib.Scores
  seconds: float

  def whole(self) -> "Judged":
    """Merges the scores of all processes: rewards may depend on time limits."""
    scores = self.scores
    if processes.count() == 1:
      return self
    ours = processes.share()
    mine = np.zeros((3 + len(scores.parts), len(self.text)), np.float32)
    failed = scores.failure != ""
    mine[:, ours] = scores.reward, scores.solved, failed, *scores.parts.values()
    reward, solved, failed, *parts = processes.total(mine)
    elsewhere = "a verifier failed in another process"
    failure = np.where(failed > 0, elsewhere, "").astype(object)
    failure[ours] = scores.failure
    by_name = dict(zip(scores.parts, parts, strict=True))
    return self._replace(scores=judge_lib.Scores(reward, solved > 0, failure, by_name))


class Outcome(NamedTuple):
  asked: int  # prompts, the first of the queue
  kept: np.ndarray  # i32[P]  those that are trained on, ascending
  useless: int  # of those that were asked
  seconds: float  # from the last answer to the first P prompts to the end

  def metrics(self) -> dict[str, float]:
    return {
      "rollout/prompts_asked": self.asked,
      "rollout/useless_groups": self.useless / self.asked,
      "rollout/replacement_s": self.seconds,
    }


class Replacement:
  """The prompts of one rollout: the `ask` of a rollout.

  Scoring runs in a thread, during the next chunk; its result counts from the end of that
  chunk on, so that a replayed rollout asks the same prompts.
  """

  def __init__(
    self,
    rule: Rule,
    requests: requests_lib.Requests,
    score: Callable[[samples_lib.Samples, range], Judged],
  ):
    self._rule, self._requests, self._score = rule, requests, score
    self._responses = len(requests) // len(requests.prompts)  # R
    # Responses to each prompt that have not ended yet.
    self._missing = collections.Counter(requests.prompt_idx.tolist())
    self._found: dict[int, Judged] = {}
    self._keeps: dict[int, bool] = {}
    self._answered = stopwatch.Stopwatch()  # since the first P prompts have been answered
    self._pool = concurrent.futures.ThreadPoolExecutor(1)
    self._scoring: concurrent.futures.Future | None = None

  def __call__(self, samples: samples_lib.Samples, ended: list[int], idle: bool) -> int:
    """The number of prompts asked so far; see `samples.Ask`."""
    self._collect(samples)
    answered = []
    for i in ended:
      prompt = int(self._requests.prompt_idx[i])
      self._missing[prompt] -= 1
      if not self._missing[prompt]:
        answered.append(prompt)
        if prompt < self._rule.prompts:
          self._answered = stopwatch.Stopwatch()
    if answered:
      self._scoring = self._pool.submit(self._score_prompts, samples, answered)
    if idle:
      self._collect(samples)
    return self._asked

  @property
  def _asked(self) -> int:
    useless = len(self._keeps) - sum(self._keeps.values())
    return min(self._rule.prompts + useless, len(self._requests.prompts))

  def _requests_of(self, prompt: int) -> range:
    return range(prompt * self._responses, (prompt + 1) * self._responses)

  def _score_prompts(
    self, samples: samples_lib.Samples, prompts: list[int]
  ) -> dict[int, Judged]:
    return {p: self._score(samples, self._requests_of(p)) for p in prompts}

  def _collect(self, samples: samples_lib.Samples) -> None:
    if self._scoring is None:
      return
    results, self._scoring = self._scoring.result(), None
    for prompt, mine in results.items():
      judged = mine.whole()
      self._found[prompt] = judged
      index = list(self._requests_of(prompt))
      group = responses(self._requests, samples, judged.scores, self._responses, index)
      self._keeps[prompt] = bool(self._rule.keeps(group)[0])

  def close(self) -> None:
    self._pool.shutdown()

  def finish(self) -> tuple[Judged, Outcome]:
    since_s, P, asked = self._answered.lap(), self._rule.prompts, self._asked
    keeps = np.array([self._keeps[prompt] for prompt in range(asked)])
    first = np.argsort(~keeps, stable=True)[:P]  # useless ones last
    outcome = Outcome(
      asked=asked,
      kept=np.sort(first).astype(np.int32),
      useless=int(np.sum(~keeps)),
      seconds=since_s if asked > P else 0.0,
    )
    return _joined([self._found[prompt] for prompt in range(asked)]), outcome


def _joined(parts: Sequence[Judged]) -> Judged:
  text = [t for part in parts for t in part.text]
  scores = judge_lib.join([part.scores for part in parts])
  return Judged(text, scores, sum(part.seconds for part in parts))


def responses(
  requests: requests_lib.Requests,
  samples: samples_lib.Samples,
  scores: judge_lib.Scores,
  R: int,
  index: Sequence[int],
) -> algorithm_lib.Responses:
  """What an algorithm sees of the requests `index` i32[P * R], whose scores these are."""

  def by_prompt(x):
    return x.reshape(-1, R, *x.shape[1:])

  return algorithm_lib.Responses(
    reward=by_prompt(scores.reward),
    length=by_prompt(samples.length[index]),
    max_tokens=by_prompt(requests.max_tokens[index]),
    truncated=by_prompt(samples.finish_reason[index] == samples_lib.LENGTH),
    solved=by_prompt(scores.solved),
    logp=by_prompt(samples.logp[index]),
  )


class Queue:
  """The prompts of a run in order; each step takes as many as it asked."""

  def __init__(self, batches: Iterator[list[dict]]):
    self._batches = batches  # of `data.prompt_iterator`
    # (state of the iterator before it, records) of each batch that is not used up.
    self._read: collections.deque[tuple[dict, list[dict]]] = collections.deque()
    self._taken = 0  # records of the first of them

  def peek(self, count: int) -> list[dict]:
    while sum(len(records) for _, records in self._read) < self._taken + count:
      state = self._batches.get_state()
      self._read.append((state, next(self._batches)))
    records = [record for _, batch in self._read for record in batch]
    return records[self._taken : self._taken + count]

  def take(self, count: int) -> None:
    self.peek(count)
    self._taken += count
    while self._read and self._taken >= len(self._read[0][1]):
      self._taken -= len(self._read.popleft()[1])

  def get_state(self) -> dict:
    state = self._read[0][0] if self._read else self._batches.get_state()
    return state | ({"taken": self._taken} if self._taken else {})

  def set_state(self, state: dict) -> None:
    """Restores a state of `get_state`, or of an iterator of batches."""
    state = dict(state)
    self._read.clear()
    self._taken = state.pop("taken", 0)
    self._batches.set_state(state)
