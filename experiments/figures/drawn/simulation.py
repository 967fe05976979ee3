"""Draws what the simulator says beside what was measured."""

from collections.abc import Mapping

from matplotlib import figure
import numpy as np

from experiments.figures.drawn import layout

_NAMES = {
  "plain": "plain",
  "frozen": "rule",
  "3_1_4": "always\n3_1_4",
  "8_1_9": "always\n8_1_9",
}
_COLORS = {"measured": layout.SIDES["frozen"], "simulated": layout.GREY}
BAND = 0.1  # the goal: within 10%


@layout.shown
def simulated(found: Mapping) -> figure.Figure:
  """Seconds, chunks and passes of what is on record; seconds of what was timed now."""
  titles = ["Seconds of a rollout", "Chunks of a rollout", "Passes of the busiest slices"]
  if found["cases"]:
    titles.append("Seconds, other cases")
  fig, panels = layout.panels(*titles, width=4.4)
  sides = found["recorded"]["sides"]
  pair = lambda values: dict(zip(_COLORS, values, strict=True))
  for ax, form, of in (
    (panels[0], "{:.2f}", lambda r: pair((r["measured_s"], r["simulated_s"]))),
    (panels[1], "{:.1f}", lambda r: pair(r["chunks"])),
    (panels[2], "{:.0f}", lambda r: pair(r["passes"])),
  ):
    groups = {_NAMES[side]: of(r) for side, r in sides.items()}
    layout.bars(ax, groups, _COLORS, form)
    ax.margins(y=0.25)
    ax.legend(ncols=2, loc="upper left")
  panels[0].set_ylabel("seconds, mean of 10 steps")
  for ax in panels[3:]:
    _scatter(ax, found["cases"])
  return fig


def _scatter(ax, cases: list[Mapping]) -> None:
  """Simulated over measured seconds of every rollout, and the band of 10%."""
  each = np.array([x for case in cases for r in case["sides"].values() for x in r["each"]])
  line = np.array([0.8 * each.min(), 1.2 * each.max()])
  ax.fill_between(line, (1 - BAND) * line, (1 + BAND) * line, color="#e4e4e4", zorder=0)
  ax.plot(line, line, color="black", linewidth=0.8)
  ax.plot(each[:, 0], each[:, 1], "o", color=layout.BLUE, markersize=4)
  ax.set(xlabel="measured", ylabel="simulated", xlim=line, ylim=line)


def ranking(case: Mapping, key: str) -> list[str]:
  """The sides of a case, the fastest first."""
  return sorted(case["sides"], key=lambda side: case["sides"][side][key])


def beside(found: Mapping) -> str:
  """Deviations by case; whether the sides rank the same; and what was counted."""
  rows, each = [], []
  for case in (found["recorded"], *found["cases"]):
    of = [case["sides"][side] for side in _NAMES]
    deviations = [r["simulated_s"] / r["measured_s"] - 1 for r in of]
    same = ranking(case, "measured_s") == ranking(case, "simulated_s")
    name = f"{case['slices']} slices, {case['slots']} responses each"
    ranks = "same" if same else "different"
    rows.append([name, *(f"{d:+.0%}" for d in deviations), ranks])
    each += deviations
  heads = ["simulated over measured", *(n.replace("\n", " ") for n in _NAMES.values())]
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
