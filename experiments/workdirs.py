"""The folder of a run: what its checkpoints were made with, and who may go on from them.

`config.json` in a workdir is the config that its checkpoints were made with. A run that
resumes may change how long it is, when it evaluates and when it saves (`FREE`). Anything
else would mix two experiments in one folder: it is refused, or taken to another folder
(`--fork`), which starts from a copy of the latest checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import logging
import os
import pathlib
from typing import Any, NamedTuple

from tlt_jax import checkpoint
from tlt_jax import json_objects
from tlt_jax import metrics
from tlt_jax import writing

FORK = "Go on in this folder, from --workdir's latest checkpoint, with other settings."
FREE = ("steps", "evaluation", "checkpoint")  # what a resumed run may change
_CONFIG, _CHECKPOINTS = "config.json", "checkpoints"
_ORIGIN = "forked_from.json"  # workdir, step and config that a fork started from


class WorkdirError(ValueError):
  """A workdir that a run cannot go on in; the message names the remedy."""


class Workdir(NamedTuple):
  """The folder of a run."""

  path: pathlib.Path
  checkpoints: checkpoint.Checkpoints
  left_behind: tuple[str, ...] = ()  # of the checkpoint's state, which a fork makes anew


def open(
  path: str,
  config: Mapping[str, Any],
  fork: str | None = None,
  holds: Sequence[str] = (),
) -> Workdir:
  """Opens a run's folder, a new one or one to go on in; changes nothing in it.

  Args:
    path: the folder
    config: of the run, with a section "checkpoint" and an entry "steps"
    fork: another folder, where the run goes on from the latest checkpoint of `path`; ""
      for none, None for a command that cannot
    holds: files of the folder that depend on the config, as checkpoints do
  Raises:
    WorkdirError: the checkpoints were made with other settings, or are of later steps
    CheckpointError: the latest one is damaged
  """
  folder = pathlib.Path(path)
  if fork:
    folder = _fork(folder, pathlib.Path(fork), config)
  checkpoints = checkpoint.Checkpoints(folder / _CHECKPOINTS, **config["checkpoint"])
  is_new = checkpoints.latest() is None
  if is_new and not any((folder / name).exists() for name in holds):
    return Workdir(folder, checkpoints)
  ways_out = "go back to them, or take another --workdir"
  if fork is not None:
    ways_out += ", or go on with the new ones in another folder: --fork=NEW_WORKDIR"
  changed = [
    f"{key} was {json.dumps(old)} and is {json.dumps(new)} now"
    for key, old, new in _changes(_read(folder, ways_out), config)
    if key.removeprefix("run.").split(".")[0] not in FREE
  ]
  if changed:
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    raise WorkdirError(
      f"{folder} was made with other settings: {'; '.join(changed[:5])}{more}; {ways_out}"
    )
  done = 0 if is_new else checkpoints.data()[0]
  if done > config["steps"]:
    raise WorkdirError(
      f"--config.steps={config['steps']}: {folder} has done {done} steps already; ask for "
      "as many or more, or take another --workdir"
    )
  return Workdir(folder, checkpoints, _left_behind(folder, config, done))


def _left_behind(folder: pathlib.Path, config: Mapping, step: int) -> tuple[str, ...]:
  """The parts of a fork's first checkpoint that its settings make anew: the drafter."""
  path = folder / _ORIGIN
  if not path.exists():
    return ()
  try:
    origin = json_objects.parse(path.read_bytes())
    first, before = origin["step"], dict(origin["config"])
  except (OSError, LookupError, TypeError, ValueError) as e:
    raise WorkdirError(
      f"{path} says what this folder was forked from, and cannot be read ({e!r:.200}); "
      "fork again, to another folder"
    ) from e
  if first != step:  # a checkpoint of its own
    return ()
  changed = {key.split(".")[0] for key, _, _ in _changes(before, config)}
  return ("drafter",) if changed & {"drafter", "spot"} else ()


def record(workdir: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Writes `workdir/config.json`, at once or not at all."""
  workdir.mkdir(parents=True, exist_ok=True)
  partial = workdir / f"{_CONFIG}.new"
  with writing.to(workdir / _CONFIG):
    partial.write_text(json.dumps(config, indent=2) + "\n")
  os.replace(partial, workdir / _CONFIG)


def _read(workdir: pathlib.Path, ways_out: str) -> dict[str, Any]:
  """Reads `workdir/config.json`."""
  path = workdir / _CONFIG
  try:
    return json_objects.parse(path.read_bytes())
  except (OSError, ValueError) as e:
    raise WorkdirError(
      f"{path} holds the settings that this folder was made with, and cannot be read "
      f"({e}): {ways_out}"
    ) from e


def _changes(old: Mapping, new: Mapping, prefix: str = "") -> Iterator[tuple]:
  """Yields (dotted key, old value, new value) of every difference between configs."""
  for name in sorted(old.keys() | new.keys()):
    key, a, b = prefix + name, old.get(name, "absent"), new.get(name, "absent")
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      yield from _changes(a, b, f"{key}.")
    elif json.loads(json.dumps(b)) != a:  # as the file has it: lists for tuples
      yield key, a, b


def _fork(old: pathlib.Path, new: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
  """Copies the latest checkpoint and the records up to it; returns the new folder.

  The checkpoint comes last: a fork that has one is complete, and only goes on.
  """
  if new.resolve() == old.resolve():
    raise WorkdirError(f"--fork={new} is the workdir itself; name another folder")
  if checkpoint.latest(new / _CHECKPOINTS) is not None:
    return new
  step = checkpoint.checked(old / _CHECKPOINTS)
  origin = _read(old, "no fork can start from it")
  record(new, config)
  origin = {"workdir": str(old.resolve()), "step": step, "config": origin}
  (new / _ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
  for name in ("metrics.jsonl", "rollouts.jsonl"):
    if (old / name).is_file():
      kept = [r for r in metrics.read(old / name) if r["step"] < step]
      (new / name).write_text("".join(json.dumps(r) + "\n" for r in kept))
  checkpoint.copy(step, old / _CHECKPOINTS, new / _CHECKPOINTS)
  logging.info("weights and place in the data are those of step %d of %s", step, old)
  return new
