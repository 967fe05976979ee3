"""Rewards: a verifier is any function `score(prompt, response, answer)`.

It returns the response's reward, or a pair: the reward, and whether the response solves
the problem. Of a reward alone, a threshold decides that. A verifier that also takes
`length` or `max_tokens` is given them: the response's tokens, and how many it might have
had.

A config names one by its dotted path, in this package or in the user's own; with
arguments, what is named is a function that returns the verifier; and several are added up
with weights:

    tlt_jax.tasks.latex.score + 0.2 * tlt_jax.tasks.form.overlong(buffer=512)

The first one says which responses are solved. `parse` reads such a text, and `verify` asks
about one response; `judge` asks about whole batches, in a pool of processes.
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
_ON_REQUEST = ("length", "max_tokens")  # that a verifier may take besides


class RewardError(ValueError):
  """A verifier that cannot be found or called, or that fails too often."""


class Term(NamedTuple):
  """One verifier of a sum."""

  name: str  # of its mean in the metrics
  weight: float
  score: Score


class Verdict(NamedTuple):
  """What verifiers say of one response."""

  rewards: tuple[float, ...]  # of each
  solved: bool
  failure: str = ""  # what went wrong, if one gave no reward; then there are no rewards


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
    more = dict.fromkeys(wanted(score), 0)
    inspect.signature(score).bind("prompt", "response", "answer", **more)
  except TypeError as e:
    raise RewardError(
      f"reward {call.path!r} cannot be called as {name}(prompt, response, answer): {e}"
    ) from e
  return score


def wanted(score: Score) -> list[str]:
  """What a verifier takes besides prompt, response and answer."""
  known = inspect.signature(score).parameters
  return [name for name in _ON_REQUEST if name in known]


def verify(
  terms: Sequence[Term],
  solved_at: float,
  prompt: Any,
  response: str,
  answer: Any,
  given: Mapping[str, int],
) -> Verdict:
  """Asks verifiers about a response; what goes wrong in one is reported, not raised.

  Args:
    terms: the verifiers; the first one says whether the response is solved
    solved_at: the least reward of a solved response, where it returns a number only
    prompt, response, answer: what they judge
    given: `length` and `max_tokens`, for a verifier that takes them
  """
  rewards, solved = [], []
  for name, _, score in terms:
    failure = f"reward {name}: "
    more = {name: given[name] for name in wanted(score)}
    try:
      returned = score(prompt, response, answer, **more)
    except (Exception, SystemExit, GeneratorExit) as e:  # Ctrl-C still ends the run
      failure += f"{type(e).__name__}: {e} {place(response, answer)}"
      return Verdict((), False, failure)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    value, said = map(_python, returned if is_pair else (returned, None))
    if not _is_finite_number(value) or (is_pair and not isinstance(said, bool)):
      failure += (
        f"returned {shortened(returned)}, neither a finite number nor a pair of one and a "
        f"bool, (reward, solved) {place(response, answer)}"
      )
      return Verdict((), False, failure)
    rewards.append(float(value))
    solved.append(said if is_pair else bool(value >= solved_at))
  return Verdict(tuple(rewards), solved[0])


def place(response: str, answer: Any) -> str:
  """Names a sample in a message."""
  return f"(response {shortened(response)}, answer {shortened(answer)})"


def _python(value):
  """A scalar of numpy or JAX as Python's; anything else as it is."""
  return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value


def _is_finite_number(value) -> bool:
  largest = float(np.finfo(np.float32).max)
  return isinstance(value, numbers.Real) and abs(value) <= largest


def shortened(value: Any) -> str:
  """A value for a message: both ends of a long one."""
  text = repr(value)
  return text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}"
