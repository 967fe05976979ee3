"""Tables on the terminal."""

from collections.abc import Iterable, Sequence

import numpy as np
import rich.console
import rich.table


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
  """Prints a table, 100 characters wide at most."""
  table = rich.table.Table(*columns, title=title, title_justify="left")
  for row in rows:
    table.add_row(*row)
  rich.console.Console(width=100).print(table)


def spread(values, unit: float = 1.0, digits: int = 2) -> str:
  """f[N] as "median (least-most)"."""
  low, middle, high = (unit * f(values) for f in (np.min, np.median, np.max))
  return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
