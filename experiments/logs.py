"""What a command prints to stderr: a line per event, and of an error one line at the end.

Libraries tell an error of a thread several times, with tracebacks, before it is raised
where the command waits for that thread. `TLT_TRACEBACK=1` shows all of it.
"""

import logging
import os
import sys
import threading


def start(process: int | None = None) -> None:
  """Begins to log, and takes what threads leave uncaught.

  Args:
    process: its number, which every line gets, where a job has several
  """
  handler = logging.StreamHandler(sys.stderr)
  number = "" if process is None else f"[{process}] "
  form = f"%(asctime)s {number}%(message)s"
  handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
  logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
  for name in ("absl", "jax", "orbax"):
    logging.getLogger(name).setLevel(logging.WARNING)
  if os.environ.get("TLT_TRACEBACK"):
    return
  # A read that fails in orbax is raised, and would be logged again by each task.
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  handler.addFilter(_is_no_echo)
  threading.excepthook = sys.unraisablehook = _uncaught


def _is_no_echo(record: logging.LogRecord) -> bool:
  """False for an error of orbax's threads, which is raised where they are waited for."""
  return not (record.exc_info and "orbax" in record.pathname)


def _uncaught(args) -> None:
  """Logs in one line what a thread, or a callback from C++, left uncaught."""
  error = args.exc_value
  # Of tensorstore's writes that were under way when another one failed.
  if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
    return
  if not isinstance(error, SystemExit):
    name = threading.current_thread().name
    text = " ".join(str(error).split())
    logging.error("%s in thread %s: %s", type(error).__name__, name, text)
