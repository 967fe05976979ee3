"""The results of a figure, from the output of its commands."""

from collections.abc import Callable, Mapping
import hashlib
import json
import pathlib

from experiments.figures import paper
from tlt_jax import metrics
from tlt_jax.simulate import scenario as scenario_lib

SCENARIOS = pathlib.Path(__file__).parents[1] / "scenarios"


class Outputs:
  """The output of a figure's commands."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder

  def last(self, name: str) -> dict:
    """The JSON of a command's last line."""
    return json.loads((self.folder / f"{name}.out").read_text().splitlines()[-1])

  def seconds(self, name: str) -> float:
    """Wall time of a command, with start and compilation."""
    return float((self.folder / f"{name}.seconds").read_text())

  def records(self, name: str, file: str) -> list[dict]:
    """The steps in a run's metrics or rollouts."""
    found = metrics.read(self.folder / name / f"{file}.jsonl")
    return metrics.steps(found) if file == "metrics" else found

  def digest(self, name: str) -> str:
    """A hash of the policy that a run ended with."""
    weights = hashlib.sha256()
    for file in sorted((self.folder / name / "policy").glob("*.safetensors")):
      weights.update(file.read_bytes())
    return weights.hexdigest()[:16]


ROLLOUTS = ("plain", "tlt", "frozen", "ngram")
PARTS = {
  "rollout": "rollout/seconds_s",
  "reward": "reward/seconds_s",
  "update": "policy/seconds_s",
  "sync": "weight_sync/seconds_s",
  "step": "step/seconds_s",
}


def lengths(outputs: Outputs) -> dict:
  """Seconds by part, lengths, and how three rollouts drain."""
  steps, rollouts = (outputs.records("plain", f) for f in ("metrics", "rollouts"))
  by_time = sorted(rollouts, key=lambda r: r["live_time_s"][-1])
  chosen = [by_time[round(q * (len(by_time) - 1))] for q in (0.25, 0.5, 0.9)]
  return {
    "seconds": [{part: r[key] for part, key in PARTS.items()} for r in steps],
    "lengths": [n for r in rollouts for n in r["length"]],
    "limit": 1024,
    "tail": [tail(r) for r in rollouts],
    "draining": [_draining(r) for r in chosen],
  }


def _draining(rollout: Mapping) -> dict:
  """Live requests over the time of a rollout, and the strategy of each chunk."""
  return {
    "step": rollout["step"],
    "time_s": rollout["live_time_s"],
    "live": rollout["live_requests"],
    "strategies": [c["strategy"] for c in rollout["chunks"]],
  }


def tail(rollout: Mapping) -> float:
  """The share of a rollout's time in which at most an eighth of the requests live."""
  time, live = rollout["live_time_s"], rollout["live_requests"]
  few = next(i for i, n in enumerate(live) if n <= max(live) / 8)
  return (time[-1] - time[few]) / time[-1]


def reward(outputs: Outputs) -> dict:
  """Rewards of both runs, and whether the runs are equal."""
  names = ("plain", "tlt")
  steps = {name: outputs.records(name, "metrics") for name in names}
  lengths = [[r["length"] for r in outputs.records(name, "rollouts")] for name in names]

  def of(key: str) -> dict:
    return {name: [r[key] for r in steps[name]] for name in names}

  return {
    "reward": of("reward/mean"),
    "grad_norm": of("policy/grad_norm"),
    "tokens_per_pass": of("rollout/mean_acceptance_length"),
    "equal_lengths": lengths[0] == lengths[1],
    "policy": {name: outputs.digest(name) for name in names},
  }


def trees(outputs: Outputs) -> dict:
  """Tokens per pass of the grid, speed-ups measured here and simulated of an H100."""
  scenario = scenario_lib.read(SCENARIOS / "qwen2_5_32b.json")
  lives = [1, 2, 4, 8, 16, 32]
  trees = [f"{depth}_8_{nodes}" for depth, nodes in paper.TOKENS_PER_PASS]
  (grid,) = outputs.last("grid")["by_live_batch"].values()
  batches = outputs.last("by_batch")["by_live_batch"]
  return {
    "grid": {name: arm["mean_acceptance_length"] for name, arm in grid["arms"].items()},
    "by_batch": {
      live: {name: arm["speedup"] for name, arm in row["arms"].items()}
      for live, row in batches.items()
    },
    "simulated": {
      live: {name: scenario.speedup(live, name, "tlt") for name in trees} for live in lives
    },
  }


def children(outputs: Outputs) -> dict:
  """Tokens per pass by strategy."""
  (row,) = outputs.last("children")["by_live_batch"].values()
  lengths = {name: arm["mean_acceptance_length"] for name, arm in row["arms"].items()}
  return {"trees": lengths}


def simulated(outputs: Outputs) -> dict:
  """All timed cases, and the counts."""
  cases = sorted(outputs.folder.glob("simulated_*.out"))
  return {
    "cases": [outputs.last(path.stem) for path in cases],
    "counted": outputs.last("counted"),
  }


def kinds(outputs: Outputs) -> dict:
  """Acceptance and training time of each kind of drafter."""
  found = {}
  for name in ("eagle2", "hass", "eagle3"):
    run = f"train_{name}"
    steps = metrics.read(outputs.folder / run / "metrics.jsonl")
    found[name] = {
      "acceptance": outputs.last(run)["acceptance"],
      "seconds": outputs.seconds(run),
      "updates": len(steps),
    }
  return {"unrolled": found}


def end_to_end(outputs: Outputs) -> dict:
  """Seconds and speed-ups of all sides."""
  found = outputs.last("sides")
  kept = {
    key: {side: r for side, r in found[key].items() if side in ROLLOUTS}
    for key in ("seconds", "sides")
  }
  return found | kept


def strategies(outputs: Outputs) -> dict:
  """Rules and fixed strategies, measured and simulated."""
  runs = {"predictive": outputs.last("sides"), "bandit": outputs.last("bandit")}
  keys = ("seconds", "over_hindsight", "steps")
  return {
    "measured": {rule: {key: run[key] for key in keys} for rule, run in runs.items()},
    "simulated": outputs.last("rules"),
  }


def case_128(outputs: Outputs) -> dict:
  """How rollouts drain, simulated and measured."""
  runs = {
    name: outputs.records(f"case_{name}", "rollouts")[-1] for name in ("plain", "switched")
  }
  if runs["plain"]["length"] != runs["switched"]["length"]:
    raise ValueError("speculation changed the lengths of responses")
  return {
    "simulated": outputs.last("switching"),
    "measured": {name: _draining(r) for name, r in runs.items()},
  }


def scale(outputs: Outputs) -> dict:
  """Both scenarios by number of slices."""
  return {name: outputs.last(f"scale_{name}")["by_slices"] for name in ("7b", "32b")}


def last(name: str) -> Callable[[Outputs], Mapping]:
  """A function that keeps the whole last line of a command."""
  return lambda outputs: outputs.last(name)
