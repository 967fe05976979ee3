"""A full disk, told in one sentence: the file that did not fit, the cause, the remedy."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDY = "free some space and run the same command again"


def full_disk(error: BaseException | None) -> str | None:
  """What the system says where an error comes from a full disk, else None.

  Libraries wrap what the system says in errors of their own, of any kind.
  """
  while error is not None:
    for reason in map(os.strerror, _FULL):
      if reason in str(error):
        return reason
    error = error.__cause__ or error.__context__
  return None


@contextlib.contextmanager
def to(path: str | pathlib.Path) -> Iterator[None]:
  """Names `path` and the remedy if what is written inside does not fit.

  Raises:
    OSError: the disk is full; any other error passes as it is
  """
  try:
    yield
  except Exception as e:
    reason = full_disk(e)
    if reason is None:
      raise
    raise OSError(f"{path} cannot be written ({reason}); {REMEDY}") from e
