"""Draws what the simulator says beside what was measured."""

from collections.abc import Mapping

from matplotlib import figure
import numpy as np

from experiments.figures.drawn import layout

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
  """Simulated over measured: seconds of rollouts, their chunks and passes, by case."""
  fig, panels = layout.panels(
    "Seconds of a rollout", "Chunks of a rollout", "Passes of the busiest slices", width=4.4
  )
  for ax, of in (
    (panels[0], lambda r: (r["measured_s"], r["simulated_s"])),
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


def ranking(case: Mapping, key: str) -> list[str]:
  """The sides of a case, the fastest first."""
  return sorted(case["sides"], key=lambda side: case["sides"][side][key])


def beside(found: Mapping) -> str:
  """Deviations by case; whether the sides rank the same; and what was counted."""
  rows, each = [], []
  for case in found["cases"]:
    of = [case["sides"][side] for side in _NAMES]
    deviations = [r["simulated_s"] / r["measured_s"] - 1 for r in of]
    same = ranking(case, "measured_s") == ranking(case, "simulated_s")
    slices = "1 slice" if case["slices"] == 1 else f"{case['slices']} slices"
    name = f"{slices}, {case['slots']} responses each"
    ranks = "same" if same else "different"
    rows.append([name, *(f"{d:+.0%}" for d in deviations), ranks])
    each += deviations
  heads = ["simulated over measured", *_NAMES.values()]
  within = np.mean(np.less_equal(np.abs(each), BAND))
  lines = [layout.table([*heads, "ranking"], rows), ""]
  lines.append(f"median deviation {np.median(np.abs(each)):.0%}; {within:.0%} within 10%")
  if counted := found["counted"]:
    lines += ["", f"counted on {counted['slices']} slices, real and simulated:"]
    for side, r in counted.items():
      if side != "slices":
        equal = "every chunk equal" if r["equal"] else "chunks differ"
        chunks, passes = ("{} and {}".format(*r[what]) for what in ("chunks", "passes"))
        lines.append(f"  {side}: {chunks} chunks, {passes} passes; {equal}")
  return "\n".join(lines)
