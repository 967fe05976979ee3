"""Draws the rollouts of a run that were repeated otherwise; see `repeats`."""

from collections.abc import Mapping, Sequence

from matplotlib import figure
from matplotlib import ticker

from experiments import summary

_OWN = "#009e73"
_COLORS = {"plain": "#8c8c8c", "frozen": "#0072b2"}


def plot_gain(records: Sequence[Mapping]) -> figure.Figure:
  """Draws what each repeated rollout took, and what its passes drew, beside the run's own.

  Args:
    records: of metrics.jsonl, those that have `plain/seconds_s`
  """
  steps = [r["step"] for r in records]
  sides = [side for side in summary.SIDES if f"{side}/seconds_s" in records[0]]
  fig = figure.Figure(figsize=(7.6, 3.4), layout="constrained")
  seconds, drawn = fig.subplots(1, 2)
  until_last = [r["rollout/seconds_s"] - r.get("drafter/training_s", 0.0) for r in records]
  own = [r.get("rollout/mean_acceptance_length", 1.0) for r in records]
  line = dict(marker="o", markersize=4.5, linewidth=1.8)
  titles = []
  for side in sides:
    label = f"repeated {summary.SIDES[side]}"
    took = [r[f"{side}/seconds_s"] for r in records]
    seconds.plot(steps, took, color=_COLORS[side], label=label, **line)
    lengths = [r.get(f"{side}/mean_acceptance_length", 1.0) for r in records]
    drawn.plot(steps, lengths, color=_COLORS[side], **line)
    found = summary.gain(records, side)
    title = f"{found['mean']:.2f}x as fast as {side}"
    if len(records) > 1:
      title += " ({:.2f} to {:.2f})".format(*found["interval"])
    titles.append(title)
  seconds.plot(steps, until_last, color=_OWN, label="of this run", **line)
  drawn.plot(steps, own, color=_OWN, **line)
  fig.suptitle("Rollouts of the same tokens: " + ", ".join(titles), fontsize="medium")
  seconds.set(title="seconds of a rollout", xlabel="RL step")
  drawn.set(title="tokens that a pass of the policy draws", xlabel="RL step")
  seconds.set_ylim(bottom=0)
  drawn.set_ylim(bottom=0.9)
  for ax in (seconds, drawn):
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  seconds.legend(loc="best")
  return fig
