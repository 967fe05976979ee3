"""Weights & Biases: the same metrics as TensorBoard's.

The package wandb is imported only if a config asks for it. A resumed run continues its W&B
run, whose id is kept in the workdir; W&B drops steps that it has already.
"""

from collections.abc import Mapping
import pathlib
from typing import Any
import uuid

from tlt_jax import processes
from tlt_jax import ranges


@ranges.options
class Options:
  """Reports to Weights & Biases."""

  project: str = ranges.field(
    "", "project of Weights & Biases; '': none, and the package is not needed"
  )


class Board:
  def __init__(self, options: Options, workdir: pathlib.Path, config: Mapping[str, Any]):
    """Starts a run, or continues that of the workdir.

    Raises:
      ValueError: the package is missing, or the service refuses
    """
    try:
      import wandb
    except ImportError as e:
      raise ValueError(
        "config.wandb.project asks for Weights & Biases, and its package is not there: pip "
        'install wandb, or --config.wandb.project=""'
      ) from e
    note = workdir / "wandb_run.txt"
    if not note.exists():
      note.write_text(uuid.uuid4().hex[:12] + "\n")
    try:
      self._run = wandb.init(
        project=options.project,
        dir=str(workdir),
        id=note.read_text().strip(),
        name=workdir.name,
        resume="allow",
        config=dict(config),
      )
    except wandb.errors.Error as e:
      raise ValueError(
        f"Weights & Biases cannot begin a run ({e!s:.200}); log in with `wandb login`, or "
        "set WANDB_MODE=offline"
      ) from e

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    self._run.log(dict(scalars), step=step)

  def close(self) -> None:
    self._run.finish()


def make(
  options: Options, workdir: pathlib.Path, config: Mapping[str, Any]
) -> Board | None:
  """The board that a config asks for, on the first process; else None."""
  if not options.project or not processes.is_first():
    return None
  return Board(options, workdir, config)
