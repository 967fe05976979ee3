"""`tlt COMMAND`: the commands of `experiments/`, wherever the package is installed.

A wheel has that folder in `tlt_jax/bundled`, a checkout next to `tlt_jax`. `tlt` makes it
importable, also for subprocesses.
"""

import ast
import os
import pathlib
import runpy
import sys

_HERE = pathlib.Path(__file__).parent
_START = 'if __name__ == "__main__":'  # at the end of a file that is a command


def home() -> pathlib.Path:
  bundled = _HERE / "bundled"
  return bundled if bundled.is_dir() else _HERE.parent


def commands() -> dict[str, pathlib.Path]:
  """The file of each command, by its name, such as "train"."""
  folder = home() / "experiments"
  files = sorted(folder.rglob("*.py"), key=lambda path: (len(path.parts), path))
  return {
    ".".join(path.relative_to(folder).with_suffix("").parts): path
    for path in files
    if _START in path.read_text()
  }


def listing() -> str:
  lines = ["tlt COMMAND --help says what a command takes. Commands:", ""]
  for name, path in commands().items():
    about = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines.append(f"  {name:22} {about.partition(chr(10))[0]}")
  return "\n".join(lines)


def main() -> None:
  if len(sys.argv) < 2 or sys.argv[1] in ("help", "-h", "--help"):
    print(listing())
    return
  name, known = sys.argv[1], commands()
  if name not in known:
    sys.exit(f"error: no command {name!r:.60}; `tlt` alone lists them")
  place = str(home())
  sys.path.insert(0, place)
  inherited = os.environ.get("PYTHONPATH")
  os.environ["PYTHONPATH"] = os.pathsep.join([place, *([inherited] if inherited else [])])
  del sys.argv[1]
  runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
