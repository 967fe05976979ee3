"""Ranges of numbers, as types of arguments and fields: `slots: ranges.Count`.

Whoever makes an argument declares there which values it takes. Commands read these
declarations (`experiments.declarations`) and check a config by them before anything is
loaded; `check` holds the arguments of a call against them. Upper limits are where a value
can only be a slip: counts and lengths must fit the i32 arrays that they end up in, many
times over.
"""

from collections.abc import Callable, Mapping
import inspect
import types
import typing
from typing import Annotated, Any

from annotated_types import Interval
import numpy as np
import pydantic

Count = Annotated[int, Interval(ge=1, le=2**20)]  # at least one of something
CountOrZero = Annotated[int, Interval(ge=0, le=2**20)]
Tokens = Annotated[int, Interval(ge=1, le=2**24)]  # of a sequence, or a part of one
Large = Annotated[int, Interval(ge=1, le=2**40)]  # on the host: bytes, records, tokens
Steps = Annotated[int, Interval(ge=1, le=10**9)]  # also of an optimizer: its updates
StepsOrZero = Annotated[int, Interval(ge=0, le=10**9)]
# Evaluations draw with the seed + 2^31, which has to fit 32 bits.
Seed = Annotated[int, Interval(ge=0, lt=2**31)]

Share = Annotated[float, Interval(ge=0, le=1)]
ShareAboveZero = Annotated[float, Interval(gt=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Real = Annotated[float, Interval(ge=-1e6, le=1e6)]
Positive = Annotated[float, Interval(gt=0, le=1e6)]
Base = Annotated[float, Interval(ge=1, le=1e9)]  # of rotary frequencies
NotNegative = Annotated[float, Interval(ge=0, le=1e6)]


def check(declared: Callable, values: Mapping[str, Any]) -> None:
  """Raises if an argument is of another type than its annotation, or out of its range.

  Args:
    declared: the function or class whose annotations count
    values: its arguments by name: `locals()` where it begins, `vars(self)` of a dataclass
  Raises:
    ValueError: names the argument, its value, and what it takes
  """
  function = declared.__init__ if inspect.isclass(declared) else declared
  for name, annotation in typing.get_type_hints(function, include_extras=True).items():
    if name not in values:
      continue
    value = values[name]
    plain = value.item() if isinstance(value, np.generic) else value
    if not holds(annotation, plain):
      raise ValueError(f"{name} must be {words(annotation)}, got {value!r:.60}")


def holds(annotation: Any, value: Any) -> bool:
  """Whether a value is of a type, and within its range.

  Lists do for tuples. Of a type that pydantic does not know anything is.
  """
  try:
    adapter = pydantic.TypeAdapter(annotation)
    return _is_valid(adapter, value) or _is_valid(adapter, _tuples(value))
  except (pydantic.PydanticUserError, NameError):  # or with a name that it cannot find
    return True


def _is_valid(adapter: pydantic.TypeAdapter, value: Any) -> bool:
  try:
    adapter.validate_python(value, strict=True)
  except pydantic.ValidationError:
    return False
  return True


def _tuples(value: Any) -> Any:
  """Lists as tuples: a config may use either."""
  return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


_WORDS = {
  int: "a whole number",
  float: "a number",
  str: "a text",
  bool: "True or False",
  type(None): "None",
  Any: "anything",
}


def words(annotation: Any) -> str:
  """A type in words, with its range: "a whole number from 1 to 1,048,576"."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  plain = origin or annotation
  if origin is Annotated:
    limits = [_limits(x) for x in args[1:] if isinstance(x, Interval)]
    return " ".join([words(args[0]), *limits])
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
  """A range in words: "from 1 to 1,048,576", "above 0 and at most 1"."""
  number = lambda n: f"{n:,.0f}" if n == int(n) else f"{n:g}"
  if x.ge is not None and x.le is not None:
    return f"from {number(x.ge)} to {number(x.le)}"
  limits = (("at least", x.ge), ("above", x.gt), ("at most", x.le), ("below", x.lt))
  return " and ".join(f"{which} {number(n)}" for which, n in limits if n is not None)
