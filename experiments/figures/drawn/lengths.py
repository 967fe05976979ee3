"""Draws how long responses are, how rollouts drain, and where a step's time goes."""

from collections.abc import Mapping

from matplotlib import figure
import numpy as np

from experiments.figures import paper
from experiments.figures.drawn import layout

_PARTS = {"rollout": layout.BLUE, "tail": "#e69f00", "update": "#009e73"}


@layout.shown
def tail(found: Mapping) -> figure.Figure:
  """Lengths, live requests over time, and the parts of a step."""
  fig, (left, middle, right) = layout.panels(
    "Response lengths",
    "Live requests in a rollout",
    "Time of a step",
    width=4.0,
    width_ratios=(1.1, 1.1, 0.8),
  )
  _lengths(left, np.array(found["lengths"]), found["limit"])
  colors = ("#a6cee3", "#1f78b4", "#08306b")
  for rollout, color in zip(found["draining"], colors, strict=True):
    time, live = rollout["time_s"], rollout["live"]
    label = f"step {rollout['step'] + 1}: {time[-1]:.1f} s"
    middle.step(time, live, where="post", color=color, linewidth=1.6, label=label)
  eighth = max(found["draining"][0]["live"]) / 8
  middle.axhline(eighth, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
  middle.text(0.1, eighth - 0.4, "tail: an eighth or less", va="top")
  middle.set(xlabel="seconds since it began", ylabel="live requests")
  middle.set(xlim=(0, None), ylim=(0, None))
  middle.legend()
  _parts(right, parts(found))
  return fig


def _lengths(ax, lengths: np.ndarray, limit: int) -> None:
  ax.hist(
    lengths,
    bins=np.linspace(0, limit, 33),
    weights=np.full(len(lengths), 100 / len(lengths)),
    color=layout.BLUE,
  )
  median, cut = np.median(lengths), np.mean(lengths == limit)
  ax.axvline(median, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
  ax.text(median + 12, ax.get_ylim()[1], f"median {median:.0f}", va="top")
  ax.annotate(
    f"{cut:.0%} at the limit",
    (limit, 100 * cut),
    (-26, -4),
    textcoords="offset points",
    ha="right",
  )
  ax.set(xlabel="tokens", ylabel="responses (%)", xlim=(0, limit))


def _parts(ax, shares: Mapping[str, float]) -> None:
  bottom = 0.0
  for part, share in shares.items():
    color = _PARTS.get(part, layout.GREY)
    ax.bar([0], [100 * share], 0.6, bottom=[100 * bottom], color=color)
    if share > 0.04:
      middle, text = 100 * (bottom + share / 2), f"{part} {share:.0%}"
      ax.text(0, middle, text, ha="center", va="center", color="white")
    bottom += share
  theirs = 100 * paper.ROLLOUT_SHARE
  ax.plot([-0.42, 0.42], [theirs, theirs], color=layout.PAPER, linewidth=2)
  ax.text(0.46, theirs, f"paper: rollouts\nup to {theirs:.0f}%", va="center")
  ax.set(ylabel="share of a step (%)", xticks=[], xlim=(-0.5, 1.15), ylim=(0, 100))


def parts(found: Mapping) -> dict[str, float]:
  """Shares of all steps' time; the tail apart from the rest of the rollouts."""
  seconds = {
    part: np.array([step[part] for step in found["seconds"]])
    for part in found["seconds"][0]
  }
  total = seconds["step"].sum()
  in_tail = float((seconds["rollout"] * found["tail"]).sum())
  return {
    "rollout": (seconds["rollout"].sum() - in_tail) / total,
    "tail": in_tail / total,
    "update": seconds["update"].sum() / total,
    "reward and sync": (seconds["reward"].sum() + seconds["sync"].sum()) / total,
  }


def compare(found: Mapping) -> str:
  """What the paper says, and what was found here."""
  shares, lengths = parts(found), found["lengths"]
  rollouts = shares["rollout"] + shares["tail"]
  longest = np.max(lengths) / np.median(lengths)
  return layout.table(
    ["", "paper", "here"],
    [
      [
        "share of rollouts in a step",
        f"up to {paper.ROLLOUT_SHARE:.0%}",
        f"{rollouts:.0%}",
      ],
      ["of a rollout, at most an eighth live", None, f"{np.mean(found['tail']):.0%}"],
      ["longest response over the median", None, f"{longest:.1f}"],
    ],
  )


_CASES = {
  "simulated": "SIMULATED: Qwen2.5-32B on four H100",
  "measured": "Measured: 20M parameters, 2 CPU cores",
}


@layout.shown
def case_128(found: Mapping) -> figure.Figure:
  """Live requests over time, plain and with speculation from 32 live on."""
  fig, panels = layout.panels(*(_CASES[kind] for kind in found), width=6.0)
  for ax, case in zip(panels, found.values(), strict=True):
    for name, side in (("plain", "plain"), ("switched", "frozen")):
      time, live = case[name]["time_s"], case[name]["live"]
      label = (
        f"{'plain' if name == 'plain' else 'speculating from 32 on'}: {time[-1]:.0f} s"
      )
      color = layout.SIDES[side]
      ax.step(time, live, where="post", color=color, linewidth=2, label=label)
    ax.axhline(32, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    at = switched_at(case["switched"])
    live = np.interp(at, case["switched"]["time_s"], case["switched"]["live"])
    arrow = dict(textcoords="offset points", arrowprops={"arrowstyle": "->"})
    ax.annotate("speculation begins", (at, live), (30, 30), **arrow)
    ax.set(xlabel="seconds since the rollout began", ylabel="live requests")
    ax.set(xlim=(0, None), ylim=(0, None))
    ax.legend()
  return fig


def switched_at(rollout: Mapping) -> float:
  """The second at which the first chunk that speculates began."""
  first = next(i for i, s in enumerate(rollout["strategies"]) if s != "off")
  return rollout["time_s"][first]


def compare_case(found: Mapping) -> str:
  """The paper's speed-up, simulated and measured ones."""
  rows = [["whole rollout", paper.CASE_128], ["from 32 live requests on", None]]
  for case in found.values():
    seconds = {name: side["time_s"][-1] for name, side in case.items()}
    left = {name: end - _at_32(case[name]) for name, end in seconds.items()}
    rows[0].append(seconds["plain"] / seconds["switched"])
    rows[1].append(left["plain"] / left["switched"])
  return layout.table(["speed-up", "paper", *found], rows)


def _at_32(rollout: Mapping) -> float:
  points = zip(rollout["time_s"], rollout["live"], strict=True)
  return next(time for time, live in points if live <= 32)
