"""What can be drawn of a run: a figure of its folder, or of its report."""

from collections.abc import Callable, Iterator
import contextlib
import pathlib
from typing import Any, NamedTuple

from tlt_jax import metrics


class Drawing(NamedTuple):
  """A figure, or a trace, and the data for it."""

  name: str  # of its file
  draw: Callable  # data -> a figure, or what JSON can hold
  data: Any
  file: pathlib.Path  # that the data are of

  @contextlib.contextmanager
  def told(self) -> Iterator[None]:
    """Names the file if what is drawn inside fails; raises metrics.MetricError."""
    try:
      yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as e:
      raise metrics.MetricError(
        f"{self.file}: {self.name} cannot be drawn, its records are not those of a run "
        f"({e!r:.200})"
      ) from e
