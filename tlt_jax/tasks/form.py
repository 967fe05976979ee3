r"""Rewards for the form of a response, whatever it says: format and length.

They are parts of a sum (`config.reward`), beside one that judges the answer:

    tlt_jax.tasks.math.score + 0.1 * tlt_jax.tasks.form.think
      + 0.5 * tlt_jax.tasks.form.overlong(buffer=512)
"""

from collections.abc import Callable
import functools
import re

from tlt_jax import ranges
from tlt_jax import worker

_CPU_S = 1.0  # of a search for a pattern


def think(prompt: object, response: str, answer: object) -> float:
  """1.0 for a text within <think> and </think> and an answer behind them, else 0.0.

  There is one such pair. The opening tag may be missing, because chat templates of
  reasoning models end in it. (DeepSeek-R1's format reward,
  https://arxiv.org/abs/2501.12948, section 2.2.2.)
  """
  del prompt, answer
  thoughts, tag, behind = response.partition("</think>")
  thoughts = thoughts.strip().removeprefix("<think>")
  tagged = any(t in thoughts + behind for t in ("<think>", "</think>"))
  return float(bool(tag and thoughts.strip() and behind.strip()) and not tagged)


def matches(pattern: str) -> Callable[[object, str, object], float]:
  r"""A reward of 1.0 for responses that a regular expression matches as a whole.

  Its dot matches line breaks too. A search that takes more than a second of CPU time has
  found nothing: what a model writes can keep most patterns busy for ever.

  Args:
    pattern: in Python's syntax, such as "<answer>.+</answer>\\s*"
  Raises:
    ValueError: it is no regular expression
  """
  ranges.check(matches, locals())
  try:
    re.compile(pattern, re.DOTALL)
  except re.error as e:
    raise ValueError(f"pattern={pattern!r} is no regular expression: {e}") from e
  search = worker.Worker(f"{__name__}.is_match", cpu_s=_CPU_S)

  def score(prompt: object, response: str, answer: object) -> float:
    del prompt, answer
    try:
      return float(search(pattern, response))
    except worker.Stopped:
      return 0.0

  return score


def is_match(pattern: str, text: str) -> bool:
  """Whether a pattern matches a text as a whole; for a process of its own."""
  return _compiled(pattern).fullmatch(text) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern:
  return re.compile(pattern, re.DOTALL)


def overlong(buffer: ranges.Tokens) -> Callable[..., float]:
  """DAPO's soft punishment of long responses: 0 down to -1 over the last tokens allowed.

  Equation 13 of https://arxiv.org/abs/2503.14476: with L = `max_tokens`, a response of
  at most L - buffer tokens gives 0, a longer one (L - buffer - length) / buffer, so that
  one that was cut gives -1.

  Args:
    buffer: tokens before the longest response in which the punishment grows
  """
  ranges.check(overlong, locals())

  def score(
    prompt: object, response: str, answer: object, length: int, max_tokens: int
  ) -> float:
    del prompt, response, answer
    return min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer))

  return score
