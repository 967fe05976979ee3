"""The summary at the end of a run: tables of its metrics, and the gain of TLT in words."""

from collections.abc import Iterator, Mapping, Sequence
import io
import sys

import rich.box
import rich.console
import rich.table

from tlt_jax import metrics

# Seconds of one step, and the label of each phase in the final table.
_PHASES = {
  "rollout": "rollout/seconds_s",
  "reward": "reward/seconds_s",
  "policy update": "policy/seconds_s",
  "weight sync": "weight_sync/seconds_s",
}
# Rows of the final table: label, key, format.
_QUANTITIES = (
  ("reward mean", "reward/mean", ".3f"),
  ("solved", "reward/solved", ".3f"),
  ("response length, mean", "rollout/length_mean", ".0f"),
  ("response length, p50", "rollout/length_p50", ".0f"),
  ("response length, p99", "rollout/length_p99", ".0f"),
  ("response length, max", "rollout/length_max", ".0f"),
  ("acceptance length", "rollout/mean_acceptance_length", ".2f"),
  ("rollout tokens/s", "rollout/tokens_per_s", ".0f"),
  ("step seconds", "step/seconds_s", ".2f"),
)
# How rollouts are repeated, see `repeats`.
SIDES = {"plain": "plainly", "frozen": "with the first drafter, frozen"}
LATE = 10  # last steps of a run, with a gain separately


def text(records: Sequence[Mapping[str, float]], k: int = 10) -> str:
  """Two tables, of first and last steps and of time by phase, and the gain of TLT.

  First and last are means over `k` steps, at most half of the run each; for evaluations,
  the first and the last one. Coloured on a terminal.

  Args:
    records: of steps and evaluations, as `metrics.Writer.write` returns them
    k: steps at each end
  """
  done = [r for r in records if "reward/mean" in r]  # others are evaluations only
  k = max(1, min(k, len(done) // 2))
  steps = "step" if k == 1 else f"{k} steps"
  ends = []
  for label, key, form in _QUANTITIES:
    if any(key in r for r in done[:k]) and any(key in r for r in done[-k:]):
      means = (format(_mean(part, key), form) for part in (done[:k], done[-k:]))
      ends.append((label, *means))
  for label, key in (("accuracy", "eval/accuracy"), ("reward", "eval/reward_mean")):
    if found := [f"{r[key]:.3f}" for r in records if key in r]:
      ends.append((f"eval {label} (one)", found[0], found[-1]))
  seconds = {label: _total(records, key) for label, key in _PHASES.items()}
  total = _total(records, "step/seconds_s")
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
  columns = ("quantity", f"first {steps}", f"last {steps}")
  console.print(_table(columns, ends), _table(("phase", "seconds", "share"), times))
  for sentence in (*_gain(records), *_time_of_slices(records)):
    console.print(sentence)
  return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> rich.table.Table:
  table = rich.table.Table(columns[0], box=rich.box.SIMPLE_HEAD)
  for column in columns[1:]:
    table.add_column(column, justify="right")
  for row in rows:
    table.add_row(*row)
  return table


def _gain(records: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """The gain of speculation and training: measured by repeats, else estimated."""
  compared = [r for r in records if "plain/seconds_s" in r]
  if not compared:
    yield from _estimated_gain(records)
    return
  sides = {side: label for side, label in SIDES.items() if f"{side}/tokens" in compared[0]}
  tokens, different, ties = (
    sum(r[f"{side}/{key}"] for r in compared for side in sides)
    for key in ("tokens", "differing_tokens", "near_ties")
  )
  steps = [r for r in records if "rollout/seconds_s" in r]
  yield (
    f"Gain: in {len(compared)} of {len(steps)} steps the rollout was repeated "
    f"{' and '.join(sides.values())}. Of {tokens:,} tokens compared {different:,} were "
    "different" + (f", and {ties} at a tie in rounding." if ties else ".")
  )
  late = [r for r in steps[-LATE:] if r in compared]
  for side, label in sides.items():
    faster = f"{_faster(compared, side)} in all"
    if 1 < len(late) < len(compared):
      faster += f", {_faster(late, side)} in the last {LATE} steps"
    whole = gain(compared, side, "step")["mean"]
    yield (
      f"This run's rollouts, against those repeated {label}: {faster}. Its steps, all "
      f"training included: {whole:.2f} times."
    )
  if "frozen" in sides:
    drawn = [
      " and ".join(f"{r[key]:.2f}" for r in (compared[0], compared[-1]))
      for key in ("rollout/mean_acceptance_length", "frozen/mean_acceptance_length")
    ]
    yield (
      f"A pass drew {drawn[0]} tokens in the first and the last of these rollouts; with "
      f"the frozen drafter {drawn[1]}."
    )


def _faster(compared: Sequence[Mapping[str, float]], side: str) -> str:
  """How many times as fast the run's own rollouts were, with its interval."""
  found = gain(compared, side)
  low, high = found["interval"]
  interval = f" (95%: {low:.2f} to {high:.2f})" if len(compared) > 1 else ""
  return f"{found['mean']:.2f} times as fast{interval}"


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
    yield (
      f"Speculation: rollouts took {spent:.1f} s, {than} "
      f"({(spent + saved) / spent:.2f} times as fast), by plain steps timed in this run."
    )


def _time_of_slices(records: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """How long slices speculated, were idle, and trained."""
  spent = _total(records, "rollout/seconds_s")
  if speculating := _total(records, "rollout/speculating_s"):
    tokens = _mean(records, "rollout/mean_acceptance_length")
    yield (
      f"Speculation ran for {speculating / spent:.0%} of the rollouts' time; a pass of "
      f"the policy drew {tokens:.2f} tokens, plain ones included."
    )
  if any("drafter/updates" in r for r in records):
    idle, harvested = (_total(records, f"rollout/{k}_s") for k in ("idle", "harvested"))
    after, updates = (_total(records, f"drafter/{k}") for k in ("training_s", "updates"))
    slices = max(r.get("rollout/slices", 0) for r in records)
    share = f" ({idle / (slices * spent):.0%} of their time)" if slices and spent else ""
    yield (
      f"Spot training: slices were idle for {idle:.1f} s{share}, and trained the drafter "
      f"on what takes about {harvested:.1f} s alone; {updates:.0f} updates in all. "
      f"Training after rollouts took {after:.1f} s."
    )


def _total(records: Sequence[Mapping[str, float]], key: str) -> float:
  return sum(r.get(key, 0.0) for r in records)


def _mean(records: Sequence[Mapping[str, float]], key: str) -> float:
  values = [r[key] for r in records if key in r]
  return sum(values) / len(values)
