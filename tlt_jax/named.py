"""Objects that configs name: dotted names are imported, errors suggest the nearest name."""

from collections.abc import Iterable
import difflib
import importlib
import importlib.util
import pathlib
import pkgutil
import re
import types
from typing import Any


class NameNotFound(ValueError):
  """A dotted name that does not exist; the message says which part."""


def nearest(name: str, known: Iterable[str]) -> str:
  """The end of an error message: "; did you mean 'x'?", or "" if nothing is near."""
  near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
  return f"; did you mean {near[0]!r}?" if near else ""


def nearest_path(path: str, known: Iterable[str]) -> str:
  """As `nearest`, of dotted names: all that end in the same last part."""
  last = path.rpartition(".")[2]
  same = [name for name in known if name.rpartition(".")[2] == last]
  if len(same) < 2:
    return nearest(path, known)
  return f"; did you mean {' or '.join(map(repr, same))}?"


def load(path: str) -> Any:
  """The object at `package.module.name`; NameNotFound if a part is missing or fails."""
  module_name, _, name = path.rpartition(".")
  if not module_name:
    raise NameNotFound(f"{path!r} is not of the form package.module.name")
  module = _import(module_name)
  if not hasattr(module, name):
    public = [known for known in vars(module) if not known.startswith("_")]
    raise NameNotFound(f"module {module_name} has no {name!r}" + nearest(name, public))
  return getattr(module, name)


def module(name: str, package: str, attribute: str) -> types.ModuleType:
  """Imports a module of `package` ("grpo"), or any module ("my_package.my_module").

  Raises:
    NameNotFound: no such module, or it lacks the attribute
  """
  if "." not in name and name not in _modules(package):
    known = [n for n in _modules(package) if _has(f"{package}.{n}", attribute)]
    raise NameNotFound(
      f"{package} has {', '.join(sorted(known))}, and modules of one's own have dotted "
      "names" + nearest(name, known)
    )
  found = _import(name if "." in name else f"{package}.{name}")
  if not hasattr(found, attribute):
    raise NameNotFound(f"module {found.__name__} has no {attribute!r}")
  return found


def _has(module: str, attribute: str) -> bool:
  """Whether a module's source defines it at the top; nothing is imported."""
  source = importlib.util.find_spec(module).origin
  at_the_top = re.compile(rf"^(?:def )?{attribute}\b *[(:=]", re.MULTILINE)
  return bool(source and at_the_top.search(pathlib.Path(source).read_text()))


def _import(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    # Only if the path itself leads nowhere, not an import inside the module.
    if e.name is None or not f"{name}.".startswith(f"{e.name}."):
      raise NameNotFound(f"importing {name} failed: {e}") from e
    parent, _, last = e.name.rpartition(".")
    raise NameNotFound(f"no module {e.name!r}" + nearest(last, _modules(parent))) from e
  except (Exception, SystemExit) as e:
    raise NameNotFound(f"importing {name} failed: {type(e).__name__}: {e}") from e


def _modules(package: str) -> list[str]:
  if not package:
    return [m.name for m in pkgutil.iter_modules()]
  folders = vars(importlib.import_module(package)).get("__path__", [])
  return [m.name for m in pkgutil.iter_modules(folders)]
