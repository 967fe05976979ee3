"""The log says what is about to be allocated, before it is, with the right numbers."""

import logging
import types

import jax
import jax.numpy as jnp
import psutil
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax import memory

GIB = 2**30


def half(mesh, size: int) -> jax.ShapeDtypeStruct:
  """So many bytes, a half of them on each slice of a mesh of two."""
  over = axes.sharding(mesh, axes.DATA)
  return jax.ShapeDtypeStruct((size // 4,), jnp.float32, sharding=over)


def test_a_line_names_what_is_free_and_warns_of_what_is_not(monkeypatch, caplog):
  """Devices of a CPU share its memory; a little is not worth a line."""
  caplog.set_level(logging.INFO)
  mesh = tiny.mesh(2)
  room = memory.Room(3 * GIB, 4 * GIB)
  monkeypatch.setattr(memory, "machine", lambda: room)
  memory.announce("the cache", half(mesh, memory.LEAST_BYTES), "rollout.slots")
  memory.announce_programs("2 programs", half(mesh, memory.LEAST_BYTES))
  assert not caplog.records
  memory.announce("the cache", half(mesh, 3 * GIB), "rollout.slots")
  memory.announce("the cache", half(mesh, 7 * GIB // 2), "rollout.slots")
  memory.announce_programs("2 programs", half(mesh, 2 * GIB))
  assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
  assert all("3.0 GiB of 4.0 GiB free" in text for text in caplog.messages)
  assert "allocating 1.5 GiB on each of 2 devices for the cache" in caplog.messages[0]
  assert "smaller: rollout.slots" in caplog.messages[1]


def test_a_device_with_memory_of_its_own_is_asked(monkeypatch, caplog):
  """The fullest counts, and each holds its own part alone."""

  def device(used):
    return types.SimpleNamespace(
    memory_stats=lambda: {"bytes_limit": 8 * GIB, "bytes_in_use": used * GIB}
  )

  room, shared = memory.room([device(1), device(5), device(2)])
  assert (room, shared) == (memory.Room(3 * GIB, 8 * GIB), False)
  caplog.set_level(logging.INFO)
  monkeypatch.setattr(memory, "room", lambda _: (room, shared))
  memory.announce("the cache", half(tiny.mesh(2), 6 * GIB), "rollout.slots")
  assert caplog.records[-1].levelname == "INFO"
  memory.announce("the cache", half(tiny.mesh(2), 7 * GIB), "rollout.slots")
  assert caplog.records[-1].levelname == "WARNING"


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_limits_what_is_free(tmp_path, monkeypatch, version):
  """Its own or one around it; pages of files that were read do not count as used."""
  top, line = tmp_path, "0::/a/b"
  names, cache = ("memory.max", "memory.current"), "inactive_file"
  if version == 1:
    top, line = tmp_path / "memory", "4:memory:/a/b\n3:cpu:/"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    cache = "total_inactive_file"
  own = tmp_path / "cgroup"
  own.write_text(line + "\n")
  monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
  monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
  machine = types.SimpleNamespace(available=9 * GIB, total=10 * GIB)
  monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
  (top / "a" / "b").mkdir(parents=True)
  assert memory.machine() == memory.Room(9 * GIB, 10 * GIB)
  for folder, limit in ((top / "a", 4 * GIB), (top / "a" / "b", "max")):
    for name, value in zip(names, (limit, 3 * GIB), strict=True):
      (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache} {GIB}\n")
  assert memory.machine() == memory.Room(2 * GIB, 4 * GIB)
  own.unlink()
  assert memory.machine() == memory.Room(9 * GIB, 10 * GIB)
