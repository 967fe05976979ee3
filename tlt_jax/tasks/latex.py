r"""Mathematics whose answer is a LaTeX expression: number, interval, matrix, word...

The response's final answer is the content of the last \boxed{...} or the line after the
last ####, by `gsm8k.final_answer`, and otherwise the last line. It is right if it
is mathematically equal to the gold answer: \frac12, 0.5 and \dfrac{2}{4} are, so are
(x+1)^2 and x^2+2x+1, and {1,2} and {2,1}, but not (1,2) and (2,1).

math-verify (https://github.com/huggingface/Math-Verify) decides where plain comparison does
not. Its computer algebra can take forever or all memory: such a response fails by
verifier.cpu_s or verifier.memory_mb.
"""

import functools
import logging
import re
from typing import Any

from tlt_jax.tasks import gsm8k
from tlt_jax.tasks import written_number

_LONGEST = 1000  # characters of a final answer

_SPELLINGS = (
  (r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\!", ""),
  (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
  (r"\\cdot\s*i(?![a-zA-Z])", " i"),  # math-verify would take i for a variable
  (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
  (r"(?<=[0-9])(?:\\,|\\ |\{,\})(?=[0-9]{3}(?![0-9]))", ""),  # 10\,000
  (
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?\s*([0-9.]+)\s*\^\s*\{?\\circ\}?[)}]?",
    r"\1(\\frac{\2\\pi}{180})",
  ),
)
_PLAIN = str.maketrans("０１２３４５６７８９\u2212", "0123456789-")
_WITH_BASE = re.compile(r"_\s*(?:\{\s*[0-9]+\s*\}|[0-9]+)\s*$")
_DECIMAL = re.compile(r"[-+]?(?:\\?\$)?[0-9][0-9,]*+(?:\.[0-9]*)?")


def score(prompt: object, response: str, answer: object) -> float:
  r"""1.0 if the final answer equals the gold one, perhaps in \boxed{...} or after ####."""
  del prompt
  text = gsm8k.gold_text(answer)
  marked = gsm8k.final_answer(text)
  gold = (text if marked is None else marked).strip()
  if not gold:
    raise ValueError(f"gold answer {text[-60:]!r} is empty")
  final = gsm8k.final_answer(response)
  is_marked = final is not None
  if final is None:
    final = (gsm8k.after_thoughts(response).strip().splitlines() or [""])[-1]
  return float(is_equal(gold, final.strip(), is_marked))


def is_equal(gold: str, final: str, is_marked: bool = True) -> bool:
  """Whether two LaTeX texts are equal; `is_marked`: `final` is an answer alone."""
  if len(final) > _LONGEST + len(gold):
    return False
  gold, final = _respelt(gold), _respelt(final)
  if re.sub(r"[\s$]", "", gold) == re.sub(r"[\s$]", "", final) != "":
    return True
  if _WITH_BASE.search(gold) or _WITH_BASE.search(final):
    return re.sub(r"[\s{}$]", "", gold) == re.sub(r"[\s{}$]", "", final)
  if _DECIMAL.fullmatch(gold) and _DECIMAL.fullmatch(final):  # the most frequent case
    numbers = written_number.read(gold), written_number.read(final)
    if None not in numbers:
      return numbers[0] == numbers[1]
  return _verify(gold, final, is_marked)


def _respelt(text: str) -> str:
  text = text.translate(_PLAIN)
  for spelling, plain in _SPELLINGS:
    text = re.sub(spelling, plain, text)
  return text.rstrip(". ")


def _verify(gold: str, final: str, is_marked: bool) -> bool:
  math_verify, kinds = _math_verify()
  try:
    expected = math_verify.parse(rf"\boxed{{{gold}}}", kinds, parsing_timeout=None)
    text = rf"\boxed{{{final}}}" if is_marked else final
    found = math_verify.parse(text, kinds, parsing_timeout=None)
    return bool(math_verify.verify(expected, found, timeout_seconds=None))
  except (Exception, MemoryError, RecursionError):  # of an answer that makes no sense
    return False


@functools.cache
def _math_verify() -> tuple[Any, list]:
  import math_verify  # sympy takes seconds, and only this task needs it

  logging.getLogger("math_verify").setLevel(logging.CRITICAL)
  latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
  return math_verify, [latex, math_verify.ExprExtractionConfig()]
