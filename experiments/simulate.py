"""Simulates rollouts on other devices: what would TLT gain there?

    python -m experiments.simulate                             # Qwen2.5-7B on 8-64 H100
    python -m experiments.simulate --scenario=short_answers
    python -m experiments.simulate --scenario=MINE.json --lengths=RUN/rollouts.jsonl \\
      --acceptance=RUN/metrics.jsonl --table=BENCH.json
    python -m experiments.simulate --ways           # whole runs, and other ways than TLT

Scheduler, selector and harvest are those of real rollouts; a cost model gives the times.
Plain decoding, a frozen drafter and TLT (the drafter trains in idle slices) are compared by
number of slices, then by acceptance, batch and tail. With --ways it is whole runs of many
steps, synchronous ones and those that train on older tokens. Figures go to --out. The last
line is JSON. Scenarios are described in experiments/scenarios/README.md.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib

from absl import flags
from matplotlib import figure
import numpy as np

from experiments import launch
from experiments import plot
from experiments import tables
from experiments import timeline
from experiments import ways
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import rollout as rollout_lib
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

SCENARIOS = pathlib.Path(__file__).parent / "scenarios"

_SCENARIO = flags.DEFINE_string("scenario", "qwen2_5_7b", "A bundled name, or a file.")
_SLICES = flags.DEFINE_list("slices", [], "Numbers of slices, instead of its own.")
_LENGTHS = flags.DEFINE_string("lengths", "", "Trace: JSON list, or rollouts.jsonl.")
_ACCEPTANCE = flags.DEFINE_list(
  "acceptance", [], "Chance of each drafted position, or a JSON list, or metrics.jsonl."
)
_CHANCES = flags.DEFINE_float(
  "chances", None, "Factor of all chances, such as what a block's are to EAGLE's."
)
_MODEL = flags.DEFINE_string("model", "", "Hugging Face folder, for its config.json.")
_TABLE = flags.DEFINE_string(
  "table", "", "Last line of bench.rollout or bench.decode_steps, for the costs."
)
_OUT = flags.DEFINE_string("out", "runs/simulate", "Folder of the figures.")
_WAYS = flags.DEFINE_bool("ways", False, "Whether to compare ways to run RL; 5 minutes.")
_SENSITIVITY = flags.DEFINE_bool("sensitivity", True, "Whether to vary the workload.")

_PARTS = {
  timeline.PLAIN: "plain",
  timeline.SPECULATIVE: "drafted",
  timeline.TRAIN: "trained",
  timeline.IDLE: "idle",
  timeline.OUTSIDE: "other",
}


def chosen() -> scenario_lib.Scenario:
  """The scenario of the flags."""
  name = _SCENARIO.value
  bundled = SCENARIOS / f"{name}.json"
  if not name.endswith(".json") and not bundled.exists():
    known = ", ".join(sorted(path.stem for path in SCENARIOS.glob("*.json")))
    raise ValueError(f"no scenario {name!r}; there are {known}, or give a .json file")
  scenario = scenario_lib.read(bundled if bundled.exists() else name)
  changes = {}
  if _SLICES.value:
    changes["slices"] = tuple(int(n) for n in _SLICES.value)
  if _MODEL.value:
    text = (pathlib.Path(_MODEL.value) / "config.json").read_text()
    changes["model"] = json.loads(text)
  if _LENGTHS.value:
    changes["lengths"] = {"trace": _LENGTHS.value}
  if _ACCEPTANCE.value:
    changes |= {"frozen": _rates(_ACCEPTANCE.value), "adapted": ()}
  if _CHANCES.value is not None:
    changes["chances"] = _CHANCES.value
  if _TABLE.value:
    table = json.loads(pathlib.Path(_TABLE.value).read_text().splitlines()[-1])
    others = dict(scenario.table or {})
    if "micro_batch" in table:  # measured with the steps
      others["micro_batch"] = table["micro_batch"]
    changes |= {"device": None, "table": others | {"table": table}}
  return dataclasses.replace(scenario, **changes)


def _rates(given: list[str]) -> tuple[float, ...]:
  """Chances of drafted positions, from the command line or a file."""
  if given[0].endswith((".json", ".jsonl")):
    return scenario_lib.read_acceptance(given[0])
  return tuple(map(float, given))


def parts(samples: samples_lib.Samples) -> dict[str, float]:
  """Shares of all slices' time by part."""
  slices = timeline.spans(rollout_lib.record(samples))
  total = sum(span.end_s - span.start_s for spans in slices for span in spans)
  shares = dict.fromkeys(_PARTS.values(), 0.0)
  for span in (span for spans in slices for span in spans):
    shares[_PARTS[span.kind]] += (span.end_s - span.start_s) / total
  return shares


def by_slices(scenario: scenario_lib.Scenario) -> tuple[dict, samples_lib.Samples]:
  """Simulates all sides on each number of slices.

  A whole step is a rollout and the policy's update, by the roofline; rewards and weight
  sync are left out.

  Returns:
    slices -> side -> results; and the samples of the last TLT
  """
  found, tokens = {}, int(scenario.draw_lengths().sum())
  prompts = scenario.prompts * scenario.responses * scenario.prompt_tokens
  for slices in scenario.slices:
    sides = {side: scenario.run(side, slices) for side in scenario_lib.SIDES}
    update_s = None  # unknown to a table
    if isinstance(scenario.costs, costs_lib.Roofline):
      update_s = scenario.costs.policy_update_s(tokens + prompts, slices)
    seconds = {side: samples.timeline[-1][0] for side, samples in sides.items()}
    found[slices] = {
      side: {
        "rollout_s": seconds[side],
        "speedup_rollout": seconds["plain"] / seconds[side],
        "speedup_step": update_s
        and (seconds["plain"] + update_s) / (seconds[side] + update_s),
        "mean_acceptance_length": samples.mean_acceptance_length,
        "chunks": len(samples.chunks),
        "parts": parts(samples),
      }
      for side, samples in sides.items()
    }
  return found, sides["tlt"]


def sensitivity(scenario: scenario_lib.Scenario) -> dict[str, dict[str, float]]:
  """Speed-ups of rollouts with a frozen drafter, with one thing changed.

  On the scenario's first number of slices.
  """
  lengths = scenario.draw_lengths()
  mean = lengths.mean()

  def tail(share: float) -> dict:
    return {"given": (mean + share * (lengths - mean)).round().tolist()}

  def scaled(factor: float) -> tuple[float, ...]:
    return tuple(min(factor * rate, 1.0) for rate in scenario.frozen)

  variants = {
    "acceptance": {f"x {f:g}": {"frozen": scaled(f)} for f in (0.0, 0.5, 0.75, 1.0)},
    "requests": {
      str(prompts * scenario.responses): {"prompts": prompts}
      for prompts in (max(scenario.prompts // 4, 1), scenario.prompts, 2 * scenario.prompts)
    },
    "tail": {
      "none: all of mean length": {"lengths": tail(0.0)},
      "half": {"lengths": tail(0.5)},
      "as it is": {"lengths": tail(1.0)},
    },
  }
  slices = scenario.slices[0]

  def speedup(changes: Mapping) -> float:
    changed = dataclasses.replace(scenario, **{"trees": {}} | dict(changes))
    plain, frozen = (
      changed.run(side, slices).timeline[-1][0] for side in ("plain", "frozen")
    )
    return plain / frozen

  return {
    what: {name: speedup(changes) for name, changes in cases.items()}
    for what, cases in variants.items()
  }


def against_paper(scenario: scenario_lib.Scenario, found: Mapping) -> list[list[str]]:
  """Rows: what, the paper's figure, ours."""
  paper, rows = scenario.paper, []
  if "end_to_end" in paper:
    ours = [sides["tlt"]["speedup_step"] for sides in found.values()]
    low, high = paper["end_to_end"]
    span = f"{min(ours):.2f}x to {max(ours):.2f}x"
    rows.append(["whole step, TLT", f"{low}x to {high}x", span])
  for name, length in paper.get("lengths", {}).items():
    own = scenario.acceptance("tlt").length(strategy_lib.parse(name))
    rows.append([f"tokens per pass, {name} (taken from it)", f"{length}", f"{own:.2f}"])
  for name, batches in paper.get("by_batch", {}).items():
    for live, theirs in batches.items():
      ours = scenario.speedup(int(live), name, "tlt")
      rows.append([f"speed-up, {name}, {live} live", f"{theirs}x", f"{ours:.2f}x"])
  return rows


def verdict(found: Mapping) -> str:
  """The result in a sentence."""
  last = list(found)[-1]
  tlt, frozen = (found[last][side]["speedup_rollout"] for side in ("tlt", "frozen"))
  best = max(tlt, frozen)
  if best < 1.1:
    return f"TLT would not help here: rollouts {best:.2f}x as fast on {last} slices."
  side = "TLT" if tlt >= frozen else "A frozen drafter (training costs more than it brings)"
  return f"{side} would make rollouts {best:.2f}x as fast on {last} slices."


def report(found: Mapping, varied: Mapping, compared: list[list[str]], even: int) -> None:
  tables.show(
    "Speed-ups on n slices, tokens per pass, and shares of all slices' time",
    ["n", "side", "s", "rollout", "step", "per pass", *_PARTS.values()],
    [
      [
        str(slices),
        side,
        f"{r['rollout_s']:.1f}",
        f"{r['speedup_rollout']:.2f}x",
        f"{r['speedup_step']:.2f}x" if r["speedup_step"] else "",
        f"{r['mean_acceptance_length']:.2f}",
        *(f"{share:.0%}" for share in r["parts"].values()),
      ]
      for slices, sides in found.items()
      for side, r in sides.items()
    ],
  )
  if varied:
    tables.show(
      "Speed-up of rollouts with a frozen drafter, one thing changed",
      ["what", "case", "speed-up"],
      [
        [what, case, f"{speedup:.2f}x"]
        for what, cases in varied.items()
        for case, speedup in cases.items()
      ],
    )
  if compared:
    title = "Compared with the paper (arXiv 2511.16665)"
    tables.show(title, ["what", "paper", "here"], compared)
  print(f"Speculation pays up to {even} live requests per slice, of those that run here.")


def draw(found: Mapping, samples: samples_lib.Samples, out: pathlib.Path) -> list[str]:
  """Writes the figures: speed-ups by slices, and a TLT rollout's timeline."""
  out.mkdir(parents=True, exist_ok=True)
  fig = figure.Figure(figsize=(6, 4), layout="constrained")
  ax = fig.subplots()
  at = np.arange(len(found))
  for i, side in enumerate(("frozen", "tlt")):
    for j, measure in enumerate(("speedup_rollout", "speedup_step")):
      values = [sides[side][measure] or 0.0 for sides in found.values()]
      label = f"{side}, {'rollout' if j == 0 else 'whole step'}"
      ax.bar(at + 0.2 * (2 * i + j) - 0.3, values, 0.2, label=label)
  ax.axhline(1.0, color="black", linewidth=0.8)
  ax.set_xticks(at, [str(slices) for slices in found])
  ax.set(xlabel="slices", ylabel="speed-up over plain decoding")
  ax.legend()
  paths = [out / "speedup.png", out / "timeline.png"]
  fig.savefig(paths[0], dpi=150)
  plot.plot_timeline(rollout_lib.record(samples)).savefig(paths[1], dpi=150)
  return [str(path) for path in paths]


def compare_ways(scenario: scenario_lib.Scenario) -> None:
  found = ways.compare(scenario)
  ways.report(found)
  print(ways.verdict(found))
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  result = {
    "scenario": _SCENARIO.value,
    "ways": ways.as_json(found),
    "verdict": ways.verdict(found),
    "figures": [ways.draw(found, out)],
  }
  print(json.dumps(result))


def main():
  scenario = chosen()
  print(scenario.about)
  if _WAYS.value:
    compare_ways(scenario)
    return
  found, samples = by_slices(scenario)
  varied = sensitivity(scenario) if _SENSITIVITY.value else {}
  even = scenario.break_even()
  compared = against_paper(scenario, found)
  report(found, varied, compared, even)
  print(verdict(found))
  figures = draw(found, samples, pathlib.Path(_OUT.value))
  result = {
    "scenario": _SCENARIO.value,
    "by_slices": {str(slices): sides for slices, sides in found.items()},
    "sensitivity": varied,
    "break_even_live_batch": even,
    "paper": compared,
    "verdict": verdict(found),
    "figures": figures,
  }
  print(json.dumps(result))


if __name__ == "__main__":
  launch.run(main)
