"""Executes the notebooks of this folder and keeps their outputs in them.

    python -m experiments.figures.render                  # all, in a few seconds
    python -m experiments.figures.render lengths spot

They draw the data of `experiments.figures.collect`.
"""

from collections.abc import Iterable, Iterator
import copy
import pathlib
import sys

from jupyter_client import manager
import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent


def notebooks() -> list[pathlib.Path]:
  """All notebooks of this folder, by name."""
  return sorted(FOLDER.glob("*.ipynb"))


def executed(paths: Iterable[pathlib.Path]) -> Iterator[nbformat.NotebookNode]:
  """Executes notebooks one after the other, without sharing variables.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed
  """
  kernel = manager.KernelManager(kernel_name="python3")
  kernel.start_kernel(cwd=str(FOLDER))
  try:
    for path in paths:
      notebook = nbformat.read(path, as_version=4)
      fresh = copy.deepcopy(notebook)
      fresh.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
      nbclient.NotebookClient(fresh, km=kernel, timeout=60).execute()
      for cell, done in zip(notebook.cells, fresh.cells[1:], strict=True):
        if cell.cell_type == "code":
          cell.outputs, cell.execution_count = done.outputs, None
          for output in cell.outputs:
            if "execution_count" in output:
              output["execution_count"] = None
          cell.metadata.pop("execution", None)
      yield notebook
  finally:
    kernel.shutdown_kernel(now=True)


def main(names: list[str]) -> None:
  paths = [path for path in notebooks() if not names or path.stem in names]
  if not paths:
    known = ", ".join(path.stem for path in notebooks())
    sys.exit(f"error: no such notebook; there are {known}")
  for path, notebook in zip(paths, executed(paths), strict=True):
    nbformat.write(notebook, path)
    print(path)


if __name__ == "__main__":
  main(sys.argv[1:])
