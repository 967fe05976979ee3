"""Draws how many drafted tokens stand: by tree, position, drafter, and over RL steps."""

from collections.abc import Mapping
import json

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
  for depth, color in zip(sorted({k[0] for k in grid}), _LINES, strict=True):
    points = sorted((k[2], v) for k, v in grid.items() if k[0] == depth)
    label = f"depth {depth}"
    left.plot(
      *zip(*points, strict=True), marker="o", color=color, label=label, linewidth=1.6
    )
  theirs = sorted((n, v) for (_, n), v in paper.TOKENS_PER_PASS.items())
  left.plot(*zip(*theirs, strict=True), "D", color=layout.PAPER, label="paper, 32B")
  for (depth, nodes), length in paper.TOKENS_PER_PASS.items():
    at = dict(textcoords="offset points", ha="right", color=layout.PAPER, fontsize=8.5)
    left.annotate(f"depth {depth}", (nodes, length), (-7, -3), **at)
  layout.counts(left, [4, 8, 16, 32, 64])
  left.set(xlabel="nodes verified per pass", ylabel="tokens per pass", ylim=(0, 9.8))
  left.legend(loc="upper left", fontsize=8.5)
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


def trees_beside(found: Mapping) -> str:
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
  """Tokens per pass by children per node; what stands by position."""
  fig, (left, middle, right) = layout.panels(
    "Trees of depth 6, 16 nodes",
    "SmolLM2 on GSM8K, chains of 5",
    "SmolLM2 on sums, after 40 steps",
    width=4.5,
  )
  places = range(len(found))
  layout.bars(left, {_top_k(name): {"": n} for name, n in found.items()}, {"": layout.BLUE})
  left.set_xticks(places, [_top_k(name) for name in found])
  left.set(xlabel="children per node (top-k)", ylabel="tokens per pass")
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


def children_beside(found: Mapping) -> str:
  """Tokens per pass by children; the paper's figures are not on record."""
  rows = [[f"top-k {_top_k(name)}", None, length] for name, length in found.items()]
  return layout.table(["tokens per pass, Countdown", "paper", "here"], rows)


def follows() -> list[Mapping]:
  """Frozen and adapted drafters of SmolLM2 over the steps of a run."""
  path = results.RESULTS / "smollm2_sums" / "acceptance.json"
  return json.loads(path.read_text())


@layout.shown
def following(found: Mapping) -> figure.Figure:
  """Agreement after every update of the drafter; adapted against frozen by step."""
  fig, (left, right) = layout.panels(
    "Agreement of drafter and policy, Countdown",
    "SmolLM2 on sums: chains of 3",
    width=5.6,
    width_ratios=(1.5, 1.0),
  )
  at = 0
  for i, values in enumerate(found["agreement"]):
    xs = np.arange(at, at + len(values))
    left.plot(xs, values, color=layout.SIDES["TLT"], linewidth=1.2)
    at += len(values)
    if i + 1 < len(found["agreement"]):
      label = "the policy is updated" if i == 0 else None
      left.axvline(at - 0.5, color="black", linewidth=0.7, dashes=(4, 3), label=label)
  left.set(xlabel="updates of the drafter", ylabel="1 - total variation")
  left.legend(loc="lower right", frameon=True, framealpha=0.9)
  for drafter, side in (("frozen", "frozen"), ("trained", "TLT")):
    rows = [r for r in follows() if r["drafter"] == drafter]
    if drafter == "trained":
      rows = [next(r for r in follows() if r["step"] == 0), *rows]
    right.plot(
      [r["step"] for r in rows],
      [r["tokens_per_pass"] for r in rows],
      color=layout.SIDES[side],
      marker="o",
      linewidth=1.8,
      label="frozen" if drafter == "frozen" else "adapted in the run",
    )
  right.set(xlabel="policy after so many RL steps", ylabel="tokens per pass")
  right.legend()
  return fig


def following_beside(found: Mapping) -> str:
  """Tokens per pass of frozen and adapted drafters."""
  last = {r["drafter"]: r["tokens_per_pass"] for r in follows() if r["step"] == 40}
  dip, gain = dips(found["agreement"])
  return layout.table(
    ["", "paper", "here"],
    [
      ["tokens per pass, frozen", paper.FOLLOWING["frozen"], f"{last['frozen']:.2f}"],
      ["tokens per pass, adapted", paper.FOLLOWING["adapted"], f"{last['trained']:.2f}"],
      ["agreement, change at an update of the policy", None, f"{dip:+.3f}"],
      ["agreement, change between two of them", None, f"{gain:+.3f}"],
    ],
  )


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
  """Acceptance and training cost of kinds of drafters."""
  fig, (left, middle, right) = layout.panels(
    "SmolLM2-135M on GSM8K, chains of 5",
    "Countdown, equal number of updates",
    "Training, seconds an update",
    width=4.5,
  )
  path = results.RESULTS / "smollm2_gsm8k" / "acceptance.json"
  colors = {"n-gram": layout.SIDES["n-gram"], "EAGLE-2": "#0072b2", "EAGLE-3": "#009e73"}
  groups = {}
  for case in json.loads(path.read_text()):
    group = groups.setdefault(f"T = {case['temperature']:g}", {})
    group[case["drafter"]] = case["mean_acceptance_length"]
  layout.bars(left, groups, colors)
  left.set(ylabel="tokens per pass")
  layout.one(left)
  left.legend(ncols=1, loc="upper right")
  colors = {"3_1_4": "#56b4e9", "5_1_6": "#0072b2"}
  groups = {}
  for name, kind in _KINDS.items():
    cases = found[name]["acceptance"]
    groups[kind.replace(", ", ",\n")] = {
      c["strategy"]: c["mean_acceptance_length"] for c in cases if c["strategy"] in colors
    }
  layout.bars(middle, groups, colors)
  middle.set(ylabel="tokens per pass")
  middle.legend(["chains of 3", "chains of 5"], ncols=2, loc="upper left")
  middle.margins(y=0.25)
  layout.one(middle)
  costs = {k.replace(", ", ",\n"): {"s": cost(found[n])} for n, k in _KINDS.items()}
  layout.bars(right, costs, {"s": layout.GREY})
  right.set(ylabel="seconds")
  return fig


def cost(found: Mapping) -> float:
  """Seconds of the whole command over its updates: start, responses and measuring too."""
  return found["seconds"] / found["updates"]


def kinds_beside(found: Mapping) -> str:
  """Tokens per pass by kind, and what its training took."""
  rows = [
    [
      kind,
      None,
      " and ".join(f"{c['mean_acceptance_length']:.2f}" for c in found[name]["acceptance"]),
      f"{cost(found[name]):.2f} s",
    ]
    for name, kind in _KINDS.items()
  ]
  updates = next(iter(found.values()))["updates"]
  heads = [f"Countdown, {updates} updates", "paper", "tokens per pass", "an update"]
  return layout.table(heads, rows)
