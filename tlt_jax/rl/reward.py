"""Rewards: a verifier is any function `score(prompt, response, answer) -> float`.

`make("tlt_jax.tasks.countdown.score")` finds one by its dotted path, in this
package or in the user's own; `score_all` runs it over a batch. Whatever goes
wrong inside a verifier is reported with its name and the sample it failed on.
"""

from collections.abc import Callable, Sequence
import difflib
import importlib
import inspect
import numbers
import pkgutil
import types

import numpy as np

Score = Callable[[object, str, object], float]


class RewardError(ValueError):
  """A verifier that cannot be found, fails, or returns no usable number."""


def make(path: str) -> Score:
  """Finds the function at `package.module.function`.

  Raises:
    RewardError: no such module or function (names the nearest), a module that
      fails on import, or a function that does not take the three arguments
  """
  module_name, _, name = path.rpartition(".")
  if not module_name:
    raise RewardError(f"reward {path!r} is not of the form package.module.function")
  module = _import(path, module_name)
  score = getattr(module, name, None)
  if not callable(score):
    functions = [n for n, x in vars(module).items() if inspect.isfunction(x)]
    raise RewardError(
      f"reward {path!r}: module {module_name} has no function {name!r}"
      + _nearest(name, functions)
    )
  try:
    inspect.signature(score).bind("prompt", "response", "answer")
  except TypeError as e:
    raise RewardError(
      f"reward {path!r} cannot be called as {name}(prompt, response, answer): {e}"
    ) from e
  return score


def _import(path: str, module_name: str) -> types.ModuleType:
  """Imports a module; an error says whether the path is wrong or the module."""
  try:
    return importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # Only if the path itself leads nowhere, not an import inside the module.
    if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
      raise RewardError(f"reward {path!r}: importing {module_name} failed: {e}") from e
    parent, _, name = e.name.rpartition(".")
    raise RewardError(
      f"reward {path!r}: no module {e.name!r}" + _nearest(name, _modules(parent))
    ) from e
  except Exception as e:
    raise RewardError(
      f"reward {path!r}: importing {module_name} failed: {type(e).__name__}: {e}"
    ) from e


def _modules(package: str) -> list[str]:
  """The names that may follow `package.` in an import; top-level names for ""."""
  if not package:
    return [m.name for m in pkgutil.iter_modules()]
  folders = vars(importlib.import_module(package)).get("__path__", [])
  return [m.name for m in pkgutil.iter_modules(folders)]


def _nearest(name: str, known: list[str]) -> str:
  near = difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {near[0]!r}?" if near else ""


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
