"""The style of every figure. Nothing here imports jax: notebooks draw with it."""

STYLE = {
  "axes.grid": True,
  "axes.grid.axis": "y",
  "axes.axisbelow": True,
  "axes.spines.right": False,
  "axes.spines.top": False,
  "axes.titlelocation": "left",
  "axes.titlesize": 11,
  "axes.labelsize": 10,
  "figure.dpi": 150,
  "font.size": 9.5,
  "grid.color": "#e4e4e4",
  "grid.linewidth": 0.7,
  "legend.frameon": False,
  "lines.solid_capstyle": "round",
}
