"""Calls in a config: weighted sums, and several by name.

    my_package.maths.score
    my_package.maths.score + 0.1 * tlt_jax.tasks.form.overlong(buffer=512)
    easy=my_package.problems.Problems(level=1), hard=my_package.problems.Problems(level=5)

Python's own parser reads them. Arguments are literals, given by name.
"""

import ast
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Call:
  path: str  # dotted name
  options: dict[str, Any] | None  # arguments; None: there are no brackets
  weight: float = 1.0


def weighted(text: str) -> list[Call]:
  """Parses `WEIGHT * NAME(ARGUMENT=VALUE, ...) + ...`; weights, brackets optional."""
  try:
    return _terms(ast.parse(f"({text})", mode="eval").body, 1.0)
  except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
    raise ValueError(
      "is not of the form WEIGHT * package.module.name(ARGUMENT=VALUE, ...) + ..., in "
      f"which weights, arguments and all but the first name may be left out ({e})"
    ) from e


def by_name(text: str) -> dict[str, Call]:
  try:
    listed = ast.parse(f"listed({text})", mode="eval").body
    if not isinstance(listed, ast.Call) or listed.args or not listed.keywords:
      raise ValueError("each is KEY=NAME(ARGUMENT=VALUE, ...)")
    if any(keyword.arg is None for keyword in listed.keywords):
      raise ValueError("** cannot be read")
    return {keyword.arg: _call(keyword.value, 1.0) for keyword in listed.keywords}
  except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
    raise ValueError(
      f"is not of the form KEY=package.module.name(ARGUMENT=VALUE, ...), ... ({e})"
    ) from e


def _terms(node: ast.expr, sign: float) -> list[Call]:
  match node:
    case ast.BinOp(left, ast.Add(), right):
      return _terms(left, sign) + _terms(right, sign)
    case ast.BinOp(left, ast.Sub(), right):
      return _terms(left, sign) + _terms(right, -sign)
    case ast.UnaryOp(ast.USub(), of):
      return _terms(of, -sign)
    case ast.BinOp(ast.Constant(int() | float() as weight), ast.Mult(), of):
      return [_call(of, sign * weight)]
  return [_call(node, sign)]


def _call(node: ast.expr, weight: float) -> Call:
  if not isinstance(node, ast.Call):
    return Call(_path(node), None, weight)
  if node.args or any(keyword.arg is None for keyword in node.keywords):
    raise ValueError("arguments are given by name")
  options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
  return Call(_path(node.func), options, weight)


def _path(node: ast.expr) -> str:
  match node:
    case ast.Name(name):
      return name
    case ast.Attribute(of, name):
      return f"{_path(of)}.{name}"
  raise ValueError(f"{ast.unparse(node)!r:.60} is no dotted name")
