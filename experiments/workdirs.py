"""The folder of a run: config, checkpoints, and the rules for resuming.

A workdir has the config of its checkpoints in `config.json`. A resumed run may change its
length, when it evaluates, compares and saves, and its devices (`FREE`). Any other change
would mix two experiments in one folder: it raises an error, or goes to another folder
(`--fork`) that starts from the latest checkpoint of the first. `forked_from.json` in such a
folder names the first.
"""

import atexit
from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import socket
import time
from typing import Any, NamedTuple

from experiments import sizes
from experiments import trees
from tlt_jax import checkpoint
from tlt_jax import json_objects
from tlt_jax import metrics
from tlt_jax import processes
from tlt_jax import writing
from tlt_jax.rl import carry as carry_lib

FORK = "Go on in this folder, from --workdir's latest checkpoint, with other settings."
SCHEDULE = (
  "A run's rollouts.jsonl, to train the drafter as it was there; default: this run's own, "
  "for steps that are done again after a crash."
)
# What a resumed run may change.
FREE = ("steps", "evaluation", "compare", "checkpoint", "tensor_parallel", "wandb")
_VOCAB_SIZE = "drafter_vocab_size"  # an entry of a run
CONFIG, _ORIGIN, _CHECKPOINTS = "config.json", "forked_from.json", "checkpoints"
_LOCK = ".lock"  # names the process that writes here
_NAMED_S = 0.3  # seconds within which a process that has locked a folder has named itself
# Part of a checkpoint -> settings; where one of them differs, a fork initializes the part.
_NOT_RESTORED = {
  "drafter": (
    "drafter.",
    "drafter_vocab_size.",
    "spot.",
    "rollout.max_prompt.",
    "sampling.max_tokens.",
  ),
  "critic": ("algorithm.name.",),
}


class WorkdirError(ValueError):
  """A workdir in which a run cannot continue; the message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Workdir:
  """The folder of a run, open."""

  path: pathlib.Path
  config: Any  # of the run, a tree of `config`
  checkpoints: checkpoint.Checkpoints  # to write
  start: checkpoint.Checkpoints | None = None  # of which the latest is restored
  forked_from: pathlib.Path | None = None  # the workdir of `start`, if it is another one
  not_restored: tuple[str, ...] = ()  # parts of the checkpoint that a fork initializes
  log: pathlib.Path | None = None  # rollouts.jsonl of the same run, if there is one

  def kept_drafter(self) -> dict | None:
    """What the checkpoint has of its drafter, see `Spot.data`; None: it begins."""
    if self.start is None or "drafter" in self.not_restored:
      return None
    return self.start.data()[1]["drafter"]

  def begin(self, step: int) -> None:
    """Writes config.json; for a fork also its origin and the records before `step`."""
    processes.barrier()  # every process has read what is there
    if not processes.is_first():
      return
    if self.forked_from is not None:
      origin = {"workdir": str(self.forked_from.resolve()), "step": step}
      with writing.to(self.path):
        (self.path / _ORIGIN).write_text(json.dumps(origin) + "\n")
        for name in ("metrics.jsonl", "rollouts.jsonl"):
          if (self.forked_from / name).is_file():
            records = metrics.read(self.forked_from / name)
            lines = [json.dumps(r) + "\n" for r in records if r["step"] < step]
            (self.path / name).write_text("".join(lines))
    _write(self.path, self.config)


class _Lock(NamedTuple):
  """A lock that this process holds."""

  file: int  # descriptor of the open file
  made: list[pathlib.Path]  # folders that were not there before, the innermost first


_locked: dict[pathlib.Path, _Lock] = {}  # by folder


def lock(folder: pathlib.Path) -> None:
  """Makes a folder this job's until that ends; raises WorkdirError if it is another's.

  When the job ends, by whatever, the folder is free. A folder that was made for the lock,
  and got no other file, is removed then, except by a kill. Where the file system has no
  locks, a warning says so.
  """

  def take() -> str:
    if folder.resolve() in _locked:
      return ""
    if folder.exists() and not folder.is_dir():
      raise WorkdirError(f"{folder} is a file; name another folder")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = None
    while file is None:
      with writing.to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        time.sleep(_NAMED_S)
        owner = os.read(file, 1000).decode(errors="replace").strip()
        os.close(file)
        return owner or "another process"
      except OSError as e:
        logging.warning(
          "%s is on a file system without locks (%s): make sure that no second command "
          "writes there",
          folder,
          e.strerror,
        )
      if not _is_at(file, folder / _LOCK):  # its last owner has just removed it
        os.close(file)
        file = None
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _locked[folder.resolve()] = _Lock(file, made)
    return ""

  if owner := processes.on_first(take):
    raise WorkdirError(
      f"{folder} is in use by {owner}, which writes its files: wait for it or stop it, or "
      "take another folder"
    )


def lock_output(folder: pathlib.Path) -> None:
  """Locks a folder for results, which is no workdir; raises WorkdirError."""
  lock(folder)
  if processes.on_first((folder / CONFIG).exists):
    raise WorkdirError(
      f"{folder} is the workdir of a run, whose results would be replaced; name another "
      "folder"
    )


def _is_at(file: int, path: pathlib.Path) -> bool:
  """Whether an open file is the one at a path."""
  try:
    return os.path.samestat(os.fstat(file), path.stat())
  except FileNotFoundError:
    return False


def unlock(folder: pathlib.Path) -> None:
  """Ends a `lock`; nothing if this process has none."""
  held = _locked.pop(folder.resolve(), None)
  if held is None:
    return
  with contextlib.suppress(OSError):
    (folder / _LOCK).unlink()
    for path in held.made:
      path.rmdir()  # only if it is empty
  os.close(held.file)


@atexit.register
def _unlock_all() -> None:
  for folder in list(_locked):
    unlock(folder)


def _forget() -> None:
  """In a forked child: it would keep the locks if it outlives this process."""
  while _locked:
    os.close(_locked.popitem()[1].file)


os.register_at_fork(after_in_child=_forget)


def open(
  path: str,
  config: Any,
  fork: str | None = None,
  holds: Mapping[str, tuple[str, ...]] | None = None,
) -> Workdir:
  """Opens and locks the folder of a new or resumed run; changes no file of it.

  All processes of a job use what the first one finds there. See `lock` for a new folder.

  Args:
    fork: another folder, to continue there from the latest checkpoint of `path`; "" for
      none, None for a command without forks
    holds: other file of the folder -> keys of the config that it depends on
  Raises:
    WorkdirError: the checkpoints were made with other settings, or are of later steps;
      a fork's folder is not its own
    CheckpointError: the latest one is damaged
  """
  if fork:
    _check_target(pathlib.Path(path), pathlib.Path(fork))
  own = pathlib.Path(fork or path)
  lock(own)
  try:
    return _open(pathlib.Path(path), config, fork, holds)
  except Exception:
    unlock(own)
    raise


def _open(
  folder: pathlib.Path,
  config: Any,
  fork: str | None,
  holds: Mapping[str, tuple[str, ...]] | None,
) -> Workdir:
  """See `open`, of which it is the part that reads."""
  origin, last = _origin(folder), checkpoint.latest(folder / _CHECKPOINTS)
  if origin is not None and last is None and not fork:
    folder, fork = origin, str(folder)  # a fork that was killed before its first checkpoint
  if fork:
    new = pathlib.Path(fork)
    if checkpoint.latest(new / _CHECKPOINTS) is None:
      return _fork(folder, new, config)
    folder = new
  checkpoints = _checkpoints(folder, config)
  ways_out = "use those settings again, or start afresh in another --workdir"
  if fork is not None:
    ways_out = (
      "use those settings again, start afresh in another --workdir, or go on from its "
      "latest checkpoint with the new settings: --fork=NEW_WORKDIR"
    )
  if checkpoints.latest() is None:
    holds = holds or {}
    held = processes.on_first(lambda: [f for f in holds if (folder / f).exists()])
    bound = {key for file in held for key in holds[file]}
    if bound:
      _check_settings(folder, config, ways_out, lambda key: key.split(".")[0] in bound)
    return Workdir(folder, config, checkpoints, log=_own_log(folder, config))
  _check_settings(folder, config, ways_out, lambda key: not _is_free(key))
  _check_steps(checkpoints, config)
  log = folder / "rollouts.jsonl"
  return Workdir(folder, config, checkpoints, start=checkpoints, log=log)


def keep_sizes(path: str, config: Any, fork: str = "") -> Any:
  """The config, with its open sizes as in the folder if that has the same run.

  A new fork keeps the number of tokens of the drafter, if it goes on with the same one.
  """
  with contextlib.suppress(WorkdirError):  # `open` raises it again
    old = read(pathlib.Path(fork or path), type(config), "")
    filled = _with_sizes_of(old, config)
    if all(_is_free(key) for key, _, _ in _changes(_json(old), filled)):
      return filled
  if fork and getattr(config, _VOCAB_SIZE, 0) is None:
    with contextlib.suppress(WorkdirError):
      origin = read_json(pathlib.Path(path), "")
      if origin.get("drafter") == config.drafter:
        return dataclasses.replace(config, **{_VOCAB_SIZE: origin.get(_VOCAB_SIZE)})
  return config


def _with_sizes_of(old: Any, new: Any) -> Any:
  """The new config with the old one's values for open sizes."""
  changes = {}
  if getattr(new, _VOCAB_SIZE, 0) is None:
    changes[_VOCAB_SIZE] = getattr(old, _VOCAB_SIZE)
  for section, names in (sizes.OPEN | {"drafter": ("vocab_size",)}).items():
    if dataclasses.is_dataclass(made := getattr(new, section, None)):
      was = getattr(old, section)
      open_names = [n for n in names if getattr(made, n, 0) is None]
      kept = {name: getattr(was, name) for name in open_names}
      changes[section] = dataclasses.replace(made, **kept)
  if hasattr(new, "run"):
    changes["run"] = _with_sizes_of(old.run, new.run)
  return dataclasses.replace(new, **changes)


def _is_free(key: str) -> bool:
  """Whether a resumed run may change a dotted key."""
  return key.removeprefix("run.").split(".")[0] in FREE


def record(workdir: pathlib.Path, config: Any) -> None:
  """Locks the workdir and writes its config.json; called by all processes."""
  lock(workdir)
  if processes.is_first():
    _write(workdir, config)


def _write(workdir: pathlib.Path, config: Any) -> None:
  """Writes config.json atomically."""
  partial = workdir / f"{CONFIG}.new"
  with writing.to(workdir / CONFIG):
    partial.write_text(json.dumps(trees.to_dict(config), indent=2) + "\n")
  os.replace(partial, workdir / CONFIG)


def _checkpoints(folder: pathlib.Path, config: Any) -> checkpoint.Checkpoints:
  return checkpoint.Checkpoints(folder / _CHECKPOINTS, **vars(config.checkpoint))


def _fork(old: pathlib.Path, new: pathlib.Path, config: Any) -> Workdir:
  start = _checkpoints(old, config)
  _check_steps(start, config)
  settings = read_json(old, "no fork can start from there")
  changed = [f"{key}." for key, _, _ in _changes(settings, config)]
  return Workdir(
    new,
    config,
    _checkpoints(new, config),
    start=start,
    forked_from=old,
    not_restored=tuple(
      part
      for part, keys in _NOT_RESTORED.items()
      if any(key.startswith(keys) for key in changed)
    ),
    log=_own_log(new, config),
  )


def _check_target(old: pathlib.Path, new: pathlib.Path) -> None:
  """Raises if a fork cannot use this folder."""
  origin = _origin(new)
  if new.resolve() == old.resolve():
    raise WorkdirError(f"--fork={new} is the workdir itself; name another folder")
  if new.exists() and not new.is_dir():
    raise WorkdirError(f"--fork={new} is a file; name another folder")
  held = [path for path in new.iterdir() if path.name != _LOCK] if new.is_dir() else []
  if held and origin != old.resolve():
    raise WorkdirError(
      f"--fork={new} holds something else than a fork of {old}; name a new folder"
    )


def _check_steps(checkpoints: checkpoint.Checkpoints, config: Any) -> None:
  """Raises if a run has done more steps than the config has."""
  done, _ = checkpoints.data()
  if done > config.steps:
    raise WorkdirError(
      f"--config.steps={config.steps}: {checkpoints.folder.parent} has done {done} "
      "steps already; ask for as many or more, or take another --workdir"
    )


def _check_settings(folder: pathlib.Path, config: Any, ways_out: str, counts) -> None:
  """Raises if a config differs from a folder's in a key that counts."""
  changed = [
    f"{key} was {_shown(old)} and is {_shown(new)} now"
    for key, old, new in _changes(read_json(folder, ways_out), config)
    if counts(key)
  ]
  if changed:
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    raise WorkdirError(
      f"{folder} was made with other settings: {'; '.join(changed[:5])}{more}; {ways_out}"
    )


def _own_log(folder: pathlib.Path, config: Any) -> pathlib.Path | None:
  """rollouts.jsonl of the same run, if that was killed before its first checkpoint."""
  try:
    is_same = not list(_changes(read_json(folder, ""), config))
  except WorkdirError:
    return None
  return folder / "rollouts.jsonl" if is_same else None


def _origin(folder: pathlib.Path) -> pathlib.Path | None:
  """The workdir that a folder was forked from, None if it was not."""
  path = folder / _ORIGIN

  def named():
    if not path.exists():
      return None
    return str(pathlib.Path(json_objects.parse(path.read_bytes())["workdir"]))

  try:
    found = processes.on_first(named)
    return None if found is None else pathlib.Path(found)
  except (OSError, LookupError, TypeError, ValueError) as e:
    raise WorkdirError(
      f"{path} says what this folder was forked from, and cannot be read ({e!r:.200}); "
      "fork again, to another folder"
    ) from e


def read(workdir: pathlib.Path, tree: type, ways_out: str) -> Any:
  """The config of `workdir/config.json`; raises WorkdirError, naming `ways_out`."""
  raw = read_json(workdir, ways_out)
  try:
    return trees.validate(tree, raw)
  except trees.ConfigError as e:
    raise WorkdirError(f"{workdir / CONFIG}: {e}; {ways_out}") from e


def read_json(workdir: pathlib.Path, ways_out: str) -> dict[str, Any]:
  """The JSON of `workdir/config.json`; raises WorkdirError, naming `ways_out`."""
  path = workdir / CONFIG
  try:
    raw = processes.on_first(lambda: json_objects.parse(path.read_bytes()))
  except (OSError, ValueError) as e:
    raise WorkdirError(
      f"{path} holds the settings that this folder was made with, and cannot be read "
      f"({e}); restore it: {ways_out}"
    ) from e
  for run in (raw, raw.get("run")):
    if isinstance(run, dict) and "strategies" in run:
      # As runs were from before there were these entries.
      run.setdefault(_VOCAB_SIZE, 0)
      if isinstance(run.get("rollout"), dict):
        run["rollout"].setdefault("carry", dataclasses.asdict(carry_lib.Options()))
  return raw


_ABSENT = object()


def _json(config: Any) -> dict[str, Any]:
  """A config in JSON types: tuples are lists."""
  return json.loads(json.dumps(trees.to_dict(config)))


def _changes(old: Mapping, new: Any) -> Iterator[tuple]:
  """Yields (dotted key, old value, new value) of every difference from a config.json."""
  before, after = dict(_leaves(old)), dict(_leaves(_json(new)))
  for key in sorted(before.keys() | after.keys()):
    a, b = before.get(key, _ABSENT), after.get(key, _ABSENT)
    if a != b:
      yield key, a, b


def _leaves(config: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
  for name, value in config.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
  return "not there" if value is _ABSENT else json.dumps(value)
