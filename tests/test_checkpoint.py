"""Checkpoints: what is saved comes back, half of it never does."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax import checkpoint


@functools.cache
def state(step: int):
  """A little of everything that a learner's state holds, split over 4 x 2 devices."""
  mesh = tiny.mesh(4, 2)
  split, whole = axes.sharding(mesh, axes.DATA, axes.MODEL), axes.sharding(mesh)
  w = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
  params = {
    "layer": {"w": jax.device_put(w + step, split)},
    "scale": jax.device_put(jnp.full(7, step, jnp.bfloat16), whole),
  }
  made = {"params": params, "opt": optax.adamw(1e-3).init(params), "step": jnp.int32(step)}
  return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), made)


def abstract(like):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
  )


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def saved(folder, steps, **options) -> checkpoint.Checkpoints:
  """The checkpoints after a run that saved these steps and ended well."""
  run = checkpoint.Checkpoints(folder, **options)
  for step in steps:
    run.save(step, state(step), {"next": step})
  run.close()
  return checkpoint.Checkpoints(folder, **options)


def steps(folder) -> list[int]:
  return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Checkpoints of steps 1 and 2; to be copied."""
  folder = tmp_path_factory.mktemp("checkpoints") / "whole"
  saved(folder, [1, 2]).close()
  return folder


def test_a_state_comes_back_bit_for_bit_in_any_layout(tmp_path):
  """In the layout it had, and split over another mesh."""
  run = saved(tmp_path, [1])
  step, restored, data = run.restore(abstract(state(1)))
  assert (step, data) == (1, {"next": 1})
  assert_equal(restored, state(1))

  def same(x, y):
    return x.sharding.is_equivalent_to(y.sharding, x.ndim) and x.dtype == y.dtype

  assert jax.tree.all(jax.tree.map(same, restored, state(1)))

  other = axes.sharding(tiny.mesh(2, 2), axes.MODEL)
  like = jax.tree.map(
    lambda x: x.update(sharding=other) if x.ndim == 2 else x, abstract(state(1))
  )
  restored = run.restore(like)[1]
  assert restored["params"]["layer"]["w"].sharding == other
  assert_equal(restored, state(1))


def test_the_latest_few_are_kept_one_per_interval(tmp_path):
  """The first step counts too, and `force` adds one between."""
  run = checkpoint.Checkpoints(tmp_path, keep=3, every=4)
  assert run.latest() is None
  for step in range(1, 12):
    run.save(step, state(step), {}, force=step == 11)
  run.save(11, state(11), {}, force=True)  # a second time: nothing happens
  run.close()
  assert steps(tmp_path) == [4, 8, 11]


def test_a_half_written_step_is_ignored_and_swept_away(tmp_path):
  """As a killed run leaves it: under a temporary name, with part of the files."""
  saved(tmp_path, [1]).close()
  half = tmp_path / "2.orbax-checkpoint-tmp"
  shutil.copytree(tmp_path / "1", half)
  (half / "state" / "manifest.ocdbt").unlink()
  run = checkpoint.Checkpoints(tmp_path)
  assert run.latest() == 1
  assert run.restore(abstract(state(1)))[0] == 1
  run.save(2, state(2), {})
  run.close()
  assert not half.exists()
  assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("kind", ["cut in half", "a bit flipped", "missing"])
def test_no_damaged_file_is_restored_as_if_it_were_whole(whole, tmp_path, kind):
  """File by file: an error that names folder and remedy, or the right arrays."""
  like, folder, named = abstract(state(2)), tmp_path / "run", 0
  for file in sorted(path for path in (whole / "2").rglob("*") if path.is_file()):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    broken = folder / file.relative_to(whole)
    content = broken.read_bytes()
    broken.unlink()
    half = len(content) // 2
    if kind == "cut in half":
      broken.write_bytes(content[:half])
    elif kind == "a bit flipped":
      broken.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    run = checkpoint.Checkpoints(folder)
    try:
      step, restored, _ = run.restore(like)
    except checkpoint.CheckpointError as e:
      text = str(e)
      assert "\n" not in text
      assert f"checkpoint {folder / '2'} is damaged (" in text
      assert "step 1" in text
      named += file.name in text
    else:
      assert step == 2
      assert_equal(restored, state(2))
    run.close()
  files = json.loads((whole / "2" / "checksums.json").read_text())["files"]
  assert named >= len(files)  # the list itself may be told, too


def test_an_error_does_not_cut_off_what_is_being_written(tmp_path):
  """Leaving the `with` block waits."""
  with pytest.raises(ZeroDivisionError), checkpoint.Checkpoints(tmp_path) as run:
    run.save(1, state(1), {})
    raise ZeroDivisionError
  assert steps(tmp_path) == [1]


def test_after_the_remedy_the_older_step_is_restored(tmp_path):
  """Deleting the damaged folder is enough, and the error did not touch the other."""
  saved(tmp_path, [1, 2]).close()
  older = {p: p.read_bytes() for p in (tmp_path / "1").rglob("*") if p.is_file()}
  largest = max((tmp_path / "2" / "state").rglob("*"), key=lambda p: p.stat().st_size)
  largest.write_bytes(b"")
  run = checkpoint.Checkpoints(tmp_path)
  with pytest.raises(checkpoint.CheckpointError, match="to go on from step 1"):
    run.restore(abstract(state(1)))
  run.close()
  assert older == {p: p.read_bytes() for p in (tmp_path / "1").rglob("*") if p.is_file()}

  shutil.rmtree(tmp_path / "2")
  run = checkpoint.Checkpoints(tmp_path)
  step, restored, data = run.restore(abstract(state(1)))
  assert (step, data) == (1, {"next": 1})
  assert_equal(restored, state(1))
  run.close()



def test_another_model_is_told_apart_from_damage(tmp_path):
  """Deleting a good checkpoint is no advice for a wrong configuration."""
  run = saved(tmp_path, [1])
  like = abstract(state(1))
  wide = jax.tree.map(lambda x: x.update(shape=(64, 128)) if x.ndim == 2 else x, like)
  with pytest.raises(checkpoint.CheckpointError, match="params/layer/w"):
    run.restore(wide)
  del like["params"]["scale"]
  with pytest.raises(checkpoint.CheckpointError, match="absent"):
    run.restore(like)


def test_a_diverged_state_is_not_saved(tmp_path):
  """The array is named, and the last good step stays the latest."""
  run = saved(tmp_path, [1], keep=1)
  for bad in (jnp.nan, jnp.inf, 1e30):
    broken = {**state(2), "params": {**state(2)["params"], "scale": jnp.full(7, bad)}}
    with pytest.raises(FloatingPointError, match="step 2: params/scale has no finite"):
      run.save(2, broken, {})
  run.close()
  run = checkpoint.Checkpoints(tmp_path)
  assert run.latest() == 1
  assert_equal(run.restore(abstract(state(1)))[1], state(1))
