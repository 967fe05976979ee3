"""The figure of a scenario's runs: acceptance, wall time, idle time and reward by step.

Curves are means over seeds.
"""

from collections.abc import Mapping, Sequence
import pathlib

import matplotlib as mpl
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from benchmarks import run_summary
from experiments import sides as sides_lib
from experiments import style
from tlt_jax import writing

# Okabe-Ito, as in `experiments.plot`.
_COLORS = {
  "plain": "#8c8c8c",
  "ngram": "#e69f00",
  "frozen": "#0072b2",
  "tlt": "#009e73",
  "eagle2": "#009e73",
  "eagle3": "#56b4e9",
}
_OTHER = "#cc79a7"


def draw(path: pathlib.Path, found: Mapping, runs: run_summary.Runs) -> None:
  """Writes a PNG of `run_summary.summarize` of the runs."""
  with mpl.rc_context(style.STYLE), writing.to(path):
    fig = figure.Figure(figsize=(10, 6.6), layout="constrained")
    (acceptance, time), (idle, reward) = fig.subplots(2, 2)
    _acceptance(acceptance, found)
    _time(time, list(found["sides"]), runs)
    _idle(idle, list(found["sides"]), runs)
    _reward(reward, found)
    seeds = ", ".join(map(str, found["seeds"]))
    fig.suptitle(f"{found['scenario']}, seeds {seeds}", x=0.01, ha="left")
    for ax in fig.axes:
      ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    fig.savefig(path)


def _line(ax, side: str, steps, values, **options) -> None:
  color = _COLORS.get(side, _OTHER)
  ax.plot(steps, values, color=color, linewidth=1.6, **({"label": side} | options))


def _acceptance(ax, found: Mapping) -> None:
  for side, s in found["sides"].items():
    if s["probes"]:
      _line(ax, side, *zip(*s["probes"], strict=True), marker="o", markersize=3.5)
  ax.set(
    title="Accepted drafts on held-out prompts",
    xlabel="RL step",
    ylabel="tokens per pass",
  )
  if ax.has_data():
    ax.legend()


def _time(ax, sides: Sequence[str], runs: run_summary.Runs) -> None:
  """Draws the wall time of every side so far, relative to the first side's."""
  total = {side: np.cumsum(_mean(f"{side}/step_s", runs)) for side in sides}
  for side in sides:
    _line(ax, side, _steps(total[side]), total[side] / total[sides[0]])
  ax.set(
    title="Wall time so far, all training included",
    xlabel="RL step",
    ylabel=f"relative to {sides[0]}",
  )
  ax.legend()


def _idle(ax, sides: Sequence[str], runs: run_summary.Runs) -> None:
  """Draws idle and harvested time, and training after rollouts, of sides that train."""
  for side in filter(sides_lib.trains, sides):
    for key, label, linestyle in (
      ("idle_s", "idle, of all slices", ":"),
      ("harvested_s", "harvested, of all slices", "-"),
      ("training_s", "training after the rollout", "--"),
    ):
      values = _mean(f"{side}/{key}", runs)
      label = f"{side}: {label}"
      _line(ax, side, _steps(values), values, label=label, linestyle=linestyle)
  ax.set(title="Idle time", xlabel="RL step", ylabel="seconds per step")
  if ax.has_data():
    ax.set_ylim(top=1.35 * ax.get_ylim()[1])  # room for the legend above the peaks
    ax.legend(loc="upper right")


def _reward(ax, found: Mapping) -> None:
  ax.plot(*zip(*found["reward"], strict=True), color="black", linewidth=1.4)
  ax.set(title="Reward, the same on all sides", xlabel="RL step", ylabel="mean")


def _mean(key: str, runs: run_summary.Runs) -> np.ndarray:
  """Means over seeds, of the steps that all seeds have done."""
  by_seed = [[r[key] for r in records if key in r] for records in runs.values()]
  done = min(map(len, by_seed))
  return np.mean([values[:done] for values in by_seed], axis=0)


def _steps(values: Sequence[float]) -> np.ndarray:
  return np.arange(1, len(values) + 1)
