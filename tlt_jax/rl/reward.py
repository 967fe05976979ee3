"""Rewards: a verifier is any function `score(prompt, response, answer)`.

It returns the response's reward, or a pair: the reward, and whether the response solves
the problem; without the latter, a threshold decides. A verifier may also take `length`, the
response's tokens, and `max_tokens`, their limit.

A config names verifiers by their dotted path, with arguments if it is a function that
returns one, and weights:

    tlt_jax.tasks.latex.score + 0.2 * tlt_jax.tasks.form.overlong(buffer=512)
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import inspect
import numbers
from typing import Any, NamedTuple

import numpy as np

from tlt_jax import calls
from tlt_jax import named

Score = Callable[..., float | tuple[float, bool]]
_OPTIONAL = ("length", "max_tokens")  # arguments of a verifier
_OF_OTHERS = {"verl": {"solution_str"}, "TRL": {"completions"}}  # their parameters


class RewardError(ValueError):
  """A verifier that cannot be found or called, or that fails too often."""


class Term(NamedTuple):
  name: str  # of its mean in the metrics
  weight: float
  score: Score


class Verdict(NamedTuple):
  rewards: tuple[float, ...]  # of each
  solved: bool
  failure: str = ""  # the error of a verifier; then there are no rewards


def parse(text: str) -> tuple[Term, ...]:
  """The verifiers that a config's `reward` names; RewardError if one is invalid."""
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


def _make(call: calls.Call) -> Score:
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
    more = dict.fromkeys(wanted(score), 0)
    for library, names in _OF_OTHERS.items():
      if names <= inspect.signature(score).parameters.keys():
        raise RewardError(
          f"reward {call.path!r} has the parameters of {library}'s rewards; wrap it in a "
          f"function score(prompt, response, answer) that calls {name} with these"
        )
    inspect.signature(score).bind("prompt", "response", "answer", **more)
  except TypeError as e:
    raise RewardError(
      f"reward {call.path!r} cannot be called as {name}(prompt, response, answer): {e}"
    ) from e
  return score


def wanted(score: Score) -> list[str]:
  known = inspect.signature(score).parameters
  return [name for name in _OPTIONAL if name in known]


def verify(
  terms: Sequence[Term],
  solved_at: float,
  prompt: Any,
  response: str,
  answer: Any,
  given: Mapping[str, int],
  catches_interrupt: bool = False,
) -> Verdict:
  """Judges a response; errors of a verifier are reported, not raised.

  The first term decides whether it is solved, by `solved_at` if its verifier does not.
  """
  rewards, solved = [], []
  for name, _, score in terms:
    failure = f"reward {name}: "
    more = {name: given[name] for name in wanted(score)}
    try:
      returned = score(prompt, response, answer, **more)
      is_pair = isinstance(returned, tuple) and len(returned) == 2
      value, said = map(_python, returned if is_pair else (returned, None))
      if not _is_finite_number(value) or (is_pair and not isinstance(said, bool)):
        failure += (
          f"returned {shortened(returned)}, neither a finite number nor a pair of one and "
          f"a bool, (reward, solved) {place(response, answer)}"
        )
        return Verdict((), False, failure)
      rewards.append(float(value))
      solved.append(said if is_pair else bool(value >= solved_at))
    except BaseException as e:
      if isinstance(e, KeyboardInterrupt) and not catches_interrupt:
        raise  # Ctrl-C still ends the run
      return Verdict((), False, failure + f"{_described(e)} {place(response, answer)}")
  return Verdict(tuple(rewards), solved[0])


def place(response: str, answer: Any) -> str:
  return f"(response {shortened(response)}, answer {shortened(answer)})"


def _python(value):
  return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value


def _is_finite_number(value) -> bool:
  largest = float(np.finfo(np.float32).max)
  return isinstance(value, numbers.Real) and abs(value) <= largest


def _described(error: BaseException) -> str:
  name = _name(error)
  try:
    return "".join((name, ": ", str(error)))  # plain text, whatever class `str` gives
  except BaseException:
    return f"{name} (its text cannot be shown)"


def _name(value: Any) -> str:
  return type.__dict__["__name__"].__get__(type(value))  # a metaclass may hide it


def shortened(value: Any) -> str:
  try:
    text = "".join(("", repr(value)))
  except Exception:  # of odd classes, and of integers of thousands of digits
    text = f"<{_name(value)} that cannot be shown>"
  return text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}"
