"""Reads command lines as their commands do, and runs none.

    python -m tests.parsed FILE

The file is a JSON list of alternatives: lists of command lines, of which one should be
read. Prints a JSON list with "" for each, or what is wrong with its last one.
"""

import functools
import importlib
import importlib.util
import json
import pathlib
import runpy
import sys

from absl import app
from absl import flags

_FOLDERS = ("experiments.", "benchmarks.", "dev.")


@functools.cache
def is_command(name: str) -> bool:
  """Whether a module defines flags when it is imported, or might."""
  spec = importlib.util.find_spec(name)
  text = pathlib.Path(spec.origin).read_text() if spec and spec.origin else ""
  return "launch.run(" in text


def problem(name: str, *args: str) -> str:
  """What a command says of its arguments; "" if they can be read."""
  spec = importlib.util.find_spec(name)
  if spec is None:
    return f"no module {name}"
  if not args:  # the text speaks of it
    return ""
  if name == "experiments.launch":
    launcher = importlib.import_module("experiments.launcher")
    _, command = launcher._parsed(args)
    return problem(*command[2:])
  if not is_command(name):
    return ""
  sys.argv = [name, *args]
  runpy.run_module(name, run_name="__main__")
  return "reads no command line"


def nothing(*_, **__):
  """Instead of what a command does."""


def main(path: str) -> None:
  app.define_help_flags()
  launch = importlib.import_module("experiments.launch")
  read = launch.run
  launch.run = lambda _, *rest, **configs: read(nothing, *rest, **configs)
  usual, found = set(flags.FLAGS), []
  for alternatives in json.loads(pathlib.Path(path).read_text()):
    for command in alternatives:
      for module in [x for x in sys.modules if x.startswith(_FOLDERS)]:
        if module != launch.__name__ and is_command(module):
          del sys.modules[module]
      for flag in set(flags.FLAGS) - usual:
        delattr(flags.FLAGS, flag)
      flags.FLAGS.unparse_flags()
      try:
        wrong = problem(*command)
      except SystemExit as e:  # a status of 2 is argparse's
        wrong = str(e.code or "")
      if not wrong:
        break
    found.append(wrong)
  print(json.dumps(found))


if __name__ == "__main__":
  main(sys.argv[1])
