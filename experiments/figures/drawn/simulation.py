"""Draws what the simulator says beside what was measured on this machine."""

from collections.abc import Mapping

from matplotlib import figure
import numpy as np

from experiments.figures.drawn import layout

_COLORS = {
  "plain": layout.SIDES["plain"],
  "frozen": layout.SIDES["frozen"],
  "3_1_4": layout.BLUE,
  "8_1_9": "#cc79a7",
}
_NAMES = {"plain": "plain", "frozen": "predictive rule", "3_1_4": "always 3_1_4"}
_NAMES["8_1_9"] = "always 8_1_9"
BAND = 0.1  # the goal: within 10%


def deviations(found: Mapping) -> list[dict]:
  """Of each case and side: simulated seconds over measured ones, less 1."""
  return [
    {
      "slices": case["slices"],
      "slots": case["slots"],
      "side": side,
      "deviation": r["simulated_s"] / r["measured_s"] - 1,
    }
    for case in found["cases"]
    for side, r in case["sides"].items()
  ]


@layout.shown
def simulated(found: Mapping) -> figure.Figure:
  """Seconds of rollouts, and speed-ups over plain decoding."""
  fig, (left, right) = layout.panels(
    "Seconds of a rollout", "Speed-up over plain decoding", width=4.4, height=4.2
  )
  for side, color in _COLORS.items():
    seconds, gains = [], []
    for case in found["cases"]:
      of, plain = case["sides"][side], case["sides"]["plain"]
      seconds += of["each"]
      gains.append([plain[k] / of[k] for k in ("measured_s", "simulated_s")])
    dots = dict(color=color, label=_NAMES[side], markersize=5, alpha=0.8)
    left.plot(*zip(*seconds, strict=True), "o", **dots)
    if side != "plain":
      right.plot(*zip(*gains, strict=True), "o", **dots | {"markersize": 7})
  for ax in (left, right):
    low, high = (
      max(min(*ax.get_xlim(), *ax.get_ylim()), 0.05),
      max(*ax.get_xlim(), *ax.get_ylim()),
    )
    line = np.array([low, high])
    ax.plot(line, line, color="black", linewidth=0.8)
    ax.fill_between(line, (1 - BAND) * line, (1 + BAND) * line, color="#e4e4e4", zorder=0)
    ax.set(xlabel="measured", ylabel="simulated", xlim=line, ylim=line)
    ax.set_aspect("equal")
  left.legend(loc="upper left")
  right.text(0.97, 0.05, "grey: within 10%", transform=right.transAxes, ha="right")
  return fig


def ranking(case: Mapping, key: str) -> list[str]:
  """The sides of a case, the fastest first."""
  return sorted(case["sides"], key=lambda side: case["sides"][side][key])


def beside(found: Mapping) -> str:
  """Deviations by case; whether the sides rank the same; and what was counted."""
  rows = []
  for case in found["cases"]:
    of = {s: r["simulated_s"] / r["measured_s"] - 1 for s, r in case["sides"].items()}
    same = ranking(case, "measured_s") == ranking(case, "simulated_s")
    rows.append(
      [
        f"{case['slices']} slices, {case['slots']} each",
        *(f"{of[side]:+.0%}" for side in _NAMES),
        "same" if same else "different",
      ]
    )
  each = [abs(d["deviation"]) for d in deviations(found)]
  within = f"{np.mean(np.less_equal(each, BAND)):.0%} of all within {BAND:.0%}"
  table = layout.table(["simulated over measured", *_NAMES.values(), "ranking"], rows)
  counted = found["counted"]
  lines = [table, "", f"median deviation {np.median(each):.0%}; {within}", ""]
  lines.append(f"counted on {counted['slices']} slices, real and simulated:")
  for side, r in counted.items():
    if side != "slices":
      equal = "every chunk equal" if r["equal"] else "chunks differ"
      lines.append(f"  {side}: {r['chunks']} chunks, {r['passes']} passes; {equal}")
  return "\n".join(lines)
