"""Table and figure of `simulate --ways`: what whole runs of RL gain by which way."""

from collections.abc import Mapping
import dataclasses
import pathlib

import matplotlib
from matplotlib import figure
import numpy as np

from experiments import style
from experiments import tables
from tlt_jax.simulate import ledger as ledger_lib
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.simulate import ways as ways_lib

_COLOURS = {  # of a kind of way
  "Synchronous": "#4d4d4d",
  "Partial": "#1b7f5a",
  "OneOff": "#c46a1b",
  "Asynchronous": "#3b62b5",
}
_LINES = {"plain": ":", "frozen": "--", "tlt": "-"}
_AGES = ("#d9d9d9", "#f2c879", "#df7f4b", "#a63232")  # of tokens


@dataclasses.dataclass(frozen=True)
class Result:
  """A way on a number of devices."""

  way: ways_lib.Way
  devices: int
  draws: int  # devices that draw; the others have the learner, or if none: all
  summary: ledger_lib.Summary


def compare(scenario: scenario_lib.Scenario) -> list[Result]:
  """Every way on every number of devices on which it fits."""
  comparison = ways_lib.Comparison.of(scenario)
  share, found = {}, []
  for slices in scenario.slices:
    for way in comparison.ways:
      best = comparison.best(scenario, way, slices, share.get(way, 0.5))
      if best is not None:
        draws, summary = best
        share[way] = draws / slices
        sizes = slices * scenario.tensor, draws * scenario.tensor
        found.append(Result(way, *sizes, summary))
  return found


def report(found: list[Result]) -> None:
  """Prints a table for each number of devices."""
  for devices in dict.fromkeys(r.devices for r in found):
    here = [r for r in found if r.devices == devices]
    base = here[0].summary.tokens_per_s
    tables.show(
      f"{devices} devices: those that draw, useful tokens/s, shares of all devices' time;\n"
      "policy versions of a response, mean and most; % of tokens 0, 1, 2, 3 or more old;\n"
      "carried 2x: twice an update's prompts in flight; async 4: four updates' ahead;\n"
      "frozen: a drafter that does not train",
      ["", "draw", "steps/h", "tokens/s", "", "idle", "drafter", "versions", "ages"],
      [_row(r, base) for r in here],
    )


def _row(r: Result, base: float) -> list[str]:
  x = r.summary
  return [
    r.way.name,
    str(r.draws),
    f"{x.steps_per_hour:.1f}",
    f"{x.tokens_per_s:,.0f}",
    f"{x.tokens_per_s / base:.2f}x",
    f"{max(x.idle, 0.0):.0%}",
    f"{x.drafter:.1%}",
    f"{x.mean_versions:.2f}, {x.most_versions}",
    " ".join(f"{100 * share:.0f}" for share in x.by_age),
  ]


def verdict(found: list[Result]) -> str:
  """The fastest ways on the most devices, by the age of what they train on."""
  most = max(r.devices for r in found)
  last = [r for r in found if r.devices == most]

  def fastest(oldest: int) -> Result:
    allowed = [r for r in last if r.summary.most_age <= oldest]
    return max(allowed, key=lambda r: r.summary.tokens_per_s)

  fresh, old = fastest(0), fastest(max(r.summary.most_age for r in last))
  gain = old.summary.tokens_per_s / fresh.summary.tokens_per_s
  return (
    f"On {most} devices {fresh.way.name} is the fastest without stale tokens; "
    f"{old.way.name} is {gain:.2f}x as fast, with {old.summary.stale:.0%} of them stale."
  )


@matplotlib.rc_context(style.STYLE)
def draw(found: list[Result], out: pathlib.Path) -> str:
  """Writes the figure; returns its path."""
  fig = figure.Figure(figsize=(11, 5.2), layout="constrained")
  speed, ages = fig.subplots(1, 2)
  _draw_speed(speed, found)
  _draw_ages(ages, found)
  path = out / "ways.png"
  fig.savefig(path, dpi=150)
  return str(path)


def _draw_speed(ax, found: list[Result]) -> None:
  marks = {}
  for way in dict.fromkeys(r.way for r in found):
    kind, of_way = type(way).__name__, [r for r in found if r.way == way]
    mark = marks.setdefault((kind, way.side), 0)
    marks[kind, way.side] += 1
    ax.plot(
      [r.devices for r in of_way],
      [r.summary.tokens_per_s / r.devices for r in of_way],
      color=_COLOURS[kind],
      linestyle=_LINES[way.side],
      marker="os^"[mark % 3],
      markersize=4,
      label=way.name,
    )
  devices = sorted({r.devices for r in found})
  ax.set_xscale("log", base=2)
  ax.set_xticks(devices, [str(n) for n in devices])
  ax.set_ylim(bottom=0)
  ax.set(xlabel="devices", ylabel="useful tokens/s per device", title="Speed")
  ax.legend(ncols=2, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.13))


def _draw_ages(ax, found: list[Result]) -> None:
  most = max(r.devices for r in found)
  last = [r for r in found if r.devices == most]
  shares = np.array([r.summary.by_age for r in last])
  left = np.zeros(len(last))
  for age, colour in enumerate(_AGES):
    label = f"{age} or more" if age == ledger_lib.OLD else str(age)
    ax.barh(range(len(last)), shares[:, age], left=left, color=colour, label=label)
    left += shares[:, age]
  ax.set_yticks(range(len(last)), [r.way.name for r in last], fontsize=8)
  ax.invert_yaxis()
  ax.grid(False)
  ax.set(xlim=(0, 1), xlabel="share of the tokens that are trained on")
  ax.set_title(f"Age of tokens in updates, {most} devices")
  ax.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.13))


def as_json(found: list[Result]) -> list[Mapping]:
  return [
    {"way": r.way.name, "devices": r.devices, "draws": r.draws}
    | dataclasses.asdict(r.summary)
    for r in found
  ]
