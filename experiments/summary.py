"""The summary that closes a run: tables of its metrics, and what TLT gained in words."""

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
LATE = 10  # last steps of a run that are looked at by themselves


def text(records: Sequence[Mapping[str, float]], k: int = 10) -> str:
  """Tells a run in two tables, first and last steps and where the time went, and in words.

  First and last are means over `k` steps, at most half of the run each; of
  evaluations they are the first and the last one. Coloured on a terminal.

  Args:
    records: of steps and evaluations, as `metrics.Writer.write` returns them
    k: steps at each end
  """
  done = [r for r in records if "reward/mean" in r]  # others are evaluations only
  k = max(1, min(k, len(done) // 2))
  ends = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  ends.add_column("quantity")
  steps = "step" if k == 1 else f"{k} steps"
  for column in (f"first {steps}", f"last {steps}"):
    ends.add_column(column, justify="right")
  for label, key, form in _QUANTITIES:
    first, last = _mean(done[:k], key), _mean(done[-k:], key)
    if first is not None and last is not None:
      ends.add_row(label, format(first, form), format(last, form))
  for label, key in (("accuracy", "eval/accuracy"), ("reward", "eval/reward_mean")):
    if found := [f"{r[key]:.3f}" for r in records if key in r]:
      ends.add_row(f"eval {label} (one)", found[0], found[-1])

  times = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  times.add_column("phase")
  times.add_column("seconds", justify="right")
  times.add_column("share", justify="right")
  seconds = {label: sum(r.get(key, 0.0) for r in records) for label, key in _PHASES.items()}
  total = sum(r.get("step/seconds_s", 0.0) for r in records)
  seconds["other"] = max(0.0, total - sum(seconds.values()))
  seconds["all steps"] = total
  for label, spent in seconds.items():
    share = f"{spent / total:.0%}" if total else "-"
    times.add_row(label, f"{spent:.1f}", share)

  written = io.StringIO()
  terminal = sys.stdout.isatty()
  console = rich.console.Console(
    file=written, force_terminal=terminal, no_color=not terminal, width=80
  )
  console.print(ends, times)
  for sentence in (*_gain(records), *_time_of_slices(records)):
    console.print(sentence)
  return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")


def _gain(records: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """What speculation and training gained: as compared in some steps, else estimated."""
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
    told = f"{_faster(compared, side)} in all"
    if 1 < len(late) < len(compared):
      told += f", {_faster(late, side)} in the last {LATE} steps"
    whole = gain(compared, side, "step")["mean"]
    yield (
      f"This run's rollouts, against those repeated {label}: {told}. Its steps, all "
      f"training included: {whole:.2f} times."
    )
  own = "rollout/mean_acceptance_length"
  if "frozen" in sides:
    pairs = [(r[own], r["frozen/mean_acceptance_length"]) for r in compared]
    (first, first_frozen), (last, last_frozen) = pairs[0], pairs[-1]
    yield (
      f"A pass drew {first:.2f} tokens in the first of these rollouts and {last:.2f} in "
      f"the last; with the frozen drafter {first_frozen:.2f} and {last_frozen:.2f}."
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
  """What speculation gained by the run's own measure, where it speculated."""
  if any("rollout/predicted_gain" in r for r in records):
    saved, spent = _total(records, "rollout/saved_s"), _total(records, "rollout/seconds_s")
    than = f"{abs(saved):.1f} s {'less' if saved >= 0 else 'more'} than without it"
    faster = (spent + saved) / spent
    yield (
      f"Speculation: rollouts took {spent:.1f} s, {than} "
      f"({faster:.2f} times as fast). That compares chunks that speculated with "
      "what their tokens take in plain steps, timed in the same buckets of this run."
    )


def _time_of_slices(records: Sequence[Mapping[str, float]]) -> Iterator[str]:
  """For what share of the rollouts slices speculated, were idle, and trained."""
  spent = _total(records, "rollout/seconds_s")
  if speculating := _total(records, "rollout/speculating_s"):
    tokens = _mean(records, "rollout/mean_acceptance_length")
    yield (
      f"Speculation ran for {speculating / spent:.0%} of the rollouts' time; a pass of "
      f"the policy drew {tokens:.2f} tokens, plain ones included."
    )
  if any("rollout/lost_s" in r for r in records):
    lost = _total(records, "rollout/lost_s")
    yield (
      f"In hindsight the best strategy throughout would have taken {lost:.1f} s less "
      f"({lost / spent:.1%} of the rollouts' time)."
    )
  if any("drafter/updates" in r for r in records):
    idle, harvested = (_total(records, f"rollout/{k}_s") for k in ("idle", "harvested"))
    slices = max(r.get("rollout/slices", 0) for r in records)
    share = f" ({idle / (slices * spent):.0%} of their time)" if slices and spent else ""
    yield (
      f"Spot training: slices were idle for {idle:.1f} s{share}, and trained the drafter "
      f"on what takes about {harvested:.1f} s alone; "
      f"{_total(records, 'drafter/updates'):.0f} updates in all."
    )
    invested, saved = (
      max(r.get(f"drafter/{k}_s", 0.0) for r in records) for k in ("invested", "saved")
    )
    if invested or saved:
      yield (
        f"Beside that, {invested:.1f} s were invested in training after rollouts. By the "
        f"run's own estimate all training saved {saved:.1f} s of rollouts."
      )


def _total(records: Sequence[Mapping[str, float]], key: str) -> float:
  """Adds up a metric over the steps that have it."""
  return sum(r.get(key, 0.0) for r in records)


def _mean(records: Sequence[Mapping[str, float]], key: str) -> float | None:
  """Averages a metric over the steps that have it; None if none has."""
  values = [r[key] for r in records if key in r]
  return sum(values) / len(values) if values else None
