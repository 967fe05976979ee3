"""Draws a run's figures from its metrics.jsonl and rollouts.jsonl.

    python -m experiments.plot --workdir=DIR

writes, into DIR/figures: reward.png (reward and accuracy over steps),
lengths.png (response lengths by outcome, early against late) and
live_requests.png (how the batch drains within a rollout).
"""

from collections.abc import Mapping, Sequence
import pathlib

from absl import app
from absl import flags
import matplotlib as mpl
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from tlt_jax import metrics

_STYLE = {
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
# Okabe-Ito, told apart by colour-blind readers.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#e69f00", "#009e73", "#8c8c8c"
_OUTCOME_COLOR = dict(zip(metrics.OUTCOMES, (_GREEN, _ORANGE, _GREY), strict=True))


def plot_all(workdir: str | pathlib.Path) -> list[pathlib.Path]:
  """Draws what the run has data for; returns the files written.

  Raises:
    metrics.MetricError: the run has no metrics.jsonl, or a damaged one
  """
  workdir = pathlib.Path(workdir)
  folder = workdir / "figures"
  records = metrics.read(workdir / "metrics.jsonl")
  rollouts = []
  if (workdir / "rollouts.jsonl").exists():
    rollouts = metrics.read(workdir / "rollouts.jsonl")
  written = []
  for name, plot, data in (
    ("reward.png", plot_reward, records),
    ("lengths.png", plot_lengths, rollouts),
    ("live_requests.png", plot_live_requests, rollouts),
  ):
    if not data:
      continue
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
      plot(data).savefig(folder / name)
    written.append(folder / name)
  return written


def plot_reward(records: Sequence[Mapping]) -> figure.Figure:
  """Reward mean of every step, its running mean, and evaluation accuracy."""
  fig = figure.Figure(figsize=(6, 3.6), layout="constrained")
  ax = fig.subplots()
  steps = np.array([r["step"] for r in records if "reward/mean" in r])
  reward = np.array([r["reward/mean"] for r in records if "reward/mean" in r])
  window = len(steps) // 20
  smooth = window > 0
  ax.plot(
    steps,
    reward,
    color=_BLUE,
    alpha=0.3 if smooth else 1.0,
    linewidth=1 if smooth else 1.8,
    marker="" if smooth else "o",
    markersize=4.5,
    label="reward mean of a step",
  )
  if smooth:
    ax.plot(
      steps,
      _running_mean(reward, window),
      color=_BLUE,
      linewidth=1.8,
      label=f"its mean over {2 * window + 1} steps",
    )
  evals = [(r["step"], r["eval/accuracy"]) for r in records if "eval/accuracy" in r]
  if evals:
    ax.plot(
      *zip(*evals, strict=True),
      color=_ORANGE,
      marker="o",
      markersize=4.5,
      linewidth=1.8,
      label="accuracy on held-out problems",
    )
  ax.set(title="Reward and accuracy", xlabel="RL step", ylabel="mean over responses")
  values = np.concatenate([reward, [accuracy for _, accuracy in evals]])
  if len(values) and 0 <= values.min() and values.max() <= 1:
    ax.set_ylim(0, 1)
  ax.xaxis.set_major_locator(_whole_numbers())
  ax.legend(loc="best")
  return fig


def _whole_numbers() -> ticker.Locator:
  return ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Centred, over `window` values to each side, fewer at the ends."""
  return np.array(
    [values[max(0, i - window) : i + window + 1].mean() for i in range(len(values))]
  )


def plot_lengths(rollouts: Sequence[Mapping]) -> figure.Figure:
  """Response lengths by outcome, the first fifth of the steps above the last."""
  count = max(1, len(rollouts) // 5)
  parts = [rollouts[:count], rollouts[-count:]] if len(rollouts) > 1 else [rollouts]
  lengths = np.concatenate([np.asarray(r["length"]) for part in parts for r in part])
  lengths = np.maximum(lengths, 1)
  long_tail = np.percentile(lengths, 99) > 4 * np.percentile(lengths, 50)
  # Whole numbers, so that no bin is empty for want of an integer in it.
  space = np.geomspace if long_tail else np.linspace
  low, high = lengths.min(), max(lengths.max() + 1, lengths.min() + 10)
  bins = int(np.clip(len(lengths) ** 0.5, 10, 40))
  edges = np.unique(np.round(space(low, high, bins + 1))) - 0.5

  fig = figure.Figure(figsize=(7, 2.3 * len(parts) + 0.4), layout="constrained")
  axes = fig.subplots(len(parts), sharex=True, sharey=True, squeeze=False)[:, 0]
  for ax, part in zip(axes, parts, strict=True):
    _plot_lengths_of(ax, part, edges)
    if long_tail:
      ax.set_xscale("log")
      ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
      ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
      ax.xaxis.set_minor_formatter(ticker.NullFormatter())
  axes[-1].set_xlabel("response length (tokens" + (", log scale)" if long_tail else ")"))
  return fig


def _plot_lengths_of(ax, part: Sequence[Mapping], edges: np.ndarray) -> None:
  lengths = np.concatenate([np.asarray(r["length"]) for r in part])
  outcome = np.concatenate([np.asarray(r["outcome"]) for r in part])
  groups = [np.maximum(lengths[outcome == o], 1) for o in metrics.OUTCOMES]
  ax.hist(
    groups,
    bins=edges,
    weights=[np.full(len(g), 100 / len(lengths)) for g in groups],
    stacked=True,
    color=_OUTCOME_COLOR.values(),
    label=[
      f"{o} ({len(g) / len(lengths):.1%})"
      for o, g in zip(metrics.OUTCOMES, groups, strict=True)
    ],
  )
  ax.margins(y=0.12)  # room for the labels of the percentiles
  top = ax.get_xaxis_transform()
  for percent in (50, 99):
    length = np.percentile(lengths, percent)
    ax.axvline(length, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    ax.text(
      length,
      1.0,
      f" p{percent} = {length:.0f} ",
      transform=top,
      va="top",
      ha="right" if percent == 50 else "left",
      fontsize=8.5,
    )
  first, last = part[0]["step"], part[-1]["step"]
  steps = f"step {first}" if first == last else f"steps {first} to {last}"
  ax.set(title=f"Response lengths, {steps}", ylabel="responses (%)")
  ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)


def plot_live_requests(rollouts: Sequence[Mapping], count: int = 3) -> figure.Figure:
  """Live requests over the time of a rollout, for `count` steps of the run."""
  chosen = np.unique(np.linspace(0, len(rollouts) - 1, count).round().astype(int))
  colors = mpl.colormaps["viridis"](np.linspace(0.8, 0.1, len(chosen)))
  fig = figure.Figure(figsize=(7, 4), layout="constrained")
  ax = fig.subplots()
  for i, color in zip(chosen, colors, strict=True):
    time, live = rollouts[i]["live_time_s"], rollouts[i]["live_requests"]
    if not len(time):
      continue
    few = next((j for j, n in enumerate(live) if n <= max(live) / 8), len(live) - 1)
    tail = (time[-1] - time[few]) / time[-1] if time[-1] else 0.0
    ax.step(
      time,
      live,
      where="post",
      color=color,
      linewidth=1.6,
      label=f"step {rollouts[i]['step']}: {time[-1]:.1f} s, {tail:.0%} tail",
    )
    ax.plot(time[few], live[few], "o", color=color, markersize=5)
  ax.set(
    title="How a rollout drains",
    xlabel="time since the rollout began (s)",
    ylabel="live requests",
  )
  ax.set_xlim(left=0)
  ax.set_ylim(bottom=0)
  ax.yaxis.set_major_locator(_whole_numbers())
  fig.legend(
    loc="outside lower center",
    ncols=len(chosen),
    title="tail: from the dot on, at most 1/8 of the requests live",
  )
  return fig


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  try:
    written = plot_all(flags.FLAGS.workdir)
  except metrics.MetricError as e:
    raise SystemExit(str(e)) from e
  for path in written:
    print(path)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "folder of a run", required=True)
  app.run(main)
