from collections.abc import Sequence
import functools
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from tlt_jax import data
from tlt_jax import json_objects
from tlt_jax import processes
from tlt_jax import writing

_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "generation_config.json",
)


def copy_files(source: str | pathlib.Path, folder: str | pathlib.Path) -> None:
  """Copies a model folder's tokenizer files to another one, on the first process."""
  if not processes.is_first():
    return
  for path in pathlib.Path(source).iterdir():
    if path.name in _FILES:
      with writing.to(pathlib.Path(folder) / path.name):
        shutil.copyfile(path, pathlib.Path(folder) / path.name)


class Tokenizer:
  def __init__(self, tokenizer, stop_tokens: tuple[int, ...]):
    self.stop_tokens = stop_tokens
    self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # exceeds all ids
    self._tokenizer = tokenizer
    self._known: dict[str, bool] = {}  # by character
    special = {
      i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    special |= {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids}
    # A special token of one character is text: a character-level model stops at "\n", and
    # its verifier checks that.
    self._hidden = {i for i, text in special.items() if len(text) > 1}

  @classmethod
  def load(cls, folder: str | pathlib.Path) -> "Tokenizer":
    """Loads the tokenizer of a folder, with the stop tokens of generation_config.json."""
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").is_file():
      raise data.DataError(f"{folder}: no tokenizer.json; copy the model's own there")
    # Transformers warns that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # takes two seconds

    files = _read_tokenizer_files(folder)
    stop = _stop_tokens(folder, files.get("generation_config.json", {}))
    try:
      tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
      )
    except Exception as e:  # a damaged file raises any error of its parser
      raise data.DataError(
        f"{folder}: {', '.join(files)} cannot be read as a tokenizer ({data.reason(e)}); "
        "copy the model's own there"
      ) from e
    if tokenizer.eos_token_id is not None:
      stop.add(tokenizer.eos_token_id)
    return cls(tokenizer, tuple(sorted(stop)))

  @property
  def has_template(self) -> bool:
    return self._tokenizer.chat_template is not None

  def encode(
    self, prompt: str | list[dict], system: str | None = None, chat: bool | None = False
  ) -> np.ndarray:
    text = self.text(prompt, system, chat)
    return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

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
    chat = self.has_template if chat is None else chat
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
    if not texts:
      return []
    encoded = self._tokenizer(list(texts), add_special_tokens=False)
    return [len(ids) for ids in encoded["input_ids"]]

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
      ids = self._tokenizer.encode(character, add_special_tokens=False)
    except Exception:  # from Rust, without a class
      return False
    if self._unknown_id not in ids:
      return bool(ids)
    return character == self._tokenizer.convert_ids_to_tokens(self._unknown_id)

  @functools.cached_property
  def _unknown_id(self) -> int | None:
    inner = self._tokenizer.backend_tokenizer
    model = json.loads(inner.to_str())["model"]  # the only way to "unk_id"
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else inner.token_to_id(token)

  def _chat(self, messages: list[dict]) -> str:
    where = f"{self._tokenizer.name_or_path} (chat_template.jinja, tokenizer_config.json)"
    if not self.has_template:
      raise data.DataError(
        f"{where}: the tokenizer has no chat template, so it cannot encode messages; use "
        "plain text prompts, or a chat model's tokenizer files"
      )
    try:
      text = self._tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
      )
    except Exception as e:  # a template may raise anything
      roles = [message["role"] for message in messages]
      raise data.DataError(
        f"{where}: the chat template refuses messages {roles!s:.100}: {data.reason(e)}"
      ) from e
    last = messages[-1]
    if last["role"] == "user" and last["content"].strip() not in text:
      raise data.DataError(
        f"{where}: the chat template leaves out what the user says; copy the model's own "
        "there"
      )
    return text

  def decode(self, ids) -> str:
    """A response's text without special tokens, except those of a single character."""
    kept = [i for i in map(int, ids) if i not in self._hidden]
    return self._tokenizer.decode(
      kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _read_tokenizer_files(folder: pathlib.Path) -> dict[str, Any]:
  """The content of a folder's tokenizer files by name, even if they are only copied."""
  contents = {}
  for name in _FILES:
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


def _stop_tokens(folder: pathlib.Path, generation_config: dict) -> set[int]:
  stop = generation_config.get("eos_token_id")
  if not isinstance(stop, list):
    stop = [] if stop is None else [stop]
  if not all(type(i) is int and 0 <= i < 2**31 for i in stop):
    raise data.DataError(
      f"{folder / 'generation_config.json'}: eos_token_id={stop!r:.60} are not ids of "
      "tokens; copy the model's own there"
    )
  return set(stop)
