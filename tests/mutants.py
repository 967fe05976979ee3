"""Modules with a fault put into them, which the tests of the module must find."""

import importlib.util
import pathlib
import types


def load(
  file: str | pathlib.Path, fault: tuple[str, str] | None, folder: pathlib.Path
) -> types.ModuleType:
  """Loads a changed copy of a module's source.

  Args:
    file: the source
    fault: a part of it, and what stands there instead, once; None: it stays as it is
    folder: for the copy
  """
  source = pathlib.Path(file).read_text()
  old, new = fault or ("", "")
  assert old in source, "the source has changed: adapt the fault to it"
  changed = folder / "mutant.py"
  changed.write_text(source.replace(old, new, 1))
  spec = importlib.util.spec_from_file_location("mutant", changed)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
