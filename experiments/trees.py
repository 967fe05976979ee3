"""Reads a config, from its file and the command line, into a tree of dataclasses.

A tree's fields say what an entry is: its type, its range, what it means. Where a section
chooses a function by name (`Arguments`), its other entries are that function's arguments,
checked against its annotations, so that an algorithm of a fork is checked like ours. What
is wrong is a `ConfigError` of one line.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib.util
import json
import pathlib
import types
import typing
from typing import Annotated, Any, Literal, NamedTuple

from absl import flags
import ml_collections
import pydantic
from pydantic_core import InitErrorDetails
from pydantic_core import PydanticCustomError
from pydantic_core import core_schema

from tlt_jax import named
from tlt_jax import ranges

FOLDER = pathlib.Path(__file__).parent / "configs"
_HELP = ("help", "helpshort", "helpfull", "?")


class ConfigError(ValueError):
  """An entry of a config that cannot be; the message names its key and what can."""


class Arguments(NamedTuple):
  """A section of arguments, as a mapping: `Annotated[dict[str, Any], Arguments(...)]`."""

  find: Callable[[str], Callable]  # the function of a name; ValueError if there is none
  by: str = ""  # the entry that names it; "": `find` needs no name
  meaning: str = ""  # of that entry

  def function(self, values: Mapping[str, Any]) -> Callable:
    """The function that a section names.

    Raises:
      pydantic.ValidationError: it names none
    """
    if not self.by:
      return self.find("")
    if self.by not in values:
      raise _error("missing", self.by, values)
    name = values[self.by]
    if not isinstance(name, str):
      raise _error("string_type", self.by, name)
    try:
      return self.find(name)
    except ValueError as e:
      kind = PydanticCustomError("not_found", "{reason}", {"reason": str(e)})
      raise _error(kind, self.by, name) from e

  def validate(self, values: Any) -> dict[str, Any]:
    """The section with the defaults of arguments that it leaves out."""
    if not isinstance(values, Mapping):
      raise PydanticCustomError("section", "takes a section")
    model = ranges.arguments(self.function(values))
    given = {k: ranges.tuples(x) for k, x in values.items() if k != self.by}
    made = model.model_validate(given).model_dump(by_alias=True)
    chosen = {self.by: values[self.by]} if self.by else {}
    # Any other default is left to the function.
    return chosen | {k: x for k, x in made.items() if k in given or _is_json(x)}

  def __get_pydantic_core_schema__(self, _, handler):
    return core_schema.no_info_plain_validator_function(self.validate)


def _error(kind: Any, name: str, value: Any) -> pydantic.ValidationError:
  """The error of one entry of a section."""
  details = InitErrorDetails(type=kind, loc=(name,), input=value)
  return pydantic.ValidationError.from_exception_data("section", [details])


def _is_json(value: Any) -> bool:
  try:
    json.dumps(value)
  except (TypeError, ValueError):
    return False
  return True


def read_by(parse: Callable[[str], Any]) -> pydantic.AfterValidator:
  """A check of a text: that `parse` reads it. An empty one is none."""

  def check(text: str) -> str:
    if text:
      parse(text)
    return text

  return pydantic.AfterValidator(check)


class Entry(NamedTuple):
  """One entry of a config."""

  annotation: Any
  meaning: str
  default: Any  # ... where it has none

  @classmethod
  def of(cls, info: Any) -> "Entry":
    """That of pydantic's `FieldInfo`."""
    annotation = Annotated[info.annotation, *info.metadata, None]
    default = ... if info.is_required() else info.default
    return cls(annotation, info.description or "", default)

  @property
  def takes(self) -> str:
    """Its type and range in words, and its meaning."""
    meaning = f" ({self.meaning})" if self.meaning else ""
    return ranges.words(self.annotation) + meaning


def entries(tree: type, values: Mapping[str, Any], path: str = "") -> dict[str, Entry]:
  """The entries of a tree by dotted key.

  Args:
    tree: a dataclass of options
    values: a config, whose names say which functions' arguments there are
    path: of the tree, with a dot behind it
  Raises:
    ConfigError: a name leads nowhere
  """
  found = {}
  for name, info in _fields(tree):
    key, here = f"{path}{name}", values.get(name, {})
    here = here if isinstance(here, Mapping) else {}
    chosen = [x for x in info.metadata if isinstance(x, Arguments)]
    if chosen:
      found |= _of_arguments(chosen[0], here, f"{key}.")
    elif dataclasses.is_dataclass(info.annotation):
      found |= entries(info.annotation, here, f"{key}.")
    else:
      found[key] = Entry.of(info)
  return found


def _fields(tree: type) -> Iterable[tuple[str, Any]]:
  """Names and `FieldInfo`s of a dataclass."""
  return _checked(tree).__pydantic_fields__.items()


def _of_arguments(section: Arguments, values: Mapping, path: str) -> dict[str, Entry]:
  """The entries of a section that goes to a function."""
  found = {}
  if section.by:
    found[f"{path}{section.by}"] = Entry(str, section.meaning, ...)
  try:
    function = section.function(values)
  except pydantic.ValidationError as e:
    error = e.errors()[0]
    if error["type"] != "not_found":  # it names nothing: validation says so
      return found
    key, reason = f"{path}{section.by}", error["ctx"]["reason"]
    raise ConfigError(f"--config.{key}={error['input']!r:.60}: {reason}") from e
  fields = ranges.arguments(function).model_fields.values()
  return found | {f"{path}{info.alias}": Entry.of(info) for info in fields}


def validate(tree: type, values: Mapping[str, Any], flag: str = "config") -> Any:
  """The tree with a config's values.

  Raises:
    ConfigError: a wrong entry; names it, its value and what it takes
  """
  return _make(tree, ranges.tuples_in(values), "", flag)


def _make(tree: type, values: Mapping[str, Any], path: str, flag: str) -> Any:
  """A section, and those in it first, so that an error is that of one section."""
  made = dict(values)
  for name, info in _fields(tree):
    if dataclasses.is_dataclass(info.annotation) and isinstance(made.get(name), Mapping):
      made[name] = _make(info.annotation, made[name], f"{path}{name}.", flag)
  try:
    checked = _checked(tree)(**made)
  except pydantic.ValidationError as e:
    raise _one_error(e, tree, values, f"--{flag}.{path}") from e
  return checked if type(checked) is tree else tree(**made)


@functools.cache
def _checked(tree: type) -> type:
  """The dataclass, with checks if it has none."""
  if hasattr(tree, "__pydantic_fields__"):
    return tree
  config = None if hasattr(tree, "__pydantic_config__") else ranges.STRICT
  return pydantic.dataclasses.dataclass(tree, frozen=True, config=config)


def _one_error(
  e: pydantic.ValidationError, tree: type, values: Mapping[str, Any], path: str
) -> ConfigError:
  """The first of pydantic's errors in a section, in our words."""
  error = e.errors(include_url=False)[0]
  key, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
  known = entries(tree, values) if kind != "not_found" else {}
  # Behind an entry's key there are places in its value, and types of a union.
  own = [k for k in known if k == key or key.startswith(f"{k}.")]
  if kind in ("unexpected_keyword_argument", "extra_forbidden"):
    inside = f"{key.rpartition('.')[0]}.".lstrip(".")
    names = [k.removeprefix(inside) for k in known if k.startswith(inside)]
    there = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    hint = named.nearest_path(key, known)
    return ConfigError(f"{path}{key}: the config has no such key; there are {there}{hint}")
  if kind == "missing" and key in known:
    return ConfigError(f"{path}{key} is missing; it takes {known[key].takes}")
  if kind == "missing" and not own:
    return ConfigError(f"{path}{key} is missing; it takes a section")
  if kind in ("value_error", "not_found"):
    reason = error["ctx"].get("reason") or error["ctx"]["error"]
    shown = f"{key}={value!r:.60}" if key else path.rstrip(".")
    return ConfigError(f"{path if key else ''}{shown}: {reason}")
  if not own:
    return ConfigError(f"{path}{key}={value!r:.60}: takes a section")
  given = functools.reduce(lambda x, name: x[name], own[0].split("."), values)
  return ConfigError(f"{path}{own[0]}={given!r:.60}: takes {known[own[0]].takes}")


def read(path: str) -> dict[str, Any]:
  """What the config file `FILE.py[:arg]` gives, as plain dicts.

  One of `configs/` can be named alone, as in `countdown:smoke`.

  Raises:
    ConfigError: no such file, or one that gives no config
  """
  file, _, arg = path.partition(":")
  if file.isidentifier() and (FOLDER / f"{file}.py").is_file():
    file = str(FOLDER / f"{file}.py")
  if not pathlib.Path(file).is_file():
    known = sorted(x.stem for x in FOLDER.glob("*.py") if x.stem != "__init__")
    raise ConfigError(
      f"no such file (in folder {pathlib.Path.cwd()}); configs to be named alone are "
      f"{', '.join(known)}{named.nearest(file, known)}"
    )
  spec = importlib.util.spec_from_file_location("config", file)
  if spec is None:
    raise ConfigError("a config is a Python file, FILE.py")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    made = module.get_config(*filter(None, [arg]))
    if not isinstance(made, ml_collections.ConfigDict | dict):
      raise TypeError(f"get_config gives a {type(made).__name__}, not a ConfigDict")
    return ml_collections.ConfigDict(made).to_dict()
  except (Exception, SystemExit) as e:  # whatever the file does
    raise ConfigError(f"{type(e).__name__}: {e}") from e


def load(path: str, tree: type) -> Any:
  """The tree of a config file."""
  return validate(tree, read(path))


def from_flags(default: str, tree: type) -> Callable[[str, Sequence[str]], tuple]:
  """What reads a config off the command line, for `launch.run`; see `parse`."""
  return functools.partial(parse, default, tree)


def parse(
  default: str, tree: type, name: str, argv: Sequence[str]
) -> tuple[Any, list[str]]:
  """The config that `--name=FILE.py[:arg]` and `--name.a.b=value` describe.

  A function that is chosen on the command line starts from its own defaults, whatever
  arguments the file gives to another one.

  Args:
    default: file, where the command line names none
    tree: of the config
    name: of the flag
    argv: the command line
  Returns:
    the config, and the command line without these flags
  Raises:
    ConfigError: a file that is none, a key that does not exist, a value that cannot be
  """
  path, overrides, rest = split(argv, name)
  path = path or default
  try:
    values = read(path)
  except ConfigError as e:
    raise ConfigError(f"--{name}={path}: {e}") from e
  _choose(tree, values, overrides)
  try:
    known = entries(tree, values)
  except ConfigError as e:
    raise ConfigError(str(e).replace("--config.", f"--{name}.", 1)) from e
  for key, text in overrides.items():
    if key not in known:
      if inside := [k for k in known if k.startswith(f"{key}.")]:
        raise ConfigError(f"--{name}.{key} is a section: set {', '.join(inside)}")
      hint = named.nearest_path(key, known) or f"; see {path}"
      raise ConfigError(f"--{name}.{key}: the config has no such key{hint}")
    _put(values, key, _value(text, known[key].annotation))
  help_string = f"Config file, FILE.py[:ARG]; its entries are set by --{name}.KEY=VALUE."
  if any(arg.lstrip("-") in _HELP for arg in argv):
    help_string += "".join(f"\n{line}" for line in _help(known, values, name))
  flags.DEFINE_string(name, path, help_string, flag_values=flags.FLAGS)
  # `--help` shows the flags of the command's own file.
  flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS[name])
  return validate(tree, values, name), rest


def _choose(tree: type, values: dict, overrides: Mapping[str, str]) -> None:
  """Empties sections whose function the command line replaces."""
  for name, info in _fields(tree):
    for section in info.metadata:
      if isinstance(section, Arguments) and section.by:
        chosen = overrides.get(f"{name}.{section.by}")
        if chosen and chosen != (values.get(name) or {}).get(section.by):
          values[name] = {section.by: chosen}


def _help(known: Mapping[str, Entry], values: Mapping, name: str) -> Iterator[str]:
  """A line for each entry: its value, meaning, type and range."""
  for key, entry in known.items():
    value = values
    for part in key.split("."):
      value = value.get(part, entry.default) if isinstance(value, Mapping) else value
    shown = "" if value is ... or isinstance(value, Mapping) else repr(value)
    yield f"--{name}.{key}={shown}: {entry.meaning} [{ranges.words(entry.annotation)}]"


def split(argv: Sequence[str], name: str) -> tuple[str, dict[str, str], list[str]]:
  """A config's file ("" if none is named), its overrides, and what is left for absl.

  A switch needs no value: `--name.a` is True, `--noname.a` is False.
  """
  path, overrides, rest, args = "", {}, [], list(argv)
  while args:
    arg = args.pop(0)
    before, equals, value = arg.partition("=")
    flag, _, key = before.lstrip("-").partition(".")
    if not arg.startswith("-") or flag not in (name, f"no{name}"):
      rest.append(arg)
      continue
    if flag != name:
      value = "False"
    elif not equals:
      value = "True" if not args or args[0].startswith("--") else args.pop(0)
    if key:
      overrides[key] = value
    else:
      path = value
  return path, overrides, rest


def _value(text: str, annotation: Any) -> Any:
  """What a text on the command line stands for; one that cannot be read stays a text."""
  kinds = _kinds(annotation)
  if text == "None" and type(None) in kinds:
    return None
  if str in kinds:
    return text
  if tuple[str, ...] in kinds and text[:1] not in "([":  # to Python 3_1_4 is 314
    return tuple(text.split(","))
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return {"true": True, "false": False}.get(text, text)


def _kinds(annotation: Any) -> set[Any]:
  """The types that an annotation allows, without ranges."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    return _kinds(args[0])
  if origin in (typing.Union, types.UnionType):
    return set().union(*map(_kinds, args))
  if origin is Literal:
    return set(map(type, args))
  return {annotation}


def change(config: Any, changes: Mapping[str, Any]) -> Any:
  """The tree with other values of some dotted keys."""
  values = to_dict(config)
  for key, value in changes.items():
    _put(values, key, value)
  return validate(type(config), values)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
  *sections, last = key.split(".")
  for part in sections:
    values = values.setdefault(part, {})
  values[last] = value


def to_dict(config: Any) -> dict[str, Any]:
  """A tree as plain dicts, as config.json has them."""
  return dataclasses.asdict(config)
