"""Draws a run's figures from its metrics.jsonl and rollouts.jsonl.

    python -m experiments.plot --workdir=DIR

writes into DIR/figures: reward.png (reward and accuracy over steps), gain.png (rollouts
that were repeated plainly), lengths.png (response lengths by outcome, early against late),
live_requests.png (how the batch drains within a rollout) and timeline.png (what every
slice did in the last rollout).
"""

from collections.abc import Mapping, Sequence
import pathlib
import sys

from absl import flags
import matplotlib as mpl
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from experiments import launch
from experiments import style
from experiments import summary
from experiments import timeline
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax import writing

# Okabe-Ito, for colour-blind readers.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#e69f00", "#009e73", "#8c8c8c"
_SKY = "#56b4e9"
_LANE = 0.84  # height of a lane of the timeline; they are 1 apart
_NAMES = {
  timeline.PLAIN: "decoding plainly",
  timeline.SPECULATIVE: "speculating, {}",
  timeline.TRAIN: "training the drafter",
  timeline.IDLE: "idle",
}
_SIDES = {"plain": _GREY, "frozen": _BLUE}  # of `summary.SIDES`


def plot_all(workdir: str | pathlib.Path) -> list[pathlib.Path]:
  """Draws what the run has data for; returns the files written.

  Of several processes the first one draws.

  Raises:
    metrics.MetricError: the run has no metrics.jsonl, or a damaged file
  """
  if not processes.is_first():
    return []
  folder = pathlib.Path(workdir)
  of_steps, of_rollouts = folder / "metrics.jsonl", folder / "rollouts.jsonl"
  records = metrics.read(of_steps)
  if not records:
    raise metrics.MetricError(f"{of_steps}: holds no step yet")
  _check_numbers(of_steps, records)
  rollouts = metrics.read(of_rollouts) if of_rollouts.exists() else []
  repeated = [r for r in records if "plain/seconds_s" in r]
  drawn = [r for r in rollouts if r.get("chunks") != []]  # a step may draw nothing
  written = []
  for name, draw, data, source in (
    ("reward.png", plot_reward, records, of_steps),
    ("gain.png", plot_gain, repeated, of_steps),
    ("lengths.png", plot_lengths, rollouts, of_rollouts),
    ("live_requests.png", plot_live_requests, rollouts, of_rollouts),
    ("timeline.png", plot_timeline, drawn and drawn[-1], of_rollouts),
  ):
    if data:
      path = folder / "figures" / name
      path.parent.mkdir(parents=True, exist_ok=True)
      with mpl.rc_context(style.STYLE), writing.to(path):
        try:
          draw(data).savefig(path)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
          raise metrics.MetricError(
            f"{source}: {name} cannot be drawn, its records are not those of a run "
            f"({e!r:.200})"
          ) from e
      written.append(path)
  return written


def _check_numbers(path: pathlib.Path, records: Sequence[Mapping]) -> None:
  """Raises if a metric is no finite number, which would be drawn as a category."""
  for record in records:
    for key, value in record.items():
      if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise metrics.MetricError(
          f'{path}, "step": {record["step"]}: {key} is {value!r:.60}, no finite number'
        )


def _whole_numbers() -> ticker.Locator:
  return ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def plot_reward(records: Sequence[Mapping]) -> figure.Figure:
  """Draws the reward of every step, its running mean, the share of solved responses if
  that is another, and evaluation accuracy.
  """
  fig = figure.Figure(figsize=(6, 3.6), layout="constrained")
  ax = fig.subplots()
  curves = {
    key: np.array([(r["step"] + 1, r[key]) for r in records if key in r]).reshape(-1, 2)
    for key in ("reward/mean", "reward/solved", "eval/accuracy")
  }
  curves["eval/accuracy"][:, 0] -= 1  # after so many steps
  reward, solved, accuracy = curves.values()
  window = len(reward) // 20
  faint = dict(alpha=0.3, linewidth=1) if window else dict(marker="o", linewidth=1.8)
  ax.plot(*reward.T, color=_BLUE, markersize=4.5, label="reward mean of a step", **faint)
  if window:
    label = f"its mean over {2 * window + 1} steps"
    ax.plot(reward[:, 0], _running_mean(reward[:, 1], window), color=_BLUE, label=label)
  if all(r["reward/solved"] == r["reward/mean"] for r in records if "reward/solved" in r):
    solved = solved[:0]  # the same curve
  if len(solved):
    label = "solved responses of a step"
    ax.plot(*solved.T, color=_GREEN, linewidth=1.2, label=label)
  if len(accuracy):
    label = "accuracy on held-out problems"
    ax.plot(*accuracy.T, color=_ORANGE, marker="o", markersize=4.5, label=label)
  ax.set(title="Reward and accuracy", xlabel="RL step", ylabel="mean over responses")
  values = np.concatenate([curve[:, 1] for curve in (reward, solved, accuracy)])
  if len(values) and 0 <= values.min() and values.max() <= 1:
    ax.set_ylim(0, 1)
  ax.xaxis.set_major_locator(_whole_numbers())
  ax.legend(loc="best")
  return fig


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Centred, over `window` values to each side, fewer at the ends."""
  return np.array(
    [values[max(0, i - window) : i + window + 1].mean() for i in range(len(values))]
  )


def plot_gain(records: Sequence[Mapping]) -> figure.Figure:
  """Draws seconds and tokens per pass of repeated rollouts, and of the run's own.

  Args:
    records: of metrics.jsonl, those that have `plain/seconds_s`
  """
  steps = [*map(metrics.number, records)]
  fig = figure.Figure(figsize=(7.6, 3.4), layout="constrained")
  seconds, drawn = fig.subplots(1, 2)
  line = dict(marker="o", markersize=4.5, linewidth=1.8)
  titles = []
  for side, color in _SIDES.items():
    if f"{side}/seconds_s" not in records[0]:
      continue
    took = [r[f"{side}/seconds_s"] for r in records]
    label = f"repeated {summary.SIDES[side]}"
    seconds.plot(steps, took, color=color, label=label, **line)
    lengths = [r.get(f"{side}/mean_acceptance_length", 1.0) for r in records]
    drawn.plot(steps, lengths, color=color, **line)
    found = summary.gain(records, side)
    title = f"{found['mean']:.2f}x as fast as {side}"
    if len(records) > 1:
      title += " ({:.2f} to {:.2f})".format(*found["interval"])
    titles.append(title)
  until_last = [r["rollout/seconds_s"] - r.get("drafter/training_s", 0.0) for r in records]
  own = [r.get("rollout/mean_acceptance_length", 1.0) for r in records]
  seconds.plot(steps, until_last, color=_GREEN, label="of this run", **line)
  drawn.plot(steps, own, color=_GREEN, **line)
  fig.suptitle("Rollouts of the same tokens: " + ", ".join(titles), fontsize="medium")
  seconds.set(title="seconds of a rollout", xlabel="RL step")
  drawn.set(title="tokens that a pass of the policy draws", xlabel="RL step")
  seconds.set_ylim(bottom=0)
  drawn.set_ylim(bottom=0.9)
  for ax in (seconds, drawn):
    ax.xaxis.set_major_locator(_whole_numbers())
  seconds.legend(loc="best")
  return fig


def plot_lengths(rollouts: Sequence[Mapping]) -> figure.Figure:
  """Draws response lengths by outcome, the first fifth of the steps above the last."""
  count = max(1, len(rollouts) // 5)
  parts = [rollouts[:count], rollouts[-count:]] if len(rollouts) > 1 else [rollouts]
  lengths = np.concatenate([np.asarray(r["length"]) for part in parts for r in part])
  lengths = np.maximum(lengths, 1)
  long_tail = np.percentile(lengths, 99) > 4 * np.percentile(lengths, 50)
  space = np.geomspace if long_tail else np.linspace
  high = max(lengths.max() + 1, lengths.min() + 10)
  bins = int(np.clip(len(lengths) ** 0.5, 10, 40))
  # Whole numbers, so that every bin has an integer in it.
  edges = np.unique(np.round(space(lengths.min(), high, bins + 1))) - 0.5
  fig = figure.Figure(figsize=(7, 2.3 * len(parts) + 0.4), layout="constrained")
  axes = fig.subplots(len(parts), sharex=True, sharey=True, squeeze=False)[:, 0]
  for ax, part in zip(axes, parts, strict=True):
    _plot_lengths_of(ax, part, edges)
    if long_tail:
      ax.set_xscale("log")
      ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
  axes[-1].set_xlabel("response length (tokens" + (", log scale)" if long_tail else ")"))
  return fig


def _plot_lengths_of(ax, part: Sequence[Mapping], edges: np.ndarray) -> None:
  lengths = np.maximum(np.concatenate([np.asarray(r["length"]) for r in part]), 1)
  outcome = np.concatenate([np.asarray(r["outcome"]) for r in part])
  groups = {o: lengths[outcome == o] for o in metrics.OUTCOMES}
  ax.hist(
    groups.values(),
    bins=edges,
    weights=[np.full(len(g), 100 / len(lengths)) for g in groups.values()],
    stacked=True,
    color=(_GREEN, _ORANGE, _GREY),
    label=[f"{o} ({len(g) / len(lengths):.1%})" for o, g in groups.items()],
  )
  for percent, style_of_line in ((50, "--"), (99, ":")):
    length = np.percentile(lengths, percent)
    label = f"p{percent} = {length:.0f}"
    ax.axvline(length, color="black", linewidth=0.8, linestyle=style_of_line, label=label)
  first, last = metrics.number(part[0]), metrics.number(part[-1])
  steps = f"step {first}" if first == last else f"steps {first} to {last}"
  ax.set(title=f"Response lengths, {steps}", ylabel="responses (%)")
  ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plot_live_requests(rollouts: Sequence[Mapping], count: int = 3) -> figure.Figure:
  """Draws live requests over the time of a rollout, for `count` steps of the run."""
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
    label = f"step {metrics.number(rollouts[i])}: {time[-1]:.1f} s, {tail:.0%} tail"
    ax.step(time, live, where="post", color=color, linewidth=1.6, label=label)
    ax.plot(time[few], live[few], "o", color=color, markersize=5)
  ax.set(title="How a rollout drains", xlabel="time since the rollout began (s)")
  ax.set(ylabel="live requests", xlim=(0, None), ylim=(0, None))
  ax.yaxis.set_major_locator(_whole_numbers())
  fig.legend(
    loc="outside lower center",
    ncols=len(chosen),
    title="tail: from the dot on, at most 1/8 of the requests live",
  )
  return fig


def plot_timeline(rollout: Mapping) -> figure.Figure:
  """Draws what every slice of a rollout did, a lane each, and its live requests."""
  slices, chunks = timeline.spans(rollout), rollout["chunks"]
  end, count = chunks[-1]["end_s"], len(slices)
  used = dict.fromkeys(c["strategy"] for c in chunks if c["strategy"] != "off")
  shades = mpl.colormaps["YlGn"](np.linspace(0.85, 0.3, max(len(used), 1)))
  colors = {(timeline.PLAIN, ""): _SKY}
  for strategy, shade in zip(used, shades, strict=False):
    colors[timeline.SPECULATIVE, strategy] = shade
  colors |= {(timeline.TRAIN, ""): _ORANGE, (timeline.IDLE, ""): "#dcdcdc"}
  height = min(0.6 * count, 3 + 0.065 * count)
  fig = figure.Figure(figsize=(8, height + 1.7), layout="constrained")
  ax = fig.subplots()
  for (kind, strategy), color in colors.items():
    label = _NAMES[kind].format(strategy)
    for s, spans in enumerate(slices):
      mine = [x for x in spans if (x.kind, x.strategy) == (kind, strategy)]
      parts = [(x.start_s, x.end_s - x.start_s) for x in mine]
      if parts:
        ax.broken_barh(parts, (s - _LANE / 2, _LANE), facecolors=color, label=label)
        label = None  # once
  live = np.array([c["live"] for c in chunks] + [[0] * count])
  time, most = [*(c["start_s"] for c in chunks), end], max(1, live.max())
  for s, of_slice in enumerate(live.T):
    label = f"live requests ({most} fill a lane)" if s == 0 else None
    y = s + _LANE / 2 - 0.96 * _LANE * of_slice / most
    ax.step(time, y, where="post", color="black", linewidth=0.8, label=label)
  ax.set_title(f"What the slices did in the rollout of step {metrics.number(rollout)}")
  ax.set(xlabel="time since the rollout began (s)", ylabel="slice")
  ax.set(xlim=(0, end), ylim=(count - 0.4, -0.6))
  ax.grid(False)
  ax.yaxis.set_major_locator(_whole_numbers())
  fig.legend(loc="outside lower center", ncols=3)
  return fig


def main():
  for path in plot_all(flags.FLAGS.workdir):
    print(path)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "folder of a run", required=True)
  launch.run(main)
