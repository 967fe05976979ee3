"""Weights & Biases beside TensorBoard, if a config asks for it."""

import sys
import types

import pytest

from tlt_jax import metrics
from tlt_jax import wandb_board

OPTIONS = wandb_board.Options(project="tlt")


def test_it_gets_what_tensorboard_gets_and_goes_on_in_the_same_run(tmp_path, monkeypatch):
  """By a stand-in for the package, which only notes calls."""
  calls = []
  run = types.SimpleNamespace(
    log=lambda scalars, step: calls.append((step, scalars)),
    finish=lambda: calls.append("finish"),
  )

  def init(**given):
    return calls.append(given) or run

  errors = types.SimpleNamespace(Error=RuntimeError)
  monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, errors=errors))
  for step in (0, 1):
    board = wandb_board.make(OPTIONS, tmp_path, {"seed": 3})
    writer = metrics.Writer(tmp_path, resume_step=step, board=board)
    writer.write(step, {"reward/mean": 0.5})
    writer.close()
  begun = [call for call in calls if isinstance(call, dict)]
  assert len(begun) == 2 and len({call["id"] for call in begun}) == 1
  assert begun[0]["config"] == {"seed": 3}
  assert [c for c in calls if isinstance(c, tuple)] == [
    (0, {"reward/mean": 0.5}),
    (1, {"reward/mean": 0.5}),
  ]
  assert calls.count("finish") == 2


def test_the_package_itself_writes_offline(tmp_path, monkeypatch):
  """No login, no network: a file that `wandb sync` can send."""
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_SILENT", "true")
  monkeypatch.setenv("WANDB_MODE", "offline")
  board = wandb_board.make(OPTIONS, tmp_path, {"seed": 3})
  writer = metrics.Writer(tmp_path, board=board)
  writer.write(0, {"reward/mean": 0.5})
  writer.close()
  (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
  assert b"reward/mean" in written.read_bytes()
