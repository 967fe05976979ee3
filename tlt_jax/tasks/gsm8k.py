r"""GSM8K: grade-school word problems whose answer is one number.

The response's final answer is, in this order of precedence:

    the content of the last \boxed{...}     So she has \boxed{72\text{ clips}}.
    the line after the last ####            #### 72
    the last number in the text             So she has 72 clips.

Of nested boxes the innermost counts. A box that is not closed, or is empty, is no answer,
whatever else the response says; neither is a #### with nothing after it. Text up to the
last </think> does not count.

A final answer must be one number, in a form that `written_number` or `arithmetic` reads. It
is compared exactly, whatever its unit; an ambiguous number is wrong.
"""

import decimal
import fractions
import math
import numbers
import re

from tlt_jax.tasks import written_number

_BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{")
_BRACE = re.compile(r"(?<!\\)[{}]")


def score(prompt: object, response: str, answer: object) -> float:
  """1.0 if the final answer equals `answer`, a number or a solution with "#### 72"."""
  del prompt
  text = gold_text(answer)
  gold = written_number.read(text.rpartition("####")[2])
  if gold is None:
    raise ValueError(f"gold answer {text[-60:]!r} is not a number")
  return float(final_number(response) == gold)


def gold_text(answer: object) -> str:
  """A gold answer as a text; ValueError unless it is a text or a finite number."""
  if isinstance(answer, str):
    return answer
  is_number = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
  if not is_number or not math.isfinite(answer):
    kind = type(answer).__name__
    raise ValueError(f"gold answer {answer!r:.60} ({kind}) is neither a text nor a number")
  if isinstance(answer, numbers.Integral):
    return str(int(answer))
  return format(decimal.Decimal(repr(float(answer))), "f")  # 1e16 in full


def final_number(response: str) -> fractions.Fraction | None:
  final = final_answer(response)
  if final is None:
    return written_number.read_last(after_thoughts(response))
  return written_number.read(final)


def final_answer(response: str) -> str | None:
  """The text in the box or after ####, "" if it is empty; None without either."""
  response = after_thoughts(response)
  boxes = list(_BOX.finditer(response))
  if boxes:
    return _inside(response, boxes[-1].end())
  if "####" in response:
    lines = response.rpartition("####")[2].strip().splitlines()
    return lines[0] if lines else ""
  return None


def after_thoughts(response: str) -> str:
  return response.rpartition("</think>")[2]


def _inside(text: str, start: int) -> str:
  depth = 1
  for brace in _BRACE.finditer(text, start):
    depth += 1 if brace[0] == "{" else -1
    if not depth:
      return text[start : brace.start()]
  return ""
