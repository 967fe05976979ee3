"""Logs large allocations before they happen.

A process that exceeds the machine's memory is killed without a message. The last line of
its log then says what it was about to allocate, how much was free, and which entries of the
config make it smaller.
"""

import collections
from collections.abc import Iterable, Iterator
import logging
import math
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil

LEAST_BYTES = 64 * 2**20  # per device; less is not logged

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_OWN_CGROUPS = pathlib.Path("/proc/self/cgroup")
_PAGE_CACHE = ("total_inactive_file", "inactive_file")  # used, but reclaimable


class Room(NamedTuple):
  free: int
  total: int

  def __str__(self) -> str:
    return f"{text(self.free)} of {text(self.total)} free"


def announce(what: str, arrays: Any, smaller: str) -> None:
  """Logs an allocation, and what makes it smaller; warns if it exceeds the free memory."""
  held = bytes_by_device(arrays)
  most = max(held.values(), default=0)
  if most < LEAST_BYTES:
    return
  have, shared = room(held)
  each = f"on each of {len(held)} devices " if len(held) > 1 else ""
  line = f"allocating {text(most)} {each}for {what}; {have}"
  if (sum(held.values()) if shared else most) > have.free:
    logging.warning("%s: this will probably not fit; smaller: %s", line, smaller)
  else:
    logging.info("%s", line)


def announce_programs(what: str, inputs: Any) -> None:
  held = bytes_by_device(inputs)
  if max(held.values(), default=0) >= LEAST_BYTES:
    have, _ = room(held)
    logging.info("compiling %s, whose scratch memory is not known yet; %s", what, have)


def bytes_by_device(arrays: Any) -> dict[jax.Device | int, int]:
  """Bytes per device, which is a number on an abstract mesh, of arrays or shapes."""
  held = collections.Counter()
  for x in jax.tree.leaves(arrays):
    sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    size = math.prod(sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
    mesh = getattr(sharding, "mesh", None)
    is_abstract = isinstance(mesh, jax.sharding.AbstractMesh)
    on = range(mesh.size) if is_abstract else sharding.addressable_devices
    held.update(dict.fromkeys(on, size))
  return dict(held)


def room(devices: Iterable[jax.Device]) -> tuple[Room, bool]:
  """The memory of the fullest of these devices, and whether they share it."""
  own = [device.memory_stats() or {} for device in devices]
  if not all("bytes_limit" in stats for stats in own):
    return machine(), True
  limits = [(stats["bytes_limit"], stats["bytes_in_use"]) for stats in own]
  return min(Room(limit - used, limit) for limit, used in limits), False


def machine() -> Room:
  """The machine's memory, or that of the tightest cgroup of this process."""
  memory = psutil.virtual_memory()
  return min([Room(memory.available, memory.total), *_cgroups()])


def _cgroups() -> Iterator[Room]:
  try:
    lines = _OWN_CGROUPS.read_text().splitlines()
  except OSError:  # not Linux
    return
  for _, controllers, path in (line.split(":", 2) for line in lines):
    top, names = _CGROUPS, ("memory.max", "memory.current")
    if controllers == "memory":  # cgroups of version 1
      top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    elif controllers:
      continue
    folder = top / path.lstrip("/")
    for around in (folder, *folder.parents):
      try:
        limit, used = (int((around / name).read_text()) for name in names)
        stat = dict(s.split() for s in (around / "memory.stat").read_text().splitlines())
      except (OSError, ValueError):  # no such folder, or "max": without a limit
        continue
      cache = next((int(stat[name]) for name in _PAGE_CACHE if name in stat), 0)
      yield Room(limit - used + cache, limit)


def text(size: int) -> str:
  return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
