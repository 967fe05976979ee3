"""The processes of one job, each with devices of its own: what they must agree on.

JAX's multi-controller runtime: every process runs the same program on the same host data,
and starts the same device programs in the same order. So whatever a process knows alone,
such as what its clock says, has to be made common before anything is decided by it. That
happens here, and every other module asks here where an array lies and who writes files.
With one process all of it is free. docs/distributed.md counts what is exchanged.
"""

import functools
import signal
import threading
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

_sigterm = threading.Event()  # set once this process has been told to stop


class Stopped(BaseException):
  """The job was told to stop (SIGTERM); it saves where it is, and can be resumed."""


class Told(NamedTuple):
  """What all processes know after `tell`."""

  seconds: float  # of the first process
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


def total(values: np.ndarray) -> np.ndarray:
  """The sum of f32 values over the processes, on each: one all-reduce.

  Zeros of all processes but one hand out what that one has, exactly.
  """
  values = np.asarray(values, np.float32)
  if count() == 1:
    return values
  sharding, add = _adder()
  width = 1 << max(values.size - 1, 0).bit_length()  # of few sizes: each is a program
  devices = sharding.mesh.devices.flat
  mine = next(i for i, d in enumerate(devices) if d.process_index == index())
  rows = np.zeros((len(devices), width), np.float32)
  rows[mine, : values.size] = values.ravel()
  placed = jax.make_array_from_callback(rows.shape, sharding, lambda part: rows[part])
  return np.asarray(add(placed))[: values.size].reshape(values.shape)


@functools.cache
def _adder():
  """The sharding of rows [devices n], and the program that adds these up on all devices."""
  mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
  over = NamedSharding(mesh, PartitionSpec("all"))
  whole = NamedSharding(mesh, PartitionSpec())
  return over, jax.jit(lambda x: jnp.sum(x, 0), out_shardings=whole)


def of_first(value: float) -> float:
  """The first process's value, rounded to f32 where there are others."""
  return float(total(np.array([value if is_first() else 0.0]))[0]) if count() > 1 else value


def barrier() -> None:
  """Returns when every process has come here."""
  total(np.zeros(1))


def tell(seconds: float) -> Told:
  """Hands out the first process's reading of a clock, and who was told to stop.

  Once per chunk: 8 bytes, one all-reduce.
  """
  stop = _sigterm.is_set()
  if count() == 1:
    return Told(seconds, stop)
  found = total(np.array([seconds if is_first() else 0.0, stop]))
  return Told(float(found[0]), bool(found[1]))


def stop_on_sigterm() -> None:
  """From now on SIGTERM asks the job to stop at the next chance; see `stop_if_told`."""
  signal.signal(signal.SIGTERM, lambda *_: _sigterm.set())


def stop_if_told() -> None:
  """Raises `Stopped` on all processes if one of them was told to stop."""
  if tell(0.0).stop:
    raise Stopped
