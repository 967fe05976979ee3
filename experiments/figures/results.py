"""Reads and writes the data of the figures: experiments/results/figures/NAME.json.

A file holds `date`, `hardware`, `commands` (those that made it), `conditions`, and
`result`, which its notebook draws.
"""

from collections.abc import Mapping
import json
import pathlib

RESULTS = pathlib.Path(__file__).parents[1] / "results"
FOLDER = RESULTS / "figures"


def exists(name: str) -> bool:
  """Whether the data of a figure have been collected."""
  return (FOLDER / f"{name}.json").exists()


def load(name: str) -> dict:
  return json.loads((FOLDER / f"{name}.json").read_text())


def store(name: str, found: Mapping) -> pathlib.Path:
  """Writes the data of a figure; numbers keep five digits."""
  FOLDER.mkdir(parents=True, exist_ok=True)
  path = FOLDER / f"{name}.json"
  lines = ",\n".join(
    f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in found.items()
  )
  path.write_text("{\n" + lines + "\n}\n")
  return path


def rounded(value):
  """The value with all fractions rounded to five digits."""
  if isinstance(value, float):
    return float(f"{value:.5g}")
  if isinstance(value, Mapping):
    return {str(key): rounded(part) for key, part in value.items()}
  if isinstance(value, list | tuple):
    return [rounded(part) for part in value]
  return value


def conditions(found: Mapping) -> str:
  """Date, hardware, conditions and commands of the data, in a few lines."""
  lines = [f"{found['date']}, {found['hardware']}", found["conditions"]]
  return "\n".join([*lines, *(f"  python -m {c}" for c in found["commands"])])
