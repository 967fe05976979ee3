"""Checkpoints: what is saved comes back, half of it never does."""

import functools
import json
import pathlib
import random
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax import checkpoint
from tlt_jax import checksums


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
  same = lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim) and x.dtype == y.dtype
  assert jax.tree.all(jax.tree.map(same, restored, state(1)))

  other = axes.sharding(tiny.mesh(2, 2), axes.MODEL)
  like = jax.tree.map(
    lambda x: x.update(sharding=other) if x.ndim == 2 else x, abstract(state(1))
  )
  restored = run.restore(like)[1]
  assert restored["params"]["layer"]["w"].sharding == other
  assert_equal(restored, state(1))


def test_what_is_restored_may_be_donated_and_saved_again(tmp_path):
  """The arrays are copied when `save` returns: changing them later is safe."""
  run = saved(tmp_path, [1])
  _, restored, _ = run.restore(abstract(state(1)))
  run.save(2, restored, {})
  jax.tree.map(lambda x: x.delete(), restored)
  run.close()
  run = checkpoint.Checkpoints(tmp_path)
  assert run.restore(abstract(state(1)))[0] == 2
  assert_equal(run.restore(abstract(state(1)))[1], state(1))


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
      list_is_missing = kind == "missing" and file.name == "checksums.json"
      fault = "has no checksums.json" if list_is_missing else "is damaged ("
      assert f"checkpoint {folder / '2'} {fault}" in text
      assert text.endswith("delete that folder to go on from step 1")
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

  (tmp_path / "1" / "data" / "metadata").unlink()
  with pytest.raises(checkpoint.CheckpointError, match="folder to start again"):
    checkpoint.Checkpoints(tmp_path).restore(abstract(state(1)))


def test_another_model_is_told_apart_from_damage(tmp_path):
  """Deleting a good checkpoint is no advice for a wrong configuration."""
  run = saved(tmp_path, [1])
  like = abstract(state(1))
  wide = jax.tree.map(lambda x: x.update(shape=(64, 128)) if x.ndim == 2 else x, like)
  with pytest.raises(checkpoint.CheckpointError) as e:
    run.restore(wide)
  assert "params/layer/w is (64, 64) there, (64, 128) here" in str(e.value)
  assert "delete" not in str(e.value)
  del like["params"]["scale"]
  with pytest.raises(checkpoint.CheckpointError, match=r"scale is \(7,\) there, absent"):
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


def damage(folder: pathlib.Path, dice: random.Random) -> str:
  """Does one thing to something in `folder` that no run does; says what."""
  paths = sorted(folder.rglob("*"))
  files = [path for path in paths if path.is_file()]
  file, other = dice.sample(files, 2)
  content = bytearray(file.read_bytes())
  at = dice.randrange(len(content)) if content else 0
  match dice.randrange(9):
    case 0 if content:
      content[at] ^= 1 << dice.randrange(8)
      file.write_bytes(content)
      return f"flipped a bit of {file}"
    case 1 if content:
      content[at] = (content[at] + dice.randrange(1, 256)) % 256
      file.write_bytes(content)
      return f"changed a byte of {file}"
    case 2:
      file.write_bytes(content[:at])
      return f"truncated {file} to {at} bytes"
    case 3:
      file.unlink()
      return f"deleted {file}"
    case 4:
      content = file.read_bytes()
      file.write_bytes(other.read_bytes())
      other.write_bytes(content)
      return f"swapped {file} and {other}"
    case 5:
      file.write_bytes(content + dice.randbytes(dice.randrange(1, 100)))
      return f"appended to {file}"
    case 6:
      path = dice.choice([path for path in paths if path.is_dir()])
      shutil.rmtree(path)
      return f"deleted {path}"
    case 7:
      file.unlink()
      file.mkdir()
      return f"made {file} a folder"
  path = dice.choice([*folder.glob("*/data/metadata"), *folder.glob("*/*.json")])
  path.write_bytes(b"")
  return f"emptied {path}"


def follow(error: checkpoint.CheckpointError, folder: pathlib.Path) -> int | None:
  """Does what the error advises; returns the step it promises to go on from."""
  found = re.fullmatch(
    rf"checkpoint {folder}/(\d+) (?:is damaged \(.+\)|has no checksums.json: it is "
    r"incomplete, or was written by an earlier version)(; ([\d, ]+) cannot be used either)?"
    r"; delete (that folder|those folders) to (start again|go on from step (\d+))",
    str(error),
  )
  assert found, error
  for step in [found[1], *(found[3] or "").split(", ")]:
    if step:
      path = folder / step
      path.unlink() if path.is_file() else shutil.rmtree(path)
  return int(found[6]) if found[6] else None


def restored_step(folder: pathlib.Path) -> int | None:
  """The step that is restored, None for none; it is as it was saved."""
  with checkpoint.Checkpoints(folder) as run:
    if run.latest() is None:
      return None
    step, state_, data = run.restore(abstract(state(1)))
  assert data == {"next": step}
  assert_equal(state_, state(step))
  return step


@pytest.mark.parametrize("seeds", [range(100), tiny.slow(range(100, 200))], ids=str)
def test_no_damage_is_restored_or_left_without_a_way_out(whole, tmp_path, seeds):
  """100 times one to three of nine kinds: an error whose advice helps, or what was
  saved, bit for bit."""
  told = 0
  for seed in seeds:
    dice = random.Random(seed)
    folder = shutil.copytree(whole, tmp_path / str(seed))
    done = []
    for _ in range(dice.choice((1, 1, 2, 3))):
      if len([path for path in folder.rglob("*") if path.is_file()]) > 1:
        done.append(damage(folder, dice))
    try:
      restored_step(folder)
    except checkpoint.CheckpointError as e:
      told, promised = told + 1, follow(e, folder)
      assert restored_step(folder) == promised, (seed, done)
    except Exception as e:
      raise AssertionError(f"seed {seed}: {done}") from e
    shutil.rmtree(folder)
  assert 25 < told < 75


def unlist(step: pathlib.Path, *names: str) -> None:
  """Takes these files off the list, by default all."""
  listed = json.loads((step / "checksums.json").read_bytes())
  kept = {name: x for name, x in listed["files"].items() if names and name not in names}
  (step / "checksums.json").write_text(json.dumps(listed | {"files": kept}))


def empty(step: pathlib.Path) -> None:
  shutil.rmtree(step / "state")
  shutil.rmtree(step / "data")


@pytest.mark.parametrize(
  "change, reason",
  [
    (lambda step: shutil.rmtree(step / "state"), "damaged .state/.* has 0 of"),
    (lambda step: (step / "checksums.json").unlink(), "has no checksums.json: it is inc"),
    (lambda step: (step / "checksums.json").write_text("[]"), "damaged .*makes no sense"),
    (lambda step: [shutil.rmtree(step), step.mkdir()], "has no checksums.json: it is inc"),
    (lambda step: [shutil.rmtree(step), step.write_text("")], "json: Not a directory"),
    (lambda step: unlist(step), "damaged .*json does not name data/"),
    (lambda step: [unlist(step), empty(step)], "damaged .*json does not name any file"),
    (lambda step: unlist(step, "state/_METADATA"), "does not name state/_METADATA"),
    (lambda step: (step / "state" / "d" / "x").write_text(""), "does not name state/d/x"),
  ],
)
def test_whatever_has_a_steps_name_is_damaged_unless_it_is_whole(
  whole, tmp_path, change, reason
):
  folder = shutil.copytree(whole, tmp_path / "run")
  change(folder / "2")
  with checkpoint.Checkpoints(folder) as run:
    assert run.latest() == 2
    with pytest.raises(checkpoint.CheckpointError, match=f"/2 .*{reason}") as e:
      run.data()
  assert follow(e.value, folder) == restored_step(folder) == 1


def test_the_advice_is_to_delete_all_that_is_damaged(tmp_path):
  """The older ones are checked too, as far back as it takes."""
  saved(tmp_path, [1, 2, 3, 4], keep=4).close()
  for step in (2, 3, 4):
    (tmp_path / str(step) / "data" / "metadata").write_text("{}")
  with pytest.raises(checkpoint.CheckpointError, match="; 3, 2 cannot be used eit") as e:
    restored_step(tmp_path)
  assert follow(e.value, tmp_path) == restored_step(tmp_path) == 1


def test_steps_that_changed_places_are_told(whole, tmp_path):
  """Each is whole, but not the step that it is named for."""
  folder = shutil.copytree(whole, tmp_path / "run")
  (folder / "1").rename(folder / "x")
  (folder / "2").rename(folder / "1")
  (folder / "x").rename(folder / "2")
  with pytest.raises(checkpoint.CheckpointError, match=r"of step 1\); 1 cannot be used"):
    restored_step(folder)


def test_the_data_are_read_alone_and_the_files_checked_once(whole, tmp_path, monkeypatch):
  """So that settings are compared before a model is loaded."""
  folder = shutil.copytree(whole, tmp_path / "run")
  sums, read = checksums.sums, []
  monkeypatch.setattr(checksums, "sums", lambda paths: read.extend(paths) or sums(paths))
  with checkpoint.Checkpoints(folder) as run:
    assert run.data() == (2, {"next": 2})
    assert read
    read.clear()
    assert run.restore(abstract(state(2)))[0] == 2
    assert not read
  (folder / "2" / "state" / "_METADATA").write_bytes(b"")
  with checkpoint.Checkpoints(folder) as run:
    with pytest.raises(checkpoint.CheckpointError, match="2 is damaged .*_METADATA has 0"):
      run.data()


def test_a_folder_without_checkpoints_is_left_as_it_is(tmp_path):
  """Not even made."""
  with checkpoint.Checkpoints(tmp_path / "none" / "here") as run:
    assert run.latest() is None
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint"):
      run.data()
  assert not (tmp_path / "none").exists()
  with checkpoint.Checkpoints(tmp_path / "none" / "here") as run:
    run.save(1, state(1), {"next": 1})
  assert restored_step(tmp_path / "none" / "here") == 1


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
  """A file, and a link to itself."""
  (tmp_path / "file").write_text("")
  (tmp_path / "loop").symlink_to("loop")
  for name in ("file", "loop"):
    with pytest.raises(checkpoint.CheckpointError, match=f"{tmp_path / name} cannot be"):
      checkpoint.Checkpoints(tmp_path / name)


@pytest.mark.parametrize("killed", ["before its list", "before its name"])
def test_a_step_has_its_list_before_its_name(whole, tmp_path, monkeypatch, killed):
  """So that there is no moment at which a kill leaves a step without one."""
  folder = shutil.copytree(whole, tmp_path / "run")

  async def cut(self):
    if self.get_final().name == "3":
      raise KeyError("killed")
    await rename(self)

  rename = ocp.path.atomicity.AtomicRenameTemporaryPath.finalize
  if killed == "before its list":
    monkeypatch.setattr(checkpoint._Listed, "finalize", cut)
  else:
    monkeypatch.setattr(ocp.path.atomicity.AtomicRenameTemporaryPath, "finalize", cut)
  with pytest.raises(KeyError), checkpoint.Checkpoints(folder) as run:
    run.save(3, state(3), {"next": 3})
  monkeypatch.undo()
  (half,) = folder.glob("3.*")
  assert (half / "checksums.json").exists() == (killed == "before its name")
  assert restored_step(folder) == 2
  with checkpoint.Checkpoints(folder) as run:
    run.save(3, state(3), {"next": 3})
  assert not half.exists()


def test_training_goes_on_while_checksums_are_computed(tmp_path, monkeypatch):
  """`save` returns before, and until they are there no step is."""
  write, go_on = checksums.write, threading.Event()
  monkeypatch.setattr(checksums, "write", lambda *args: go_on.wait() and write(*args))
  with checkpoint.Checkpoints(tmp_path) as run:
    run.save(1, state(1), {"next": 1})
    assert run.latest() is None
    go_on.set()
  assert restored_step(tmp_path) == 1


def test_a_step_that_is_deleted_while_it_is_read_is_told(whole, tmp_path, monkeypatch):
  folder, sums = shutil.copytree(whole, tmp_path / "run"), checksums.sums

  def deleted(paths):
    shutil.move(folder / "2", folder / "3")
    return sums(paths)

  monkeypatch.setattr(checksums, "sums", deleted)
  with pytest.raises(checkpoint.CheckpointError, match="replaced .* while it was read;"):
    checkpoint.checked(folder)
