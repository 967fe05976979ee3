"""Draws the rollouts of a run that were repeated plainly; see `plain_rollouts`."""

from collections.abc import Mapping, Sequence

from matplotlib import figure
from matplotlib import ticker

from experiments.bench import interleave

_OWN, _PLAIN = "#009e73", "#8c8c8c"


def plot_gain(records: Sequence[Mapping]) -> figure.Figure:
  """Draws what each repeated rollout took, beside the run's own of the same step.

  Args:
    records: of metrics.jsonl, those that have `plain/seconds_s`
  """
  steps = [r["step"] for r in records]
  own, plain = ([r[f"{side}/seconds_s"] for r in records] for side in ("rollout", "plain"))
  fig = figure.Figure(figsize=(6, 3.2), layout="constrained")
  ax = fig.subplots()
  for seconds, color, label in (
    (plain, _PLAIN, "repeated plainly"),
    (own, _OWN, "of this run, with speculation"),
  ):
    ax.plot(
      steps, seconds, color=color, marker="o", markersize=4.5, linewidth=1.8, label=label
    )
  gain = interleave.ratio(plain, own)
  title = f"Rollouts of the same tokens: {gain['mean']:.2f}x as fast"
  if len(records) > 1:
    title += " (95% interval {:.2f} to {:.2f})".format(*gain["interval"])
  ax.set(title=title, xlabel="RL step", ylabel="seconds of a rollout")
  ax.set_ylim(bottom=0)
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  ax.legend(loc="best")
  return fig
