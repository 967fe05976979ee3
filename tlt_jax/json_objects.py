import json


def parse(content: bytes) -> dict:
  """A JSON object in UTF-8; ValueError continues the file's name: "is not JSON (...)"."""
  try:
    value = json.loads(content.decode("utf-8-sig"))
  except RecursionError as e:
    raise ValueError("is not JSON (nested too deeply)") from e
  except ValueError as e:
    raise ValueError(f"is not JSON ({e})") from e
  if not isinstance(value, dict):
    raise ValueError(f"holds no JSON object but a {type(value).__name__}")
  return value
