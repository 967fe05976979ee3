"""Fields of records: nested ones by dotted names, and where known layouts have them."""

from collections.abc import Mapping, Sequence
import datetime
import decimal
import json
from typing import Any

# Names by precedence: those of the first group of which a record has any may hold it.
# verl has `prompt` (messages) and `reward_model.ground_truth`; TRL `prompt` or `messages`,
# and columns of any name for rewards; OpenRLHF `input` and `label`; NeMo RL `problem` and
# `expected_answer`; Tulu 3 `messages` and `ground_truth`.
PROMPTS = (
  ("prompt",),
  ("question", "problem", "query", "input", "instruction"),
  ("messages",),
)
ANSWERS = (
  ("reward_model.ground_truth",),
  ("ground_truth", "expected_answer", "final_answer", "gold_answer"),
  ("answer", "label", "target"),
  ("solution",),
  ("completion.-1.content",),
  ("completion", "output"),
  ("messages.-1.content",),
)


def look_up(record: Any, name: str) -> Any:
  """The value of a field, or at a path such as 'reward_model.ground_truth' or 'a.-1.b'.

  A number is an index of a list; a text on the way may be the JSON of a dict or list.

  Raises:
    KeyError: there is none
  """
  if not name:
    return record
  record = _opened(record)
  parts = name.split(".")
  if isinstance(record, Mapping):
    for count in range(len(parts), 0, -1):  # a key may have dots
      key = ".".join(parts[:count])
      if key in record and has(record[key], rest := ".".join(parts[count:])):
        return look_up(record[key], rest)
  if isinstance(record, list | tuple):
    try:
      return look_up(record[int(parts[0])], ".".join(parts[1:]))
    except (ValueError, IndexError):
      pass
  raise KeyError(name)


def has(record: Any, name: str) -> bool:
  try:
    look_up(record, name)
  except KeyError:
    return False
  return True


def _opened(value: Any) -> Any:
  if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
    try:
      return json.loads(value)
    except (ValueError, RecursionError):
      pass
  return value


def candidates(record: Mapping, groups: Sequence[Sequence[str]]) -> list[str]:
  """The names that may hold what is looked for, in upper or lower case."""
  own = {str(key).lower(): key for key in record}
  for group in groups:
    names = [own.get(name, name) for name in group]
    found = [name for name in names if has(record, name) and _is_answer(record, name)]
    if found:
      return found
  return []


def _is_answer(record: Mapping, name: str) -> bool:
  """False for the last message of a conversation if it is not the assistant's."""
  messages, is_last, _ = name.partition(".-1.content")
  role = f"{messages}.-1.role"
  return not is_last or (has(record, role) and look_up(record, role) == "assistant")


def names(record: Mapping) -> list[str]:
  """The names of all fields, nested ones with dots."""
  found = []
  for key, value in record.items():
    inner = _opened(value)
    if isinstance(inner, Mapping) and inner:
      found += [f"{key}.{name}" for name in names(inner)]
    else:
      found.append(str(key))
  return found


def as_prompt(value: Any, name: str) -> Any:
  """A prompt as text or messages.

  Messages may be JSON in a text. The last turn of a conversation in a field `messages` is
  the answer if it is the assistant's.
  """
  opened = _opened(value)
  is_messages = isinstance(opened, list) and opened and isinstance(opened[0], Mapping)
  if not is_messages:
    return value
  if name.rpartition(".")[2].lower() == "messages":
    while has(opened, "-1.role") and look_up(opened, "-1.role") == "assistant":
      opened = opened[:-1]
  return opened


def plain(value: Any) -> Any:
  """A value of a Parquet file as what JSON has: decimals, dates and bytes become texts."""
  match value:
    case decimal.Decimal():
      return format(value, "f")
    case datetime.date() | datetime.time():
      return value.isoformat()
    case datetime.timedelta():
      return str(value)
    case bytes():
      return value.decode(errors="replace")
    case dict():
      return {str(key): plain(x) for key, x in value.items()}
    case list() | tuple():
      return [plain(x) for x in value]
  return value
