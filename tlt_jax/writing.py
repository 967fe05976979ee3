from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDY = "free some space and run the same command again"


def full_disk(error: BaseException | None) -> str | None:
  """The system's message if an error, of any library, comes from a full disk, else None."""
  while error is not None:
    for reason in map(os.strerror, _FULL):
      if reason in str(error):
        return reason
    error = error.__cause__ or error.__context__
  return None


@contextlib.contextmanager
def to(path: str | pathlib.Path) -> Iterator[None]:
  """Raises an OSError with `path` and the remedy if the disk is full."""
  try:
    yield
  except Exception as e:
    reason = full_disk(e)
    if reason is None:
      raise
    raise OSError(f"{path} cannot be written ({reason}); {REMEDY}") from e
