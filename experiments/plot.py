"""Draws a run's figures from its metrics.jsonl and rollouts.jsonl.

    python -m experiments.plot --workdir=DIR

writes, into DIR/figures: reward.png (reward and accuracy over steps), gain.png (rollouts
that were repeated plainly), lengths.png (response lengths by outcome, early against late),
live_requests.png (how the batch drains within a rollout) and, of the last rollout,
timeline.png (what every slice did) and rollout_trace.json (the same as a trace; it
opens in https://ui.perfetto.dev).
"""

from collections.abc import Callable, Mapping, Sequence
import json
import pathlib
import sys

from absl import flags
import matplotlib as mpl
from matplotlib import colors as mpl_colors
from matplotlib import figure
from matplotlib import patches
from matplotlib import ticker
import numpy as np

from experiments import drawing as drawing_lib
from experiments import launch
from experiments import plot_gain
from experiments import style
from experiments import timeline
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax import writing

STYLE = style.STYLE
# Okabe-Ito, told apart by colour-blind readers.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#e69f00", "#009e73", "#8c8c8c"
_SKY = "#56b4e9"
_LANE = 0.84  # height of a lane of the timeline; they are 1 apart
_COLUMNS = 2400  # that time is divided into there
_OUTCOME_COLOR = dict(zip(metrics.OUTCOMES, (_GREEN, _ORANGE, _GREY), strict=True))


def drawings(workdir: pathlib.Path) -> list[drawing_lib.Drawing]:
  """What can be drawn of a run.

  Raises:
    metrics.MetricError: the run has no metrics.jsonl, or a damaged file
  """
  of_steps, of_rollouts = workdir / "metrics.jsonl", workdir / "rollouts.jsonl"
  records = metrics.read(of_steps)
  if not records:
    raise metrics.MetricError(f"{of_steps}: holds no step yet")
  _check_numbers(of_steps, records)
  rollouts = metrics.read(of_rollouts) if of_rollouts.exists() else []
  repeated = [r for r in records if "plain/seconds_s" in r]
  # A run of an earlier version has no chunks.
  last = next((r for r in reversed(rollouts) if r.get("chunks")), None)
  made = drawing_lib.Drawing
  found = (
    made("reward.png", plot_reward, records, of_steps),
    made("gain.png", plot_gain.plot_gain, repeated, of_steps),
    made("lengths.png", plot_lengths, rollouts, of_rollouts),
    made("live_requests.png", plot_live_requests, rollouts, of_rollouts),
    made("timeline.png", plot_timeline, last, of_rollouts),
    made("rollout_trace.json", timeline.trace, last, of_rollouts),
  )
  return [drawing for drawing in found if drawing.data]


def plot_all(workdir: str | pathlib.Path) -> list[pathlib.Path]:
  """Draws what the run has data for; returns the files written.

  Of several processes the first one draws.

  Raises:
    metrics.MetricError: the run has no metrics.jsonl, or a damaged file
  """
  if not processes.is_first():
    return []
  workdir = pathlib.Path(workdir)
  folder, written = workdir / "figures", []
  for drawing in drawings(workdir):
    folder.mkdir(parents=True, exist_ok=True)
    with drawing.told():
      _write(folder / drawing.name, drawing.draw, drawing.data)
    written.append(folder / drawing.name)
  return written


def _check_numbers(path: pathlib.Path, records: Sequence[Mapping]) -> None:
  """Raises if a metric is none: what is no number would be drawn as a category."""
  for record in records:
    for key, value in record.items():
      if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise metrics.MetricError(
          f"{path}: {key} of step {record['step']} is {value!r:.60}, no finite number"
        )


def _write(path: pathlib.Path, draw: Callable, data) -> None:
  """Writes a figure, or what else `draw` makes of the data."""
  with mpl.rc_context(STYLE), writing.to(path):
    drawn = draw(data)
    if isinstance(drawn, figure.Figure):
      drawn.savefig(path)
    else:
      path.write_text(json.dumps(drawn, separators=(",", ":")))


def plot_reward(records: Sequence[Mapping]) -> figure.Figure:
  """Draws the reward of every step, its running mean, the share of solved responses if
  that is another, and evaluation accuracy.
  """
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
  judged = [r for r in records if "reward/solved" in r]
  solved = [(r["step"], r["reward/solved"]) for r in judged]
  if all(r["reward/solved"] == r["reward/mean"] for r in judged):
    solved = []  # the same curve
  if solved:
    label = "solved responses of a step"
    ax.plot(*zip(*solved, strict=True), color=_GREEN, linewidth=1.2, label=label)
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
  values = np.concatenate([reward, [share for _, share in solved + evals]])
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
  """Draws response lengths by outcome, the first fifth of the steps above the last."""
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
  for percent, height in ((50, 1.0), (99, 0.93)):
    length = np.percentile(lengths, percent)
    ax.axvline(length, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    ax.text(
      length,
      height,
      f" p{percent} = {length:.0f} ",
      transform=top,
      va="top",
      ha="right",
      fontsize=8.5,
    )
  first, last = part[0]["step"], part[-1]["step"]
  steps = f"step {first}" if first == last else f"steps {first} to {last}"
  ax.set(title=f"Response lengths, {steps}", ylabel="responses (%)")
  ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)


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


def plot_timeline(rollout: Mapping) -> figure.Figure:
  """Draws what every slice of a rollout did, a lane each, and its live requests.

  What is narrower than a pixel blends with its neighbours, by its share of the time.
  """
  slices, chunks = timeline.spans(rollout), rollout["chunks"]
  end, count = chunks[-1]["end_s"], len(slices)
  colors = _activity_colors(chunks)
  height = min(0.6 * count, 3 + 0.065 * count)
  fig = figure.Figure(figsize=(8, height + 1.7), layout="constrained")
  ax = fig.subplots()
  edges = np.linspace(0, end, _COLUMNS + 1)
  share = np.stack([_shares(spans, list(colors), edges) for spans in slices])
  for s, pixels in enumerate(share @ np.stack(list(colors.values()))):
    lane = (0, end, s + _LANE / 2, s - _LANE / 2)
    ax.imshow(pixels[None].clip(0, 1), extent=lane, aspect="auto")
  handles = []
  for (activity, color), mean in zip(colors.items(), share.mean((0, 1)), strict=True):
    if mean:
      label = f"{_activity_label(activity, rollout)} ({mean:.0%})"
      edge = "#bbbbbb" if activity[0] == timeline.OUTSIDE else color
      handles.append(patches.Patch(facecolor=color, edgecolor=edge, label=label))
  handles.append(_plot_live_of_slices(ax, chunks))
  _name_strategies(ax, chunks)
  ax.set_title(f"What the slices did in the rollout of step {rollout['step']}", pad=16)
  ax.set(xlabel="time since the rollout began (s)", ylabel="slice")
  ax.set(xlim=(0, end), ylim=(count - 0.4, -0.6))
  ax.grid(False)
  ax.spines["left"].set_visible(False)
  ax.tick_params(axis="y", length=0)
  ax.yaxis.set_major_locator(_whole_numbers())
  fig.legend(
    handles=handles,
    loc="outside lower center",
    ncols=3,
    title="in brackets: share of the slices' time",
  )
  return fig


def _activity_colors(chunks: Sequence[Mapping]) -> dict[tuple[str, str], np.ndarray]:
  """RGB of each kind of span and strategy, in the order of the legend."""
  used = dict.fromkeys(c["strategy"] for c in chunks if c["strategy"] != "off")
  shades = mpl.colormaps["YlGn"](np.linspace(0.3, 0.85, len(used)))
  chosen = {(timeline.PLAIN, ""): _SKY}
  for strategy, shade in zip(used, shades, strict=True):
    chosen[timeline.SPECULATIVE, strategy] = _GREEN if len(used) == 1 else shade
  chosen[timeline.TRAIN, ""] = _ORANGE
  chosen[timeline.IDLE, ""] = "#dcdcdc"
  chosen[timeline.OUTSIDE, ""] = "white"
  return {activity: np.array(mpl_colors.to_rgb(c)) for activity, c in chosen.items()}


def _shares(spans: Sequence, activities: Sequence, edges: np.ndarray) -> np.ndarray:
  """Of each stretch between two edges, the share that went into each activity."""
  ends = [0.0, *(span.end_s for span in spans)]
  shares = []
  for activity in activities:
    took = [
      span.end_s - span.start_s if (span.kind, span.strategy) == activity else 0.0
      for span in spans
    ]
    until = np.interp(edges, ends, np.cumsum([0.0, *took]))
    shares.append(np.diff(until) / np.diff(edges))
  return np.stack(shares, axis=-1)


def _activity_label(activity: tuple[str, str], rollout: Mapping) -> str:
  """Names an activity in the legend; training of unknown length is drawn as idle time."""
  kind, strategy = activity
  trained = any(any(c["trained"]) for c in rollout["chunks"])
  untimed = trained and not rollout["micro_batch_s"]
  return {
    timeline.PLAIN: "decoding plainly",
    timeline.SPECULATIVE: f"speculating, {strategy}",
    timeline.TRAIN: "training the drafter",
    timeline.IDLE: "idle, or training (not timed)" if untimed else "idle",
    timeline.OUTSIDE: "outside chunks",
  }[kind]


def _plot_live_of_slices(ax, chunks: Sequence[Mapping]):
  """Draws a step line in each lane; returns one, for the legend."""
  live = np.array([c["live"] for c in chunks] + [[0] * len(chunks[0]["live"])])
  time = [*(c["start_s"] for c in chunks), chunks[-1]["end_s"]]
  most = max(1, live.max())
  for s, of_slice in enumerate(live.T):
    y = s + _LANE / 2 - 0.96 * _LANE * of_slice / most
    y[1:][(of_slice[1:] == 0) & (of_slice[:-1] == 0)] = np.nan  # ends where it falls to 0
    width = 1.0 if live.shape[1] <= 16 else 0.6
    (line,) = ax.step(time, y, where="post", color="black", linewidth=width)
  line.set_label(f"live requests ({most} fill a lane)")
  return line


def _name_strategies(ax, chunks: Sequence[Mapping]) -> None:
  """Writes strategies above the lanes, over each stretch that is wide enough."""
  first, end = 0, chunks[-1]["end_s"]
  for i in range(1, len(chunks) + 1):
    if i < len(chunks) and chunks[i]["strategy"] == chunks[first]["strategy"]:
      continue
    start, stop = chunks[first]["start_s"], chunks[i - 1]["end_s"]
    strategy, first = chunks[first]["strategy"], i
    if (stop - start) / end < 0.012 * (len(strategy) + 1):
      continue
    ax.annotate(
      strategy,
      (start, 1.0),
      xycoords=ax.get_xaxis_transform(),
      xytext=(0, 3),
      textcoords="offset points",
      fontsize=8.5,
    )


def main():
  for path in plot_all(flags.FLAGS.workdir):
    print(path)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "folder of a run", required=True)
  launch.run(main)
