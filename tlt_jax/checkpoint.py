"""Checkpoints: atomic, asynchronous, checked, the latest few kept (orbax).

A step's folder has a list of its files with their SHA-256, and gets its final name, a
number, only after that list is written: a killed run leaves no half-written step. Nothing
is restored unless every file matches the list: orbax restores arrays with flipped bits
(tensorstore's CRC covers metadata, not the uncompressed chunks).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import functools
import hashlib
import json
import logging
import pathlib
import re
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from tlt_jax import processes
from tlt_jax import programs
from tlt_jax import progress
from tlt_jax import writing

_STATE, _DATA = "state", "data"  # the folders of a step
_LIST = "checksums.json"  # {"step", "files": {name: SHA-256}} of the files in its folders


class CheckpointError(ValueError):
  """A checkpoint that cannot be read; the message names it and the remedy."""


class _Listed(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """The temporary folder of a step; it gets its list, then its final name."""

  async def finalize(self):
    """Runs in the writing thread, for `state` and `data` too."""
    if _is_step(self.get_final().name):
      listed = {"step": int(self.get_final().name)}
      listed["files"] = await asyncio.to_thread(_sums, pathlib.Path(self.get()))
      (self.get() / _LIST).write_text(json.dumps(listed))
    await super().finalize()


class Checkpoints:
  """Keeps the checkpoints of one run: an array tree plus small JSON data per step.

  Leaving a `with` block waits for pending writes, after an error too: the interpreter's
  exit would cut them off. A job that is asked to stop saves again then, see `at_stop`. Each
  process writes its shards of the arrays; the first one decides which step is the latest.

  Raises:
    CheckpointError: `folder` is a file, or may not be read
  """

  def __init__(self, folder: str | pathlib.Path, keep: int = 2, every: int = 1):
    if keep < 1 or every < 1:
      raise ValueError(f"checkpoints need keep >= 1 and every >= 1, got {keep}, {every}")
    self.folder = pathlib.Path(folder).absolute()
    self._keep, self._every = keep, every
    self._intact: int | None = None  # the step whose files were checked
    self._at_stop: Callable[[], tuple | None] | None = None
    _steps(self.folder)

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self.folder,
      item_handlers={
        _STATE: ocp.StandardCheckpointHandler(),
        _DATA: ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        max_to_keep=self._keep,
        save_interval_steps=self._every,
        create=False,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
        temporary_path_class=_Listed,
        lightweight_initialize=True,  # it would read files that nothing has checked
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind, error, _):
    if programs.loss(error) is not None:
      return  # orbax would wait for a process that is gone
    last = self._at_stop() if kind is processes.Stopped and self._at_stop else None
    if last is not None:
      step, state, data = last
      self.save(step, state, data, force=True)
      self.wait()
      logging.info("step %d is saved in %s", step, self.folder)
    self.close()

  def at_stop(self, snapshot: Callable[[], tuple | None]) -> "Checkpoints":
    """If `processes.Stopped` leaves the `with` block, saves what `snapshot` returns."""
    self._at_stop = snapshot
    return self

  def latest(self) -> int | None:
    return latest(self.folder)

  def save(self, step: int, state: Any, data: dict, force: bool = False) -> None:
    """Copies the arrays, then writes them in the background.

    `force` saves although `step` is not a multiple of `every`.

    Raises:
      FloatingPointError: an array has no finite norm; nothing is saved, so that a run can
        resume from the latest checkpoint
    """
    saved = step == self._manager.latest_step()
    wanted = not saved and (force or self._manager.should_save(step))
    if not processes.of_first(wanted):  # orbax asks what this process sees of the folder
      return
    finite = jax.device_get(_finite(state))
    bad = [_name(path) for path, ok in jax.tree.leaves_with_path(finite) if not ok]
    if bad:
      self.wait()
      raise FloatingPointError(
        f"step {step}: {bad[0]} has no finite norm, the run has diverged; the last "
        f"checkpoint in {self.folder} is of step {_last(self.folder)}"
      )
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data)
    )
    with self._full_disk_as_error(), progress.shown("writing a checkpoint"):
      self._manager.save(step, args=args, force=True)

  @contextlib.contextmanager
  def _full_disk_as_error(self) -> Iterator[None]:
    try:
      yield
    except Exception as e:
      reason = writing.full_disk(e)
      if reason is None:
        raise
      step = _last(self.folder)
      there = "starts from the beginning" if step is None else f"continues from step {step}"
      raise OSError(
        f"a checkpoint in {self.folder} cannot be written ({reason}); {writing.REMEDY}: "
        f"it {there}"
      ) from e

  def data(self) -> tuple[int, dict]:
    """Step and JSON data of the latest checkpoint, after checking all its files."""
    step = self.latest()
    if step is None or step != self._intact:
      with progress.shown(f"checking the files of the checkpoint in {self.folder}"):
        step = processes.on_first(lambda: checked(self.folder))
      self._intact = step
    handler = ocp.JsonCheckpointHandler()
    return step, handler.restore(epath.Path(self.folder / str(step) / _DATA))

  def restore(
    self, abstract_state: Any, without: Sequence[str] = ()
  ) -> tuple[int, Any, dict]:
    """Reads the latest (step, state, data), after checking all its files.

    The keys `without` of a state that is a dict are not read.

    Raises:
      CheckpointError: there is none, or it is damaged, or of another shape than
        `abstract_state`
    """
    step, data = self.data()

    def keep(tree):
      return {k: x for k, x in tree.items() if k not in without} if without else tree

    state = self._read(step, keep(abstract_state), keep, partial=bool(without))
    return step, state, data

  def restore_part(self, abstract_part: dict) -> tuple[int, dict]:
    step, _ = self.data()
    return step, self._read(
      step, abstract_part, lambda stored: _part(stored, abstract_part), partial=True
    )

  def _read(self, step: int, wanted: Any, select: Callable, partial: bool) -> Any:
    """Reads a state whose files were checked, of which `select` is as `wanted`."""
    folder = self.folder / str(step)
    handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(folder / _STATE)
    try:
      stored = ocp.StandardCheckpointHandler().metadata(path)
      difference = _first_difference(select(stored), wanted)
      if not difference:
        args = ocp.args.PyTreeRestore(
          wanted,
          restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
          partial_restore=partial,
        )
        with progress.shown(f"reading the checkpoint {folder}"):
          state = jax.block_until_ready(handler.restore(path, args=args))
    except Exception as e:  # orbax and tensorstore raise many kinds
      raise CheckpointError(
        f"checkpoint {folder} is whole, but cannot be restored here: {_reason(e)}"
      ) from e
    if difference:
      raise CheckpointError(
        f"checkpoint {folder} belongs to another configuration: {difference}; go back "
        "to the policy and optimizer it was made with, or use another workdir"
      )
    logging.info("restored %s", folder)
    return state

  def wait(self) -> None:
    if "_manager" in vars(self):
      with self._full_disk_as_error(), progress.shown("writing a checkpoint"):
        self._manager.wait_until_finished()

  def close(self) -> None:
    self.wait()
    if "_manager" in vars(self):
      self._manager.close()


def latest(folder: str | pathlib.Path) -> int | None:
  """The last step in a folder of checkpoints, None without one; a collective call."""
  return processes.on_first(lambda: _last(pathlib.Path(folder)))


def _last(folder: pathlib.Path) -> int | None:
  return max(_steps(folder), default=None)


def checked(folder: str | pathlib.Path) -> int:
  """The last step in a folder, with its files checked; CheckpointError without one."""
  folder = pathlib.Path(folder)
  *older, last = _steps(folder) or [None]
  if last is None:
    raise CheckpointError(f"{folder} holds no checkpoint")
  fault = _fault(folder / str(last), last)
  if not fault:
    return last
  if _last(folder) != last:  # its run continues, and may have deleted this one
    raise CheckpointError(
      f"checkpoint {folder / str(last)} was replaced by a newer checkpoint while it was "
      "read; run the same command again"
    )
  then = f"go on from step {older[-1]}" if older else "start again"
  raise CheckpointError(
    f"checkpoint {folder / str(last)} is damaged ({fault}); delete that folder to {then}"
  )


@jax.jit
def _finite(state: Any) -> Any:
  """Whether each array's norm is finite, in float32: values stay below 1e19.

  One program: many small ones, each with a sum over the devices, can deadlock on CPUs.
  """
  return jax.tree.map(
    lambda x: jnp.isfinite(jnp.sum(jnp.square(x.astype(jnp.float32)))), state
  )


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _steps(folder: pathlib.Path) -> list[int]:
  try:
    names = [path.name for path in folder.iterdir()]
  except FileNotFoundError:
    return []
  except OSError as e:
    raise CheckpointError(
      f"checkpoints folder {folder} cannot be read ({e.strerror}); make it a folder that "
      "can be read, or use another workdir"
    ) from e
  return sorted(int(name) for name in names if _is_step(name))


def _is_step(name: str) -> bool:
  return bool(re.fullmatch("0|[1-9][0-9]*", name))


def _sums(folder: pathlib.Path) -> dict[str, str]:
  paths = sorted(path for path in folder.glob("*/**/*") if path.is_file())

  def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()

  with futures.ThreadPoolExecutor() as threads:
    sums = threads.map(sha256, paths)
    return {str(p.relative_to(folder)): x for p, x in zip(paths, sums, strict=True)}


def _fault(folder: pathlib.Path, step: int) -> str | None:
  try:
    listed = json.loads((folder / _LIST).read_bytes())
    files = {} if listed["step"] != step else listed["files"]
    found = _sums(folder)
    differ = [n for n in sorted(files | found) if files.get(n) != found.get(n)]
  except PermissionError as e:
    raise CheckpointError(
      f"checkpoint {folder} may not be read ({e.filename}); allow it, or use another "
      "workdir"
    ) from e
  except OSError as e:
    return f"{pathlib.Path(e.filename or _LIST).name}: {e.strerror}"
  except (ValueError, LookupError, TypeError):
    return f"its {_LIST} makes no sense"
  if not files:
    return f"its {_LIST} is of another step, or empty"
  return f"{differ[0]} is missing or differs from {_LIST}" if differ else None


def _part(found: Any, like: Any) -> dict[str, Any]:
  names = {_name(path) for path, _ in jax.tree.leaves_with_path(like)}
  found = {_name(path): x for path, x in jax.tree.leaves_with_path(found)}
  return {name: x for name, x in found.items() if name in names}


def _first_difference(found, expected) -> str | None:
  trees = (found, expected)
  found, expected = (
    {_name(path): tuple(x.shape) for path, x in jax.tree.leaves_with_path(t)} for t in trees
  )
  for name in sorted(found.keys() | expected.keys(), key=lambda x: (x.count("/"), x)):
    there, here = found.get(name, "absent"), expected.get(name, "absent")
    if there != here:
      return f"{name} is {there} there, {here} here"
  return None


def _reason(e: BaseException) -> str:
  while e.__cause__ is not None:
    e = e.__cause__
  lines = str(e).strip().splitlines()
  return lines[0][:300] if lines else type(e).__name__
