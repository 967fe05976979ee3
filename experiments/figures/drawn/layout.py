"""What the figures have in common: sizes, colours, bars, tables, and how they are shown.

The other modules here read JSON and draw; none of them imports jax.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import io

from IPython import display
import matplotlib as mpl
from matplotlib import axes as mpl_axes
from matplotlib import figure
from matplotlib import patheffects
import numpy as np
from PIL import Image as pil

from experiments import style
from experiments.figures import results

# A colour for each way to roll out, wherever it is drawn; Okabe-Ito.
SIDES = {
  "plain": "#56b4e9",
  "n-gram": "#cc79a7",
  "frozen": "#009e73",
  "TLT": "#e69f00",
}
_ABOVE = {"textcoords": "offset points", "ha": "center", "fontsize": 8.5}
PAPER = "#d55e00"  # what the paper reports
BLUE, GREY = "#0072b2", "#8c8c8c"


def panels(*titles: str, width: float = 4.2, height: float = 3.3, **subplots):
  """A figure with a panel for each title, side by side: (figure, panels)."""
  fig = figure.Figure(figsize=(width * len(titles), height), layout="constrained")
  axes = np.atleast_1d(fig.subplots(1, len(titles), **subplots))
  for ax, title in zip(axes, titles, strict=True):
    ax.set_title(title)
  fig.get_layout_engine().set(w_pad=0.1)
  return fig, axes


def shown(draw: Callable[..., figure.Figure]) -> Callable[..., display.Image]:
  """Makes a function that draws one whose figure a notebook shows."""

  @functools.wraps(draw)
  def call(*args) -> display.Image:
    with mpl.rc_context(style.STYLE):
      return image(draw(*args))

  return call


def image(fig: figure.Figure) -> display.Image:
  """The figure as a notebook shows it, in 128 colours: small enough to be committed."""
  drawn = io.BytesIO()
  fig.savefig(drawn, dpi=130)
  reduced, drawn = pil.open(drawn).convert("RGB").quantize(128), io.BytesIO()
  reduced.save(drawn, "PNG", optimize=True)
  return display.Image(drawn.getvalue(), width=int(100 * fig.get_figwidth()))


def present(
  name: str,
  draw: Callable[[Mapping], display.Image],
  compare: Callable[[Mapping], str],
) -> display.Image | None:
  """Shows conditions of the data, a table of paper and results, and the figure.

  Args:
    name: of the figure, in `results`
    draw: of its data
    compare: writes the table
  """
  if not results.exists(name):
    command = f"python -m experiments.figures.collect --figure={name}"
    print(f"data not yet collected: {command}")
    return None
  found = results.load(name)
  print(results.conditions(found), compare(found["result"]), sep="\n\n")
  return draw(found["result"])


def bars(
  ax: mpl_axes.Axes,
  groups: Mapping[str, Mapping[str, float]],
  colors: Mapping[str, str],
  form: str = "{:.2f}",
  errors: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> None:
  """Draws bars with their values above: group -> what -> value.

  Args:
    ax: where
    groups: missing values leave gaps
    colors: of what, in order
    form: of the values
    errors: the bounds of some of the values
  """
  width = 0.8 / len(colors)
  for j, (what, color) in enumerate(colors.items()):
    at = [i + (j - (len(colors) - 1) / 2) * width for i in range(len(groups))]
    values = [group.get(what, np.nan) for group in groups.values()]
    ax.bar(at, values, 0.92 * width, color=color, label=what)
    for x, value, name in zip(at, values, groups, strict=True):
      high = value
      if bounds := (errors or {}).get(name, {}).get(what):
        ax.plot([x, x], bounds, color="black", linewidth=0.9)
        high = max(bounds)
      if np.isfinite(value):
        text = ax.annotate(form.format(value), (x, high), (0, 3), **_ABOVE)
        text.set_path_effects([patheffects.withStroke(linewidth=2, foreground="white")])
  ax.set_xticks(range(len(groups)), list(groups))
  ax.margins(y=0.12)


def one(ax: mpl_axes.Axes) -> None:
  """A line where there is no speed-up."""
  ax.axhline(1.0, color="black", linewidth=0.8)


def counts(ax: mpl_axes.Axes, values: Sequence[int]) -> None:
  """Makes the horizontal axis one of doublings, with these ticks."""
  ax.set_xscale("log", base=2)
  ax.set_xticks(list(values), [str(v) for v in values])
  ax.minorticks_off()


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
  """Writes a table in plain text; numbers with fractions get two digits."""
  cells = [list(columns), *([_cell(x) for x in row] for row in rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

  def align(row: Sequence[str]) -> str:
    padded = [x.rjust(w) for x, w in zip(row, widths, strict=True)]
    return "  ".join([row[0].ljust(widths[0]), *padded[1:]])

  head, *body = map(align, cells)
  return "\n".join([head, "-" * len(head), *body])


def _cell(value: object) -> str:
  if value is None:
    return "not known here"
  return f"{value:.2f}" if isinstance(value, float) else str(value)
