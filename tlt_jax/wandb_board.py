"""Weights & Biases: the same metrics as TensorBoard's, where a config asks for them.

The package wandb is imported only then. A run that resumes goes on in its W&B run, whose id
is kept in the workdir; W&B drops steps that it has already.
"""

from collections.abc import Mapping
import pathlib
from typing import Any, Literal
import uuid

from tlt_jax import processes
from tlt_jax import ranges


@ranges.options
class Options:
  """Where Weights & Biases gets a run's metrics."""

  project: str = ranges.field(
    "", "project of Weights & Biases; '': none, and the package is not needed"
  )
  mode: Literal["online", "offline"] = ranges.field(
    "online",
    "'offline' writes to WORKDIR/wandb only; `wandb sync` of that folder sends it later",
  )


class Board:
  """One run at Weights & Biases."""

  def __init__(self, options: Options, workdir: pathlib.Path, config: Mapping[str, Any]):
    """Begins a run, or goes on with that of the workdir.

    Args:
      options: with a project
      workdir: of the run
      config: of the run
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
        mode=options.mode,
        dir=str(workdir),
        id=note.read_text().strip(),
        name=workdir.name,
        resume="allow",
        config=dict(config),
      )
    except wandb.errors.Error as e:
      raise ValueError(
        f"Weights & Biases cannot begin a run ({e!s:.200}); log in with `wandb login`, or "
        "--config.wandb.mode=offline"
      ) from e

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Records scalars of a step."""
    self._run.log(dict(scalars), step=step)

  def close(self) -> None:
    """Ends the run, and sends what is left."""
    self._run.finish()


def make(
  options: Options, workdir: pathlib.Path, config: Mapping[str, Any]
) -> Board | None:
  """The board that a config asks for; None if it asks for none.

  Of several processes the first one has it.

  Args:
    options: whether there is one
    workdir, config: of the run
  """
  if not options.project or not processes.is_first():
    return None
  return Board(options, workdir, config)
