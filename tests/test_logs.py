"""The log: an error that is raised elsewhere is not told twice; nothing else is lost."""

import logging
import threading

import pytest

from experiments import logs


def record(path: str, error: Exception | None) -> logging.LogRecord:
  told = (type(error), error, None) if error else None
  return logging.LogRecord("absl", logging.ERROR, path, 1, "text", (), told)


@pytest.mark.parametrize(
  "path, error, kept",
  [
    ("/lib/orbax/checkpoint/future.py", OSError("full"), False),
    ("/lib/orbax/checkpoint/future.py", None, True),
    ("/lib/grain/loader.py", OSError("full"), True),
  ],
)
def test_only_errors_of_orbaxs_threads_are_left_out(path, error, kept):
  assert logs._is_no_echo(record(path, error)) == kept


def test_what_a_thread_leaves_uncaught_is_one_line(monkeypatch, caplog):
  monkeypatch.setattr(threading, "excepthook", logs._uncaught)

  def fail(error):
    raise error

  for error in (OSError("no\n  such"), RuntimeError("Event loop is closed"), SystemExit()):
    thread = threading.Thread(target=fail, args=[error], name="worker")
    thread.start()
    thread.join()
  assert [r.getMessage() for r in caplog.records] == ["OSError in thread worker: no such"]
  assert not any(r.exc_info for r in caplog.records)
