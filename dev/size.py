"""Prints the size of the code, and how much of it some modules import.

    python -m dev.size

Imports are counted transitively within the repo, with those inside functions and of
packages.
"""

import ast
from collections.abc import Iterable, Iterator
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FIGURES = "experiments/figures"
PARTS = {
  "tlt_jax": ["tlt_jax"],
  "experiments, without figures": ["experiments"],
  FIGURES: [FIGURES],
  "benchmarks, dev": ["benchmarks", "dev"],
  "tests": ["tests"],
}
CLOSURES = {
  "a rollout": ["tlt_jax.spec_decode.rollout.make"],
  "an RL step": ["tlt_jax.rl.sample", "tlt_jax.rl.learner"],
  "a run": ["experiments.train"],
}


def files_of(folders: Iterable[str]) -> set[pathlib.Path]:
  """The Python files of folders; of `experiments` all but the figures."""
  found = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
  return {p for p in found if FIGURES in folders or ROOT / FIGURES not in p.parents}


def count_lines(paths: Iterable[pathlib.Path]) -> int:
  return sum(path.read_text().count("\n") for path in paths)


def find_module(name: str) -> pathlib.Path | None:
  """The file of a dotted name; None if it is none of this repo."""
  path = name.replace(".", "/")
  files = (ROOT / f"{path}.py", ROOT / path / "__init__.py")
  return next(filter(pathlib.Path.is_file, files), None)


def imported_names(path: pathlib.Path) -> Iterator[str]:
  """The dotted names that a file imports; of `from a import b` both a and a.b."""
  package = path.relative_to(ROOT).parts[:-1]
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) + 1 - node.level] if node.level else ()
      base = ".".join([*above, *([node.module] if node.module else [])])
      yield base
      yield from (f"{base}.{alias.name}" for alias in node.names)


def import_closure(names: Iterable[str]) -> set[pathlib.Path]:
  """The files that importing these modules reads."""
  found, todo = set(), list(names)
  while todo:
    name = todo.pop()
    path = find_module(name)
    if path is not None and path not in found:
      found.add(path)
      todo += [*imported_names(path), name.rpartition(".")[0]]
  return found


def main() -> None:
  for name, folders in PARTS.items():
    print(f"{name:30}{count_lines(files_of(folders)):8,} lines")
  for name, found in zip(CLOSURES, map(import_closure, CLOSURES.values()), strict=True):
    print(f"{f'imports of {name}':30}{count_lines(found):8,} lines in {len(found)} files")


if __name__ == "__main__":
  main()
