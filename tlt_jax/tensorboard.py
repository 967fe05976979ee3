"""TensorBoard events, written synchronously.

tensorboardX's own writer uses a thread. If that dies, as on a full disk, its queue fills up
and the run hangs.
"""

from collections.abc import Mapping
import pathlib
import time

from tensorboardX import event_file_writer
from tensorboardX import summary
from tensorboardX.proto import event_pb2

from tlt_jax import writing


class Board:
  def __init__(self, folder: str | pathlib.Path, resume_step: int = 0):
    """Starts a file; TensorBoard drops events of others from `resume_step` on."""
    self._folder = pathlib.Path(folder)
    self._folder.mkdir(parents=True, exist_ok=True)
    with writing.to(self._folder):
      self._events = event_file_writer.EventsWriter(str(self._folder / "events"))
      begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._add(event_pb2.Event(step=resume_step, session_log=begin))
      self._events.flush()

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    with writing.to(self._folder):
      for name, value in scalars.items():
        self._add(event_pb2.Event(step=step, summary=summary.scalar(name, value)))
      self._events.flush()

  def close(self) -> None:
    self._events.close()

  def _add(self, event: event_pb2.Event) -> None:
    event.wall_time = time.time()
    self._events.write_event(event)
