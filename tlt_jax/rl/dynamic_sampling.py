"""Dynamic sampling: prompts whose responses say nothing are replaced while others run.

Yu et al. 2025 (DAPO, https://arxiv.org/abs/2503.14476, section 3.2). A step is to train on
P prompts that `Algorithm.keeps`. A rollout starts with the first P of the `Queue`. As soon
as all responses to a prompt have ended they are scored; each prompt that is not kept is
replaced by the next one of the queue, whose requests take slots that have become free.

Who ends first decides nothing. At any time P + (prompts found useless so far) prompts have
been asked, so that in the end n have: the least n with n = P + (useless among the first n).
That number depends on the responses alone, and these on weights and seed alone; so do the
prompts that are kept, and where the queue goes on.

Departures from the paper:
- It asks again in whole batches until one is full, and may find more prompts than it needs.
  Here none is asked before one is missing, so nothing is left over: no response is carried
  to a later step, whose policy did not draw it.
- There is a budget. Once it is spent the batch is filled with the first useless prompts, so
  that shapes stay as they are; the learner leaves them out, as it does without replacement.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import time
from typing import NamedTuple

import numpy as np

from tlt_jax import processes
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import judge as judge_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib


class Rule(NamedTuple):
  """Which prompts are replaced."""

  keeps: Callable[[algorithm_lib.Responses], np.ndarray]  # as in `algorithm.Algorithm`
  prompts: int  # P, that are wanted of each step


def make(
  algorithm: algorithm_lib.Algorithm, prompts: int, most_prompts: int
) -> Rule | None:
  """The rule of a run; None if no prompt is replaced.

  Args:
    algorithm: its `keeps` judges each prompt by that prompt's responses alone
    prompts: P, that are wanted of each step
    most_prompts: that a step may ask; 0: P
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
  """What the responses to consecutive requests are worth."""

  text: list[str]
  scores: judge_lib.Scores
  seconds: float  # that this took

  def whole(self) -> "Judged":
    """With the scores of all processes, of which each has judged every n-th response.

    So a reward that differs from process to process, as one with a time limit may, is the
    same for all.
    """
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
  """The account of a rollout."""

  asked: int  # prompts, the first of the queue
  kept: np.ndarray  # i32[P]  those that are trained on, ascending
  useless: int  # of those that were asked
  seconds: float  # that the rollout went on after the first P prompts were answered

  def metrics(self) -> dict[str, float]:
    """`rollout/*` of one step."""
    return {
      "rollout/prompts_asked": self.asked,
      "rollout/useless_groups": self.useless / self.asked,
      "rollout/replacement_s": self.seconds,
    }


class Replacement:
  """The prompts of one rollout: which are asked, and what came of each.

  It is the `ask` of a rollout. Scoring runs in a thread, during the chunk that follows;
  what it finds counts from the end of that chunk on, however fast it was, so that a
  rollout that is decided alike asks alike.
  """

  def __init__(
    self,
    rule: Rule,
    requests: requests_lib.Requests,
    score: Callable[[samples_lib.Samples, range], Judged],
  ):
    """Has asked nobody yet.

    Args:
      rule: of the run
      requests: of all prompts that may be asked, R each, side by side
      score: scores a range of requests that have ended
    """
    self._rule, self._requests, self._score = rule, requests, score
    self._responses = len(requests) // len(requests.prompts)  # R
    # Responses to each prompt that have not ended yet.
    self._missing = collections.Counter(requests.prompt_idx.tolist())
    self._found: dict[int, Judged] = {}
    self._keeps: dict[int, bool] = {}
    self._answered_s = 0.0  # when the last of the first P prompts was answered
    self._pool = concurrent.futures.ThreadPoolExecutor(1)
    self._scoring: concurrent.futures.Future | None = None

  def __call__(self, samples: samples_lib.Samples, ended: list[int], idle: bool) -> int:
    """How many prompts are asked by now; see `samples.Ask`."""
    self._collect(samples)
    answered = []
    for i in ended:
      prompt = int(self._requests.prompt_idx[i])
      self._missing[prompt] -= 1
      if not self._missing[prompt]:
        answered.append(prompt)
        if prompt < self._rule.prompts:
          self._answered_s = time.perf_counter()
    if answered:
      score = lambda: {p: self._score(samples, self._of(p)) for p in answered}
      self._scoring = self._pool.submit(score)
    if idle:
      self._collect(samples)
    return self._asked

  @property
  def _asked(self) -> int:
    useless = len(self._keeps) - sum(self._keeps.values())
    return min(self._rule.prompts + useless, len(self._requests.prompts))

  def _of(self, prompt: int) -> range:
    """The requests of a prompt."""
    return range(prompt * self._responses, (prompt + 1) * self._responses)

  def _collect(self, samples: samples_lib.Samples) -> None:
    """Waits for the scores that are being computed, and judges their prompts."""
    if self._scoring is None:
      return
    found, self._scoring = self._scoring.result(), None
    for prompt, mine in found.items():
      scored = self._found[prompt] = mine.whole()
      of = list(self._of(prompt))
      group = responses(self._requests, samples, scored.scores, self._responses, of)
      self._keeps[prompt] = bool(self._rule.keeps(group)[0])

  def close(self) -> None:
    """Ends the thread."""
    self._pool.shutdown()

  def finish(self) -> tuple[Judged, Outcome]:
    """The scores of all prompts that were asked, and the account of the rollout."""
    now, P, asked = time.perf_counter(), self._rule.prompts, self._asked
    keeps = np.array([self._keeps[prompt] for prompt in range(asked)])
    first = np.argsort(~keeps, stable=True)[:P]  # useless ones behind the others
    outcome = Outcome(
      asked=asked,
      kept=np.sort(first).astype(np.int32),
      useless=int(np.sum(~keeps)),
      seconds=now - self._answered_s if asked > P else 0.0,
    )
    return _joined([self._found[prompt] for prompt in range(asked)]), outcome


def _joined(parts: Sequence[Judged]) -> Judged:
  """The same responses as one."""
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
  """What an algorithm sees of scored responses, R per prompt.

  Args:
    requests, samples: of a rollout
    scores: of the requests of `index`
    index: i32[P R]  requests, those of a prompt side by side
  """
  by_prompt = lambda x: x.reshape(-1, R, *x.shape[1:])
  return algorithm_lib.Responses(
    reward=by_prompt(scores.reward),
    length=by_prompt(samples.length[index]),
    max_tokens=by_prompt(requests.max_tokens[index]),
    truncated=by_prompt(samples.finish_reason[index] == samples_lib.LENGTH),
    solved=by_prompt(scores.solved),
    logp=by_prompt(samples.logp[index]),
  )


class Queue:
  """The prompts of a run in their order, of which each step takes as many as it asked."""

  def __init__(self, batches: Iterator[list[dict]]):
    """Starts where the iterator stands; see `data.prompt_iterator`."""
    self._batches = batches
    # (state of the iterator before it, records) of each batch of which some is left.
    self._read: collections.deque[tuple[dict, list[dict]]] = collections.deque()
    self._taken = 0  # records of the first of them

  def peek(self, count: int) -> list[dict]:
    """The next records, which stay in the queue."""
    while sum(len(records) for _, records in self._read) < self._taken + count:
      state = self._batches.get_state()
      self._read.append((state, next(self._batches)))
    records = [record for _, batch in self._read for record in batch]
    return records[self._taken : self._taken + count]

  def take(self, count: int) -> None:
    """Removes so many records."""
    self.peek(count)
    self._taken += count
    while self._read and self._taken >= len(self._read[0][1]):
      self._taken -= len(self._read.popleft()[1])

  def get_state(self) -> dict:
    """Says which record comes next; JSON can hold it."""
    state = self._read[0][0] if self._read else self._batches.get_state()
    return state | ({"taken": self._taken} if self._taken else {})

  def set_state(self, state: dict) -> None:
    """Goes on from what `get_state` gave, or the state of an iterator of batches."""
    state = dict(state)
    self._read.clear()
    self._taken = state.pop("taken", 0)
    self._batches.set_state(state)
