"""Reads what arguments declare: type, range, meaning and default of a config's keys.

A section of a config goes to one function or dataclass of the library. Its signature
declares the section's keys: an annotation such as `ranges.Count` gives type and range,
the comment beside a field, or the entry under "Args:", the meaning. `of` reads them,
`check` holds a config against them, `describe` writes them out for `--help`. Sections
whose function is itself named in the config (`chosen`) are read the same way, so that
an algorithm of a fork is checked by its own annotations.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from typing import Any, NamedTuple

from tlt_jax import named
from tlt_jax import ranges

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
REQUIRED = inspect.Parameter.empty  # the default of a key that has none


class ConfigError(ValueError):
  """An entry of a config that cannot be; the message names its key and what can."""


class Key(NamedTuple):
  """One entry of a config."""

  type: Any  # an annotation, with its range
  meaning: str = ""
  default: Any = REQUIRED
  find: Callable[[Any], Any] | None = None  # raises ValueError for what does not exist


class Chosen(NamedTuple):
  """A section whose other entries are the arguments of what one of them names."""

  by: str  # the entry that names it
  meaning: str  # of that entry
  find: Callable[[str], Callable]  # raises ValueError for a name that leads nowhere

  def keys(self, name: str) -> dict[str, Any]:
    """The entries of the section where `name` is chosen."""
    return {self.by: Key(str, self.meaning), **of(self.find(name))}


Section = Mapping[str, "Key | Chosen | Section"]


def of(declared: Callable, without: tuple[str, ...] = ()) -> dict[str, Key | Section]:
  """The keys that a function or dataclass declares.

  Args:
    declared: whose parameters they are; one whose type is a dataclass is a section
    without: parameters that do not come from a config
  """
  function = declared.__init__ if inspect.isclass(declared) else declared
  try:
    hints = typing.get_type_hints(function, include_extras=True)
  except (NameError, TypeError):  # of a fork, with names that only type checkers see
    hints = {}
  meanings = _of_args(inspect.getdoc(declared)) | _of_args(inspect.getdoc(function))
  if dataclasses.is_dataclass(declared):
    meanings |= _of_comments(declared)
  keys = {}
  for name, parameter in inspect.signature(declared).parameters.items():
    if name in without or parameter.kind in _MANY:
      continue
    annotation = hints.get(name, Any)
    if dataclasses.is_dataclass(annotation):
      keys[name] = of(annotation)
    else:
      keys[name] = Key(annotation, meanings.get(name, ""), parameter.default)
  return keys


def _of_args(docstring: str | None) -> dict[str, str]:
  """The meanings that a docstring gives under "Args:", by name."""
  section = re.search(r"^ *Args:\n((?:(?: +.*)?\n?)*)", docstring or "", re.MULTILINE)
  meanings, names, indent = {}, [], None
  for line in section[1].splitlines() if section else []:
    depth = len(line) - len(line.lstrip())
    entry = re.match(r" +([\w, ]+): (.*)", line)
    indent = depth if indent is None else indent
    if not line.strip() or depth < indent:
      break
    if entry and depth == indent:
      names = entry[1].split(", ")
      meanings |= dict.fromkeys(names, entry[2])
    else:
      meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
  return meanings


def _of_comments(dataclass: type) -> dict[str, str]:
  """The comments of a dataclass's fields, behind them or in the lines above."""
  try:
    source = textwrap.dedent(inspect.getsource(dataclass))
  except OSError:  # no source, as in an interactive session
    return {}
  behind, alone = {}, {}  # line -> comment
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      lines = alone if token.line.lstrip().startswith("#") else behind
      lines[token.start[0]] = token.string.lstrip("# ")
  meanings = {}
  for node in ast.parse(source).body[0].body:
    if not isinstance(node, ast.AnnAssign):
      continue
    first = node.lineno
    while first - 1 in alone:
      first -= 1
    above = [alone[line] for line in range(first, node.lineno)]
    inside = [behind[i] for i in range(node.lineno, node.end_lineno + 1) if i in behind]
    meanings[node.target.id] = " ".join(inside or above)
  return meanings


def fill_in(
  section: Section, config: dict, overrides: Mapping[str, str], flag: str = "config"
) -> None:
  """Adds the keys that a config leaves out, with their defaults.

  Where the command line chooses another function than the config, the config's arguments
  of that one are dropped: the new one starts from its own defaults.

  Args:
    section: what is declared
    config: sections and values; changed in place
    overrides: dotted key -> text, of the command line; keys without a default are added
      if they are among them
    flag: of the config
  Raises:
    ConfigError: what is chosen leads nowhere
  """
  for path, known, values in _sections(section, config):
    dotted = lambda name, path=path: ".".join((*path, name))
    if isinstance(known, Chosen):
      name = overrides.get(dotted(known.by))
      if name is not None and name != values.get(known.by):
        values.clear()
        values[known.by] = name
    for name, key in _keys_of(known, values, path, flag).items():
      if name in values:
        continue
      if not isinstance(key, Key | Chosen):
        values[name] = {}
      elif isinstance(key, Key) and _is_json(key.default):
        values[name] = key.default
      elif dotted(name) in overrides:
        values[name] = None


def _is_json(default: Any) -> bool:
  """Whether a config can hold a default; any other is left to the function."""
  try:
    json.dumps(default)
  except (TypeError, ValueError):
    return False
  return True


def check(section: Section, config: Mapping, flag: str = "config") -> None:
  """Raises if an entry is missing, unknown, of another type or out of its range.

  Raises:
    ConfigError: names the entry as the command line does, its value, and what is wanted
  """
  for path, known, values in _sections(section, config):
    keys = _keys_of(known, values, path, flag)
    where = ".".join((f"--{flag}", *path, ""))
    for name in values:
      if name not in keys:
        raise ConfigError(
          f"{where}{name}: the config has no such key; there are {', '.join(keys)}"
          + named.nearest(name, keys)
        )
    for name, key in keys.items():
      if name not in values:
        if isinstance(key, Key) and key.default is not REQUIRED:
          continue
        raise ConfigError(f"{where}{name} is missing; it takes {describe(key)}")
      if isinstance(key, Key) and not ranges.holds(key.type, values[name]):
        raise ConfigError(f"{where}{name}={values[name]!r:.60}: takes {describe(key)}")
      if isinstance(key, Key) and key.find is not None:
        try:
          key.find(values[name])
        except ValueError as e:
          raise ConfigError(f"{where}{name}={values[name]!r:.60}: {e}") from e
      if not isinstance(key, Key) and not isinstance(values[name], Mapping):
        raise ConfigError(f"{where}{name}={values[name]!r:.60}: takes a section")


def rows(section: Section, config: Mapping) -> Iterator[tuple[str, Any, Key]]:
  """Yields (dotted key, value, what is declared) of every entry that a config has."""
  for path, known, values in _sections(section, config):
    for name, key in _keys_of(known, values, path).items():
      if isinstance(key, Key) and name in values:
        yield ".".join((*path, name)), values[name], key


def _sections(section, values, path=()) -> Iterator[tuple[tuple, Any, dict]]:
  """Yields (path, what is declared, values) of a section and of those in it."""
  yield path, section, values
  for name, known in _keys_of(section, values, path).items():
    if not isinstance(known, Key) and isinstance(values.get(name), Mapping):
      yield from _sections(known, values[name], (*path, name))


def _keys_of(known, values, path: tuple, flag: str = "config") -> Section:
  """The keys of a section, given its values: they say what is chosen."""
  if not isinstance(known, Chosen):
    return known
  key, by = ".".join((f"--{flag}", *path, known.by)), Key(str, known.meaning)
  if known.by not in values:
    raise ConfigError(f"{key} is missing; it takes {describe(by)}")
  if not isinstance(values[known.by], str):
    raise ConfigError(f"{key}={values[known.by]!r:.60}: takes {describe(by)}")
  try:
    return known.keys(values[known.by])
  except ValueError as e:
    raise ConfigError(f"{key}={values[known.by]!r:.60}: {e}") from e


def plain_type(annotation: Any) -> type:
  """The type that text on the command line is read as: the first that is not None."""
  args = typing.get_args(annotation)
  if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
    return plain_type(next(arg for arg in args if arg is not type(None)))
  if typing.get_origin(annotation) is typing.Literal:
    return type(args[0])
  plain = typing.get_origin(annotation) or annotation
  return plain if plain in (int, float, str, bool, tuple) else object


def describe(key: Key) -> str:
  """What an entry is, in words: its type and range, and its meaning."""
  words = ranges.words(key.type) if isinstance(key, Key) else "a section"
  meaning = key.meaning if isinstance(key, Key | Chosen) else ""
  return f"{words} ({meaning})" if meaning else words
