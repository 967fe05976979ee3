"""Checkpoints: atomic, asynchronous, the latest few kept (orbax).

A step's folder appears under its final name only when it is complete, so a
killed run leaves nothing half-written behind. Shapes, dtypes and shardings of
what is restored come from the abstract state. Each folder lists the sizes of its
files, so that damage is seen and named before anything is read.
"""

import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

_SIZES = "sizes.json"  # in a step's folder: its files and their bytes


class CheckpointError(ValueError):
  """A checkpoint that cannot be read; the message names it and the remedy."""


class Checkpoints:
  """Keeps the checkpoints of one run: an array tree plus small JSON data per step.

  Leaving a `with` block waits for what is being written, after an error too:
  the interpreter's own exit would cut it off.
  """

  def __init__(self, folder: str | pathlib.Path, keep: int = 2, every: int = 1):
    """Opens (and creates) `folder`; keeps the latest `keep`, one per `every` steps."""
    if keep < 1 or every < 1:
      raise ValueError(f"checkpoints need keep >= 1 and every >= 1, got {keep}, {every}")
    self.folder = pathlib.Path(folder).absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "data": ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        save_interval_steps=every,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=self._list_sizes),
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_):
    self.close()

  def latest(self) -> int | None:
    """The last complete step, None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, data: dict, force: bool = False) -> None:
    """Starts saving; arrays are copied before it returns, written behind it.

    Args:
      step: number of steps done
      state: tree of arrays
      data: what JSON can hold (iterator state, counters)
      force: save although `step` is not a multiple of `every`
    Raises:
      FloatingPointError: an array has no finite norm; nothing is saved, so that the
        latest checkpoint stays one to go on from
    """
    if step == self.latest() or not (force or self._manager.should_save(step)):
      return
    finite = jax.device_get(_finite(state))
    bad = [_name(path) for path, ok in jax.tree.leaves_with_path(finite) if not ok]
    if bad:
      raise FloatingPointError(
        f"step {step}: {bad[0]} has no finite norm, the run has diverged; the last "
        f"checkpoint in {self.folder} is of step {self.latest()}"
      )
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data)
      ),
      force=force,
    )

  def _list_sizes(self) -> None:
    """Completes what was just written; only that has no list of its files yet."""
    for folder in self.folder.iterdir():
      if folder.is_dir() and not (folder / _SIZES).exists():
        files = (path for path in folder.glob("*/**/*") if path.is_file())
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        (folder / _SIZES).write_text(json.dumps(sizes))

  def restore(self, abstract_state: Any) -> tuple[int, Any, dict]:
    """Reads the latest (step, state, data).

    Args:
      abstract_state: shapes, dtypes and shardings of the state
    Raises:
      CheckpointError: damaged, or of another shape than `abstract_state`
    """
    step = self.latest()
    folder = self.folder / str(step)
    try:
      _check_sizes(folder)
      found = self._manager.item_metadata(step)["state"]
      difference = _first_difference(found, abstract_state)
      if not difference:
        restored = self._manager.restore(
          step,
          args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
          ),
        )
    except Exception as e:  # orbax and tensorstore raise many kinds
      older = [s for s in self._manager.all_steps() if s != step]
      where = f"to go on from step {max(older)}" if older else "to start again"
      raise CheckpointError(
        f"checkpoint {folder} is damaged ({_reason(e)}); delete that folder {where}"
      ) from e
    if difference:
      raise CheckpointError(
        f"checkpoint {folder} belongs to another configuration: {difference}; go back "
        "to the policy and optimizer it was made with, or use another workdir"
      )
    logging.info("restored %s", folder)
    state = jax.block_until_ready(restored["state"])
    return step, state, restored["data"]

  def wait(self) -> None:
    """Returns when nothing is being written any more."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for what is being written, and lets go of the folder."""
    self.wait()
    self._manager.close()


@jax.jit
def _finite(state: Any) -> Any:
  """Whether each array's norm is finite, in float32: values stay below 1e19.

  One program: many small ones, each with a sum over the devices, can deadlock on CPUs.
  """
  norm = lambda x: jnp.sum(jnp.square(x.astype(jnp.float32)))
  return jax.tree.map(lambda x: jnp.isfinite(norm(x)), state)


def _name(path) -> str:
  """The name of a leaf, its keys joined by slashes."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_sizes(folder: pathlib.Path) -> None:
  """Raises if a file is shorter or longer than when it was written."""
  if not (folder / _SIZES).is_file():
    return
  for name, size in json.loads((folder / _SIZES).read_text()).items():
    path = folder / name
    found = path.stat().st_size if path.is_file() else 0
    if found != size:
      raise ValueError(f"{name} has {found} of {size} bytes")


def _first_difference(found, expected) -> str | None:
  """Names a leaf that one tree has and the other has not, or has in another shape."""
  trees = (found, expected)
  found, expected = (
    {_name(path): tuple(x.shape) for path, x in jax.tree.leaves_with_path(t)}
    for t in trees
  )
  for name in sorted(found.keys() | expected.keys(), key=lambda x: (x.count("/"), x)):
    there, here = found.get(name, "absent"), expected.get(name, "absent")
    if there != here:
      return f"{name} is {there} there, {here} here"
  return None


def _reason(e: BaseException) -> str:
  """The first line of the error that caused all others."""
  while e.__cause__ is not None:
    e = e.__cause__
  lines = str(e).strip().splitlines()
  return lines[0][:300] if lines else type(e).__name__
