"""A model folder's tokenizer: text to ids and back as tokenizer.json says, chats, stops."""

from collections.abc import Iterable, Mapping, Sequence
import datetime
import functools
import itertools
import json
import logging
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import tokenizers

from tlt_jax import chat_template
from tlt_jax import data
from tlt_jax import json_objects
from tlt_jax import processes
from tlt_jax import writing

_TOKENIZER, _CONFIG, _GENERATION = (
  "tokenizer.json",
  "config.json",
  "generation_config.json",
)
_FILES = (
  _TOKENIZER,
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
  _GENERATION,
)
# What transformers makes a tokenizer of in a folder without tokenizer.json.
_OLDER = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")


def reads_date(folder: str | pathlib.Path) -> bool:
  """Whether the chat template of a folder asks which day it is."""
  paths = [pathlib.Path(folder) / name for name in _FILES[1:]]
  return any(b"strftime_now" in path.read_bytes() for path in paths if path.is_file())


class Tokenizer:
  """Encodes and decodes as `inner` does, and renders chats.

  Args:
    inner: of the library tokenizers
    named: special tokens by role, as in {"bos_token": "<s>"}, for chat templates
    special: other texts that are markup, not part of a response
    template: turns messages into text; None: there is none
    stops: id of a token that ends a response -> where that is said
    folder: for messages
  """

  def __init__(
    self,
    inner: tokenizers.Tokenizer,
    named: Mapping[str, str] | None = None,
    special: Iterable[str] = (),
    template: chat_template.Template | None = None,
    stops: Mapping[int, Sequence[str]] | None = None,
    folder: str | pathlib.Path = "",
  ):
    inner.no_truncation()
    inner.no_padding()
    self.inner, self.folder = inner, folder
    self.template, self._named = template, dict(named or {})
    self._stops = dict(sorted((stops or {}).items()))
    self.vocab_size = max(inner.get_vocab().values()) + 1  # exceeds all ids
    self._known: dict[str, bool] = {}  # by character
    added = inner.get_added_tokens_decoder()
    markup = {i: token.content for i, token in added.items() if token.special}
    markup |= {inner.token_to_id(t): t for t in (*self._named.values(), *special)}
    # A special token of one character is text: a character-level model stops at "\n", and
    # its verifier checks that.
    self._hidden = {i for i, text in markup.items() if len(text) > 1}

  @classmethod
  def load(
    cls, folder: str | pathlib.Path, today: datetime.date | None = None
  ) -> "Tokenizer":
    """Loads the tokenizer of a folder, with all tokens that its files say end a response.

    Args:
      today: the day that chat templates see; None: this one
    Raises:
      data.DataError: a file is missing or damaged
    """
    folder = pathlib.Path(folder)
    files = _read_files(folder)
    inner = _inner(folder)
    named, special = _special_tokens(files)
    for token in (*named.values(), *special):
      if inner.token_to_id(token) is None:
        logging.warning(
          "%s: the files beside it name the special token %r, which it does not have; it "
          "is plain text",
          folder / _TOKENIZER,
          token,
        )
    source = _template(folder, files)
    try:
      template = None if source is None else chat_template.Template(source, today)
    except Exception as e:  # a template may be anything
      raise data.DataError(
        f"{folder}: the chat template is damaged ({data.reason(e)}); copy the model's own "
        "there"
      ) from e
    return cls(inner, named, special, template, _stops(folder, files, inner), folder)

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    return tuple(self._stops)

  def describe_stops(self) -> str:
    """Which tokens end a response, and which files say so."""
    if not self._stops:
      return (
        f"no token ends a response: no file of {self.folder} names one, so every response "
        f'runs to its longest; set "eos_token_id" in {_GENERATION}'
      )
    each = [
      f"{self.inner.id_to_token(i)!r} ({i}; {', '.join(where)})"
      for i, where in self._stops.items()
    ]
    return f"responses end at {' or '.join(each)}"

  @property
  def has_template(self) -> bool:
    return self.template is not None

  def encode(
    self, prompt: str | list[dict], system: str | None = None, chat: bool | None = False
  ) -> np.ndarray:
    """The ids of `opening` and `text`."""
    ids = self.inner.encode(self.text(prompt, system, chat), add_special_tokens=False).ids
    return np.asarray([*self.opening(prompt, chat), *ids], np.int32)

  def opening(self, prompt: str | list[dict], chat: bool | None = False) -> list[int]:
    """What tokenizer.json puts in front, unless a template or the prompt has done so."""
    if not isinstance(prompt, str) or self._applies_template(chat):
      return []
    ids, text = self._opening
    return [] if prompt.startswith(text) else ids

  def _applies_template(self, chat: bool | None) -> bool:
    return self.has_template if chat is None else chat

  @functools.cached_property
  def _opening(self) -> tuple[list[int], str]:
    full = self.inner.encode("0")
    count = sum(itertools.takewhile(bool, full.special_tokens_mask))
    return full.ids[:count], "".join(full.tokens[:count])

  def text(
    self, prompt: str | list[dict], system: str | None = None, chat: bool | None = False
  ) -> str:
    """The text that the model continues.

    A string is used as it is, or as the user's message if `chat` (None: if there is a chat
    template); messages go through the template, which opens the assistant's turn. `system`
    is used if they have none.

    Raises:
      data.DataError: a chat without a template, or one that the template refuses
    """
    chat = self._applies_template(chat)
    if isinstance(prompt, str) and not chat:
      if system is not None:
        raise data.DataError("a system message needs a chat: set chat, or use messages")
      return prompt
    messages = prompt
    if isinstance(prompt, str):
      messages = [{"role": "user", "content": prompt}]
    if system is not None and messages[0]["role"] != "system":
      messages = [{"role": "system", "content": system}, *messages]
    return self._chat(messages)

  def lengths(self, texts: Sequence[str]) -> list[int]:
    return list(map(len, self.encode_texts(texts)))

  def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of texts as they are, without an `opening`."""
    encoded = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray(each.ids, np.int32) for each in encoded]

  @functools.cached_property
  def markup(self) -> list[int]:
    """Ids of the stops, of special tokens by role, and of those in the chat template."""
    source = self.template.source if self.template else ""
    added = self.inner.get_added_tokens_decoder()
    written = {i for i, token in added.items() if token.content in source}
    named = set(map(self.inner.token_to_id, self._named.values())) - {None}
    return sorted({*self._stops} | named | written)

  def unknown(self, text: str) -> list[str]:
    """Unknown characters; most have byte fallback, others drop or replace them."""
    if self._knows("\U000f0000"):  # an unassigned character
      return []
    return [c for c in dict.fromkeys(text) if not c.isspace() and not self._knows(c)]

  def _knows(self, character: str) -> bool:
    if character not in self._known:
      self._known[character] = self._encodes(character)
    return self._known[character]

  def _encodes(self, character: str) -> bool:
    try:
      ids = self.inner.encode(character, add_special_tokens=False).ids
    except Exception:  # from Rust, without a class
      return False
    if self._unknown_id not in ids:
      return bool(ids)
    return character == self.inner.id_to_token(self._unknown_id)

  @functools.cached_property
  def _unknown_id(self) -> int | None:
    model = json.loads(self.inner.to_str())["model"]  # the only way to "unk_id"
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else self.inner.token_to_id(token)

  def _chat(self, messages: list[dict]) -> str:
    where = f"{self.folder} (chat_template.jinja, tokenizer_config.json)"
    if not self.has_template:
      raise data.DataError(
        f"{where}: the tokenizer has no chat template, so it cannot encode messages; use "
        "plain text prompts, or a chat model's tokenizer files"
      )
    try:
      text = self.template.render(messages, self._named)
    except Exception as e:  # a template may raise anything
      roles = [message["role"] for message in messages]
      raise data.DataError(
        f"{where}: the chat template refuses messages {roles!s:.100}: {data.reason(e)}"
      ) from e
    if self._leaves_out(messages, text):
      raise data.DataError(
        f"{where}: the chat template leaves out what the user says; copy the model's own "
        "there"
      )
    return text

  def _leaves_out(self, messages: list[dict], text: str) -> bool:
    """Whether the text is the same whatever the user says last; it may be reworded."""
    last = messages[-1]
    if last["role"] != "user" or last["content"].strip() in text:
      return False
    other = {**last, "content": "0" if "1" in last["content"] else "1"}
    try:
      return self.template.render([*messages[:-1], other], self._named) == text
    except Exception:  # it read the message
      return False

  def decode(self, ids) -> str:
    """A response's text without special tokens, except those of a single character."""
    kept = [i for i in map(int, ids) if i not in self._hidden]
    return self.inner.decode(kept, skip_special_tokens=False)

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes it to a model's folder, with all stops, on the first process.

    What other programs read of a model's folder then says the same: generation_config.json
    and config.json name all stops.
    """
    if not processes.is_first():
      return
    source, folder = pathlib.Path(self.folder), pathlib.Path(folder)
    for name in _FILES:
      if (source / name).is_file():
        with writing.to(folder / name):
          shutil.copyfile(source / name, folder / name)
    if not (source / _TOKENIZER).is_file():
      with writing.to(folder / _TOKENIZER):
        self.inner.save(str(folder / _TOKENIZER))
    write_stops(folder, self.stop_tokens)


def write_stops(folder: pathlib.Path, stops: Sequence[int]) -> None:
  """Sets eos_token_id in generation_config.json and in config.json, if there is one."""
  ids = {"eos_token_id": list(stops) if len(stops) != 1 else stops[0]}
  if not stops:
    return
  for name in (_GENERATION, _CONFIG):
    path = folder / name
    if name == _GENERATION or path.is_file():
      raw = json_objects.parse(path.read_bytes()) if path.is_file() else {}
      with writing.to(path):
        path.write_text(json.dumps(raw | ids, indent=2) + "\n")


def _inner(folder: pathlib.Path) -> tokenizers.Tokenizer:
  path = folder / _TOKENIZER
  try:
    if path.is_file():
      return tokenizers.Tokenizer.from_file(str(path))
    found = [name for name in _OLDER if (folder / name).is_file()]
    if not found:
      raise data.DataError(f"{folder}: no {_TOKENIZER}; copy the model's own there")
    # Transformers warns that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # takes two seconds

    made = transformers.AutoTokenizer.from_pretrained(
      folder, local_files_only=True, trust_remote_code=False
    )
    logging.warning(
      "%s has no %s: transformers makes a %s of %s",
      folder,
      _TOKENIZER,
      type(made).__name__,
      " and ".join(found),
    )
    return made.backend_tokenizer
  except data.DataError:
    raise
  except Exception as e:  # a damaged file raises any error of its parser
    what = _TOKENIZER if path.is_file() else " and ".join(found)
    raise data.DataError(
      f"{folder}: {what} cannot be read as a tokenizer ({data.reason(e)}); copy the "
      "model's own there"
    ) from e


def _read_files(folder: pathlib.Path) -> dict[str, Any]:
  """The content of a folder's tokenizer files by name, even if they are only copied."""
  contents = {}
  for name in (*_FILES[1:], _CONFIG):
    path = folder / name
    if not path.exists():
      continue
    content = path.read_bytes()
    try:
      is_json = path.suffix == ".json"
      contents[name] = json_objects.parse(content) if is_json else content.decode()
    except ValueError as e:
      raise data.DataError(f"{path} {e}; copy the model's own there") from e
  return contents


def _special_tokens(files: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
  """Special tokens by role, and others, as the files say; the later one counts."""
  named, others = {}, []
  for name in ("special_tokens_map.json", "tokenizer_config.json"):
    for key, value in files.get(name, {}).items():
      if key in ("additional_special_tokens", "extra_special_tokens"):
        values = value.values() if isinstance(value, dict) else value or []
        others += [text for text in map(_content, values) if text]
      elif key.endswith("_token") and (text := _content(value)):
        named[key] = text
  return named, others


def _content(token: Any) -> str | None:
  """The text of a token, which files give alone or with its properties."""
  content = token.get("content") if isinstance(token, dict) else token
  return content if isinstance(content, str) else None


def _template(folder: pathlib.Path, files: Mapping[str, Any]) -> str | None:
  if "chat_template.jinja" in files:
    return files["chat_template.jinja"]
  found = None
  for name in ("tokenizer_config.json", "chat_template.json"):
    if found is None:
      found = files.get(name, {}).get("chat_template")
  if isinstance(found, list):
    found = {each.get("name"): each.get("template") for each in found}
  if isinstance(found, dict):
    if "default" not in found:
      raise data.DataError(
        f"{folder}: its chat templates are {', '.join(map(str, found))}, none is the "
        "default; write the one to use to chat_template.jinja"
      )
    found = found["default"]
  return found


def _stops(
  folder: pathlib.Path, files: Mapping[str, Any], inner: tokenizers.Tokenizer
) -> dict[int, list[str]]:
  """Ids that end a response, with the files that say so: all of them count."""
  stops: dict[int, list[str]] = {}
  for name in (_GENERATION, _CONFIG):
    raw = files.get(name, {})
    text_config = raw.get("text_config")
    inside = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    for value in (raw.get("eos_token_id"), inside):
      ids = value if isinstance(value, list) else [] if value is None else [value]
      if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise data.DataError(
          f"{folder / name}: eos_token_id={value!r:.60} are not ids of tokens; copy the "
          "model's own there"
        )
      for i in ids:
        if inner.id_to_token(i) is None:
          logging.warning(
            "%s: eos_token_id names token %d, which the tokenizer does not have; it is "
            "ignored",
            folder / name,
            i,
          )
        else:
          stops.setdefault(i, []).append(name)
  for name in ("tokenizer_config.json", "special_tokens_map.json"):
    text = _content(files.get(name, {}).get("eos_token"))
    i = None if text is None else inner.token_to_id(text)
    if i is not None:
      stops.setdefault(i, []).append(name)
  return {i: list(dict.fromkeys(where)) for i, where in stops.items()}
