"""Checks of what a config.json says: sizes, numbers and switches, by their key."""

import sys
from typing import Any

from tlt_jax.models import hf_folder

_LARGEST = 2**31 - 1  # tokens and positions are i32

_EXPECTED = {
  int: f"a whole number from 1 to {_LARGEST}",
  float: "a finite number above 0",
  bool: "true or false",
  str: "a string",
  list: "a list",
  dict: "an object",
}


def check(key: str, value: Any, kind: type) -> Any:
  """Returns the value of a key if it is of its kind.

  Args:
    key: for the error
    value: from JSON
    kind: int for a size, which is at least 1; float for a number above 0; bool, str,
      list or dict
  Raises:
    hf_folder.CheckpointError: it is not
  """
  if kind is int:
    right = type(value) is int and 1 <= value <= _LARGEST
  elif kind is float:
    right = type(value) in (int, float) and 0 < value <= sys.float_info.max
  else:
    right = type(value) is kind
  if not right:
    raise hf_folder.CheckpointError(
      f"{key}={value!r:.60} is not {_EXPECTED[kind]}; restore the original config.json"
    )
  return value
