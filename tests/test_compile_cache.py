"""Compiled programs outlive a run, whatever is wrong with their folder."""

import os
import resource
import types
import warnings

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from experiments import compile_cache

OPTIONS = (
  "jax_compilation_cache_dir",
  "jax_enable_compilation_cache",
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
  """JAX's options, the environment and how warnings are shown are those of before."""
  before = {name: getattr(jax.config, name) for name in OPTIONS}
  monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
  monkeypatch.setenv("TRITON_CACHE_DIR", "")
  monkeypatch.delenv("TRITON_CACHE_DIR")
  monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def compile_some():
  jax.clear_caches()

  def some_product(x):
    return x @ x + 1

  return jax.jit(some_product).lower(jnp.ones((3, 3))).compile()


@pytest.fixture
def begin(tmp_path, monkeypatch):
  """Starts the caches in the user's folder of caches."""

  def begin():
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.start()
    return compile_cache.usual()

  return begin


def test_small_programs_are_kept_too(begin):
  folder = begin()
  compile_some()
  assert list(folder.glob("jit_some_product-*-cache"))
  assert os.environ["TRITON_CACHE_DIR"].startswith(str(folder))


def test_a_users_folder_and_threshold_stay(tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "9")
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 9.0)
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
  compile_cache.start()
  compile_some()
  assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
  assert not list((tmp_path / "mine").glob("*-cache"))


def test_a_bucket_of_a_cloud_gets_no_files_of_xla():
  jax.config.update("jax_compilation_cache_dir", "gs://bucket/compiled")
  compile_cache.start()
  assert jax.config.jax_persistent_cache_enable_xla_caches == ""


def test_a_damaged_entry_is_compiled_again_and_replaced(begin, caplog):
  """One line says so; the next run finds it whole."""
  folder = begin()
  compile_some()
  (entry,) = folder.glob("jit_some_product-*-cache")
  whole = entry.read_bytes()
  entry.write_bytes(whole[: len(whole) // 2])
  with warnings.catch_warnings():  # pytest collects them; a command shows them
    warnings.showwarning = compile_cache._Errors(folder, warnings.showwarning)
    compile_some()
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
      "reading compiled programs fails"
    ]
    assert len(entry.read_bytes()) >= len(whole) - 8
    compile_some()
  assert len(caplog.records) == 1


def test_a_disk_that_gets_full_leaves_no_part_of_an_entry(begin, caplog):
  """One line says so, for all programs. (Here a file can have 100 bytes.)"""
  folder = begin()
  with warnings.catch_warnings():
    warnings.showwarning = compile_cache._Errors(folder, warnings.showwarning)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
      compile_some()
      compile_some()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not list(folder.glob("*-cache"))
  (record,) = caplog.records
  assert record.getMessage().startswith("writing compiled programs fails: OSError")


@pytest.mark.parametrize("fault", ["file", "full"])
def test_a_folder_that_cannot_be_written_to(begin, tmp_path, monkeypatch, caplog, fault):
  """One warning; programs are compiled, and nothing is kept."""
  if fault == "file":
    (tmp_path / "tlt_jax").write_text("no folder")
  else:
    usage = types.SimpleNamespace(free=2**20)
    monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda _: usage)
  folder = begin()
  compile_some()
  (record,) = caplog.records
  assert "not kept" in record.getMessage()
  assert "JAX_COMPILATION_CACHE_DIR" in record.getMessage()
  assert not list(folder.glob("*-cache"))
  assert os.path.isdir(os.environ["TRITON_CACHE_DIR"])


def test_what_was_not_used_for_longest_is_removed(tmp_path):
  """Of all versions, until the rest fits."""
  for age, name in enumerate(("new/a", "new/b", "old/c", "old/d")):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(100))
    os.utime(path, (10**9 - age, 10**8))
  compile_cache.prune(tmp_path, most=250)
  left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
  assert left == {"new/a", "new/b"}
