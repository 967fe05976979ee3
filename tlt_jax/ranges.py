"""Types with a range, `slots: ranges.Count`, and checks of arguments against them.

Dataclasses of options are pydantic's (`options`): a field has its type, its range and its
description, and a wrong value is a ValueError that names the field. Functions check their
arguments with `check`. Upper limits catch typos.
"""

from collections.abc import Callable, Mapping
import functools
import inspect
import re
import types
import typing
from typing import Annotated, Any

from annotated_types import Interval
import numpy as np
import pydantic

Count = Annotated[int, Interval(ge=1, le=2**20)]
CountOrZero = Annotated[int, Interval(ge=0, le=2**20)]
Tokens = Annotated[int, Interval(ge=1, le=2**24)]  # per sequence
Large = Annotated[int, Interval(ge=1, le=2**40)]  # on the host: bytes, records, tokens
Steps = Annotated[int, Interval(ge=1, le=10**9)]  # or optimizer updates
StepsOrZero = Annotated[int, Interval(ge=0, le=10**9)]
# Evaluations use the seed + 2^31, which must fit 32 bits.
Seed = Annotated[int, Interval(ge=0, lt=2**31)]

Share = Annotated[float, Interval(ge=0, le=1)]
ShareAboveZero = Annotated[float, Interval(gt=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Real = Annotated[float, Interval(ge=-1e6, le=1e6)]
Positive = Annotated[float, Interval(gt=0, le=1e6)]
Base = Annotated[float, Interval(ge=1, le=1e9)]  # of rotary frequencies
NotNegative = Annotated[float, Interval(ge=0, le=1e6)]

STRICT = pydantic.ConfigDict(
  strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
)


def field(default: Any, description: str) -> Any:
  """A field of `options`; required if the default is `...`."""
  return pydantic.Field(default, description=description)


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def options(cls: type) -> type:
  """A frozen dataclass whose fields are checked, and given by name only."""
  return pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=STRICT)


@functools.cache
def arguments(function: Callable, without: tuple[str, ...] = ()) -> type:
  """A pydantic model of the named arguments of a function or class.

  The docstring's "Args:" describe its fields. Annotations that cannot be evaluated allow
  anything.
  """
  called = function.__init__ if inspect.isclass(function) else function
  try:
    hints = typing.get_type_hints(called, include_extras=True)
  except (NameError, TypeError):
    hints = {}
  fields, meanings = {}, _described(function)
  for name, parameter in inspect.signature(function).parameters.items():
    is_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if is_many or name in without:
      continue
    default = ... if parameter.default is parameter.empty else parameter.default
    made = pydantic.Field(default, alias=name, description=meanings.get(name))
    # The alias allows any name.
    fields[f"{name}_"] = (_readable(hints.get(name, Any)), made)
  return pydantic.create_model(
    getattr(function, "__name__", "Arguments"), __config__=STRICT, **fields
  )


def _described(function: Callable) -> dict[str, str]:
  called = [function, getattr(function, "__init__", None)]
  meanings = {}
  for docstring in map(inspect.getdoc, called):
    section = re.search(r"^ *Args:\n((?:(?: +.*)?\n?)*)", docstring or "", re.MULTILINE)
    text = inspect.cleandoc("\n" + section[1]) if section else ""
    for entry in re.split(r"\n(?=\w)", text.partition("\n\n")[0]):
      names, _, meaning = entry.partition(": ")
      if re.fullmatch(r"[\w, ]+", names):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
  return meanings


def _readable(annotation: Any) -> Any:
  try:
    pydantic.TypeAdapter(annotation)
  except (pydantic.PydanticUserError, NameError):
    return Any
  return annotation


def check(function: Callable, values: Mapping[str, Any]) -> None:
  """Checks arguments, such as `locals()` at its start, against a function's annotations.

  Raises:
    ValueError: names the argument, its value, and what it takes
  """
  model = arguments(function)
  known = {field.alias: field for field in model.model_fields.values()}
  given = {name: tuples(value) for name, value in values.items() if name in known}
  try:
    model.model_validate(given)
  except pydantic.ValidationError as e:
    wrong = [error["loc"][0] for error in e.errors() if error["type"] != "missing"]
    if not wrong:
      return
    name = wrong[0]
    takes = words(known[name].annotation, known[name].metadata)
    raise ValueError(f"{name} must be {takes}, got {values[name]!r:.60}") from e


def tuples(value: Any) -> Any:
  """Converts lists to tuples, numpy's numbers to Python's."""
  if isinstance(value, np.generic):
    return value.item()
  if type(value) in (list, tuple):
    return tuple(map(tuples, value))
  return value


def tuples_in(values: Mapping[str, Any]) -> dict[str, Any]:
  """Converts nested mappings to dicts, with `tuples` of their values."""
  return {
    name: tuples_in(x) if isinstance(x, Mapping) else tuples(x)
    for name, x in values.items()
  }


_WORDS = {
  int: "a whole number",
  float: "a number",
  str: "a text",
  bool: "True or False",
  type(None): "None",
  Any: "anything",
}


def words(annotation: Any, limits: typing.Sequence[Any] = ()) -> str:
  """A type in words, with its range: "a whole number from 1 to 1,048,576"."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  plain = origin or annotation
  if origin is Annotated:
    return words(args[0], args[1:])
  if limits := [_limits(x) for x in limits if isinstance(x, Interval)]:
    return " ".join([words(annotation), *limits])
  if origin in (typing.Union, types.UnionType):
    return " or ".join(map(words, args))
  if origin is typing.Literal:
    return "one of " + ", ".join(map(repr, args))
  if inspect.isclass(plain) and issubclass(plain, Mapping):
    return "a mapping"
  if origin is tuple and args[-1] is not ...:
    return "(" + ", ".join(map(words, args)) + ")"
  if args:  # another sequence
    kind = "list" if origin is list else "tuple"
    return f"a {kind}, each entry {words(args[0])}"
  return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(x: Interval) -> str:
  def number(n: float) -> str:
    return f"{n:,.0f}" if n == int(n) else f"{n:g}"

  if x.ge is not None and x.le is not None:
    return f"from {number(x.ge)} to {number(x.le)}"
  limits = (("at least", x.ge), ("above", x.gt), ("at most", x.le), ("below", x.lt))
  return " and ".join(f"{which} {number(n)}" for which, n in limits if n is not None)
