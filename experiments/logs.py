"""Logging of commands to stderr: a line per event, and one final line for an error.

Libraries log an error in a thread several times, with tracebacks, before it is raised in
the main thread. `TLT_TRACEBACK=1` shows all of them.
"""

import logging
import os
import sys
import threading


def start(process: int | None = None) -> None:
  """Configures logging, with the number of the process in jobs of several."""
  handler = logging.StreamHandler(sys.stderr)
  number = "" if process is None else f"[{process}] "
  line = f"%(asctime)s {number}%(message)s"
  handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
  logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
  for name in ("absl", "jax", "orbax"):
    logging.getLogger(name).setLevel(logging.WARNING)
  if os.environ.get("TLT_TRACEBACK"):
    return
  # Each task would log a failed read of orbax, which is raised anyway.
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  handler.addFilter(_is_no_echo)
  threading.excepthook = sys.unraisablehook = _uncaught


def _is_no_echo(record: logging.LogRecord) -> bool:
  """False for an error in orbax's threads, which is raised in the main thread."""
  return not (record.exc_info and "orbax" in record.pathname)


def _uncaught(args) -> None:
  """Logs an uncaught error of a thread, or of a C++ callback, in one line."""
  error = args.exc_value
  # From tensorstore's writes in flight when another one failed.
  if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
    return
  if not isinstance(error, SystemExit):
    name = threading.current_thread().name
    text = " ".join(str(error).split())
    logging.error("%s in thread %s: %s", type(error).__name__, name, text)
