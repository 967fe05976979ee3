"""The reports of a run: metrics.jsonl, rollouts.jsonl, TensorBoard, the terminal."""

from collections.abc import Iterable, Mapping, Sequence
import json
import math
import os
import pathlib
import sys
from typing import TextIO

import numpy as np
from numpy import typing as npt
from scipy import special
import tqdm

from tlt_jax import json_objects
from tlt_jax import processes
from tlt_jax import tensorboard
from tlt_jax import wandb_board
from tlt_jax import writing

OUTCOMES = ("solved", "wrong", "truncated")
_RECORD_START = b'{"step": '


class MetricError(ValueError):
  """An invalid metric, or a damaged metrics file."""


def interval(values: npt.ArrayLike) -> tuple[float, float]:
  """The mean and half the width of its 95% confidence interval.

  Student's, t(0.975, n - 1) * s / sqrt(n), for n >= 2 independent values f[n].
  """
  values = np.asarray(values)
  t = special.stdtrit(len(values) - 1, 0.975)
  half = t * values.std(ddof=1) / np.sqrt(len(values))
  return float(values.mean()), float(half)


def ratio(above: npt.ArrayLike, below: npt.ArrayLike) -> dict:
  """Geometric mean of the ratios of f[n], its 95% interval, and their range."""
  each = np.asarray(above) / np.asarray(below)
  middle, half = interval(np.log(each)) if len(each) > 1 else (np.log(each[0]), 0.0)
  return {
    "mean": float(np.exp(middle)),
    "interval": [float(np.exp(middle - half)), float(np.exp(middle + half))],
    "range": [float(each.min()), float(each.max())],
  }


class Writer:
  """Writes the metrics files of one run: one record per step, in step order.

  A record's `step` counts the steps before it; elsewhere steps count from 1, see `number`.
  Opening drops what a killed run wrote after its last checkpoint, so that a resumed run has
  each step once. `board` gets the metrics too. Only the first process writes.

  Raises:
    MetricError: an existing file is damaged before its last line
  """

  def __init__(
    self,
    workdir: str | pathlib.Path,
    resume_step: int = 0,
    board: wandb_board.Board | None = None,
  ):
    self._writes = processes.is_first()
    if not self._writes:
      return
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    paths = [workdir / "metrics.jsonl", workdir / "rollouts.jsonl"]
    records = [read(path) if path.exists() else [] for path in paths]  # before any change
    self._metrics, self._rollouts = (
      _open_at(path, [r for r in of_file if r["step"] < resume_step])
      for path, of_file in zip(paths, records, strict=True)
    )
    self._boards = [tensorboard.Board(workdir / "tensorboard", resume_step)]
    self._boards += [board] if board is not None else []

  def write(self, step: int, metrics: Mapping[str, object]) -> dict:
    """Records finite scalars of one step, on disk when it returns.

    Raises:
      MetricError: a value is NaN, infinite or no number
    """
    record = {"step": int(step)}
    for key, value in metrics.items():
      record[key] = _scalar(key, record, value)
    if not self._writes:
      return record
    _append(self._metrics, record)
    for board in self._boards:
      board.write(step, {key: x for key, x in record.items() if key != "step"})
    return record

  def write_rollout(self, step: int, rollout: Mapping[str, object]) -> None:
    """Records one rollout for the figures.

    `length` and `outcome` per response; `live_requests` at `live_time_s` seconds; `chunks`,
    see `samples.ChunkRecord`; `micro_batch_s` of the drafter's training, 0 if unknown; and
    `decisions` of the clock, (name, value) each, for replays.
    """
    if self._writes:
      _append(self._rollouts, {"step": int(step), **rollout})

  def close(self) -> None:
    if not self._writes:
      return
    self._metrics.close()
    self._rollouts.close()
    for board in self._boards:
      board.close()


def number(record: Mapping[str, object]) -> int:
  """The number of a record's step, as in the log and in figures: the first step is 1."""
  return record["step"] + 1


def steps(records: Iterable[Mapping]) -> list[Mapping]:
  """Those of a run's metrics that are of a step; others are of an evaluation only."""
  return [r for r in records if "rollout/seconds_s" in r or "reward/mean" in r]


def _scalar(key: str, record: Mapping[str, object], value: object) -> int | float:
  step = f"step {number(record)}"
  if key.startswith("eval/"):
    step = f"the evaluation after step {record['step']}"
  try:
    found = value.item() if hasattr(value, "item") else value
    finite = math.isfinite(found)
  except (TypeError, ValueError) as e:
    raise MetricError(f"{step}: metric {key!r} is {value!r:.80}, not a number") from e
  if not finite:
    raise MetricError(
      f"{step}: metric {key!r} is {found}; the run has diverged or divides "
      "by an empty count"
    )
  return found


def _append(file: TextIO, record: dict) -> None:
  with writing.to(file.name):
    file.write(json.dumps(record, default=lambda x: x.tolist(), allow_nan=False) + "\n")
    file.flush()


def _open_at(path: pathlib.Path, kept: Sequence[Mapping]) -> TextIO:
  content = "".join(json.dumps(record) + "\n" for record in kept).encode()
  if path.exists() and content != path.read_bytes():
    new = path.with_name(path.name + ".new")
    with writing.to(new), new.open("wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(new, path)
  return path.open("a")


def read(path: str | pathlib.Path) -> list[dict]:
  """The records of a metrics or rollouts file, less a half-written last line.

  Raises:
    MetricError: no such file, or damaged before its last line
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise MetricError(f"{path}: no such file; a run writes it in its workdir")
  *lines, rest = path.read_bytes().split(b"\n")
  records = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
  try:
    records += [_parse(path, len(lines) + 1, rest)] if rest else []
  except MetricError:
    if not rest.startswith(_RECORD_START[: len(rest)]):  # no half-written record
      raise
  return records


def _parse(path: pathlib.Path, number: int, line: bytes) -> dict:
  try:
    record = json_objects.parse(line)
  except ValueError as e:
    raise MetricError(f"{path}, line {number} {e}; delete that line") from e
  step = record.get("step")
  if type(step) is not int or step < 0:
    raise MetricError(f"{path}, line {number}: not a record of a step; delete that line")
  return record


class Progress:
  """Shows progress: a bar on a terminal, else one line per step.

      step 12/60  reward 0.61  solved 50%  length 143/1024  rollout 3.1 s  update 2.0 s

  Only the first process shows it. `done` is the number of steps before a resume.
  """

  def __init__(self, total: int, done: int = 0, stream: TextIO | None = None):
    self._total = total
    self._stream = sys.stderr if stream is None else stream
    self._bar = None
    self._shows = processes.is_first()
    if self._shows and self._stream.isatty():
      self._bar = tqdm.tqdm(
        total=total, initial=done, unit="step", file=self._stream, dynamic_ncols=True
      )

  def update(self, done: int, record: Mapping[str, float]) -> None:
    parts = _progress_parts(record)
    if not self._shows:
      return
    if self._bar is None:
      line = "  ".join([f"step {done}/{self._total}", *parts])
      print(line, file=self._stream, flush=True)
      return
    self._bar.set_postfix_str("  ".join(parts), refresh=False)
    self._bar.update(done - self._bar.n)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


def _progress_parts(record: Mapping[str, float]) -> list[str]:
  templates = (
    "reward {reward/mean:.2f}",
    "solved {reward/solved:.0%}",
    "eval {eval/accuracy:.0%}",
    "length {rollout/length_mean:.0f}/{rollout/length_max:.0f}",
    "accepted {rollout/mean_acceptance_length:.2f}",
    "rollout {rollout/seconds_s:.1f} s",
    "update {policy/seconds_s:.1f} s",
    "step {step/seconds_s:.1f} s",
  )
  if record.get("compile/seconds_s", 0.0) >= 1.0:  # or it would be on every line
    templates += ("compiling {compile/seconds_s:.1f} s",)
  parts = []
  for template in templates:
    try:
      parts.append(template.format_map(record))
    except KeyError:  # not every step has every metric
      continue
  return parts
