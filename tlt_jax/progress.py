"""Says what takes long, and how far it is.

    with progress.shown(lambda: f"reading the weights, {count} of {total}"):
      ...

logs "reading the weights, 120 of 290, 10 s" after ten seconds, and again every ten (later
every tenth of the time that has passed); of what is over before, nothing. What is shown
within something else follows it: "evaluation: 12 of 64 responses ended: compiling chunk,
20 s". Only the first process of a job logs.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import logging
import threading
import time
from typing import TypeVar

from tlt_jax import processes

T = TypeVar("T")
Text = str | Callable[[], str]  # a function is called by another thread, which only reads

EVERY_S = 10.0
_SHARE = 0.1  # of the time that has passed between two lines

_shown: list["_Entry"] = []  # what is under way, the outermost first


class _Entry:
  def __init__(self, text: Text):
    self.text = text

  def __str__(self) -> str:
    return self.text if isinstance(self.text, str) else self.text()


@contextlib.contextmanager
def shown(text: Text) -> Iterator[None]:
  """Shows what the `with` block does for as long as that takes."""
  entry, ended, is_outermost = _Entry(text), threading.Event(), not _shown
  _shown.append(entry)
  if is_outermost and processes.is_first():
    threading.Thread(target=_say, args=(ended,), daemon=True).start()
  try:
    yield
  finally:
    ended.set()
    _shown.remove(entry)


@contextlib.contextmanager
def counted(what: str, items: Sequence[T]) -> Iterator[Iterator[T]]:
  """As `shown`, with the number of the item that the block has taken from the iterator."""
  at = 0

  def each():
    nonlocal at
    for item in items:
      at += 1
      yield item

  with shown(lambda: f"{what} {at:,} of {len(items):,}"):
    yield each()


def _say(ended: threading.Event) -> None:
  began, wait_s = time.monotonic(), EVERY_S
  while not ended.wait(wait_s) and (texts := list(_shown)):
    seconds = time.monotonic() - began
    logging.info("%s, %.0f s", ": ".join(map(str, texts)), seconds)
    wait_s = max(EVERY_S, _SHARE * seconds)
