"""Runs the commands of a figure, and stores the data that it draws.

    python -m experiments.figures.collect --figure=lengths
    python -m experiments.figures.collect --figure=lengths --full

By default minutes on 2 CPU cores; with --full the size of a paper, hours for some. The
commands are in `recipes.py`. Their output is kept in runs/figures, and they run again only
with --again. Writes experiments/results/figures/NAME.json.
"""

import datetime
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time

from absl import flags

from experiments import launch
from experiments.figures import kept
from experiments.figures import recipes
from experiments.figures import results

_FIGURE = flags.DEFINE_string("figure", None, "Name of the figure.", required=True)
_FULL = flags.DEFINE_bool("full", False, "In full size, for hours.")
_AGAIN = flags.DEFINE_bool("again", False, "Run commands that have run, too.")
_NOTE = flags.DEFINE_string("note", "", "Further conditions of the data.")


def hardware() -> str:
  """Number and model name of this machine's CPU cores."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", lines)[1]
  except (OSError, TypeError):
    name = platform.processor()
  return f"{os.cpu_count()} cores of {name}"


def run(name: str, command: str, folder: pathlib.Path) -> None:
  """Runs a command, unless it has run, with its output in NAME.out."""
  output = folder / f"{name}.out"
  if output.exists() and not _AGAIN.value:
    print(f"{name}: has run", flush=True)
    return
  print(f"{name}: python -m {command}", flush=True)
  shutil.rmtree(folder / name, ignore_errors=True)  # a run would resume
  began, partial = time.time(), output.with_suffix(".partial")
  with partial.open("w") as f:
    arguments = [sys.executable, "-m", *shlex.split(command)]
    subprocess.run(arguments, stdout=f, check=True)
  (folder / f"{name}.seconds").write_text(f"{time.time() - began:.1f}")
  partial.rename(output)


def main():
  figure = _FIGURE.value
  if figure not in recipes.RECIPES:
    known = ", ".join(recipes.RECIPES)
    raise ValueError(f"no figure {figure!r} is collected; there are {known}")
  recipe = recipes.RECIPES[figure]
  folder = pathlib.Path("runs/figures_full" if _FULL.value else "runs/figures")
  folder.mkdir(parents=True, exist_ok=True)
  known = recipes.commands(str(folder), _FULL.value)
  commands = {name: known[name] for name in recipe.commands}
  for name, command in commands.items():
    try:
      run(name, command, folder)
    except subprocess.CalledProcessError as e:
      raise ValueError(f"{name} failed: its error is above") from e
  found = {
    "date": datetime.date.today().isoformat(),
    "hardware": hardware(),
    "conditions": "; ".join(filter(None, [recipe.conditions, _NOTE.value])),
    "commands": list(commands.values()),
    "result": recipe.keep(kept.Outputs(folder)),
  }
  print(results.store(figure, found))


if __name__ == "__main__":
  launch.run(main)
