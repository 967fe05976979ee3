"""Checkpoints: atomic, asynchronous, the latest few kept (orbax).

A step's folder appears under its final name only when it is complete, so a
killed run leaves nothing half-written behind. Shapes, dtypes and shardings of
what is restored come from the abstract state.
"""

import logging
import pathlib

import jax
import orbax.checkpoint as ocp


class CheckpointError(Exception):
  """A checkpoint that cannot be read; the message names it and the remedy."""


class Checkpoints:
  """The checkpoints of one run: an array tree plus small JSON data per step."""

  def __init__(self, folder: str | pathlib.Path, keep: int = 2, every: int = 1):
    """Opens (and creates) `folder`; keeps the latest `keep`, one per `every` steps."""
    self.folder = pathlib.Path(folder).absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        save_interval_steps=every,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
      ),
    )

  def latest(self) -> int | None:
    """The last complete step, None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state, data: dict, force: bool = False) -> None:
    """Starts saving; arrays are copied before it returns, written behind it.

    Args:
      step: number of steps done
      state: tree of arrays
      data: what JSON can hold (iterator state, counters)
      force: save although `step` is not a multiple of `every`
    """
    if step == self.latest():
      return
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data)
      ),
      force=force,
    )

  def restore(self, abstract_state) -> tuple[int, object, dict]:
    """The latest (step, state, data).

    Raises:
      CheckpointError: damaged, or of another shape than `abstract_state`
    """
    step = self.latest()
    try:
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
        ),
      )
    except Exception as e:  # orbax and tensorstore raise many kinds
      reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else type(e).__name__
      older = [s for s in self._manager.all_steps() if s != step]
      remedy = (
        f"delete that folder to go on from step {max(older)}"
        if older
        else "delete that folder to start again"
      )
      raise CheckpointError(
        f"checkpoint {self.folder / str(step)} is damaged or belongs to another "
        f"configuration ({reason}); {remedy}"
      ) from e
    logging.info("restored %s", self.folder / str(step))
    state = jax.block_until_ready(restored["state"])
    return step, state, restored["data"]

  def close(self) -> None:
    """Waits for what is being written."""
    self._manager.wait_until_finished()
    self._manager.close()
