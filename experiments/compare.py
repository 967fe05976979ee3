"""Compares runs: a table, curves, and paired accuracy on the same held-out problems.

    python -m experiments.compare WORKDIR WORKDIR ... [--figure=compare.png] [--steps=10]

The table has the reward and the step time of the last steps, and the accuracy of the last
evaluation with its 95% interval over problems. The figure has reward and accuracy over
steps, over their time, and over drawn tokens. Gains are relative to the first workdir, at
the last evaluation of each, paired over common problems. A folder of
`experiments.evaluate --output` also counts as a workdir. The last line is JSON.
"""

import collections
from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from absl import flags
import matplotlib as mpl
from matplotlib import figure
import numpy as np

from experiments import evaluations
from experiments import launch
from experiments import style
from experiments import tables
from tlt_jax import metrics
from tlt_jax import writing

_FIGURE = flags.DEFINE_string("figure", "compare.png", "File of the curves; '': none.")
_STEPS = flags.DEFINE_integer("steps", 10, "Average over so many steps.", lower_bound=1)

# Okabe-Ito, for colour-blind readers.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")

# What a step takes, by axis of the figure.
_STEP = "RL step"
_SPENT = {
  "minutes of steps": lambda r: r["step/seconds_s"] / 60,
  "drawn tokens, thousands": lambda r: (
    r["rollout/tokens_per_s"] * r["rollout/seconds_s"] / 1e3
  ),
}


def read(workdir: pathlib.Path) -> tuple[list[dict], dict[int, list[dict]]]:
  """A workdir's metrics, and the problems of its evaluations by step."""
  path = workdir / "metrics.jsonl"
  records = metrics.read(path) if path.exists() else []
  evaluated = evaluations.read(workdir)
  if not records and not evaluated:
    raise ValueError(f"{workdir}: no workdir, it has neither metrics.jsonl nor evaluations")
  return records, evaluated


def summary(records: Sequence[Mapping], evaluated: Mapping, steps: int) -> dict[str, Any]:
  """Averages over a workdir's last steps, and the results of its last evaluation."""
  trained = metrics.steps(records)
  result: dict[str, Any] = {"steps": len(trained)}
  for name, key in (("reward", "reward/mean"), ("solved", "reward/solved")):
    values = [r[key] for r in trained[-steps:] if key in r]
    if values:
      result[name] = float(np.mean(values))
  if seconds := [r["step/seconds_s"] for r in trained[-steps:] if "step/seconds_s" in r]:
    result["step_s"] = float(np.median(seconds))
  if evaluated:
    by_problem = [np.mean(problem["solved"]) for problem in evaluated[max(evaluated)]]
    result["problems"] = len(by_problem)
    result["accuracy"] = float(np.mean(by_problem))
    if len(by_problem) > 1:
      result["accuracy_half_width"] = metrics.interval(by_problem)[1]
  return result


def paired(first: Sequence[Mapping], other: Sequence[Mapping]) -> dict[str, Any]:
  """The gain in accuracy of `other` on common problems, with the 95% interval.

  Problems are matched by set and prompt, repeated ones in order.

  Returns:
    problems: the number of common ones; with two or more, gain and gain_half_width
  """
  named_first, named_other = _by_name(first), _by_name(other)
  gains = [
    np.mean(named_other[name]["solved"]) - np.mean(problem["solved"])
    for name, problem in named_first.items()
    if name in named_other
  ]
  result: dict[str, Any] = {"problems": len(gains)}
  if len(gains) > 1:
    result["gain"], result["gain_half_width"] = metrics.interval(gains)
  return result


def _by_name(problems: Sequence[Mapping]) -> dict[tuple, Mapping]:
  named, seen = {}, collections.Counter()
  for problem in problems:
    name = (problem.get("set", ""), json.dumps(problem["prompt"]))
    named[name, seen[name]] = problem
    seen[name] += 1
  return named


def costs(records: Sequence[Mapping]) -> dict[str, dict[int, float]]:
  """By axis of a figure: what a run took up to each step, the one before its first too."""
  trained = metrics.steps(records)
  numbers = [metrics.number(r) for r in trained]
  numbers = [min(numbers, default=1) - 1, *numbers]
  total = {_STEP: {number: float(number) for number in numbers}}
  for axis, of_step in _SPENT.items():
    try:
      sums = np.cumsum([0.0, *map(of_step, trained)])
    except KeyError:  # it does not have that
      sums = []
    total[axis] = dict(zip(numbers, sums, strict=False))
  return total


def rewards(records: Sequence[Mapping], window: int) -> list[tuple[int, float, float]]:
  """(last step, mean, half of its 95% interval over steps) of so many steps in turn."""
  known = [r for r in metrics.steps(records) if "reward/mean" in r]
  parts = [known[i : i + window] for i in range(0, len(known), window)]
  return [
    (metrics.number(part[-1]), *_interval([r["reward/mean"] for r in part]))
    for part in parts
    if len(part) > 1 or window == 1
  ]


def _interval(values: Sequence[float]) -> tuple[float, float]:
  """The mean, and half of its 95% interval; 0 of a single value."""
  return metrics.interval(values) if len(values) > 1 else (float(values[0]), 0.0)


def plot_curves(runs: Mapping[str, tuple], window: int) -> figure.Figure:
  """Draws reward and accuracy by what they took: steps, time and tokens; see `costs`."""
  fig = figure.Figure(figsize=(11, 6.2), layout="constrained")
  axes = fig.subplots(2, 3, sharex="col", sharey="row")
  drawn = {}
  for i, (name, (records, evaluated)) in enumerate(runs.items()):
    shares = {n: [np.mean(p["solved"]) for p in found] for n, found in evaluated.items()}
    accuracy = [(step, *_interval(s)) for step, s in sorted(shares.items())]
    took = costs(records)
    took[_STEP] |= {step: step for step in shares}  # of `evaluate`: without records
    for (reward, below), (axis, at) in zip(axes.T, took.items(), strict=True):
      below.set_xlabel(axis)
      for ax, points in ((reward, rewards(records, window)), (below, accuracy)):
        points = [(at[step], *rest) for step, *rest in points if step in at]
        if points:
          drawn[name] = ax.errorbar(
            *zip(*points, strict=True),
            color=_COLORS[i % len(_COLORS)],
            marker="o",
            markersize=4,
            capsize=3,
            label=name,
          )
  axes[0, 0].set(title=f"Reward, {window} steps each", ylabel="mean, 95% over steps")
  axes[1, 0].set(title="Accuracy on held-out problems", ylabel="share solved, 95%")
  for ax in axes[:, 1:].flat:
    ax.set_visible(ax.has_data())
  columns = len(drawn) if len(drawn) <= 3 else -(-len(drawn) // 2)
  fig.legend(drawn.values(), drawn, loc="outside lower center", ncols=max(columns, 1))
  return fig


def _number(row: Mapping[str, Any], name: str, spec: str) -> str:
  return format(row[name], spec) if name in row else "-"


def _percent(row: Mapping[str, Any], name: str, spec: str = ".1f") -> str:
  if name not in row:
    return "-"
  half = row.get(f"{name}_half_width")
  text = f"{100 * row[name]:{spec}}"
  return text if half is None else f"{text} ± {100 * half:.1f}"


def main(*workdirs: str):
  if len(workdirs) < 2 or len(set(workdirs)) < len(workdirs):
    raise ValueError("give two or more different workdirs to compare")
  runs = {name: read(pathlib.Path(name)) for name in workdirs}
  result = {}
  for name, (records, evaluated) in runs.items():
    result[name] = summary(records, evaluated, _STEPS.value)
    base = runs[workdirs[0]][1]
    if name != workdirs[0] and base and evaluated:
      result[name]["paired"] = paired(base[max(base)], evaluated[max(evaluated)])
  tables.show(
    f"Means of the last {_STEPS.value} steps, and the last evaluation",
    ("workdir", "steps", "reward", "step s", "accuracy %", "gain, paired, points"),
    [
      (
        name,
        str(row["steps"]),
        _number(row, "reward", ".3f"),
        _number(row, "step_s", ".2f"),
        _percent(row, "accuracy"),
        _percent(row.get("paired", {}), "gain", "+.1f"),
      )
      for name, row in result.items()
    ],
  )
  if _FIGURE.value:
    with mpl.rc_context(style.STYLE), writing.to(_FIGURE.value):
      plot_curves(runs, _STEPS.value).savefig(_FIGURE.value)
  print(json.dumps(result))


if __name__ == "__main__":
  launch.run(main, takes_arguments=True)
