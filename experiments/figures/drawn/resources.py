"""Draws what compiled programs and spot training take, and what they give."""

from collections.abc import Mapping

from matplotlib import figure

from experiments.figures import paper
from experiments.figures.drawn import layout

_CASES = {"one strategy": "one\nstrategy", "naive": "naive,\nall", "buckets": "buckets"}
_PAPER_CASES = {
  "one strategy": "one strategy",
  "naive": "naive, several",
  "buckets": "buckets",
}


@layout.shown
def pool(found: Mapping) -> figure.Figure:
  """Programs, compile time and memory of three pools, and the paper's memory."""
  fig, panels = layout.panels(
    "Programs",
    "Compile time, s",
    "Growth of the process, MiB",
    "Paper: graphs, GB",
    width=3.2,
  )
  keys = ("programs", "compile_s", "resident_mib")
  forms = ("{:.0f}", "{:.1f}", "{:.0f}")
  for ax, key, form in zip(panels, keys, forms, strict=False):
    groups = {name: {key: found[case][key]} for case, name in _CASES.items()}
    layout.bars(ax, groups, {key: layout.BLUE}, form)
  groups = {
    _CASES[case]: {"GB": paper.GRAPHS_GB[theirs]} for case, theirs in _PAPER_CASES.items()
  }
  layout.bars(panels[3], groups, {"GB": layout.PAPER})
  return fig


def compare_pool(found: Mapping) -> str:
  """Both as multiples of one strategy."""
  rows = []
  for case in ("naive", "buckets"):
    theirs = paper.GRAPHS_GB[_PAPER_CASES[case]] / paper.GRAPHS_GB["one strategy"]
    ours = found[case]["resident_mib"] / found["one strategy"]["resident_mib"]
    rows.append([f"memory of {case} over one strategy", theirs, ours])
  seconds = found["naive"]["compile_s"] / found["buckets"]["compile_s"]
  rows.append(["compile time of naive over buckets", None, seconds])
  return layout.table(["", "paper", "here"], rows)


@layout.shown
def spot(found: Mapping) -> figure.Figure:
  """Checkpoints, packing, and idle time that was harvested."""
  fig, (left, middle, right) = layout.panels(
    "A step loses to a checkpoint, ms",
    "Packed over padded rows",
    "Time of the slices in a rollout",
    width=4.4,
  )
  ours = found["checkpoint"]
  groups = {
    "synchronous": {"paper": paper.CHECKPOINT_MS["synchronous"]},
    "asynchronous": {"paper": paper.CHECKPOINT_MS["asynchronous"]},
    "selective": {"paper": paper.CHECKPOINT_MS["selective"]},
  }
  for name, key in (
    ("synchronous", "full_s"),
    ("asynchronous", "behind_s"),
    ("selective", "selective_s"),
  ):
    if key in ours:
      groups[name]["here"] = 1e3 * ours[key]
  layout.bars(left, groups, {"paper": layout.PAPER, "here": layout.BLUE}, "{:.0f}")
  left.set_ylabel("ms")
  left.legend()
  groups = {"": {"paper": paper.PACKING, "here": found["packing"]["ratio"]}}
  layout.bars(middle, groups, {"paper": layout.PAPER, "here": layout.BLUE}, "{:.1f}x")
  middle.set(ylabel="sequences trained per second, ratio", xlim=(-1, 1))
  middle.legend()
  idle = 100 * found["idle_share"]
  trained = idle * found["harvested_share"]
  parts = (
    ("decoding and host", 100 - idle, layout.SIDES["plain"]),
    ("idle, trained in", trained, layout.SIDES["TLT"]),
    ("idle, lost", idle - trained, layout.GREY),
  )
  start = 0.0
  for name, share, color in parts:
    right.bar(
      [0], [share], 0.5, bottom=[start], color=color, label=f"{name} ({share:.1f}%)"
    )
    start += share
  right.set(ylabel="share (%)", xticks=[], xlim=(-0.5, 1.5), ylim=(0, 100))
  right.legend(loc="upper right", reverse=True)
  return fig


def compare_spot(found: Mapping) -> str:
  """Ratios of the paper and ours."""
  theirs, ours = paper.CHECKPOINT_MS, found["checkpoint"]
  return layout.table(
    ["", "paper", "here"],
    [
      [
        "synchronous over selective checkpoint",
        theirs["synchronous"] / theirs["selective"],
        ours["full_s"] / ours["selective_s"],
      ],
      ["packed over padded training", paper.PACKING, found["packing"]["ratio"]],
      ["idle share of the slices' time", None, f"{found['idle_share']:.1%}"],
      ["of that, trained in", None, f"{found['harvested_share']:.0%}"],
      ["rollouts longer by training", None, f"{found['busy_overhead']:+.1%}"],
    ],
  )
