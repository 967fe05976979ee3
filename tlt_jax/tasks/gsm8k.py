r"""GSM8K: grade-school word problems whose answer is one number.

The response's final answer is, in this order of precedence:

    the content of the last \boxed{...}     So she has \boxed{72\text{ clips}}.
    the line after the last ####            #### 72
    the last number in the text             So she has 72 clips.

A final answer that is plainly a number is compared exactly, whatever its
thousands separators, currency or unit. Anything else, such as
\frac{144}{2}, goes to math-verify (https://github.com/huggingface/Math-Verify);
two numbers in a box are no answer.

What reaches math-verify is bounded in length and vocabulary, so that it always
ends at once. Its own timeouts would make rewards depend on the machine's load,
and they use signals, which only the main thread may.
"""

import fractions
import functools
import logging
import re

_NUMBER = re.compile(
  r"(?:(?<![\w)}])-)?"  # a sign only where it cannot be a subtraction
  r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
)
_BRACE = re.compile(r"(\\boxed\s*)?\{|\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ORNAMENT = re.compile(
  r"\\[,!;: ]|\\quad|\\?\$|\\[()\[\]]|[€£¢]|\\left|\\right|\^\{?\\circ\}?"
  r"|(?<![0-9)}])\*\*|\*\*(?=\s|[.,;:]|$)"  # bold, not a power
)
_BEFORE = re.compile(r"[A-Za-z\s:(*]*")
_MAGNITUDE = r"hundred|thousand|million|billion|dozen"
_UNIT = re.compile(
  rf"\s*[%°]?(?:\s*/)?\s*\(?(?!{_MAGNITUDE})(?:[A-Za-z][A-Za-z\s,;:'\"()/-]*)?[.)*\s]*"
)
# What math-verify may see: no variables, no factorials, no towers of powers.
_EXPRESSION = re.compile(
  r"(?:[0-9.,+\-*/(){} ]|\\[dt]?frac|\\sqrt|\\times|\\cdot|\\div|\^\{?-?[0-9]{1,2}\}?)+"
)
_MAX_LENGTH = 64  # of a final answer, in characters


def score(prompt: object, response: str, answer: object) -> float:
  """1.0 if the response's final answer equals the gold number, else 0.0.

  Args:
    prompt: not used
    response: text of the solution
    answer: GSM8K's solution ending in "#### 72", or the number itself
  Raises:
    ValueError: the gold answer is no number
  """
  del prompt
  gold = _plain_number(str(answer).rpartition("####")[2])
  if gold is None:
    raise ValueError(f"gold answer {str(answer)[-60:]!r} is not a number")
  final = _final_answer(response)
  if final is None:
    return 0.0
  number = _plain_number(final)
  if number is not None:
    return float(number == gold)
  return float(_math_verify_equal(gold, final))


def _final_answer(response: str) -> str | None:
  """The text that holds the final answer, None if there is none."""
  boxed = _last_boxed(response)
  if boxed is not None:
    return boxed
  if "####" in response:
    lines = response.rpartition("####")[2].strip().splitlines()
    return lines[0] if lines else None
  numbers = _NUMBER.findall(_clean(response))
  return numbers[-1] if numbers else None


def _last_boxed(text: str) -> str | None:
  """The content of the last closed \\boxed{...}; its braces may nest."""
  opened, content = [], None
  for brace in _BRACE.finditer(text):
    if brace[0] != "}":
      opened.append(brace.end() if brace[1] else None)
    elif opened:
      start = opened.pop()
      content = content if start is None else text[start : brace.start()]
  return content


def _clean(text: str) -> str:
  """Drops currency, spacing and markup; the text of \\text{...} stays."""
  text = text.replace("{,}", ",").replace("\\%", "%").replace("\u2212", "-")
  return _ORNAMENT.sub("", _TEXT.sub(r" \1 ", text))


def _plain_number(text: str) -> fractions.Fraction | None:
  """The number, if that is all the text holds besides words and a unit.

  Of an equation the right side counts: `x = 72`.
  """
  if len(text) > _MAX_LENGTH:
    return None
  text = _clean(text).rpartition("=")[2]
  numbers = list(_NUMBER.finditer(text))
  if len(numbers) != 1:
    return None
  before, after = text[: numbers[0].start()], text[numbers[0].end() :]
  if not _BEFORE.fullmatch(before) or not _UNIT.fullmatch(after):
    return None
  return fractions.Fraction(numbers[0][0].replace(",", ""))


@functools.cache
def _math_verify():
  """Imports the library."""
  import math_verify  # brings sympy, most of a second

  # It warns that it runs without timeouts; see the top of this file.
  for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)
  return math_verify


def _math_verify_equal(gold: fractions.Fraction, text: str) -> bool:
  """Whether math-verify finds the text equal to the gold number."""
  text = _clean(text).rpartition("=")[2].strip().rstrip(".")
  if (
    len(text) > _MAX_LENGTH
    or not _EXPRESSION.fullmatch(text)
    or text.count("^") > 1
    or "**" in text
  ):
    return False
  library = _math_verify()
  parsed = library.parse(f"${text}$", parsing_timeout=None)
  expected = library.parse(f"${gold}$", parsing_timeout=None)
  return bool(parsed) and library.verify(expected, parsed, timeout_seconds=None)
