"""Rewards: a verifier is any function `score(prompt, response, answer) -> float`.

`make("tlt_jax.tasks.countdown.score")` finds one by its dotted path, in this
package or in the user's own; `score_all` runs it over a batch. Whatever goes
wrong inside a verifier is reported with its name and the sample it failed on.
"""

from collections.abc import Callable, Sequence
import inspect
import numbers

import numpy as np

from tlt_jax import named

Score = Callable[[object, str, object], float]


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
  score: Score, prompts: Sequence, responses: Sequence[str], answers: Sequence
) -> np.ndarray:
  """Scores every sample; each reward is a finite number.

  Args:
    score: a verifier
    prompts, responses, answers: B of each
  Returns:
    f32[B]
  Raises:
    RewardError: the verifier failed or returned something else; names it and
      the sample
  """
  name = f"{score.__module__}.{getattr(score, '__qualname__', score)}"
  rewards = np.zeros(len(responses), np.float32)
  samples = zip(prompts, responses, answers, strict=True)
  for i, (prompt, response, answer) in enumerate(samples):
    try:
      value = score(prompt, response, answer)
    except Exception as e:
      raise RewardError(
        f"reward {name} failed on sample {i}: {type(e).__name__}: {e} "
        f"(response {_shortened(response)}, answer {_shortened(answer)})"
      ) from e
    if not _is_finite_number(value):
      raise RewardError(
        f"reward {name} returned {_shortened(value)} for sample {i}, not a finite "
        f"number (response {_shortened(response)}, answer {_shortened(answer)})"
      )
    rewards[i] = value
  return rewards


def _is_finite_number(value) -> bool:
  if hasattr(value, "item") and np.ndim(value) == 0:  # numpy's, JAX's
    value = value.item()
  largest = float(np.finfo(np.float32).max)
  return isinstance(value, numbers.Real) and abs(value) <= largest


def _shortened(value) -> str:
  text = repr(value)
  return text if len(text) <= 120 else f"{text[:60]}...{text[-57:]}"
