"""Whole simulated runs of RL, by ways to deal with the long tail, on equal devices.

`Synchronous`, `Partial`, `OneOff` and `Asynchronous` are the ways. All draw the same
responses to the same prompts, with the real scheduler, with or without speculation, and
update the policy on as many groups per step. The last two give the learner slices of its
own; `best_split` finds how many.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any, Literal

import numpy as np
import pydantic

from tlt_jax import ranges
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import groups as groups_lib
from tlt_jax.simulate import ledger as ledger_lib
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import quorum as quorum_lib

Group = groups_lib.Group
Side = Literal[scenario_lib.SIDES]
_DRAFTS = {"plain": "", "frozen": ", frozen", "tlt": ", TLT"}


class Crew:
  """Slices that draw, slices that update the policy, and what they have done so far."""

  def __init__(
    self,
    scenario: scenario_lib.Scenario,
    side: str,
    draws: int,
    slices: int,
    most: int,
    slots: int,
  ):
    """`draws` of the `slices` draw responses to at most `most` prompts, in so many slots.

    The others update the policy; if there are none, all do.
    """
    self.scenario, self.draws, self.learns = scenario, draws, (slices - draws) or slices
    self.costs: costs_lib.Roofline = scenario.costs
    self.prompts = groups_lib.Prompts(scenario.draw_group)
    self.ledger = ledger_lib.Ledger(slices)
    self.rollouts = scenario.rollouts_of(side, draws, most, slots)
    self.timer = self.rollouts.timer

  @property
  def wanted(self) -> int:
    """Groups of an update."""
    return self.scenario.prompts

  def batch(self, groups: Sequence[Group]) -> groups_lib.Batch:
    return groups_lib.Batch(groups, self.scenario.prompt_tokens, self.scenario.max_tokens)

  def draw(
    self, batch: groups_lib.Batch, until: samples_lib.Until | None = None
  ) -> samples_lib.Samples:
    began = self.timer.now()
    samples = self.rollouts(batch.requests(), batch.lengths, until=until)
    self.ledger.drew(samples, self.timer.now() - began, self.draws)
    return samples

  def draw_all(self, groups: Sequence[Group], version: int) -> None:
    batch = self.batch(groups)
    batch.take(version, self.draw(batch).length)

  def update_s(self, groups: Sequence[Group]) -> float:
    """Seconds of an update."""
    tokens = sum(int(group.lengths.sum()) for group in groups)
    tokens += len(groups) * self.scenario.responses * self.scenario.prompt_tokens
    return self.costs.policy_update_s(tokens, self.learns)

  def score(self, groups: Sequence[Group], version: int) -> None:
    """A forward pass over the responses that this version has drawn a part of."""
    tokens = 0
    for group in groups:
      drew = group.by_version.get(version, np.zeros_like(group.lengths)) > 0
      tokens += int((group.drawn + self.scenario.prompt_tokens)[drew].sum())
    seconds = self.costs.policy_update_s(tokens, self.learns, passes=1.0)
    self._spend("update", seconds, self.learns)

  def update(self, groups: Sequence[Group], version: int, began_s: float) -> None:
    """Waits until an update that began then is done, and gives all slices the weights."""
    self.timer.wait_until(began_s + self.update_s(groups))
    self.sync()
    self.book(groups, version)

  def sync(self) -> None:
    """Gives all slices the new weights."""
    self._spend("sync", self.costs.weight_sync_s(), self.ledger.slices)

  def _spend(self, what: str, seconds: float, slices: int) -> None:
    self.timer.spend(seconds)
    self.ledger.spent(what, seconds, slices)

  def book(self, groups: Sequence[Group], version: int) -> None:
    """Books an update of a policy `version`, whose weights are in place."""
    self.ledger.spent("update", self.update_s(groups), self.learns)
    self.ledger.updated(groups, version, self.timer.now())


@ranges.options
class Synchronous:
  """All devices draw whole groups; then all update the policy on them."""

  side: Side = "plain"

  @property
  def name(self) -> str:
    return "synchronous" + _DRAFTS[self.side]

  def in_flight(self, prompts: int) -> int:
    """Groups that are drawn at a time, of an update's `prompts`."""
    return prompts

  def run(self, crew: Crew, steps: int) -> None:
    """Updates the policy so often."""
    for version in range(steps):
      groups = crew.prompts.ask(crew.wanted)
      crew.draw_all(groups, version)
      crew.update(groups, version, crew.timer.now())


@ranges.options
class Partial:
  """Rollouts end when enough of the groups in flight are complete; the others go on later.

  See `rollout.quorum`. Their KV is computed again by the next policy, and the learner's
  log-probabilities of them before each update (`rl.carry`).
  """

  side: Side = "plain"
  asked: ranges.Positive = ranges.field(
    2.0, "groups in flight, per group of an update: 1 or more"
  )
  versions: ranges.Count = ranges.field(4, "policy versions that a response may span")

  @property
  def name(self) -> str:
    return f"carried {self.asked:g}x" + _DRAFTS[self.side]

  def in_flight(self, prompts: int) -> int:
    return max(round(self.asked * prompts), prompts)

  def run(self, crew: Crew, steps: int) -> None:
    flying: list[Group] = []
    for version in range(steps):
      flying += crew.prompts.ask(self.in_flight(crew.wanted) - len(flying))
      batch = crew.batch(flying)
      if len(batch):
        self._draw(crew, batch, version, len(flying) - len(batch.groups))
      groups = [group for group in flying if group.is_complete][: crew.wanted]
      numbers = {group.number for group in groups}
      flying = [group for group in flying if group.number not in numbers]
      crew.score(flying, version)
      crew.update(groups, version, crew.timer.now())

  def _draw(self, crew: Crew, batch: groups_lib.Batch, version: int, complete: int) -> None:
    must_end = np.array([g.must_end(version, self.versions) for g in batch.groups])
    quorum = quorum_lib.Quorum(
      max(crew.wanted - complete, 0), must_end[batch.group, batch.response]
    )
    until = quorum.until(batch.requests())
    samples = crew.draw(batch, until)
    batch.take(version, np.minimum(samples.length, batch.begun + until.tokens))


@ranges.options
class OneOff:
  """Some slices draw whole groups while the others train on those drawn before."""

  side: Side = "plain"

  @property
  def name(self) -> str:
    return "one step off" + _DRAFTS[self.side]

  def in_flight(self, prompts: int) -> int:
    return prompts

  def run(self, crew: Crew, steps: int) -> None:
    groups = crew.prompts.ask(crew.wanted)
    crew.draw_all(groups, 0)
    for version in range(steps):
      began_s, following = crew.timer.now(), crew.prompts.ask(crew.wanted)
      crew.draw_all(following, version)
      crew.update(groups, version, began_s)
      groups = following


@ranges.options
class Asynchronous:
  """Some slices draw without ever waiting for the slowest; the others train meanwhile.

  AReaL, 2505.24298: the learner takes the oldest complete groups as soon as there are
  enough. New weights interrupt all responses, which go on once their KV is computed again.
  At version v at most (v + bound + 1) updates' prompts have been asked.
  """

  side: Side = "plain"
  bound: ranges.CountOrZero = ranges.field(4, "updates for which prompts are asked ahead")

  @property
  def name(self) -> str:
    return f"async {self.bound}" + _DRAFTS[self.side]

  def in_flight(self, prompts: int) -> int:
    return (self.bound + 1) * prompts

  def run(self, crew: Crew, steps: int) -> None:
    learner, flying = _Learner(crew), []
    while learner.version < steps:
      most = (learner.version + self.bound + 1) * crew.wanted
      flying += crew.prompts.ask(most - crew.prompts.asked)
      version = learner.version
      if len(batch := crew.batch(flying)):
        samples = crew.draw(batch, learner.until_weights(batch))
        batch.take(version, samples.length)
      if learner.version == version:  # nothing is left to draw
        crew.timer.wait_until(learner.done_s)
        learner.look([])
      crew.sync()
      learner.put_in_place()
      flying = [group for group in flying if group.number not in learner.taken]


class _Learner:
  """The learner of an asynchronous run, as it is seen after each chunk."""

  def __init__(self, crew: Crew):
    self.crew, self.version = crew, 0
    self.taken: set[int] = set()  # numbers of groups that it took
    self._complete: list[Group] = []
    self._trained: list[tuple[list[Group], int]] = []  # since the weights were sent last
    self._training: list[Group] = []
    self.done_s = 0.0  # when it is done with them

  def until_weights(self, batch: groups_lib.Batch) -> samples_lib.Until:
    """Pauses all once new weights are there."""
    version, left = self.version, np.bincount(batch.group)

    def until(samples: samples_lib.Samples, ended: list[int]) -> np.ndarray | None:
      of = batch.group[ended]
      np.subtract.at(left, of, 1)
      self.look([batch.groups[g] for g in np.unique(of) if not left[g]])
      return None if self.version == version else samples.length

    return until

  def look(self, complete: list[Group]) -> None:
    """Ends and begins updates by the time, now that these groups are complete, too."""
    now_s = self.crew.timer.now()
    if self._training and self.done_s <= now_s:
      self._trained.append((self._training, self.version))
      self._training, self.version = [], self.version + 1
      self._begin(self.done_s + self.crew.costs.weight_sync_s())  # on what was complete
    self._complete += complete
    self._begin(now_s)

  def _begin(self, at_s: float) -> None:
    wanted = self.crew.wanted
    if self._training or len(self._complete) < wanted:
      return
    self._complete.sort(key=lambda group: group.number)
    self._training, self._complete = self._complete[:wanted], self._complete[wanted:]
    self.taken |= {group.number for group in self._training}
    self.done_s = at_s + self.crew.update_s(self._training)

  def put_in_place(self) -> None:
    """Books the updates whose weights the rollouts have got now."""
    for groups, version in self._trained:
      self.crew.book(groups, version)
    self._trained = []


Way = Synchronous | Partial | OneOff | Asynchronous
APART = OneOff, Asynchronous  # with slices of its own for the learner
_KINDS = {
  "synchronous": Synchronous,
  "partial": Partial,
  "one_off": OneOff,
  "asynchronous": Asynchronous,
}


@ranges.options
class Comparison:
  """The ways that a scenario compares, and how long they run."""

  ways: tuple[Way, ...]
  steps: ranges.Count = ranges.field(12, "updates of each run")
  warm_up: ranges.Count = ranges.field(4, "the first of them, which are not counted")
  slots: ranges.Count = ranges.field(128, "most requests of a slice at a time")
  least_learner: ranges.Count = ranges.field(1, "fewest slices that hold the learner")

  def __post_init__(self):
    if self.warm_up >= self.steps:
      raise ValueError(f"warm_up={self.warm_up} leaves none of steps={self.steps}")

  @classmethod
  def of(cls, scenario: scenario_lib.Scenario) -> "Comparison":
    """ValueError: the scenario has none, or a wrong one."""
    if not isinstance(scenario.costs, costs_lib.Roofline):
      raise ValueError("ways need updates of the policy: give the scenario a device")
    if "compared" not in scenario.ways:
      raise ValueError("the scenario compares no ways: give it `ways` with `compared`")
    sizes = dict(scenario.ways)
    made = cls(ways=tuple(map(_way, sizes.pop("compared"))), **sizes)
    if made.ways[:1] != (Synchronous(),):
      raise ValueError(
        'the first of the `compared` ways is what others are compared with: {"kind": '
        '"synchronous"}'
      )
    return made

  def run(
    self, scenario: scenario_lib.Scenario, way: Way, slices: int, draws: int
  ) -> ledger_lib.Ledger:
    """A run of which `draws` slices draw."""
    most = way.in_flight(scenario.prompts)
    crew = Crew(scenario, way.side, draws, slices, most, self.slots)
    way.run(crew, self.steps)
    return crew.ledger

  def splits(self, slices: int) -> list[int]:
    """Numbers of slices that may draw while the others learn: eighths of all."""
    each = max(slices // 8, 1)
    return [n for n in range(each, slices, each) if slices - n >= self.least_learner]

  def best(
    self, scenario: scenario_lib.Scenario, way: Way, slices: int, share: float = 0.5
  ) -> tuple[int, ledger_lib.Summary] | None:
    """The slices that draw, and what that gives: as many as bring most useful tokens.

    Begins with a `share` of all, and goes on in the direction that helps. None: the learner
    does not fit beside the slices that draw.
    """

    @functools.cache
    def result(draws: int) -> ledger_lib.Summary:
      return self.run(scenario, way, slices, draws).summary(self.warm_up)

    if not isinstance(way, APART):
      return slices, result(slices)
    splits = self.splits(slices)
    if not splits:
      return None
    at = int(np.argmin(np.abs(np.array(splits) - share * slices)))

    def speed(i: int) -> float:
      return result(splits[i]).tokens_per_s if 0 <= i < len(splits) else 0.0

    step = 1 if speed(at + 1) > speed(at) else -1
    while speed(at + step) > speed(at):
      at += step
    return splits[at], result(splits[at])


def _way(fields: Mapping[str, Any]) -> Way:
  kind = fields.get("kind")
  if kind not in _KINDS:
    raise ValueError(f"a way's kind is one of {', '.join(_KINDS)}; not {kind!r}")
  own = {name: value for name, value in fields.items() if name != "kind"}
  try:
    return _KINDS[kind](**own)
  except pydantic.ValidationError as e:
    wrong = e.errors()[0]
    raise ValueError(f"the way {dict(fields)}: {wrong['loc'][0]}: {wrong['msg']}") from e
