r"""Rewards for the form of a response, whatever it says: format and length.

They are terms of a sum (`config.reward`), with one that judges the answer:

    tlt_jax.tasks.latex.score + 0.1 * tlt_jax.tasks.form.think
      + 0.5 * tlt_jax.tasks.form.overlong(buffer=512)
"""

from collections.abc import Callable
import re

from tlt_jax import ranges


def think(prompt: object, response: str, answer: object) -> float:
  """1.0 for one <think>...</think> followed by an answer, neither empty, else 0.0.

  The opening tag may be missing, because chat templates of reasoning models end in it.
  (DeepSeek-R1's format reward, https://arxiv.org/abs/2501.12948, section 2.2.2.)
  """
  del prompt, answer
  thoughts, tag, final = response.partition("</think>")
  thoughts = thoughts.strip().removeprefix("<think>")
  tagged = any(t in thoughts + final for t in ("<think>", "</think>"))
  return float(bool(tag and thoughts.strip() and final.strip()) and not tagged)


def matches(pattern: str) -> Callable[[object, str, object], float]:
  r"""A reward of 1.0 for responses that a regular expression matches as a whole.

  Its dot matches line breaks too. A pattern that takes forever fails by verifier.cpu_s.

  Args:
    pattern: in Python's syntax, such as "<answer>.+</answer>\\s*"
  Raises:
    ValueError: it is no regular expression
  """
  ranges.check(matches, locals())
  try:
    compiled = re.compile(pattern, re.DOTALL)
  except re.error as e:
    raise ValueError(f"pattern={pattern!r} is no regular expression: {e}") from e

  def score(prompt: object, response: str, answer: object) -> float:
    del prompt, answer
    return float(compiled.fullmatch(response) is not None)

  return score


def overlong(buffer: ranges.Tokens) -> Callable[..., float]:
  """DAPO's soft punishment of long responses: 0 down to -1 over the last tokens allowed.

  Equation 13 of https://arxiv.org/abs/2503.14476: with L = `max_tokens`, a response of
  at most L - buffer tokens gives 0, a longer one (L - buffer - length) / buffer.

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
