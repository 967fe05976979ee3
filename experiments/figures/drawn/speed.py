"""Draws speed-ups: of whole steps, of rules that choose strategies, of many slices."""

from collections.abc import Mapping
import json

from matplotlib import figure

from experiments.figures import paper
from experiments.figures import results
from experiments.figures.drawn import layout

_NAMES = {"plain": "plain", "ngram": "n-gram", "frozen": "frozen", "tlt": "TLT"}


def larger_target() -> list[Mapping]:
  """Rows of results/bench_step_cpu.jsonl on the larger target: one per batch, and TLT's.

  Returns:
    {"title", "sides"} each; the sides of a row are relative to the fastest plain one
  """
  lines = (results.RESULTS / "bench_step_cpu.jsonl").read_text().splitlines()
  rows = []
  for row in map(json.loads, lines):
    command = row["command"]
    if "runs/wide" not in command or "log-normal" in command:
      continue
    target = row["result"]["targets"]["default"]
    slots = row["result"]["workload"]["rollout"]["slots"]
    intervals = row["rollout_interval_t"]["default"]
    sides = {
      _NAMES[side.removesuffix("+rebalance")]: found
      | {"speedup_rollout_interval": intervals[side]}
      for side, found in target["sides"].items()
      if side.endswith("+rebalance")
    }
    rows.append({"title": f"{slots}", "sides": sides, "steps": target["steps"]})
  return rows


@layout.shown
def end_to_end(found: Mapping) -> figure.Figure:
  """Rollouts and whole steps, on the default target and on the larger one."""
  fig, (left, right) = layout.panels(
    "Default target (1.5M), 16 responses per slice",
    "Larger target (20M), frozen drafter",
    width=5.6,
  )
  groups, errors = {}, {}
  for what, key in (("rollout", "speedup_rollout"), ("whole step", "speedup_step")):
    groups[what] = {_NAMES[s]: r[key] for s, r in found["sides"].items()}
  errors["rollout"] = {
    _NAMES[s]: r["speedup_rollout_interval"]
    for s, r in found["sides"].items()
    if "speedup_rollout_interval" in r and s != "plain"
  }
  layout.bars(left, groups, layout.SIDES, errors=errors)
  left.set_ylabel("speed-up over plain decoding")
  left.margins(y=0.25)
  left.legend(ncols=4, loc="upper left")
  rows = [row for row in larger_target() if "TLT" not in row["sides"]]
  rows.sort(key=lambda row: int(row["title"]))
  groups = {
    row["title"]: {
      "rollout": row["sides"]["frozen"]["speedup_rollout"],
      "whole step": row["sides"]["frozen"]["speedup_step"],
    }
    for row in rows
  }
  errors = {
    row["title"]: {"rollout": row["sides"]["frozen"]["speedup_rollout_interval"]}
    for row in rows
  }
  colors = {"rollout": layout.SIDES["frozen"], "whole step": "#99d8c7"}
  layout.bars(right, groups, colors, errors=errors)
  least, most = paper.END_TO_END["least"], paper.END_TO_END["most"]
  right.axhspan(least, most, color=layout.PAPER, alpha=0.15, linewidth=0)
  right.text(3.45, most, "paper, whole steps", ha="right", va="bottom", color=layout.PAPER)
  right.set(xlabel="responses per slice", ylabel="speed-up over plain decoding")
  right.set_ylim(0, 2.7)
  right.legend(ncols=2, loc="upper left")
  for ax in (left, right):
    layout.one(ax)
  return fig


def compare(found: Mapping) -> str:
  """The paper's whole steps, and ours."""
  spread = f"{paper.END_TO_END['least']} to {paper.END_TO_END['most']}"
  mean = paper.END_TO_END["geometric mean, H100"]
  rows = [["TLT, paper's models on GPUs", f"{spread}, mean {mean}", ""]]
  rows += [
    [f"{_NAMES[s]}, default target", None, f"{r['speedup_step']:.2f}"]
    for s, r in found["sides"].items()
    if s != "plain"
  ]
  for row in larger_target():
    for side, r in row["sides"].items():
      if side != "plain":
        name = f"{side}, larger target, {row['title']} per slice"
        rows.append([name, None, f"{r['speedup_step']:.2f}"])
  return layout.table(["speed-up of whole steps", "paper", "here"], rows)


_RULES = {"predictive": "predictive rule", "bandit": "TLT's bandit"}
_CHOSEN = {
  "always plain": layout.SIDES["plain"],
  "always 3_1_4": layout.SIDES["frozen"],
  "always the longer chain": layout.BLUE,
  "best in hindsight": layout.GREY,
  "predictive rule": layout.SIDES["TLT"],
  "TLT's bandit": "#cc79a7",
}


@layout.shown
def strategies(found: Mapping) -> figure.Figure:
  """Seconds of a rollout by what chooses the strategy."""
  fig, (left, right) = layout.panels(
    "Measured: small policy, 2 CPU cores",
    "SIMULATED: Qwen2.5-7B, 8 H100",
    width=6.0,
    height=3.6,
  )
  for ax, groups, form in (
    (left, measured_rules(found["measured"]), "{:.2f}"),
    (right, {"": simulated_rules(found["simulated"])}, "{:.0f}"),
  ):
    drawn = {name for group in groups.values() for name in group}
    layout.bars(ax, groups, {n: c for n, c in _CHOSEN.items() if n in drawn}, form)
    ax.set_ylabel("seconds of a rollout")
  handles, labels = right.get_legend_handles_labels()
  fig.legend(handles, labels, loc="outside lower center", ncols=3)
  return fig


def measured_rules(found: Mapping) -> dict[str, dict[str, float]]:
  """Seconds by run and what chose; each run has one rule and the fixed strategies."""
  return {
    f"run of {name}": {
      "always plain": run["seconds"]["plain"]["rollout"],
      "always 3_1_4": run["seconds"]["3_1_4"]["rollout"],
      "always the longer chain": run["seconds"]["8_1_9"]["rollout"],
      "best in hindsight": run["seconds"]["frozen"]["rollout"] / run["over_hindsight"],
      name: run["seconds"]["frozen"]["rollout"],
    }
    for rule, name in _RULES.items()
    if (run := found.get(rule))
  }


def simulated_rules(found: Mapping) -> dict[str, float]:
  """Seconds by what chose."""
  return {
    "always plain": found["plain"],
    "always 3_1_4": found["3_1_4"],
    "always the longer chain": found["6_1_7"],
    "best in hindsight": found["hindsight"],
    "predictive rule": found["predictive"],
    "TLT's bandit": found["epsilon_greedy"],
  }


def compare_strategies(found: Mapping) -> str:
  """How far each rule is from the best in hindsight."""
  simulated, rows = simulated_rules(found["simulated"]), []
  for rule, name in _RULES.items():
    run = found["measured"].get(rule)
    measured = f"{run['over_hindsight']:.2f}" if run else "not measured"
    ratio = simulated[name] / simulated["best in hindsight"]
    rows.append([name, None, measured, f"{ratio:.2f}"])
  heads = ["time over the best in hindsight", "paper", "measured", "simulated"]
  return layout.table(heads, rows)


@layout.shown
def scale(found: Mapping) -> figure.Figure:
  """Simulated speed-ups by number of GPUs."""
  fig, panels = layout.panels(
    "SIMULATED: Qwen2.5-7B, one H100 a slice",
    "SIMULATED: Qwen2.5-32B, four H100 a slice",
    width=5.2,
  )
  for ax, (model, gpus) in zip(panels, (("7b", 1), ("32b", 4)), strict=True):
    rows = {gpus * int(n): sides for n, sides in found[model].items()}
    least, most = paper.END_TO_END["least"], paper.END_TO_END["most"]
    ax.axhspan(least, most, color=layout.PAPER, alpha=0.15, linewidth=0)
    for side, name in (("frozen", "frozen"), ("tlt", "TLT")):
      for key, dash in (("speedup_rollout", "--"), ("speedup_step", "-")):
        what = "rollout" if key == "speedup_rollout" else "whole step"
        values = [sides[side][key] for sides in rows.values()]
        ax.plot(
          list(rows),
          values,
          dash,
          color=layout.SIDES[name],
          marker="o",
          markersize=4,
          label=f"{name}, {what}",
        )
    layout.counts(ax, list(rows))
    layout.one(ax)
    ax.set(xlabel="H100s (8 a node)", ylabel="speed-up over plain", ylim=(0, 4.2))
    band = dict(color=layout.PAPER, ha="right", va="bottom")
    ax.text(list(rows)[-1], least + 0.02, "paper, whole steps", **band)
  panels[1].legend(loc="lower right", ncols=2)
  return fig


def compare_scale(found: Mapping) -> str:
  """Whole steps of the paper and of the simulator."""
  spread = f"{paper.END_TO_END['least']} to {paper.END_TO_END['most']}"
  rows = []
  for model in ("7b", "32b"):
    ours = [sides["tlt"]["speedup_step"] for sides in found[model].values()]
    rows.append([f"Qwen2.5-{model.upper()}", spread, f"{min(ours):.2f} to {max(ours):.2f}"])
  return layout.table(["TLT, whole steps", "paper", "simulated"], rows)
