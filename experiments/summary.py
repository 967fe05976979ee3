"""The summary at the end of a run: tables of its metrics, and the gain of TLT in words."""

from collections.abc import Iterator, Mapping, Sequence
import io
import pathlib
import shlex
import sys

import rich.box
import rich.console
import rich.table

from experiments import config as config_lib
from experiments import equal_rewards
from experiments import trees
from tlt_jax import metrics

# Seconds of one step, and the label of each phase in the final table.
_PHASES = {
  "rollout": "rollout/seconds_s",
  "reward": "reward/seconds_s",
  "policy update": "policy/seconds_s",
  "weight sync": "weight_sync/seconds_s",
}
# The same of what is not in `step/seconds_s`.
_OUTSIDE = {
  "evaluations": "eval/seconds_s",
  "rollouts repeated to compare": ("plain/seconds_s", "frozen/seconds_s"),
  "compiling": "compile/seconds_s",
}
# Rows of the final table: label, key, format.
_QUANTITIES = (
  ("reward mean", "reward/mean", ".3f"),
  ("solved", "reward/solved", ".3f"),
  ("response length, mean", "rollout/length_mean", ".0f"),
  ("response length, median", "rollout/length_p50", ".0f"),
  ("response length, 99th percentile", "rollout/length_p99", ".0f"),
  ("response length, max", "rollout/length_max", ".0f"),
  ("tokens per pass of the policy", "rollout/mean_acceptance_length", ".2f"),
  ("rollout tokens/s", "rollout/tokens_per_s", ".0f"),
  ("step seconds", "step/seconds_s", ".2f"),
)
# How rollouts are repeated, see `repeats`.
SIDES = {"plain": "plainly", "frozen": "with the first drafter, frozen"}
_OTHERS = {"plain": "plain decoding", "frozen": "the first drafter, frozen,"}
LATE = 10  # last steps of a run, with a gain separately


def text(records: Sequence[Mapping[str, float]], k: int = 10) -> str:
  """Two tables, of first and last steps and of time by phase, and the gain of TLT.

  First and last are means over `k` steps, at most half of the run each; for evaluations,
  the first and the last one. Coloured on a terminal.

  Args:
    records: of steps and evaluations, as `metrics.Writer.write` returns them
    k: steps at each end
  """
  done = metrics.steps(records)
  if not done:
    return "The run has done no step."
  k = max(1, min(k, len(done) // 2))
  ends, hidden = [], _hidden(records)
  for label, key, form in _QUANTITIES:
    if key not in hidden and any(key in r for r in done[:k]):
      means = (format(_mean(part, key), form) for part in (done[:k], done[-k:]))
      ends.append((label, *means))
  for label, key in (("accuracy", "eval/accuracy"), ("reward", "eval/reward_mean")):
    found = [f"{r[key]:.3f}" for r in records if key in r and key not in hidden]
    if found:
      ends.append((f"eval {label}, first and last", found[0], found[-1]))
  seconds = {label: _total(done, key) for label, key in _PHASES.items()}
  if any("critic/loss" in r for r in done):
    seconds = {
      label.replace("policy update", "policy and critic update"): spent
      for label, spent in seconds.items()
    }
  total = _total(done, "step/seconds_s")
  seconds["other"] = max(0.0, total - sum(seconds.values()))
  seconds["all steps"] = total
  times = [
    (label, f"{spent:.1f}", f"{spent / total:.0%}" if total else "-")
    for label, spent in seconds.items()
  ]

  written, terminal = io.StringIO(), sys.stdout.isatty()
  console = rich.console.Console(
    file=written, force_terminal=terminal, no_color=not terminal, width=80
  )
  steps = "step" if k == 1 else f"{k} steps"
  columns = ("quantity", f"first {steps}", f"last {steps}")
  if len(done) == 1:
    columns, ends = ("quantity", "the only step"), [(row[0], row[-1]) for row in ends]
  console.print(_table(columns, ends), _table(("phase", "seconds", "share"), times))
  sentences = [_outside(records), equal_rewards.in_summary(records)]
  for sentence in (*sentences, *_gain(done), *_time_of_slices(done)):
    if sentence:
      console.print(sentence, highlight=False)
  return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")


def _hidden(records: Sequence[Mapping[str, float]]) -> set[str]:
  """Keys whose rows would repeat others, or are of speculation in a run without it."""
  hidden = set()
  for key, same in (
    ("reward/solved", "reward/mean"),
    ("eval/reward_mean", "eval/accuracy"),
  ):
    if all(r[key] == r.get(same) for r in records if key in r):
      hidden.add(key)
  if not _total(records, "rollout/speculating_s"):
    hidden.add("rollout/mean_acceptance_length")
  return hidden


def _outside(records: Sequence[Mapping[str, float]]) -> str | None:
  """A sentence on the time that is not in steps; None where there was none."""
  parts = []
  for label, keys in _OUTSIDE.items():
    keys = (keys,) if isinstance(keys, str) else keys
    if spent := sum(_total(records, key) for key in keys):
      parts.append(f"{label} {spent:.1f} s")
  return f"Outside of these steps: {', '.join(parts)}." if parts else None


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> rich.table.Table:
  table = rich.table.Table(columns[0], box=rich.box.SIMPLE_HEAD)
  for column in columns[1:]:
    table.add_column(column, justify="right")
  for row in rows:
    table.add_row(*row)
  return table


def _gain(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """The gain of speculation and training: measured by repeats, else estimated."""
  compared = [r for r in steps if "plain/seconds_s" in r]
  if not compared:
    yield from _estimated_gain(steps)
    return
  sides = {side: label for side, label in SIDES.items() if f"{side}/tokens" in compared[0]}
  tokens, different, ties = (
    sum(r[f"{side}/{key}"] for r in compared for side in sides)
    for key in ("tokens", "differing_tokens", "near_ties")
  )
  equal = f"All {tokens:,} tokens compared were the same"
  if different:
    equal = f"Of {tokens:,} tokens compared {different:,} were different"
  yield (
    f"Gain: in {len(compared)} of {len(steps)} steps the rollout was repeated "
    f"{' and '.join(sides.values())}. {equal}"
    + (f", and {ties} at a tie in rounding." if ties else ".")
  )
  late = [r for r in steps[-LATE:] if r in compared]
  for side in sides:
    faster = _faster(compared, side)
    if 3 < len(late) < len(compared):
      faster += f"; those of the last {LATE} steps: {_faster(late, side)}"
    whole = gain(compared, side, "step")["mean"]
    yield (
      f"Against {_OTHERS[side]} this run's rollouts were {faster}. Its steps, all training "
      f"included, were {_times(whole)}."
    )
  if "frozen" in sides:
    own, frozen = (
      [f"{r[key]:.2f}" for r in (compared[0], compared[-1])]
      for key in ("rollout/mean_acceptance_length", "frozen/mean_acceptance_length")
    )
    if len(compared) == 1:
      yield (
        f"A pass of the policy drew {own[0]} tokens, with the frozen drafter {frozen[0]}."
      )
    else:
      yield (
        f"A pass of the policy drew {own[0]} tokens in the first of these rollouts and "
        f"{own[1]} in the last; with the frozen drafter {frozen[0]} and {frozen[1]}."
      )


def _faster(compared: Sequence[Mapping[str, float]], side: str) -> str:
  """How many times as fast the run's own rollouts were, with its interval."""
  found = gain(compared, side)
  low, high = found["interval"]
  if len(compared) == 1:
    return _times(found["mean"])
  interval = f"(95% interval: {low:.2f} to {high:.2f})"
  if low <= 1 <= high:
    return f"not clearly faster or slower, {found['mean']:.2f} times as fast {interval}"
  return f"{_times(found['mean'])} {interval}"


def _times(ratio: float) -> str:
  """A speed relative to another, such as "1.20 times as fast", "slower, 0.90 times"."""
  if f"{ratio:.2f}" == "1.00":
    return "as fast (1.00 times)"
  return f"{'' if ratio > 1 else 'slower, '}{ratio:.2f} times as fast"


def gain(compared: Sequence[Mapping[str, float]], side: str, of: str = "rollout") -> dict:
  """The time of a side over the run's own, as `metrics.ratio` gives it.

  Args:
    compared: records of steps whose rollouts were repeated
    side: of `SIDES`
    of: "rollout", until the last token, or "step", with all training
  """
  sides, own = [], []
  for r in compared:
    rollout_s = r["rollout/seconds_s"]
    until_last = rollout_s - r.get("drafter/training_s", 0.0)
    step_s = r["step/seconds_s"]
    own.append(until_last if of == "rollout" else step_s)
    repeated_s = r[f"{side}/seconds_s"]
    sides.append(repeated_s if of == "rollout" else step_s - rollout_s + repeated_s)
  return metrics.ratio(sides, own)


def _estimated_gain(records: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """The gain of speculation by plain steps timed in the run, if it speculated."""
  if any("rollout/predicted_gain" in r for r in records):
    saved, spent = _total(records, "rollout/saved_s"), _total(records, "rollout/seconds_s")
    than = f"{abs(saved):.1f} s {'less' if saved >= 0 else 'more'} than without it"
    if abs(saved) < 0.05:
      than = "as long as without it"
    faster = _times((spent + saved) / spent)
    yield (
      f"Speculation: rollouts took {spent:.1f} s, {than}: {faster}. (An estimate, by plain "
      "steps timed in this run.)"
    )


def _time_of_slices(records: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """How long slices speculated, were idle, and trained."""
  spent = _total(records, "rollout/seconds_s")
  if speculating := _total(records, "rollout/speculating_s"):
    tokens = _mean(records, "rollout/mean_acceptance_length")
    yield (
      f"Speculation ran for {speculating / spent:.0%} of the rollouts' time; a pass of "
      f"the policy drew {tokens:.2f} tokens, counting passes without drafts."
    )
  if any("drafter/updates" in r for r in records):
    idle, harvested = (_total(records, f"rollout/{k}_s") for k in ("idle", "harvested"))
    after, updates = (_total(records, f"drafter/{k}") for k in ("training_s", "updates"))
    slices = max(r.get("rollout/slices", 0) for r in records)
    share = f" ({idle / (slices * spent):.0%} of their time)" if slices and spent else ""
    yield (
      f"Training of the drafter: {updates:,.0f} updates. Devices were idle in rollouts for "
      f"{idle:.1f} s{share}; about {harvested:.1f} s of training were done meanwhile, and "
      f"{after:.1f} s after rollouts."
    )


def _total(records: Sequence[Mapping[str, float]], key: str) -> float:
  return sum(r.get(key, 0.0) for r in records)


def _mean(records: Sequence[Mapping[str, float]], key: str) -> float:
  values = [r[key] for r in records if key in r]
  return sum(values) / len(values)


def what_next(
  workdir: pathlib.Path, config: config_lib.RunConfig, prompt: str | Sequence[Mapping]
) -> str:
  """Where a finished run's results are, and the commands that use them.

  Args:
    prompt: an example
  """
  drafter = workdir / "drafter"
  contents = {
    "policy/": "what was trained, a Hugging Face folder",
    "drafter/": "the drafter, as it was trained in this run",
    "figures/": "rewards, lengths and time",
    "metrics.jsonl": "all numbers, by step",
    "samples/": "responses to read",
    "checkpoints/": "the same command resumes from here; for more steps give it "
    f"--config.steps={2 * config.steps}",
  }
  if not drafter.is_dir():
    del contents["drafter/"]
  if not isinstance(prompt, str):
    prompt = str(prompt[-1].get("content"))
  if len(prompt) > 200:
    prompt = "..."
  given = [] if not drafter.is_dir() else [f"--drafter={drafter}"]
  configured = _config_flags()
  commands = {
    "Measure it on more held-out prompts": [
      "evaluate",
      *configured,
      f"--model={workdir}/policy",
      f"--baseline={config.policy}",
    ],
    "See a response": [
      "generate",
      *configured,
      f"--model={workdir}/policy",
      *given,
      f"--prompt={prompt}",
    ],
    "Export it for SGLang or vLLM": [
      "export",
      f"--workdir={workdir}",
      f"--output={workdir}/served",
    ],
  }
  lines = [f"In {workdir}:", *(f"  {x:15} {what}" for x, what in contents.items())]
  for what, command in commands.items():
    lines += [f"{what}:", f"  {_as_started(command)}"]
  return "\n".join(lines)


def _config_flags() -> list[str]:
  """Those of this command line, but for the number of steps."""
  path, overrides, _ = trees.split(sys.argv, "config")
  flags = [f"--config.{key}={x}" for key, x in overrides.items() if key != "steps"]
  return [f"--config={path}", *flags] if path else flags


def _as_started(command: Sequence[str]) -> str:
  """A command of this project, as this one was started: by `tlt` or by Python."""
  name, *args = command
  by = sys.orig_argv
  start = [by[0], "-m", f"experiments.{name}"]
  if len(by) > 1 and pathlib.Path(by[1]).name == "tlt":
    start = ["tlt", name]
  return shlex.join([*start, *args])
