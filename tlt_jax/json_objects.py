"""JSON objects from files that may be damaged, or be another kind of file."""

import json


def parse(content: bytes) -> dict:
  """Reads the one object that JSON text in UTF-8 holds.

  Raises:
    ValueError: it is something else; says what, to be put after the file's name
  """
  try:
    value = json.loads(content.decode("utf-8-sig"))
  except RecursionError as e:
    raise ValueError("is not JSON (nested too deeply)") from e
  except ValueError as e:
    raise ValueError(f"is not JSON ({e})") from e
  if not isinstance(value, dict):
    raise ValueError(f"holds no JSON object but a {type(value).__name__}")
  return value
