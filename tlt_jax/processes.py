"""The processes of one job, each with its own devices, and how they agree.

In JAX's multi-controller runtime every process runs the same program on the same host data,
and starts the same device programs in the same order. So the local knowledge of a process,
such as its clock, is shared here before a decision depends on it.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, NamedTuple
import zlib

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

STOPPED = 143  # exit status after SIGTERM or Ctrl-C, as of a process that SIGTERM killed
_ENDED = 130  # after a second Ctrl-C, as of a process that Ctrl-C killed
_UNWIND_S = 5.0  # that a process outside of `saving` may take to end after a signal

# Whether this process has a request to stop, is in `saving`, and has been in it. Plain
# values: a lock that a signal handler takes may be held by the handler that it interrupts.
_stop_requested = False
_saving = False
_resumes = False


class Stopped(BaseException):
  """Ends the job on request (SIGTERM, Ctrl-C); see `stop_on_signals`.

  `together`: all processes of the job raise it, at the same place.
  """

  def __init__(self, together: bool = True):
    super().__init__(together)
    self.together = together

  def __str__(self) -> str:
    return "stopped" + ("; the same command resumes" if _resumes else "")


class Agreement(NamedTuple):
  seconds: np.ndarray  # summed over the processes
  stop: bool  # whether any process was asked to stop


def count() -> int:
  return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
  return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
  """Whether this process writes the job's files and shows its progress."""
  return index() == 0


def share() -> slice:
  """This process's items of a list, every n-th one."""
  return slice(index(), None, count())


def place(x: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
  """Places an array that every process has; each process copies its own shards.

  (`jax.device_put` would first compare it between all processes.)
  """
  spans = isinstance(x, jax.Array) and not x.is_fully_addressable
  if count() == 1 or spans:
    return jax.device_put(x, sharding)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])


def fetch(tree: Any) -> Any:
  def whole(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(whole, tree)


def gather(tree: Any) -> Any:
  """Brings arrays [n ...], split by rows over one axis, to all hosts, by one all-gather."""
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
  parts = sharding.mesh.shape[sharding.spec[0]]

  def pack(leaves):
    as_bytes = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in leaves)
    return jnp.concatenate([x.reshape(parts, -1) for x in as_bytes], axis=1)

  return jax.jit(pack, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))


def total(values: np.ndarray) -> np.ndarray:
  """The sum of f32 values over the processes, by one all-gather.

  With zeros on all processes but one it is a broadcast.
  """
  values = np.asarray(values, np.float32)
  if count() == 1:
    return values
  width = 1 << max(values.size - 1, 0).bit_length()  # few sizes: each is a program
  sharding = _over_all()
  devices = sharding.mesh.devices.flat
  mine = next(i for i, d in enumerate(devices) if d.process_index == index())
  rows = np.zeros((len(devices), width), np.float32)
  rows[mine, : values.size] = values.ravel()
  placed = jax.make_array_from_callback(rows.shape, sharding, lambda part: rows[part])
  return gather(placed).sum(0)[: values.size].reshape(values.shape)


@functools.cache
def _over_all() -> NamedSharding:
  mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
  return NamedSharding(mesh, PartitionSpec("all"))


def of_first(value: float) -> float:
  """The first process's value, rounded to f32 where there are others."""
  return float(total(np.array([value if is_first() else 0.0]))[0]) if count() > 1 else value


def on_first(call: Callable[[], Any]) -> Any:
  """Returns, on every process, the result of `call` on the first one.

  For what processes may see differently, such as the cached files of a network file system.
  A collective call, which must not be nested; the result is JSON data.

    ValueError: `call` has failed; the first process raises the original error
  """
  if count() == 1:
    return call()
  error, message = None, b""
  if is_first():
    try:
      result = {"value": call()}
    except Exception as e:
      error, result = e, {"error": str(e)}
    message = json.dumps(result).encode()
  sent = np.zeros(int(of_first(len(message))), np.float32)  # a byte each
  sent[: len(message)] = np.frombuffer(message, np.uint8)
  result = json.loads(total(sent).astype(np.uint8).tobytes())
  if "error" in result:
    raise error or ValueError(result["error"])
  return result["value"]


@functools.cache
def on_this_host() -> int:
  """The number of processes on this process's machine; a collective call."""
  names = np.zeros(count(), np.float32)
  names[index()] = zlib.crc32(socket.gethostname().encode()) % 2**24  # f32 is exact there
  names = total(names)
  return int(np.sum(names == names[index()]))


def barrier() -> None:
  total(np.zeros(1))


def agree(seconds: Sequence[float] = ()) -> Agreement:
  """Shares readings of clocks, each 0 on all processes but one, and requests to stop.

  Once per chunk: 4 bytes for each and 4 more, by one all-gather.
  """
  if count() == 1:
    return Agreement(np.asarray(seconds), _stop_requested)
  totals = total(np.array([*seconds, _stop_requested]))
  return Agreement(totals[:-1], bool(totals[-1]))


def stop_on_signals(announces: bool = True) -> None:
  """Makes SIGTERM and Ctrl-C raise `Stopped` in the main thread, which calls this once.

  In `saving` they only request a stop, see `stop_if_requested`. A second Ctrl-C ends the
  process at once, and so does the first signal outside of `saving` if a long call, such as
  XLA's compiler, keeps Python from raising. `announces`: Ctrl-C is answered by a line.
  """
  reads, writes = os.pipe()
  os.set_blocking(writes, False)
  # Python runs handlers between two of its instructions, a thread reads this at once.
  signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, _request_stop)
  threading.Thread(target=_watch, args=(reads, announces), daemon=True).start()


def _request_stop(*_) -> None:
  global _stop_requested
  first, _stop_requested = not _stop_requested, True
  if first and not _saving:
    raise Stopped(together=False)


def _watch(signals: int, announces: bool) -> None:
  interrupted = False
  while True:
    number = os.read(signals, 1)[0]
    if number == signal.SIGINT:
      if interrupted:
        then = "; the same command resumes from the last checkpoint" if _resumes else ""
        _end(_ENDED, f"ended at once by the second Ctrl-C{then}", announces)
      interrupted = True
    elif number != signal.SIGTERM:
      continue
    if _saving:
      if announces and number == signal.SIGINT:
        write_line("\nstopping; Ctrl-C again ends at once")
    elif not select.select([signals], [], [], _UNWIND_S)[0] and not _saving:
      _end(STOPPED, str(Stopped()), announces)


def write_line(line: str) -> None:
  """To stderr, at once: other processes of a job write there, too."""
  sys.stderr.write(f"{line}\n")
  sys.stderr.flush()


def _end(status: int, line: str, announces: bool) -> None:
  if announces:
    write_line(f"\n{line}")
  os._exit(status)


@contextlib.contextmanager
def saving() -> Iterator[None]:
  """While it lasts, a signal waits for `stop_if_requested`, so that state can be saved.

  Raises:
    Stopped: at the end, if there was a signal that nothing has answered
  """
  global _saving, _resumes
  _saving = _resumes = True
  try:
    yield
  finally:
    _saving = False
  if _stop_requested:
    raise Stopped(together=False)


def end_on_signals() -> None:
  """Undoes `stop_on_signals`: a signal ends this process at once, without a message."""
  signal.set_wakeup_fd(-1)
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)


def stop_if_requested() -> None:
  """Raises `Stopped` on all processes if one of them was asked to stop."""
  if agree().stop:
    raise Stopped
