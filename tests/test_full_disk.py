"""A full disk: what cannot be written is named, and what was there is still good."""

import contextlib

import jax
import numpy as np
import pytest

from tests import commands
from tlt_jax import checkpoint
from tlt_jax import metrics


def many(count: int) -> dict[str, float]:
  return {f"phase/quantity_{i}": 1.0 for i in range(count)}


def test_metrics_that_do_not_fit_are_named(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(0, many(2))
  full = pytest.raises(OSError, match=f"{tmp_path}/metrics.jsonl {commands.FULL_DISK}")
  with full, commands.room():
    writer.write(1, many(1000))
  with contextlib.suppress(OSError), commands.room():
    writer.close()
  again = metrics.Writer(tmp_path, resume_step=1)
  again.write(1, many(1000))
  again.close()
  assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
  """Which the error names, and the run goes on from."""

  def state(step):
    return {"w": jax.device_put(np.random.default_rng(step).random(10_000, np.float32))}

  with checkpoint.Checkpoints(tmp_path) as run:
    run.save(1, state(1), {})
  failing = checkpoint.Checkpoints(tmp_path)
  with pytest.raises(OSError, match="from step 1"), commands.room():
    failing.save(2, state(2), {})
    failing.wait()
  with checkpoint.Checkpoints(tmp_path) as run:
    step, restored, _ = run.restore(jax.eval_shape(lambda: state(1)))
    assert step == 1
    np.testing.assert_array_equal(restored["w"], state(1)["w"])
    run.save(2, restored, {})
  assert checkpoint.Checkpoints(tmp_path).latest() == 2
