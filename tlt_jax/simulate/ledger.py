"""What a simulated run did: updates, what they were trained on, and what devices did."""

import collections
from collections.abc import Sequence
import dataclasses

import numpy as np

from tlt_jax.simulate import groups as groups_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib

OLD = 3  # versions: tokens of this age or more are counted together


@dataclasses.dataclass(frozen=True)
class Update:
  """An update of the policy."""

  end_s: float  # since the run's start, with the new weights in place
  groups: tuple[int, ...]  # numbers of their prompts
  tokens: int  # of the responses
  by_age: tuple[int, ...]  # tokens, by how many versions older than it their policy was
  versions: tuple[int, ...]  # policy versions of each response
  busy: dict[str, float]  # seconds of devices so far, by what they did


@dataclasses.dataclass(frozen=True)
class Summary:
  steps_per_hour: float
  tokens_per_s: float  # of the responses that were trained on
  idle: float  # share of all devices' time, which neither draw nor train
  drafter: float  # share of it in which the drafter is trained
  update: float  # share of it in which the policy is trained
  mean_versions: float  # policy versions of a response
  most_versions: int
  most_age: int  # of a token, in versions
  by_age: tuple[float, ...]  # shares of trained tokens, of age 0, 1, ..., `OLD` or more

  @property
  def stale(self) -> float:
    """Share of trained tokens of another version than the one that is trained."""
    return 1 - self.by_age[0]


class Ledger:
  def __init__(self, slices: int):
    """Of a run on so many slices."""
    self.slices = slices
    self.updates: list[Update] = []
    self.busy = collections.Counter()  # seconds of slices, by what they did

  def drew(self, samples: samples_lib.Samples, seconds: float, slices: int) -> None:
    """Books a rollout on some slices."""
    self.busy["rollout"] += slices * seconds - samples.idle_s
    self.busy["drafter"] += samples.harvested_s

  def spent(self, what: str, seconds: float, slices: int) -> None:
    self.busy[what] += seconds * slices

  def updated(self, groups: Sequence[groups_lib.Group], version: int, now_s: float) -> None:
    """Books an update of a policy `version`, by complete groups."""
    by_age = collections.Counter()
    for group in groups:
      for drawn_by, tokens in group.by_version.items():
        by_age[version - drawn_by] += int(tokens.sum())
    ages = range(max(by_age, default=0) + 1)
    self.updates.append(
      Update(
        end_s=now_s,
        groups=tuple(group.number for group in groups),
        tokens=sum(by_age.values()),
        by_age=tuple(by_age[age] for age in ages),
        versions=tuple(int(n) for group in groups for n in group.versions),
        busy=dict(self.busy),
      )
    )

  def summary(self, warm_up: int) -> Summary:
    """Of the updates after the first `warm_up`, 1 or more."""
    before, last = self.updates[warm_up - 1], self.updates[-1]
    counted = self.updates[warm_up:]
    seconds = last.end_s - before.end_s
    tokens = sum(update.tokens for update in counted)
    total = seconds * self.slices

    def share(what: str) -> float:
      return (last.busy.get(what, 0.0) - before.busy.get(what, 0.0)) / total

    shares = {what: share(what) for what in last.busy}
    versions = np.array([n for update in counted for n in update.versions])
    most_age = max(len(update.by_age) for update in counted) - 1
    by_age = np.zeros(max(most_age, OLD) + 1)
    for update in counted:
      by_age[: len(update.by_age)] += update.by_age
    return Summary(
      steps_per_hour=3600 * len(counted) / seconds,
      tokens_per_s=tokens / seconds,
      idle=1 - sum(shares.values()),
      drafter=shares.get("drafter", 0.0),
      update=shares.get("update", 0.0),
      mean_versions=float(versions.mean()),
      most_versions=int(versions.max()),
      most_age=most_age,
      by_age=(*(by_age[:OLD] / tokens).tolist(), float(by_age[OLD:].sum() / tokens)),
    )
