"""Draws how many drafts are accepted: by tree, position, drafter, and over RL steps."""

from collections.abc import Mapping
import json

import matplotlib as mpl
from matplotlib import figure
import numpy as np

from experiments.figures import paper
from experiments.figures import results
from experiments.figures.drawn import layout

_LINES = ("#08306b", "#0072b2", "#56b4e9", "#a6cee3")
_KINDS = {"eagle2": "EAGLE-2", "hass": "EAGLE-2, unrolled", "eagle3": "EAGLE-3, unrolled"}


@layout.shown
def trees(found: Mapping) -> figure.Figure:
  """Tokens per pass by depth and nodes; speed-ups by nodes and live batch."""
  fig, (left, middle, right) = layout.panels(
    "Tokens per pass, measured",
    "Speed-up, measured (2 CPU cores)",
    "Speed-up, SIMULATED (32B, 4 H100)",
    width=4.5,
  )
  grid = {tuple(map(int, k.split("_"))): v for k, v in found["grid"].items()}
  depths = sorted({k[0] for k in grid})
  shades = mpl.colormaps["Blues"](np.linspace(0.35, 1.0, len(depths)))
  for depth, color in zip(depths, shades, strict=True):
    points = sorted((k[2], v) for k, v in grid.items() if k[0] == depth)
    label = f"depth {depth}"
    left.plot(
      *zip(*points, strict=True), marker="o", color=color, label=label, linewidth=1.6
    )
  theirs = sorted((n, v) for (_, n), v in paper.TOKENS_PER_PASS.items())
  left.plot(*zip(*theirs, strict=True), "D", color=layout.PAPER, label="paper, 32B")
  for (depth, nodes), length in paper.TOKENS_PER_PASS.items():
    at = dict(textcoords="offset points", ha="center", color=layout.PAPER, fontsize=8.5)
    left.annotate(f"depth {depth}", (nodes, length), (0, 7), **at)
  layout.counts(left, [4, 8, 16, 32, 64])
  left.set(xlabel="nodes verified per pass", ylabel="tokens per pass", ylim=(0, 11.5))
  left.legend(loc="upper left", fontsize=8.5, ncols=2)
  for ax, rows in ((middle, found["by_batch"]), (right, found["simulated"])):
    lives = [int(live) for live in rows]
    for name, color in zip(next(iter(rows.values())), _LINES, strict=False):
      nodes = name.split("_")[2]
      values = [arms[name] for arms in rows.values()]
      ax.plot(lives, values, marker="o", color=color, label=f"{nodes} nodes", linewidth=1.6)
    layout.counts(ax, lives)
    layout.one(ax)
    ax.set(xlabel="live requests", ylabel="speed-up over plain", ylim=(0, None))
  middle.set_xlabel("live requests per slice")
  known = sorted(paper.SPEEDUP_OF_16_NODES.items())
  right.plot(*zip(*known, strict=True), "D", color=layout.PAPER, label="paper, 16 nodes")
  middle.legend()
  right.legend()
  return fig


def compare_trees(found: Mapping) -> str:
  """Tokens per pass and speed-ups of the paper's trees."""
  rows = []
  for (depth, nodes), length in paper.TOKENS_PER_PASS.items():
    ours = found["grid"].get(f"{depth}_4_{nodes}")
    name = f"tokens per pass, depth {depth}, {nodes} nodes"
    rows.append([name, length, "not measured" if ours is None else ours])
  for live, speedup in paper.SPEEDUP_OF_16_NODES.items():
    simulated = found["simulated"][str(live)]["4_8_16"]
    rows.append(
      [f"speed-up of 16 nodes, {live} live", speedup, f"{simulated:.2f} simulated"]
    )
  return layout.table(["", "paper", "here"], rows)


@layout.shown
def children(found: Mapping) -> figure.Figure:
  """Tokens per pass by children per node; acceptance by position."""
  titles = ["SmolLM2 on GSM8K, chains of 5", "SmolLM2 on sums, after 40 steps"]
  if found["trees"]:
    titles.append("Countdown: trees of depth 6, 16 nodes")
  fig, (middle, right, *rest) = layout.panels(*titles, width=4.6)
  for ax in rest:
    groups = {_top_k(name): {"": n} for name, n in found["trees"].items()}
    layout.bars(ax, groups, {"": layout.BLUE})
    ax.set(xlabel="children per node (top-k)", ylabel="tokens per pass")
  path = results.RESULTS / "smollm2_gsm8k" / "acceptance.json"
  cases = [c for c in json.loads(path.read_text()) if c["drafter"] == "EAGLE-2"]
  for case, color in zip(cases, _LINES, strict=False):
    label = f"temperature {case['temperature']:g}"
    _by_position(middle, case["acceptance_rate_pos"], color, label)
  for row in follows():
    if row["step"] == 40:
      trained = row["drafter"] == "trained"
      color = layout.SIDES["TLT" if trained else "frozen"]
      label = "adapted in the run" if trained else "frozen"
      _by_position(right, row["acceptance_rate_pos"], color, label)
  for ax in (middle, right):
    ax.set_ylim(bottom=0)
  return fig


def _top_k(strategy: str) -> str:
  width = strategy.split("_")[1]
  return width if width != "1" else "1 (chain)"


def _by_position(ax, rates: list[float], color: str, label: str) -> None:
  at = range(1, 1 + len(rates))
  percent = [100 * rate for rate in rates]
  ax.plot(at, percent, marker="o", color=color, label=label, linewidth=1.8)
  ax.set_xticks(at)
  ax.set(xlabel="drafted token", ylabel="passes that keep it (%)")
  ax.legend()


def compare_children(found: Mapping) -> str:
  """Tokens per pass by children; the paper's figures are not on record."""
  trees = found["trees"] or {}
  rows = [[f"Countdown, top-k {_top_k(name)}", None, n] for name, n in trees.items()]
  last = {r["drafter"]: r["acceptance_rate_pos"] for r in follows() if r["step"] == 40}
  for k in (1, 2, 3):
    frozen, adapted = (f"{last[name][k - 1]:.2f}" for name in ("frozen", "trained"))
    rows.append([f"SmolLM2, token {k} stands, frozen and adapted", None])
    rows[-1].append(f"{frozen}, {adapted}")
  return layout.table(["", "paper", "here"], rows)


def follows() -> list[Mapping]:
  """Frozen and adapted drafters of SmolLM2 over the steps of a run."""
  path = results.RESULTS / "smollm2_sums" / "acceptance.json"
  return json.loads(path.read_text())


@layout.shown
def following(found: Mapping) -> figure.Figure:
  """Adapted against frozen drafters over RL steps, and agreement as they train."""
  titles = ["SmolLM2 on sums: chains of 3", "SmolLM2 on sums: agreement"]
  if found["agreement"]:
    titles.append("Countdown: agreement by update")
  fig, (left, middle, *rest) = layout.panels(*titles, width=4.6)
  for drafter, side in (("frozen", "frozen"), ("trained", "TLT")):
    rows = [r for r in follows() if r["drafter"] == drafter]
    if drafter == "trained":
      rows = [next(r for r in follows() if r["step"] == 0), *rows]
    left.plot(
      [r["step"] for r in rows],
      [r["tokens_per_pass"] for r in rows],
      color=layout.SIDES[side],
      marker="o",
      linewidth=1.8,
      label="frozen" if drafter == "frozen" else "adapted in the run",
    )
  left.set(xlabel="policy after so many RL steps", ylabel="tokens per pass")
  left.legend()
  steps = _smollm2_steps()
  for k, color in zip((1, 2, 3), _LINES, strict=False):
    values = [step[f"drafter/agreement_{k}"] for step in steps]
    at = [step["step"] + 1 for step in steps]
    middle.plot(at, values, color=color, linewidth=1.4, label=f"drafted token {k}")
  middle.set(xlabel="RL step", ylabel="1 - total variation, mean of a step")
  middle.legend(loc="lower right")
  for ax in rest:
    _by_update(ax, found["agreement"])
  return fig


def _smollm2_steps() -> list[dict]:
  """Metrics of the steps in which the drafter trained."""
  text = (results.RESULTS / "smollm2_sums" / "metrics.jsonl").read_text()
  steps = map(json.loads, text.splitlines())
  return [step for step in steps if "drafter/agreement_1" in step]


def _by_update(ax, agreement: list[list[float]]) -> None:
  at = 0
  for i, values in enumerate(agreement):
    xs = np.arange(at, at + len(values))
    ax.plot(xs, values, color=layout.SIDES["TLT"], linewidth=1.2)
    at += len(values)
    if i + 1 < len(agreement):
      label = "the policy is updated" if i == 0 else None
      ax.axvline(at - 0.5, color="black", linewidth=0.7, dashes=(4, 3), label=label)
  ax.set(xlabel="updates of the drafter", ylabel="1 - total variation")
  ax.legend(loc="lower right", frameon=True, framealpha=0.9)


def compare_following(found: Mapping) -> str:
  """Tokens per pass of frozen and adapted drafters."""
  last = {r["drafter"]: r["tokens_per_pass"] for r in follows() if r["step"] == 40}
  ours = {"frozen": last["frozen"], "adapted": last["trained"]}
  rows = [[f"tokens per pass, {name}", paper.FOLLOWING[name], ours[name]] for name in ours]
  ratios = [both["adapted"] / both["frozen"] for both in (paper.FOLLOWING, ours)]
  rows.append(["adapted over frozen", *ratios])
  if found["agreement"]:
    dip, gain = dips(found["agreement"])
    rows.append(["agreement, change at an update of the policy", None, f"{dip:+.3f}"])
    rows.append(["agreement, change between two of them", None, f"{gain:+.3f}"])
  return layout.table(["", "paper", "here"], rows)


def dips(agreement: list[list[float]], count: int = 5) -> tuple[float, float]:
  """Mean change of agreement at updates of the policy, and between them.

  Args:
    agreement: by RL step and update of the drafter
    count: of updates that a mean is taken of, before and after
  """
  steps = [values for values in agreement if len(values) >= 2 * count]
  first = [np.mean(values[:count]) for values in steps]
  last = [np.mean(values[-count:]) for values in steps]
  at = np.subtract(first[1:], last[:-1])
  return float(np.mean(at)), float(np.mean(np.subtract(last, first)))


@layout.shown
def kinds(found: Mapping) -> figure.Figure:
  """Acceptance of kinds of drafters, and what their training takes."""
  titles = ["SmolLM2-135M on GSM8K, chains of 5", "The same, as they are trained"]
  unrolled = found["unrolled"]
  if unrolled:
    titles += ["Countdown, equal number of updates"]
  fig, (left, middle, *rest) = layout.panels(*titles, width=4.6)
  folder = results.RESULTS / "smollm2_gsm8k"
  colors = {"n-gram": layout.SIDES["n-gram"], "EAGLE-2": "#0072b2", "EAGLE-3": "#009e73"}
  groups = {}
  for case in json.loads((folder / "acceptance.json").read_text()):
    group = groups.setdefault(f"temperature {case['temperature']:g}", {})
    group[case["drafter"]] = case["mean_acceptance_length"]
  layout.bars(left, groups, colors)
  left.set(ylabel="tokens per pass; plain decoding has 1")
  layout.one(left)
  left.legend(loc="upper right")
  learning = json.loads((folder / "learning.json").read_text())
  for name in ("EAGLE-2", "EAGLE-3"):
    points = zip(*learning[name], strict=True)
    middle.plot(*points, marker="o", color=colors[name], label=name, linewidth=1.8)
  middle.set(xlabel="updates of the drafter (1.4 to 1.6 s each)", xlim=(0, None))
  middle.set(ylabel="tokens per pass (held-out rows)", ylim=(1, None))
  middle.legend(loc="lower right")
  for ax in rest:
    groups = {
      kind.replace(", ", ",\n"): {
        "chains of 3" if c["strategy"] == "3_1_4" else "chains of 5": n
        for c in unrolled[name]["acceptance"]
        if c["strategy"] in ("3_1_4", "5_1_6") and (n := c["mean_acceptance_length"])
      }
      for name, kind in _KINDS.items()
      if name in unrolled
    }
    layout.bars(ax, groups, {"chains of 3": "#56b4e9", "chains of 5": "#0072b2"})
    ax.set(ylabel="tokens per pass")
    ax.margins(y=0.25)
    ax.legend(ncols=2, loc="upper left")
  return fig


def compare_kinds(found: Mapping) -> str:
  """Tokens per pass by kind."""
  folder = results.RESULTS / "smollm2_gsm8k"
  cases = json.loads((folder / "acceptance.json").read_text())
  rows = [["none", None, "1.00"]]
  rows += [
    [
      f"{c['drafter']}, SmolLM2, T = {c['temperature']:g}",
      None,
      c["mean_acceptance_length"],
    ]
    for c in cases
  ]
  for name, run in (found["unrolled"] or {}).items():
    length = next(
      c["mean_acceptance_length"] for c in run["acceptance"] if c["strategy"] == "5_1_6"
    )
    each = f"{run['updates']} updates of {run['seconds'] / run['updates']:.1f} s"
    rows.append([f"{_KINDS[name]}, Countdown, {each}", None, length])
  return layout.table(["tokens per pass, chains of 5", "paper", "here"], rows)
