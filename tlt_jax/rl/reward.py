"""Rewards: a verifier is any function `score(prompt, response, answer)`.

It returns the response's reward, or a pair: the reward, and whether the response solves
the problem. Of a reward alone, a threshold decides that.

`make("tlt_jax.tasks.countdown.score")` finds one by its dotted path, in this
package or in the user's own; `score_all` runs it over a batch. Whatever goes
wrong inside a verifier is reported with its name and the sample it failed on.
"""

from collections.abc import Callable, Sequence
import inspect
import numbers

import numpy as np

from tlt_jax import named

Score = Callable[[object, str, object], float | tuple[float, bool]]


class RewardError(ValueError):
  """A verifier that cannot be found, fails, or returns no usable number."""


def make(path: str) -> Score:
  """Finds the function at `package.module.function`.

  Raises:
    RewardError: no such module or function (names the nearest), a module that
      fails on import, or a function that does not take the three arguments
  """
  try:
    score = named.load(path)
  except named.NameNotFound as e:
    raise RewardError(f"reward {path!r}: {e}") from e
  name = path.rpartition(".")[2]
  if not callable(score):
    raise RewardError(f"reward {path!r}: {name} is no function")
  try:
    inspect.signature(score).bind("prompt", "response", "answer")
  except TypeError as e:
    raise RewardError(
      f"reward {path!r} cannot be called as {name}(prompt, response, answer): {e}"
    ) from e
  return score


def score_all(
  score: Score,
  prompts: Sequence,
  responses: Sequence[str],
  answers: Sequence,
  solved_at: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Scores every sample; each reward is a finite number.

  Args:
    score: a verifier
    prompts, responses, answers: B of each
    solved_at: the least reward of a solved response, where the verifier returns a number
      only
  Returns:
    rewards: f32[B]
    solved: bool[B]
  Raises:
    RewardError: the verifier failed, or returned neither a finite number nor a pair of
      one and a bool; names it and the sample
  """
  name = f"{score.__module__}.{getattr(score, '__qualname__', score)}"
  rewards = np.zeros(len(responses), np.float32)
  solved = np.zeros(len(responses), bool)
  samples = zip(prompts, responses, answers, strict=True)
  for i, (prompt, response, answer) in enumerate(samples):
    try:
      returned = score(prompt, response, answer)
    except (Exception, SystemExit, GeneratorExit) as e:  # Ctrl-C still ends the run
      raise RewardError(
        f"reward {name} failed on sample {i}: {type(e).__name__}: {e} "
        f"(response {_shortened(response)}, answer {_shortened(answer)})"
      ) from e
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    reward, said = map(_python, returned if is_pair else (returned, None))
    if not _is_finite_number(reward) or (is_pair and not isinstance(said, bool)):
      raise RewardError(
        f"reward {name} returned {_shortened(returned)} for sample {i}, neither a finite "
        "number nor a pair of one and a bool, (reward, solved) "
        f"(response {_shortened(response)}, answer {_shortened(answer)})"
      )
    rewards[i] = reward
    solved[i] = said if is_pair else reward >= solved_at
  return rewards, solved


def _python(value):
  """A scalar of numpy or JAX as Python's; anything else as it is."""
  return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value


def _is_finite_number(value) -> bool:
  largest = float(np.finfo(np.float32).max)
  return isinstance(value, numbers.Real) and abs(value) <= largest


def _shortened(value) -> str:
  text = repr(value)
  return text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}"
