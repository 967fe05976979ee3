"""The log says what is about to be allocated, before it is, with the right numbers."""

import collections
import logging
import re
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import psutil
import pytest

from experiments import from_config
from tests import commands
from tests import tiny
from tlt_jax import axes
from tlt_jax import memory
from tlt_jax import programs
from tlt_jax.models import hf
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import learner as learner_lib
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.rollout import devices

home = commands.home
GIB = 2**30


def held(arrays) -> dict[jax.Device, int]:
  """Bytes of arrays that exist, by device."""
  found = collections.Counter()
  for x in jax.tree.leaves(arrays):
    for shard in x.addressable_shards:
      found[shard.device] += shard.data.nbytes
  return dict(found)


def test_a_run_announces_each_large_allocation_before_it(home, monkeypatch, caplog):
  """In the order of the run; the figures are those of the arrays that come to be."""
  caplog.set_level(logging.INFO)
  monkeypatch.setattr(memory, "LEAST_BYTES", 1)
  monkeypatch.setattr(devices.Devices, "compile_shared", lambda *_: None)
  monkeypatch.setattr(devices.Devices, "compile_chunk", lambda *_: lambda _: None)
  said, log = [], memory.announce

  def announce(what, arrays, smaller):
    said.append((what, memory.bytes_by_device(arrays), list(map(id, jax.live_arrays()))))
    log(what, arrays, smaller)

  monkeypatch.setattr(memory, "announce", announce)

  def check(what, arrays):
    """The last that was said is `what`, of these arrays, and they were not there yet."""
    found, size, alive = said[-1]
    assert re.fullmatch(what, found)
    assert size == held(arrays)
    assert not {id(x) for x in jax.tree.leaves(arrays)} & set(alive)

  changes = {"policy": str(home / "policy"), "drafter": "eagle2"}
  config = commands.read_run("countdown.py:smoke", changes)
  mesh = tiny.mesh(2, 2)
  model, params = hf.load(config.policy, mesh, axes.TRAIN, dtype="float32")
  check(r"the weights of .*policy \(float32\)", params)
  algorithm = algorithm_lib.make("grpo", kl_coef=1e-3)
  learner = learner_lib.make(
    model, algorithm, optimizer.make("adamw", 1e-3), mesh, **vars(config.learner)
  )
  reference = from_config.copy_reference(algorithm, params)
  check("the reference policy", reference)
  assert from_config.copy_reference(algorithm_lib.make("grpo"), params) is None
  state = learner.init(params)
  check("the policy's moments", state.opt_state)
  spot = from_config.make_drafter(config, model, mesh)
  check("the training data of the drafter", spot.features)
  selector = from_config.make_selector(config)
  sampler = from_config.make_sampler(config, model, mesh, spot, selector)
  policy = learner.to_rollout(state.params)
  check(r"the policy of rollouts \(float32\)", policy)
  sampler.rollout.compile(policy, stop_tokens=1)
  shapes = sampler.rollout.backend.shapes
  slots = shapes.slots(sampler.rollout.options.slots, 1)
  check("KV cache and kept features", slices.zeros(slots))

  monkeypatch.setattr(learner.pool, "get", lambda *args: lambda: None)
  learner.run("update", None, 8)
  sampler.rollout.compile(policy, stop_tokens=1)
  lines = [r.getMessage() for r in caplog.records if r.module == "memory"]
  assert [line.split(" ")[0] for line in lines] == ["allocating"] * 6 + ["compiling"] * 3
  assert lines[6].startswith("compiling the rollout's programs (buckets: 1), whose")
  assert lines[7].startswith("compiling the policy's update, whose scratch memory is")
  assert len(said) == 6  # what a rollout allocates is said once


def test_what_is_stored_is_announced_as_it_is_stored(home, monkeypatch):
  said = []
  monkeypatch.setattr(memory, "announce", lambda *args, **_: said.append(args))
  _, params = hf.load(home / "policy")
  [(what, arrays)] = said
  assert what.endswith("policy (float32)")
  assert memory.bytes_by_device(arrays) == held(params)


def test_what_is_alive_is_counted_once_however_often_it_is_counted():
  before = programs.live_bytes()
  x = slices.zeros(half(tiny.mesh(2), 2**20))
  assert [programs.live_bytes() - before for _ in range(3)] == [2**19] * 3
  del x


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
  free = "3.0 GiB of 4.0 GiB free"
  assert caplog.messages == [
    f"allocating 1.5 GiB on each of 2 devices for the cache; {free}",
    f"allocating 1.8 GiB on each of 2 devices for the cache; {free}: this will probably "
    "not fit; smaller: rollout.slots",
    f"compiling 2 programs, whose scratch memory is not known yet; {free}",
  ]


def test_a_device_with_memory_of_its_own_is_asked(monkeypatch, caplog):
  """The fullest counts, and each holds its own part alone."""
  device = lambda used: types.SimpleNamespace(
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


_KILLED = """
import logging, os, signal, sys
from tlt_jax import memory
from tlt_jax.models import hf
logging.basicConfig(level=logging.INFO)
memory.LEAST_BYTES = 1
hf._place = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
hf.load(sys.argv[1])
"""


def test_a_process_that_is_killed_has_said_what_it_allocated(home):
  """In the last line of its log."""
  command = [sys.executable, "-c", _KILLED, str(home / "policy")]
  killed = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True)
  assert killed.returncode == -signal.SIGKILL
  last = killed.stderr.splitlines()[-1]
  assert re.search(r"allocating .* for the weights of .*policy \(float32\); .* free", last)
