r"""Reads one LaTeX expression, such as \frac{1}{2}\sqrt{x+1}, and compares two by value.

The reader accounts for every token or refuses the text with `Unread`; nothing is skipped or
guessed. Numbers are exact fractions as long as they stay rational, decimals included;
otherwise values are computed with 150 and 300 digits, and two are equal if their difference
vanishes with the precision. Expressions with variables are compared at random points.
"""

from collections.abc import Callable, Iterator, Set
import fractions
import itertools
import math
import operator
import random
import re
from typing import Any

import mpmath

Node = tuple  # an operation and its operands
Fraction = fractions.Fraction

_MAX_BITS = 1 << 15  # of an exact numerator or denominator
_MAX_FACTORIAL = 5000
_MAX_GROWTH = 1 << 16  # of the argument of what grows exponentially
_DIGITS = 150
_POINTS = 24
# Ranges of the variables, and their denominators; in the first one signs alternate.
# Numerators are odd, so that (-1)^n is real for whole n alone.
_RANGES = ((0, 10, 1024), (0, 1, 1024), (1, 10, 1024), (-10, 0, 1024), *2 * [(3, 40, 1)])
_OF_MIXED_SIGNS = 0
_TOLERANCE = 1.000001e-6  # of a decimal, relative
_SIGNIFICANT = 6  # digits that a decimal needs to stand for what it rounds


class Unread(Exception):
  """A text that is no expression, or one that no machine computes."""


class _Undefined(Exception):
  """An expression without a value at a point."""


_REPEATING = re.compile(  # 0.1\overline{6}  0.\dot{1}4285\dot{7}
  r"([0-9]*)\.([0-9]*)(?:\\overline(?:\{([0-9]+)\}|([0-9]))"
  r"|\\dot(?:\{([0-9])\}|([0-9]))(?:([0-9]*)\\dot(?:\{([0-9])\}|([0-9])))?)"
)
_TOKEN = re.compile(
  r"\\text\{[^{}]*\}|\\(?:begin|end)\{[a-z]+\*?\}(?:\{[clr|]*\})?|\\[a-zA-Z]+|\\[^a-zA-Z\s]"
  rf"|{_REPEATING.pattern}"
  r"|[0-9]+\.[0-9]+[eE][-+]?[0-9]+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
  r"|[a-zA-Z]+|[^\s]"
)
FUNCTIONS = {
  name: getattr(mpmath, "a" + name[3:] if name.startswith("arc") else name)
  for name in (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh"
    " exp ln"
  ).split()
}
_NAMES = {*FUNCTIONS, "log", "sqrt", "pi", "infty"}  # also without a backslash
_GREEK = {
  "\\" + name
  for name in (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu"
    " nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi"
    " Sigma Phi Psi Omega ell"
  ).split()
}
_CLOSING = {
  "(": ")",
  "[": "]",
  "{": "}",
  "|": "|",
  "\\lvert": "\\rvert",
  "\\lfloor": "\\rfloor",
  "\\lceil": "\\rceil",
}
_AROUND = {"|": "abs", "\\lvert": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
_DECORATIONS = {"\\vec", "\\hat", "\\bar", "\\tilde", "\\overline"}
_APPLIED = {"f", "g", "F", "G"}  # f(x) is no product


def tokens(text: str, words: Set[str]) -> list[str]:
  r"""Splits a text. Known words and those of four letters become \text{...}."""
  found = []
  for match in _TOKEN.finditer(text):
    token = match[0]
    if not token.isascii() or not token.isalpha():
      found.append(token)
    elif token in _NAMES:
      found.append("\\" + token)
    elif len(token) > 1 and token.lower() in words:
      found.append(rf"\text{{{token}}}")
    elif token.isupper():  # the segment AB
      found.append(token)
    elif len(token) > 3:
      found.append(rf"\text{{{token}}}")
    else:
      found += token
  return found


def read(of: list[str]) -> Node:
  reader = _Reader(of)
  node = reader.sum()
  if reader.rest:
    raise Unread
  return node


class _Reader:
  def __init__(self, of: list[str]):
    self.rest = of[::-1]
    self.last = ""  # the token that was taken last, braces apart
    self.in_bars = 0

  def peek(self) -> str:
    return self.rest[-1] if self.rest else ""

  def take(self, expected: str = "") -> str:
    if not self.rest or (expected and self.rest[-1] != expected):
      raise Unread
    token = self.rest.pop()
    if token not in ("{", "}"):
      self.last = token
    return token

  def sum(self) -> Node:
    node = self.product()
    while self.peek() in ("+", "-"):
      operation = self.take()
      node = (operation, node, self.product())
    return node

  def product(self) -> Node:
    node = self.signed()
    while token := self.peek():
      if token in ("*", "\\cdot", "\\times"):
        self.take()
        node = ("*", node, self.signed())
      elif token in ("/", "\\div"):
        self.take()
        node = ("/", node, self.signed())
      elif self.starts(token):
        if node[0] == "unit" or (node[0] == "/" and node[2][0] != "number"):  # 1/ab
          raise Unread
        if self.is_number(ahead=True) and self.last[-1:].isdigit():  # 3 4
          raise Unread
        node = ("*", node, self.power())
      else:
        break
    return node

  def is_number(self, ahead: bool = False) -> bool:
    token = next((t for t in reversed(self.rest) if not ahead or t != "{"), "")
    return _is_number(token)

  def starts(self, token: str) -> bool:
    if token == "|":
      return not self.in_bars
    return (
      token[:1].isalpha()
      or _is_number(token)
      or token in _CLOSING
      or token in _GREEK
      or token in _DECORATIONS
      or token in ("\\frac", "\\sqrt", "\\binom", "\\pi", "\\infty", "\\log")
      or token[1:] in FUNCTIONS
    )

  def signed(self) -> Node:
    if self.peek() in ("+", "-"):
      sign, node = self.take(), self.signed()
      return node if sign == "+" else ("neg", node)
    return self.power()

  def power(self) -> Node:
    node = self.postfix(self.mixed())
    if self.peek() == "^":
      self.take()
      node = self.postfix(("^", node, self.argument()))
      if self.peek() == "^":
        raise Unread
    return node

  def postfix(self, node: Node) -> Node:
    while True:
      token = self.peek()
      if token == "!":
        self.take()
        if self.peek() == "!":  # no factorial of a factorial
          raise Unread
        node = ("factorial", node)
      elif token in ("\\%", "%"):
        self.take()
        node = ("unit", node, "percent")
      elif token == "°" or self.rest[-2:] == ["\\circ", "^"]:
        self.rest = self.rest[: -1 if token == "°" else -2]
        node = ("unit", node, "degree")
      elif self.rest[-4:] == ["}", "\\circ", "{", "^"]:
        self.rest = self.rest[:-4]
        node = ("unit", node, "degree")
      else:
        return node

  def mixed(self) -> Node:
    """An atom, or a whole number and a fraction, as in 1 1/2."""
    whole = self.peek()
    node = self.atom()
    if not whole.isdigit() or node[0] != "number":
      return node
    if self.peek() == "\\frac":
      part = self.atom()
      if part[1][0] != "number" or part[2][0] != "number":
        return ("*", node, part)
    elif self.is_number() and self.rest[-2:-1] == ["/"]:
      part = ("/", self.atom(), (self.take(), self.atom())[1])
    else:
      return node
    if any(of[0] != "number" or of[1].denominator != 1 for of in part[1:]):
      raise Unread
    if not 0 < part[1][1] < part[2][1]:
      raise Unread
    return ("+", node, part)

  def argument(self, one_digit: bool = False) -> Node:
    r"""What a command applies to. Of \frac12 it is the 1; of x^12 it is 12."""
    token = self.peek()
    if one_digit and token.isdigit() and len(token) > 1:
      self.rest[-1:] = [token[1:], token[0]]
    if token in ("+", "-") and not one_digit:
      sign, node = self.take(), self.argument()
      return ("neg", node) if sign == "-" else node
    return self.atom()

  def group(self) -> Node:
    opening = self.take()
    outer, self.in_bars = self.in_bars, opening == "|"
    node = self.sum()
    if opening == "{" and self.peek() in ("\\choose", "\\over"):
      node = ("binomial" if self.take() == "\\choose" else "/", node, self.sum())
    self.take(_CLOSING[opening])
    self.in_bars = outer
    return (_AROUND[opening], node) if opening in _AROUND else node

  def atom(self) -> Node:
    token = self.peek()
    if token in _CLOSING:
      return self.group()
    self.take()
    if _is_number(token):
      if self.peek() == "_":
        return ("symbol", _strip_zeros(token) + self.subscript())
      return _number(token)
    if token in _APPLIED and self.peek() in ("(", "'"):
      return ("symbol", token + self.primes() + self.raw_group())
    if token[:1].isalpha() or token in _GREEK:
      name = token + self.subscript() + self.primes()
      return ("constant", name) if name in ("e", "i") else ("symbol", name)
    if token == "\\pi":
      return ("constant", "pi")
    if token == "\\infty":
      return ("infinity",)
    if token in ("\\frac", "\\binom"):
      above, below = self.argument(one_digit=True), self.argument(one_digit=True)
      return ("/" if token == "\\frac" else "binomial", above, below)
    if token == "\\sqrt":
      return self.root()
    if token in _DECORATIONS:
      is_group = self.peek() == "{"
      inside = self.raw_group() if is_group else self.take()
      if not re.fullmatch(r"\{?(?:[a-zA-Z]|\\[a-z]+)\}?", inside):
        raise Unread
      return ("symbol", token + inside.strip("{}") + self.subscript())
    if token == "\\log" or token[1:] in FUNCTIONS:
      return self.function(token[1:])
    raise Unread

  def root(self) -> Node:
    index = ("number", Fraction(2))
    if self.peek() == "[":
      self.take()
      index = self.sum()
      self.take("]")
    if self.peek().isdigit() and len(self.peek()) > 1:  # \sqrt12
      raise Unread
    return ("^", self.argument(), ("/", ("number", Fraction(1)), index))

  def function(self, name: str) -> Node:
    base = power = None
    while self.peek() in ("_", "^"):
      if self.take() == "^":
        power = self.argument()
      else:
        base = self.argument(one_digit=True)
    if base and name != "log":
      raise Unread
    if power == ("neg", ("number", Fraction(1))) and name[:3] in ("sin", "cos", "tan"):
      name, power = "arc" + name, None
    if self.peek() in _CLOSING:
      of = self.group()
      if self.peek() == "^" and self.rest[-2:-1] != ["\\circ"]:
        if power:
          raise Unread
        self.take()
        power = self.argument()
    else:
      of = self.power() if self.peek()[1:] not in FUNCTIONS else self.atom()
      while self.peek()[:1].isalnum() or self.peek() in _GREEK or self.peek() == "\\pi":
        if self.is_number() and self.last[-1:].isdigit():
          raise Unread
        of = ("*", of, self.power())
    if name not in FUNCTIONS and name != "log":
      raise Unread
    node = ("call", name, of)
    if name == "log":
      base = ("call", "ln", base or ("number", Fraction(10)))
      node = ("/", ("call", "ln", of), base)
    return ("^", node, power) if power else node

  def subscript(self) -> str:
    if self.peek() != "_":
      return ""
    self.take()
    inside = self.raw_group() if self.peek() == "{" else self.take()
    return "_" + inside.strip("{}")

  def primes(self) -> str:
    found = ""
    while self.peek() == "'":
      found += self.take()
    return found

  def raw_group(self) -> str:
    """The text of a bracket, of which only the spelling counts."""
    if self.peek() not in ("(", "{"):
      return ""
    found, depth = [], 0
    while True:
      found.append(self.take())
      depth += (found[-1] in ("(", "{")) - (found[-1] in (")", "}"))
      if not depth:
        return "".join(found)


def _is_number(token: str) -> bool:
  return token[:1].isdigit() or (token[:1] == "." and len(token) > 1)


def _strip_zeros(digits: str) -> str:
  return digits.lstrip("0") or "0"


def _number(text: str) -> Node:
  """A number with its value and, of a decimal, significant digits and last place."""
  if "\\" in text:
    whole, decimals, *repeating = _REPEATING.fullmatch(text).groups(default="")
    period = "".join(repeating)
    value = int(whole + decimals or 0) + Fraction(int(period), 10 ** len(period) - 1)
    return ("repeating", value / 10 ** len(decimals))
  mantissa, _, power = text.lower().partition("e")
  whole, _, decimals = mantissa.partition(".")
  if len(mantissa) > _MAX_BITS // 4 or len(power) > 5:
    raise Unread
  place = Fraction(10) ** (int(power or 0) - len(decimals))
  value = int(whole + decimals) * place
  if not decimals:
    return ("number", value)
  return ("number", value, len((whole + decimals).strip("0")), place)


# Values.


def equal(gold: Node, final: Node) -> bool:
  """Whether two expressions have the same value, for all values of their variables.

  A decimal of six significant digits may stand for what it rounds; 25% is 0.25 and 25, and
  60 degrees are 60 and pi/3.
  """
  if _has_infinity(gold) or _has_infinity(final):
    infinities = (("infinity",), ("neg", ("infinity",)))
    return gold == final and gold in infinities
  if _vanishes(gold, final):
    return True
  if _approximates(gold, final) or _approximates(final, gold):
    return True
  units = set(_units(gold)), set(_units(final))
  if bool(units[0]) == bool(units[1]):
    return False
  if "percent" in units[0] | units[1]:
    node = gold if units[0] else final
    if node[0] != "unit" and (node[0] != "neg" or node[1][0] != "unit"):
      return False
    zero = ("number", Fraction(0))
    if not symbols(gold) and _vanishes(("floor", ("abs", gold)), zero, is_bare=True):
      return False  # 0.5 is not 0.5%
  return _vanishes(gold, final, is_bare=True)


def proportional(gold: Node, final: Node, is_positive: bool = False) -> bool:
  """Whether the quotient is a constant other than 0, as of two forms of an equation."""
  for point in _points(symbols(gold) | symbols(final)):
    try:
      quotient = _number_of(_value(gold, point)) / _number_of(_value(final, point))
    except (_Undefined, ZeroDivisionError):
      continue
    if not quotient or (is_positive and not _is_positive(quotient)):
      return False
    left = ("*", gold, ("at", final, point))
    return _vanishes(left, ("*", final, ("at", gold, point)))
  return False


def symbols(node: Node) -> set[str]:
  if node[0] == "symbol":
    return {node[1]}
  return set().union(*(symbols(part) for part in node if isinstance(part, tuple)))


def _is_positive(value: Any) -> bool:
  return not isinstance(value, mpmath.mpc) and value > 0


def _parts(node: Node) -> Iterator[Node]:
  yield node
  for part in node:
    if isinstance(part, tuple):
      yield from _parts(part)


def _has_infinity(node: Node) -> bool:
  return any(part[0] == "infinity" for part in _parts(node))


def has_unit(node: Node) -> bool:
  return any(_units(node))


def _units(node: Node) -> Iterator[str]:
  if node[0] == "unit":
    yield node[2]
  for part in node if node[0] != "call" else ():
    if isinstance(part, tuple):
      yield from _units(part)


def _vanishes(gold: Node, final: Node, is_bare: bool = False) -> bool:
  """Whether the difference is 0 at all points at which both have a value."""
  names = symbols(gold) | symbols(final)
  parts = [*_parts(gold), *_parts(final)]
  is_complex = not names or ("constant", "i") in parts
  is_total = any(part[0] == "abs" for part in _parts(gold))  # ln|x| is no ln x
  defined = 0
  for point in _points(names):
    values = [[], []]
    for digits in (_DIGITS, 2 * _DIGITS):
      for node, of in zip((gold, final), values, strict=True):
        try:
          of.append(_value(node, point, is_complex, is_bare, digits))
        except _Undefined:
          break
    if not values[0]:
      continue
    if len(values[1]) == 2:
      defined += 1
      if not _same_number(*values):
        return False
    elif is_total:
      return False
  return defined >= (3 if names else 1)


def _same_number(gold: list, final: list) -> bool:
  """Of two numbers, each computed with _DIGITS and twice as many."""
  if isinstance(gold[0], Fraction) and isinstance(final[0], Fraction):
    return gold[0] == final[0]
  with mpmath.workdps(2 * _DIGITS):
    rough, fine = (
      abs(_number_of(a) - _number_of(b)) for a, b in zip(gold, final, strict=True)
    )
    if fine <= max(abs(_number_of(of)) for of in (gold[1], final[1])) * _tenth(
      1.5 * _DIGITS
    ):
      return True
    return fine < rough * _tenth(0.5 * _DIGITS)  # 0 was computed: only the error shrinks


def _tenth(power: float) -> Any:
  return mpmath.mpf(10) ** -power


def _approximates(decimal: Node, exact: Node) -> bool:
  if decimal[0] == "neg" and len(decimal[1]) == 4:
    decimal = ("number", -decimal[1][1], *decimal[1][2:])
  if len(decimal) != 4 or decimal[2] < _SIGNIFICANT or exact[0] == "repeating":
    return False
  if symbols(exact):
    return False
  try:
    value = _value(exact, {}, is_complex=True)
  except _Undefined:
    return False
  with mpmath.workdps(_DIGITS):
    difference = abs(_plain(operator.sub, value, decimal[1]))
    is_close = _number_of(difference) <= abs(_number_of(value)) * _TOLERANCE
    if isinstance(difference, Fraction):
      return is_close and difference < decimal[3]
    return is_close and difference < _number_of(decimal[3])


def _points(names: set[str]) -> Iterator[dict[str, Fraction]]:
  if not names:
    yield {}
    return
  numbers = random.Random(0)
  for index in range(_POINTS):
    low, high, below = _RANGES[index % len(_RANGES)]
    point = {
      name: Fraction(
        numbers.randrange(low * below + 1, high * below, 1 + (below > 1)), below
      )
      for name in sorted(names)
    }
    if index % len(_RANGES) == _OF_MIXED_SIGNS:
      signs = itertools.cycle((1, -1) if index % 2 else (-1, 1))
      point = {
        name: sign * value
        for (name, value), sign in zip(point.items(), signs, strict=False)
      }
    yield point


def _number_of(value: Any) -> Any:
  if isinstance(value, Fraction):
    return mpmath.mpf(value.numerator) / value.denominator
  return value


def _value(
  node: Node,
  point: dict[str, Fraction],
  is_complex: bool = False,
  is_bare: bool = False,
  digits: int = _DIGITS,
) -> Any:
  with mpmath.workdps(digits):
    try:
      return _Values(point, is_complex, is_bare)(node)
    except (ArithmeticError, ValueError, mpmath.libmp.ComplexResult):
      raise _Undefined from None


class _Values:
  """Values at a point; without units if `is_bare`, of the reals if not `is_complex`."""

  def __init__(self, point: dict[str, Fraction], is_complex: bool, is_bare: bool):
    self.point, self.is_complex, self.is_bare = point, is_complex, is_bare

  def __call__(self, node: Node) -> Any:
    value = self.of(node)
    if isinstance(value, Fraction):
      bits = max(value.numerator.bit_length(), value.denominator.bit_length())
      if bits > _MAX_BITS:
        raise Unread
    elif isinstance(value, mpmath.mpc) and not value.imag:
      return value.real
    elif isinstance(value, mpmath.mpc) and not self.is_complex:
      raise _Undefined
    elif not mpmath.isfinite(value):
      raise _Undefined
    elif value and abs(mpmath.mag(value)) > 2 * _MAX_GROWTH:
      raise Unread
    return value

  def of(self, node: Node) -> Any:
    match node:
      case ("number" | "repeating", value, *_):
        return value
      case ("symbol", name):
        return self.point[name]
      case ("constant", name):
        return {"e": mpmath.e, "pi": mpmath.pi, "i": mpmath.mpc(0, 1)}[name] * 1
      case ("neg", of):
        return -self(of)
      case ("at", of, point):
        return _Values(point, self.is_complex, self.is_bare)(of)
      case ("unit", of, unit):
        if self.is_bare:
          return self(of)
        if unit == "percent":
          return self(("/", of, ("number", Fraction(100))))
        return self(("/", ("*", of, ("constant", "pi")), ("number", Fraction(180))))
      case ("+", left, right):
        return _plain(operator.add, self(left), self(right))
      case ("-", left, right):
        return _plain(operator.sub, self(left), self(right))
      case ("*", left, right):
        return _plain(operator.mul, self(left), self(right))
      case ("/", above, below):
        below = self(below)
        if not below:
          raise _Undefined
        return _plain(operator.truediv, self(above), below)
      case ("^", base, exponent):
        return self.power(self(base), self(exponent))
      case ("factorial", of):
        return _factorial(self(of))
      case ("binomial", upper, lower):
        return _binomial(self(upper), self(lower))
      case ("abs", of):
        return abs(self(of))
      case ("floor" | "ceil" as name, of):
        value = self(of)
        if isinstance(value, Fraction):
          return Fraction(getattr(math, name)(value))
        return getattr(mpmath, name)(value)
      case ("call", name, of):
        argument = _Values(self.point, self.is_complex, False)(of)
        if abs(argument) > _MAX_GROWTH and name not in ("ln", "arctan"):
          raise Unread
        return FUNCTIONS[name](_number_of(argument))
    raise Unread

  def power(self, base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction):
      above, below = exponent.numerator, exponent.denominator
      if below == 1 and isinstance(base, Fraction):
        if not base and above <= 0:
          raise _Undefined
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(above) * (bits - 1) > _MAX_BITS:
          raise Unread
        return base**above
      if below % 2 and below > 1 and not isinstance(base, mpmath.mpc) and base < 0:
        return (-1) ** above * self.power(-base, exponent)  # the real root
    if not base:
      if isinstance(exponent, mpmath.mpc) or exponent <= 0:
        raise _Undefined
      return Fraction(0)
    if base == 1:
      return base
    base, exponent = _number_of(base), _number_of(exponent)
    if abs(exponent) * max(1, abs(mpmath.mag(base))) > _MAX_GROWTH:
      raise Unread
    return mpmath.power(base, exponent)


def _plain(operation: Callable, left: Any, right: Any) -> Any:
  if isinstance(left, Fraction) and isinstance(right, Fraction):
    return operation(left, right)
  return operation(_number_of(left), _number_of(right))


def _factorial(of: Any) -> Any:
  if isinstance(of, Fraction) and of.denominator == 1:
    if of < 0:
      raise _Undefined
    if of > _MAX_FACTORIAL:
      raise Unread
    return Fraction(math.factorial(int(of)))
  return mpmath.factorial(_moderate(of))


def _binomial(upper: Any, lower: Any) -> Any:
  if all(isinstance(of, Fraction) and of.denominator == 1 for of in (upper, lower)):
    if upper > _MAX_FACTORIAL:
      raise Unread
    if 0 <= lower and 0 <= upper:
      return Fraction(math.comb(int(upper), int(lower)))
  return mpmath.binomial(_moderate(upper), _moderate(lower))


def _moderate(of: Any) -> Any:
  if abs(of) > _MAX_FACTORIAL:
    raise Unread
  return _number_of(of)
