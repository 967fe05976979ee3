"""Rewards: a verifier is any function `score(prompt, response, answer)`.

It returns the response's reward, or a pair: the reward, and whether the response solves
the problem. Of a reward alone, a threshold decides that. A verifier that also takes
`length` or `max_tokens` is given them: the response's tokens, and how many it might have
had.

A config names one by its dotted path, in this package or in the user's own; with
arguments, what is named is a function that returns the verifier; and several are added up
with weights:

    tlt_jax.tasks.math.score + 0.2 * tlt_jax.tasks.form.overlong(buffer=512)

The first one says which responses are solved. `parse` reads such a text, and `score_terms`
runs its verifiers over a batch. Whatever goes wrong inside a verifier is reported with its
name and the sample it failed on.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import inspect
import numbers
from typing import NamedTuple

import numpy as np

from tlt_jax import calls
from tlt_jax import named

Score = Callable[..., float | tuple[float, bool]]
_ON_REQUEST = ("length", "max_tokens")  # that a verifier may take besides


class RewardError(ValueError):
  """A verifier that cannot be found, fails, or returns no usable number."""


class Term(NamedTuple):
  """One verifier of a sum."""

  name: str  # of its mean in the metrics
  weight: float
  score: Score


class Scores(NamedTuple):
  """What B responses are worth."""

  reward: np.ndarray  # f32[B]
  solved: np.ndarray  # bool[B]
  parts: dict[str, np.ndarray]  # f32[B] of each verifier, unweighted; {} of one alone


def parse(text: str) -> tuple[Term, ...]:
  """The verifiers that a config's `reward` names.

  Raises:
    RewardError: it is no sum of such, or one of them cannot be found or called
  """
  try:
    sum_of = calls.weighted(text)
  except ValueError as e:
    raise RewardError(f"reward {text!r}: {e}") from e
  terms, names = [], collections.Counter()
  for call in sum_of:
    name = ".".join(call.path.split(".")[-2:])
    names[name] += 1
    number = f"_{names[name]}" if names[name] > 1 else ""
    terms.append(Term(name + number, call.weight, _make(call)))
  return tuple(terms)


def make(text: str) -> Score:
  """The single verifier at `package.module.function`, or the one that a call of it gives.

  Raises:
    RewardError: there is no such, or there are several
  """
  terms = parse(text)
  if len(terms) > 1 or terms[0].weight != 1.0:
    raise RewardError(f"reward {text!r}: is a weighted sum, not a single function")
  return terms[0].score


def _make(call: calls.Call) -> Score:
  """The verifier that a call stands for.

  Raises:
    RewardError: no such module or function (names the nearest), a module that fails on
      import, wrong arguments, or a function that does not take the three arguments
  """
  try:
    score = named.load(call.path)
  except named.NameNotFound as e:
    raise RewardError(f"reward {call.path!r}: {e}") from e
  name = call.path.rpartition(".")[2]
  if not callable(score):
    raise RewardError(f"reward {call.path!r}: {name} is no function")
  if call.options is not None:
    try:
      score = score(**call.options)
    except (TypeError, ValueError) as e:
      raise RewardError(f"reward {call.path!r}, {call.options}: {e}") from e
    if not callable(score):
      raise RewardError(f"reward {call.path!r}: {name}(...) returns no function")
  try:
    inspect.signature(score).bind("prompt", "response", "answer", **_wanted(score, 0))
  except TypeError as e:
    raise RewardError(
      f"reward {call.path!r} cannot be called as {name}(prompt, response, answer): {e}"
    ) from e
  return score


def _wanted(score: Score, value) -> dict:
  """What a verifier takes besides prompt, response and answer, with `value` for each."""
  known = inspect.signature(score).parameters
  return {name: value for name in _ON_REQUEST if name in known}


def score_terms(
  terms: Sequence[Term],
  prompts: Sequence,
  responses: Sequence[str],
  answers: Sequence,
  solved_at: float,
  **given: Sequence[int],
) -> Scores:
  """Scores every sample by a weighted sum; the first verifier says what is solved.

  Args:
    terms: of `parse`
    prompts, responses, answers, solved_at: see `score_all`
    given: `length` and `max_tokens`, B of each
  Raises:
    RewardError: see `score_all`
  """
  scored = [
    score_all(term.score, prompts, responses, answers, solved_at, **given)
    for term in terms
  ]
  if len(terms) == 1 and terms[0].weight == 1.0:
    return Scores(*scored[0], parts={})
  reward = sum(
    term.weight * part.astype(np.float64)
    for term, (part, _) in zip(terms, scored, strict=True)
  ).astype(np.float32)
  if not np.isfinite(reward).all():
    raise RewardError("the weighted sum of rewards exceeds what a float32 can hold")
  parts = {term.name: part for term, (part, _) in zip(terms, scored, strict=True)}
  return Scores(reward, scored[0][1], parts)


def score_all(
  score: Score,
  prompts: Sequence,
  responses: Sequence[str],
  answers: Sequence,
  solved_at: float = 1.0,
  **given: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
  """Scores every sample; each reward is a finite number.

  Args:
    score: a verifier; one with an attribute `threads` runs on so many samples at a time
    prompts, responses, answers: B of each
    solved_at: the least reward of a solved response, where the verifier returns a number
      only
    given: `length` and `max_tokens`, B of each, for a verifier that takes them
  Returns:
    rewards: f32[B]
    solved: bool[B]
  Raises:
    RewardError: the verifier failed, or returned neither a finite number nor a pair of
      one and a bool; names it and the sample
  """
  wanted = _wanted(score, None)
  if missing := sorted(set(wanted) - set(given)):
    raise RewardError(f"reward {_name(score)} takes {missing[0]}, which is not known here")
  more = [
    {name: int(given[name][i]) for name in wanted} for i in range(len(responses))
  ]
  samples = list(zip(prompts, responses, answers, more, strict=True))
  one = lambda i: _score_one(score, i, *samples[i], solved_at=solved_at)
  with concurrent.futures.ThreadPoolExecutor(_threads(score)) as pool:
    run = map if _threads(score) == 1 else pool.map
    judged = list(run(one, range(len(samples))))
  rewards = np.array([reward for reward, _ in judged], np.float32)
  return rewards, np.array([solved for _, solved in judged], bool)


def _threads(score: Score) -> int:
  return getattr(score, "threads", 1)


def _name(score: Score) -> str:
  return f"{score.__module__}.{getattr(score, '__qualname__', score)}"


def _score_one(
  score: Score, i: int, prompt, response: str, answer, more: Mapping, solved_at: float
) -> tuple[float, bool]:
  """Reward of sample i, and whether it is solved."""
  where = f"(response {_shortened(response)}, answer {_shortened(answer)})"
  try:
    returned = score(prompt, response, answer, **more)
  except (Exception, SystemExit, GeneratorExit) as e:  # Ctrl-C still ends the run
    raise RewardError(
      f"reward {_name(score)} failed on sample {i}: {type(e).__name__}: {e} {where}"
    ) from e
  is_pair = isinstance(returned, tuple) and len(returned) == 2
  reward, said = map(_python, returned if is_pair else (returned, None))
  if not _is_finite_number(reward) or (is_pair and not isinstance(said, bool)):
    raise RewardError(
      f"reward {_name(score)} returned {_shortened(returned)} for sample {i}, neither a "
      f"finite number nor a pair of one and a bool, (reward, solved) {where}"
    )
  return float(reward), said if is_pair else bool(reward >= solved_at)


def _python(value):
  """A scalar of numpy or JAX as Python's; anything else as it is."""
  return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value


def _is_finite_number(value) -> bool:
  largest = float(np.finfo(np.float32).max)
  return isinstance(value, numbers.Real) and abs(value) <= largest


def _shortened(value) -> str:
  text = repr(value)
  return text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}"
