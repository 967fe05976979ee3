"""Draws the rewards of a run with TLT and of one that decodes plainly."""

from collections.abc import Mapping

from matplotlib import figure
import numpy as np

from experiments.figures.drawn import layout


@layout.shown
def reward(found: Mapping) -> figure.Figure:
  """Rewards by step, and tokens per pass, which depend on no clock."""
  fig, (left, right) = layout.panels(
    "Mean reward of a step", "Tokens per pass of the target", width=5.2
  )
  plain, tlt = found["reward"]["plain"], found["reward"]["tlt"]
  steps = np.arange(1, len(plain) + 1)
  wide = dict(color=layout.SIDES["plain"], linewidth=5, alpha=0.8)
  left.plot(steps, plain, **wide, label="plain decoding")
  dots = dict(color=layout.SIDES["TLT"], marker="o", markersize=4, linewidth=1.2)
  left.plot(steps, tlt, **dots, label="TLT")
  left.set(xlabel="RL step", ylabel="mean reward", ylim=(0, 1))
  left.legend(loc="lower right")
  for name, label in (("plain", "plain decoding"), ("tlt", "TLT")):
    color = layout.SIDES["plain" if name == "plain" else "TLT"]
    right.plot(
      steps, found["tokens_per_pass"][name], color=color, linewidth=1.8, label=label
    )
  right.set(xlabel="RL step", ylabel="tokens per pass and request", ylim=(0, None))
  right.legend(loc="lower right", bbox_to_anchor=(1.0, 0.3))
  for ax in (left, right):
    ax.set_xticks(range(5, len(plain) + 1, 5))
  return fig


def _equality(a, b) -> str:
  return "equal" if a == b else "different"


def compare(found: Mapping) -> str:
  """The curves in the paper and here."""
  rewards, policies = found["reward"], found["policy"]
  return layout.table(
    ["plain and TLT", "paper", "here"],
    [
      ["reward curves", "identical", _equality(rewards["plain"], rewards["tlt"])],
      ["all response lengths", None, "equal" if found["equal_lengths"] else "different"],
      ["SHA-256 of the policies", None, _equality(policies["plain"], policies["tlt"])],
      ["gradient norms", None, _equality(*found["grad_norm"].values())],
    ],
  )
