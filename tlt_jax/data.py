"""Prompts in, text out: sources of prompts, batches of prompts, the tokenizer.

`source` calls what makes prompts by its name. `load_prompts` is one such: it reads a
whole file and checks every record, so that what is wrong with it is said before the run
starts. `prompt_iterator` turns any random-access source into an endless, resumable
stream of batches. `Tokenizer` goes from a prompt to tokens and from a response's tokens
back to text. Which prompts a run can use is decided in `prompt_checks`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import functools
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple, TypeVar

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tlt_jax import json_objects
from tlt_jax import named
from tlt_jax import ranges
from tlt_jax import writing

_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "generation_config.json",
)
_END = object()
Item = TypeVar("Item")


class DataError(ValueError):
  """Data that cannot be used; the message names the place and the remedy."""


def source(source: str, **options: Any) -> Sequence[dict]:
  """The records that `package.module.name(**options)` returns, by index.

  Args:
    source: dotted name of a function or class, `load_prompts` or a task's
    options: its arguments; every source takes `size`, the most records that are wanted
  Raises:
    DataError: there is nothing of that name, or it takes other arguments
  """
  try:
    return find(source)(**options)
  except TypeError as e:
    raise DataError(f"source {source!r}: {e}") from e


def find(source: str) -> Callable[..., Sequence[dict]]:
  """The function or class of that dotted name, which makes prompts.

  Raises:
    DataError: there is nothing of that name
  """
  try:
    return named.load(source)
  except named.NameNotFound as e:
    raise DataError(f"source {source!r}: {e}") from e


def load_prompts(
  path: str | pathlib.Path,
  prompt_field: str = "prompt",
  answer_field: str | None = "answer",
  size: ranges.Large | None = None,
) -> Sequence[dict]:
  """The records of a .jsonl or .parquet file, every one checked, in file order.

  A prompt is a string or a list of chat messages ({"role", "content"}); it and
  the answer are kept as they are. Blank lines do not count. The place is for
  messages: "train.jsonl, line 17".

  Args:
    path: file of records
    prompt_field, answer_field: their names in the file; with no answer field
      every answer is ""
    size: only the first so many are returned; all if there are fewer, or for None
  Returns:
    records {"prompt", "answer", "place"}
  Raises:
    DataError: no such file, another format, a broken or incomplete record
  """
  if size is not None and size < 1:
    raise DataError(f"of a file of prompts at least 1 is wanted, not {size}")
  path = pathlib.Path(path)
  readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
  if path.suffix not in readers:
    raise DataError(
      f"{path}: prompts are read from {' or '.join(readers)} files, not from "
      f"{path.suffix or 'a file without a suffix'!r}"
    )
  if not path.is_file():
    raise DataError(f"{path}: no such file (in folder {path.absolute().parent})")
  fields = [prompt_field] if answer_field is None else [prompt_field, answer_field]
  records = []
  for place, record in readers[path.suffix](path):
    for field in fields:
      if field not in record:
        raise DataError(_no_field(place, field, record))
    problem = _prompt_problem(record[prompt_field])
    if problem:
      raise DataError(f"{place}: field {prompt_field!r} {problem}")
    answer = "" if answer_field is None else record[answer_field]
    records.append({"prompt": record[prompt_field], "answer": answer, "place": place})
  if not records:
    raise DataError(f"{path}: holds no records")
  return records[:size]


def _read_jsonl(path):
  # Bytes: a str would also be split at U+2028, which JSON strings may hold.
  for number, line in enumerate(path.read_bytes().splitlines(), 1):
    if not line.strip():
      continue
    place = f"{path}, line {number}"
    try:
      record = json_objects.parse(line)
    except ValueError as e:
      raise DataError(f"{place} {e}; a .jsonl file has one object per line") from e
    yield place, record


def _read_parquet(path):
  try:
    rows = pq.read_table(path).to_pylist()
  except (pa.ArrowException, OSError, ValueError, ArithmeticError) as e:
    raise DataError(f"{path}: not a readable Parquet file ({_reason(e)})") from e
  for number, row in enumerate(rows):
    yield f"{path}, row {number}", row


def _reason(e: Exception) -> str:
  """The first line of what somebody else's exception says."""
  return (str(e).strip() or type(e).__name__).splitlines()[0][:250]


def _no_field(place: str, field: str, record: dict) -> str:
  there = ", ".join(record)
  return f"{place}: no field {field!r}; there are {there}" + named.nearest(field, record)


def _prompt_problem(prompt) -> str | None:
  """What is wrong with a prompt, None if nothing is."""
  if isinstance(prompt, str):
    return None if prompt.strip() else "is empty"
  if not isinstance(prompt, list):
    return f"is a {type(prompt).__name__}, not a string or a list of messages"
  if not prompt:
    return "is an empty list of messages"
  for message in prompt:
    if not (
      isinstance(message, dict)
      and isinstance(message.get("role"), str)
      and isinstance(message.get("content"), str)
    ):
      return f"has a message that is not {{'role', 'content'}}: {message!r:.80}"
  return None


def prompt_iterator(source: Sequence[dict], batch: int, seed: int) -> grain.DatasetIterator:
  """Endless batches that depend on (source, batch, seed) alone, resumable exactly.

  Every epoch has its own order, and batches run on across its end, so `batch`
  may exceed the source. One thread reads ahead. `get_state()` is JSON data that
  says which batch comes next; `set_state` goes there, given the same three
  arguments.

  Args:
    source: records, by index
    batch: records per batch, exactly
    seed: another seed, another order
  Returns:
    iterator over list[dict]
  Raises:
    DataError: an empty source or batch, or a seed that is none
  """
  if batch < 1:
    raise DataError(f"a batch needs at least 1 prompt, got {batch}")
  if not len(source):
    raise DataError("there are no prompts to iterate over")
  if not 0 <= seed < 2**32:
    raise DataError(f"the seed of the prompts must lie in [0, 2**32), got {seed}")
  # Endless for any run; without a number of epochs grain 0.2 overflows at batch 1.
  epochs = 2**48 // len(source) + 1
  records = grain.MapDataset.source(source).seed(seed).shuffle().repeat(epochs)
  batches = records.batch(batch, batch_fn=list)
  return iter(
    batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
  )


def prefetch(items: Iterable[Item]) -> Iterator[Item]:
  """The same items, the next one being made in a background thread."""
  iterator = iter(items)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    following = pool.submit(next, iterator, _END)
    while (item := following.result()) is not _END:
      following = pool.submit(next, iterator, _END)
      yield item


def copy_tokenizer(source: str | pathlib.Path, folder: str | pathlib.Path) -> None:
  """Copies a model folder's tokenizer, chat template and the like to another one."""
  for path in pathlib.Path(source).iterdir():
    if path.name in _TOKENIZER_FILES:
      with writing.to(pathlib.Path(folder) / path.name):
        shutil.copyfile(path, pathlib.Path(folder) / path.name)


class Pieces(NamedTuple):
  """A text in tokens."""

  ids: list[int]  # T tokens
  spans: list[tuple[int, int]]  # of each, where its characters begin and end


class Tokenizer:
  """A Hugging Face tokenizer, for prompts in and responses out."""

  def __init__(self, tokenizer, stop_tokens: tuple[int, ...]):
    """Wraps `tokenizer`; `load` is the usual way here."""
    self.stop_tokens = stop_tokens
    self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # its ids are below
    self._tokenizer = tokenizer
    special = {
      i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    special |= {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}
    # A special token of one character is text: a character-level model stops at
    # "\n", and its verifier wants to see that it did.
    self._hidden = {i for i, text in special.items() if len(text) > 1}

  @classmethod
  def load(cls, folder: str | pathlib.Path) -> "Tokenizer":
    """The tokenizer of a model folder; nothing is fetched.

    `stop_tokens` are its end-of-text token and those that
    generation_config.json names.

    Raises:
      DataError: no tokenizer.json, or a file that cannot be read
    """
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").is_file():
      raise DataError(f"{folder}: no tokenizer.json; copy the model's own there")
    # Says that PyTorch is missing, which is as it should be.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # takes two seconds, and only text needs it

    files = _read_tokenizer_files(folder)
    stop = _stop_tokens(folder, files.get("generation_config.json", {}))
    try:
      tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
      )
    except Exception as e:  # a damaged file raises whatever its parser raises
      raise DataError(
        f"{folder}: {', '.join(files)} cannot be read as a tokenizer ({_reason(e)}); copy "
        "the model's own there"
      ) from e
    if tokenizer.eos_token_id is not None:
      stop.add(tokenizer.eos_token_id)
    return cls(tokenizer, tuple(sorted(stop)))

  def encode(
    self, prompt: str | list[dict], system: str | None = None, chat: bool = False
  ) -> np.ndarray:
    """The tokens that the model continues.

    A string is encoded as it stands, without special tokens; with `chat` it is
    the user's message. Messages go through the model's chat template, which
    then opens the assistant's turn.

    Args:
      prompt, system, chat: see `text`
    Returns:
      i32[T]
    Raises:
      DataError: see `text`
    """
    text = self.text(prompt, system, chat)
    return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

  def text(
    self, prompt: str | list[dict], system: str | None = None, chat: bool = False
  ) -> str:
    """The text that `encode` encodes.

    Args:
      prompt: text or messages
      system: system message of a chat; one that the messages bring wins
      chat: treat a string as a chat
    Raises:
      DataError: a chat without a template, or one that the template refuses
    """
    if isinstance(prompt, str) and not chat:
      if system is not None:
        raise DataError("a system message needs a chat: set chat, or use messages")
      return prompt
    messages = prompt
    if isinstance(prompt, str):
      messages = [{"role": "user", "content": prompt}]
    if system is not None and messages[0]["role"] != "system":
      messages = [{"role": "system", "content": system}, *messages]
    return self._chat(messages)

  def pieces(self, texts: Sequence[str]) -> list[Pieces]:
    """Texts in tokens, all at once; without special tokens, as in `encode`.

    Raises:
      DataError: it has no token for what it does not know
    """
    options = dict(add_special_tokens=False, return_offsets_mapping=True)
    try:
      found = self._tokenizer(list(texts), return_attention_mask=False, **options)
    except Exception as e:  # of the library's Rust part, without a class of its own
      raise DataError(f"the tokenizer cannot encode this ({e})") from e
    return [*map(Pieces, found["input_ids"], found["offset_mapping"])]

  def unknown(self, text: str, pieces: Pieces) -> list[tuple[int, int]]:
    """Where a text has characters that the tokenizer does not know.

    They become its token for the unknown, or, if there is none, nothing.

    Args:
      text: as encoded
      pieces: of it
    """
    if self._knows_all:
      return []
    if self._unknown_id is None:
      known = {i for start, end in pieces.spans for i in range(start, end)}
      lost = [i for i, c in enumerate(text) if i not in known and not c.isspace()]
      # A character that normalising joins with its neighbour is known by itself.
      return [(i, i + 1) for i in lost if not self.pieces([text[i]])[0].ids]
    own_text = self._tokenizer.convert_ids_to_tokens(self._unknown_id)
    return [
      span
      for i, span in zip(pieces.ids, pieces.spans, strict=True)
      if i == self._unknown_id and text[slice(*span)] != own_text
    ]

  @functools.cached_property
  def _unknown_id(self) -> int | None:
    """The token of what it does not know; None: there is none."""
    inner = self._tokenizer.backend_tokenizer
    model = json.loads(inner.to_str())["model"]  # "unk_id" can be read nowhere else
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else inner.token_to_id(token)

  @functools.cached_property
  def _knows_all(self) -> bool:
    """Whether no character is unknown, because what is rare is encoded as bytes."""
    try:
      rare = self.pieces(["\U000f0000"])[0].ids  # a character that nobody has assigned
    except DataError:
      return False
    return bool(rare) and self._unknown_id not in rare

  def _chat(self, messages: list[dict]) -> str:
    where = f"{self._tokenizer.name_or_path} (chat_template.jinja, tokenizer_config.json)"
    if self._tokenizer.chat_template is None:
      raise DataError(
        f"{where}: the tokenizer has no chat template, so it cannot encode messages; use "
        "plain text prompts, or a chat model's tokenizer files"
      )
    try:
      text = self._tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
      )
    except Exception as e:  # a template raises what any program may
      roles = [message["role"] for message in messages]
      raise DataError(
        f"{where}: the chat template refuses messages {roles!s:.100}: {_reason(e)}"
      ) from e
    last = messages[-1]
    if last["role"] == "user" and last["content"].strip() not in text:
      raise DataError(
        f"{where}: the chat template leaves out what the user says; copy the model's own "
        "there"
      )
    return text

  def decode(self, ids) -> str:
    """A response's text, without markup such as end-of-text and padding.

    Special tokens of a single character are text and stay.
    """
    kept = [i for i in map(int, ids) if i not in self._hidden]
    return self._tokenizer.decode(
      kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _read_tokenizer_files(folder: pathlib.Path) -> dict[str, Any]:
  """What the tokenizer files of a folder hold, by name: those that are there.

  All of them, also those that transformers passes over: runs copy them when they end.
  """
  contents = {}
  for name in _TOKENIZER_FILES:
    path = folder / name
    if not path.exists():
      continue
    content = path.read_bytes()
    try:
      is_json = path.suffix == ".json"
      contents[name] = json_objects.parse(content) if is_json else content.decode()
    except ValueError as e:
      raise DataError(f"{path} {e}; copy the model's own there") from e
  return contents


def _stop_tokens(folder: pathlib.Path, generation_config: dict) -> set[int]:
  """The end-of-text tokens that generation_config.json names."""
  stop = generation_config.get("eos_token_id")
  stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
  if not all(type(i) is int and 0 <= i < 2**31 for i in stop):
    raise DataError(
      f"{folder / 'generation_config.json'}: eos_token_id={stop!r:.60} are not ids of "
      "tokens; copy the model's own there"
    )
  return set(stop)
