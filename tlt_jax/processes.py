"""The processes of one job, each with devices of its own: what they must agree on.

JAX's multi-controller runtime: every process runs the same program on the same host data,
and starts the same device programs in the same order. So whatever a process knows alone,
such as what its clock says, has to be made common before anything is decided by it. That
happens here, and every other module asks here where an array lies and who writes files.
With one process all of it is free. docs/distributed.md counts what is exchanged.
"""

from collections.abc import Callable, Sequence
import functools
import json
import signal
import socket
import sys
from typing import Any, NamedTuple
import zlib

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

# Whether this process has been told to stop. A plain value: a lock that a signal handler
# takes may be held by the handler that it interrupts.
_is_told = False


class Stopped(BaseException):
  """Ends the job, which was told to stop (SIGTERM, Ctrl-C) and can be resumed."""


class Told(NamedTuple):
  """What all processes know after `tell`."""

  seconds: np.ndarray  # the sum of what each has read
  stop: bool  # whether any process was told to stop


def count() -> int:
  """The processes of the job."""
  return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
  """The number of this process."""
  return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
  """Whether this is the process that writes the job's files and tells of its progress."""
  return index() == 0


def share() -> slice:
  """Which items of a list are this process's, where each does every n-th of them."""
  return slice(index(), None, count())


def place(x: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
  """Puts an array that every process has on the devices, each process its own part.

  (`jax.device_put` would first compare it between all processes.)
  """
  spans = isinstance(x, jax.Array) and not x.is_fully_addressable
  if count() == 1 or spans:
    return jax.device_put(x, sharding)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])


def fetch(tree: Any) -> Any:
  """Brings arrays to the host, whole, on every process; one array at a time."""

  def whole(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(whole, tree)


def gather(tree: Any) -> Any:
  """Brings arrays [n ...] to the host, whole, on every process, in one all-gather.

  Args:
    tree: of arrays that all are split by rows over the same axis of a mesh
  """
  if count() == 1:
    return jax.device_get(tree)
  leaves, structure = jax.tree.flatten(tree)
  packed = np.asarray(_pack(leaves[0].sharding)(leaves))
  ends = np.cumsum([x.nbytes // len(packed) for x in leaves])
  parts = map(np.ascontiguousarray, np.split(packed, ends[:-1], axis=1))
  whole = [
    part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, whole)


@functools.cache
def _pack(sharding: NamedSharding) -> Callable:
  """The program that puts the bytes of arrays on every device, u8[parts bytes]."""
  parts = sharding.mesh.shape[sharding.spec[0]]

  def pack(leaves):
    as_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in leaves)
    return jnp.concatenate([x.reshape(parts, -1) for x in as_bytes], axis=1)

  return jax.jit(pack, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


def total(values: np.ndarray) -> np.ndarray:
  """The sum of f32 values over the processes, on each: one all-gather.

  Zeros of all processes but one hand out what that one has, exactly. (Between processes on
  CPUs an all-reduce takes some 3 ms more.)
  """
  values = np.asarray(values, np.float32)
  if count() == 1:
    return values
  width = 1 << max(values.size - 1, 0).bit_length()  # of few sizes: each is a program
  sharding = _over_all()
  devices = sharding.mesh.devices.flat
  mine = next(i for i, d in enumerate(devices) if d.process_index == index())
  rows = np.zeros((len(devices), width), np.float32)
  rows[mine, : values.size] = values.ravel()
  placed = jax.make_array_from_callback(rows.shape, sharding, lambda part: rows[part])
  return gather(placed).sum(0)[: values.size].reshape(values.shape)


@functools.cache
def _over_all() -> NamedSharding:
  """How rows [devices n] lie on all devices, one each."""
  mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
  return NamedSharding(mesh, PartitionSpec("all"))


def of_first(value: float) -> float:
  """The first process's value, rounded to f32 where there are others."""
  return float(total(np.array([value if is_first() else 0.0]))[0]) if count() > 1 else value


def on_first(call: Callable[[], Any]) -> Any:
  """Gives, on every process, what `call` returns on the first one.

  For what processes may see differently, such as the files of a network file system, which
  each machine remembers for some time. All processes come here, or none; `call` must not
  come here again.

  Args:
    call: returns what JSON can hold
  Raises:
    ValueError: `call` has failed; the first process raises its own error
  """
  if count() == 1:
    return call()
  error, told = None, b""
  if is_first():
    try:
      found = {"value": call()}
    except Exception as e:
      error, found = e, {"error": str(e)}
    told = json.dumps(found).encode()
  sent = np.zeros(int(of_first(len(told))), np.float32)  # a byte each
  sent[: len(told)] = np.frombuffer(told, np.uint8)
  found = json.loads(total(sent).astype(np.uint8).tobytes())
  if "error" in found:
    raise error or ValueError(found["error"])
  return found["value"]


@functools.cache
def on_this_host() -> int:
  """Counts the processes of the job on the machine of this one; all ask, or none."""
  names = np.zeros(count(), np.float32)
  names[index()] = zlib.crc32(socket.gethostname().encode()) % 2**24  # f32 is exact there
  names = total(names)
  return int(np.sum(names == names[index()]))


def barrier() -> None:
  """Returns when every process has come here."""
  total(np.zeros(1))


def tell(seconds: Sequence[float] = ()) -> Told:
  """Hands out readings of clocks, and whether a process was told to stop.

  Once per chunk: 4 bytes for each and 4 more, one all-reduce.

  Args:
    seconds: as many on every process, and 0 on all but one, whose reading it is
  """
  if count() == 1:
    return Told(np.asarray(seconds), _is_told)
  found = total(np.array([*seconds, _is_told]))
  return Told(found[:-1], bool(found[-1]))


def stop_on_signals() -> None:
  """From now on SIGTERM and Ctrl-C ask the job to stop when it can, see `stop_if_told`.

  A second Ctrl-C ends this process at once.
  """

  def remember(number, _):
    global _is_told
    _is_told = True
    if number == signal.SIGINT:
      signal.signal(number, signal.SIG_DFL)
      print("\nstopping; Ctrl-C again ends at once", file=sys.stderr, flush=True)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, remember)


def stop_if_told() -> None:
  """Raises `Stopped` on all processes if one of them was told to stop."""
  if tell().stop:
    raise Stopped
