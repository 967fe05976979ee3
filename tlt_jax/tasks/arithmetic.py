r"""Computes the arithmetic of a short LaTeX text, exactly and in microseconds.

    \frac{144}{2}   48 + 24   7.2 \times 10^{-1}   (2^3 + 1) \cdot \sqrt{64}   144 \div 2

Python's own parser reads it. Other text, division by zero, irrational roots and large
numbers have no value: 12 characters can denote a number that no machine holds.
"""

import ast
from collections.abc import Callable
import fractions
import math
import operator
import re

_MAX_LENGTH = 64  # of a text, in characters
_MAX_BITS = 1024  # of numerators and denominators, also of intermediate results

_VOCABULARY = re.compile(r"(?:[0-9.+\-*/(){}^ ]|\\(?:frac|sqrt|times|cdot|div)(?![a-z]))*+")
_TO_PYTHON = (
  ("}{", ","),
  ("{", "("),
  ("}", ")"),
  ("^", "**"),
  (r"\times", "*"),
  (r"\cdot", "*"),
  (r"\div", "/"),
  ("\\", ""),
)
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")


def value(text: str) -> fractions.Fraction | None:
  if len(text) > _MAX_LENGTH or "**" in text or not _VOCABULARY.fullmatch(text):
    return None
  for latex, python in _TO_PYTHON:
    text = text.replace(latex, python)
  text = _DECIMAL.sub(lambda d: f"({d[1]}{d[2]}/{10 ** len(d[2])})", text)
  try:
    return _compute(ast.parse(_LEADING_ZEROS.sub("", text).strip(), mode="eval").body)
  except (SyntaxError, _NoValue):
    return None


class _NoValue(Exception):
  pass


def _compute(node: ast.expr) -> fractions.Fraction:
  match node:
    case ast.Constant(int(number)):
      result = fractions.Fraction(number)
    case ast.UnaryOp(ast.USub(), of):
      result = -_compute(of)
    case ast.BinOp(left, sign, right) if type(sign) in _OPERATIONS:
      result = _OPERATIONS[type(sign)](_compute(left), _compute(right))
    case ast.Call(ast.Name("frac"), [above, below]):
      result = _divide(_compute(above), _compute(below))
    case ast.Call(ast.Name("sqrt"), [of]):
      result = _root(_compute(of))
    case _:
      raise _NoValue
  if _bits(result) > _MAX_BITS:
    raise _NoValue
  return result


def _bits(number: fractions.Fraction) -> int:
  return max(number.numerator.bit_length(), number.denominator.bit_length())


def _divide(above: fractions.Fraction, below: fractions.Fraction) -> fractions.Fraction:
  if not below:
    raise _NoValue
  return above / below


def _power(base: fractions.Fraction, exponent: fractions.Fraction) -> fractions.Fraction:
  if exponent.denominator != 1 or abs(exponent) * _bits(base) > _MAX_BITS:
    raise _NoValue
  if not base and exponent <= 0:
    raise _NoValue
  return base ** int(exponent)


def _root(of: fractions.Fraction) -> fractions.Fraction:
  if of < 0:
    raise _NoValue
  root = fractions.Fraction(math.isqrt(of.numerator), math.isqrt(of.denominator))
  if root * root != of:
    raise _NoValue
  return root


_OPERATIONS: dict[type, Callable] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: _divide,
  ast.Pow: _power,
}
