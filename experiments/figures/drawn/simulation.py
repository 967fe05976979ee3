"""Draws simulated and measured rollouts."""

from collections.abc import Mapping
import itertools

from matplotlib import figure
import numpy as np

from experiments.figures.drawn import layout
from tlt_jax import metrics

_NAMES = {
  "plain": "plain",
  "frozen": "rule",
  "3_1_4": "always 3_1_4",
  "8_1_9": "always 8_1_9",
}
_COLORS = {
  "plain": layout.SIDES["plain"],
  "frozen": layout.SIDES["frozen"],
  "3_1_4": layout.BLUE,
  "8_1_9": layout.GREY,
}
BAND = 0.1  # the goal: within 10%


@layout.shown
def simulated(found: Mapping) -> figure.Figure:
  """Simulated over measured: seconds of rollouts (medians), chunks and passes, by case."""
  fig, panels = layout.panels(
    "Seconds of a rollout", "Chunks of a rollout", "Passes of the busiest slices", width=4.4
  )
  for ax, of in (
    (panels[0], lambda r: np.median(_each(r), axis=1)),
    (panels[1], lambda r: r["chunks"]),
    (panels[2], lambda r: r["passes"]),
  ):
    _scatter(ax, [{side: of(r) for side, r in c["sides"].items()} for c in found["cases"]])
  panels[0].legend(loc="upper left")
  return fig


def _scatter(ax, cases: list[Mapping[str, tuple[float, float]]]) -> None:
  """A mark for each side of each case, measured and simulated; and the band of 10%."""
  each = np.array([pair for case in cases for pair in case.values()])
  line = np.array([0.8 * each.min(), 1.1 * each.max()])
  ax.fill_between(line, (1 - BAND) * line, (1 + BAND) * line, color="#e4e4e4", zorder=0)
  ax.plot(line, line, color="black", linewidth=0.8)
  for side, name in _NAMES.items():
    of = np.array([case[side] for case in cases])
    ax.plot(of[:, 0], of[:, 1], "o", color=_COLORS[side], markersize=5, label=name)
  ax.set(xlabel="measured", ylabel="simulated", xlim=line, ylim=line)
  ax.set(xscale="log", yscale="log")


def in_order(case: Mapping) -> tuple[int, int]:
  """Pairs of sides that simulation and measurement order alike; and all to be ordered.

  Those are the pairs whose measured ratio has an interval of 95% without 1.
  """
  alike = different = 0
  for a, b in itertools.combinations(case["sides"].values(), 2):
    low, high = metrics.ratio(_each(a)[0], _each(b)[0])["interval"]
    if not low <= 1 <= high:
      different += 1
      _, simulated = _ratios(a, b)
      alike += (low > 1) == (simulated > 1)
  return alike, different


def _each(side: Mapping) -> np.ndarray:
  """Measured and simulated seconds of a side, f64[2 turns]."""
  return np.array(side["each"]).T


def _deviation(side: Mapping) -> float:
  """Simulated over measured seconds, less 1, in the median."""
  measured, again = _each(side)
  return float(np.median(again / measured)) - 1


def _ratios(a: Mapping, b: Mapping) -> np.ndarray:
  """The medians of the ratio of two sides, measured and simulated, f64[2]."""
  return np.median(_each(a) / _each(b), axis=1)


def compare(found: Mapping) -> str:
  """Deviations by case; whether sides are in the same order; and what was counted."""
  rows, each, gains = [], [], []
  for case in found["cases"]:
    of = [case["sides"][side] for side in _NAMES]
    deviations = list(map(_deviation, of))
    slices = "1 slice" if case["slices"] == 1 else f"{case['slices']} slices"
    name = f"{slices}, {case['slots']} responses each"
    name += ", trace" if case["trace"] else ""
    name += ", default" if case["policy"] == "countdown_9m" else ""
    order = "{} of {}".format(*in_order(case))
    rows.append([name, *(f"{d:+.0%}" for d in deviations), order])
    each += deviations
    for r in of[1:]:
      measured, simulated = _ratios(of[0], r)
      gains.append(simulated / measured - 1)
  heads = ["simulated over measured", *_NAMES.values()]
  lines = [layout.table([*heads, "pairs in order"], rows), ""]
  lines += [_summary("rollouts", each), _summary("speed-ups over plain", gains)]
  if counted := found["counted"]:
    lines += ["", f"counted on {counted['slices']} slices, real and simulated:"]
    for side, r in counted.items():
      if side != "slices":
        equal = "every chunk equal" if r["equal"] else "chunks differ"
        chunks, passes = ("{} and {}".format(*r[what]) for what in ("chunks", "passes"))
        lines.append(f"  {side}: {chunks} chunks, {passes} passes; {equal}")
  return "\n".join(lines)


def _summary(what: str, deviations: list[float]) -> str:
  """How far simulated numbers are from measured ones, in a line."""
  apart = np.abs(deviations)
  within = f"{np.sum(apart <= BAND)} of {len(apart)} within {BAND:.0%}"
  return f"{what}: {within}, median deviation {np.median(apart):.0%}"
