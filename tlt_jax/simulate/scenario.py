"""Scenarios: simulated workloads, described by JSON files."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from tlt_jax import metrics
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import hf
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import rollout as rollout_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.speculation import levels
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

SIDES = ("plain", "frozen", "tlt")
_PAGE = 1024  # tokens; few large pages are counted faster, and there is room for all
_LATE = 20  # steps of a drafter's training, of which means are taken


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A workload on a machine; `experiments/scenarios/README.md` explains the fields."""

  about: str
  model: Mapping[str, Any]  # config.json of a Hugging Face folder
  slices: tuple[int, ...]  # numbers of slices to compare
  prompts: int
  responses: int  # per prompt
  prompt_tokens: int
  max_tokens: int  # of a response
  lengths: Mapping[str, Any]  # see `draw_lengths`
  strategies: str  # as configs write them, see `speculation.levels`
  frozen: tuple[float, ...]  # chance of each drafted position, given those before it
  adapted: tuple[float, ...] = ()  # with the drafter trained in rollouts; (): as frozen
  trees: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
  # Arguments of `drafter.of_target`; {}: EAGLE-3's.
  drafter: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  chances: float = 1.0  # factor of all chances
  rule: str = "predictive"
  device: Mapping[str, Any] | None = None  # fields of `costs.Device`
  tensor: int = 1  # devices of a slice
  table: Mapping[str, Any] | None = None  # of `costs.Measured`, if there is no device
  rollout: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `Options`
  spot: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `spot.Options`
  rollouts: int = 2  # the last one counts; those before teach the selector
  paper: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # printed alongside
  ways: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `Comparison`

  def __post_init__(self):
    if (self.device is None) == (self.table is None):
      raise ValueError("a scenario gives a device or a measured table, one of both")
    if not self.slices or min(self.slices) < 1:
      raise ValueError("slices are numbers from 1 on, at least one")
    if self.chances < 0:
      raise ValueError(f"chances={self.chances}: a factor of chances is 0 or more")
    arms = {arm for level in levels.parse(self.strategies) for arm in level.arms}
    strategy_lib.check_depths(arms, self.drafter_config.block)

  @property
  def config(self) -> config_lib.ModelConfig:
    return hf.parse_config(dict(self.model))

  @property
  def costs(self) -> costs_lib.Costs:
    if self.device is None:
      return costs_lib.Measured(**self.table)
    device, drafter = costs_lib.Device(**self.device), self.drafter_config
    sizes = costs_lib.Drafter.of(drafter)
    return costs_lib.Roofline(self.config, device, self.tensor, sizes)

  @property
  def drafter_config(self) -> drafter_lib.DrafterConfig:
    fields = {
      name: tuple(value) if isinstance(value, list) else value
      for name, value in ({"kind": "eagle3"} | dict(self.drafter)).items()
    }
    try:
      if "block" in fields:
        fields["block"] = drafter_lib.Block(**fields["block"])
      return drafter_lib.of_target(self.config, **fields)
    except TypeError as e:
      raise ValueError(f"drafter={dict(self.drafter)}: no such drafter ({e})") from e

  def acceptance(self, side: str) -> acceptance_lib.Rates:
    rates = self.adapted if side == "tlt" and self.adapted else self.frozen
    trees = {name: self._scaled(of_tree) for name, of_tree in self.trees.items()}
    return acceptance_lib.Rates(self._scaled(rates), trees)

  def _scaled(self, rates: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(self.chances * rate, 1.0) for rate in rates)

  def options(
    self, slices: int, prompts: int | None = None, most: int | None = None
  ) -> options_lib.Options:
    """The sizes of a rollout on `slices`: slots for all requests, unless given.

    Args:
      prompts: that are asked at a time; None: those of a rollout
      most: slots; None: as many as there are requests
    """
    total = self.prompt_tokens + self.max_tokens
    slots = -(-(prompts or self.prompts) // slices) * self.responses
    slots = slots if most is None else min(slots, most)
    slots = min(slots, self.rollout.get("slots", slots))
    buckets = options_lib.ladder(slots, 1)
    sizes = dict(max_length=total, max_prompt=self.prompt_tokens, buckets=buckets)
    sizes |= dict(page_tokens=_PAGE)
    return options_lib.Options(**sizes | dict(self.rollout) | {"slots": slots})

  def draw_lengths(self) -> np.ndarray:
    count = self.prompts * self.responses
    return draw_lengths(self.lengths, count, self.max_tokens)

  def draw_group(self, prompt: int) -> np.ndarray:
    """Lengths i32[responses] of the responses to a prompt, by its number in a run."""
    return draw_lengths(self.lengths, self.responses, self.max_tokens, (0, prompt))

  def rollouts_of(
    self, side: str, slices: int, prompts: int | None = None, slots: int | None = None
  ) -> rollout_lib.Rollouts:
    """What simulates its rollouts; `prompts` and `slots` are those of `options`."""
    selector, acceptance = None, None
    if side != "plain":
      selector = selector_lib.make(self.strategies, self.rule, has_drafter=True)
      acceptance = self.acceptance(side)
    return rollout_lib.Rollouts(
      rollout_lib.Machine(slices, self.costs),
      self.config,
      self.options(slices, prompts, slots),
      drafter=self.drafter_config,
      selector=selector,
      acceptance=acceptance,
      spot=spot_lib.Options(**self.spot) if side == "tlt" else None,
    )

  def run(self, side: str, slices: int) -> samples_lib.Samples:
    run, lengths = self.rollouts_of(side, slices), self.draw_lengths()
    requests = requests_lib.make_requests(
      [np.ones(self.prompt_tokens, np.int32)] * self.prompts,
      self.responses,
      max_tokens=self.max_tokens,
    )
    for _ in range(self.rollouts):
      samples = run(requests, lengths)
    return samples

  def speedup(self, live: int, strategy: str, side: str = "frozen") -> float:
    """The speed-up at `live` requests per slice, of a prompt and a median response each."""
    tokens = self.prompt_tokens + int(np.median(self.draw_lengths()))
    arm = strategy_lib.parse(strategy)
    step_s = {a: self.costs.step_s(live, a, live * tokens) for a in (None, arm)}
    return self.acceptance(side).length(arm) * step_s[None] / step_s[arm]

  def break_even(self) -> int:
    """The most live requests per slice, in powers of two, that speculation speeds up."""
    chosen = [arm for level in levels.parse(self.strategies) for arm in level.arms if arm]
    slots = self.options(min(self.slices)).slots
    faster = [
      live
      for live in (1 << i for i in range(slots.bit_length()))
      if any(self.speedup(live, str(arm)) > 1 for arm in chosen)
    ]
    return max(faster, default=0)


def read(path: str | pathlib.Path) -> Scenario:
  """ValueError: no such file, no JSON, or unknown or missing keys."""
  try:
    raw = json.loads(pathlib.Path(path).read_text())
  except (OSError, json.JSONDecodeError) as e:
    raise ValueError(f"{path}: no scenario can be read there ({e})") from e
  return parse(raw, str(path))


def parse(raw: Mapping[str, Any], where: str = "the scenario") -> Scenario:
  fields = {f.name: f for f in dataclasses.fields(Scenario)}
  missing = dataclasses.MISSING
  needed = {
    name
    for name, f in fields.items()
    if f.default is missing and f.default_factory is missing
  }
  if unknown := set(raw) - set(fields):
    raise ValueError(f"{where} has keys that no scenario has: {sorted(unknown)}")
  if lacks := needed - set(raw):
    raise ValueError(f"{where} lacks {sorted(lacks)}")
  tuples = {"slices", "frozen", "adapted"}
  return Scenario(**{k: tuple(v) if k in tuples else v for k, v in raw.items()})


def draw_lengths(
  what: Mapping[str, Any], count: int, most: int, seed: int | Sequence[int] = 0
) -> np.ndarray:
  """Response lengths i32[count], at most `most` tokens each.

  `what` is {"log_normal": {"median", "sigma"}}, {"geometric": {"mean"}}, {"trace": path}
  of a JSON list or a run's rollouts.jsonl, or {"given": list}. A trace of another length
  is sampled with replacement.
  """
  rng = np.random.default_rng(seed)
  match dict(what):
    case {"log_normal": {"median": median, "sigma": sigma}}:
      drawn = rng.lognormal(np.log(median), sigma, count)
    case {"geometric": {"mean": mean}}:
      drawn = rng.geometric(1 / mean, count)
    case {"trace": path}:
      drawn = _as_many(rng, read_trace(path), count)
    case {"given": lengths}:
      drawn = _as_many(rng, np.asarray(lengths), count)
    case _:
      raise ValueError(
        f"lengths are log_normal, geometric, trace or given, with their numbers; not {what}"
      )
  return np.clip(drawn, 1, most).astype(np.int32)


def _as_many(rng, known: np.ndarray, count: int) -> np.ndarray:
  return known if len(known) == count else rng.choice(known, count)


def read_trace(path: str | pathlib.Path) -> np.ndarray:
  if str(path).endswith(".jsonl"):
    found = [n for rollout in metrics.read(path) for n in rollout.get("length", [])]
  else:
    found = json.loads(pathlib.Path(path).read_text())
  if not found or not all(isinstance(n, int) and n > 0 for n in found):
    raise ValueError(f"{path}: a trace is a list of whole numbers from 1 on")
  return np.asarray(found)


def read_acceptance(path: str | pathlib.Path) -> tuple[float, ...]:
  """Rates per drafted position: a JSON list, or means over a run's metrics.jsonl.

  Of a run without rollouts, such as the training of a drafter, agreement with the target in
  its last steps, which is about what would be accepted.
  """
  if not str(path).endswith(".jsonl"):
    return tuple(json.loads(pathlib.Path(path).read_text()))
  steps = metrics.read(path)
  if shares := _means(steps, "rollout/acceptance_rate_pos_{}"):
    return tuple(acceptance_lib.conditional(shares))
  trained = [step for step in steps if "drafter/agreement_1" in step]
  if rates := _means(trained[-_LATE:], "drafter/agreement_{}"):
    return tuple(rates)
  raise ValueError(f"{path}: no rollout speculated, and no drafter trained; set strategies")


def _means(steps: Sequence[Mapping], name: str) -> list[float]:
  """The means of a metric for positions 1, 2, ..., as many as there are."""
  means = []
  while found := [s[key] for s in steps if (key := name.format(len(means) + 1)) in s]:
    means.append(float(np.mean(found)))
  return means
