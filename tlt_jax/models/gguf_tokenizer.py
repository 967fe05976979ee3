"""The tokenizer of a GGUF file, as the Hugging Face tokenizer that it was made of.

A GGUF file holds the vocabulary, the merges and the kinds of tokens, but of what cuts a
text into words before the merges apply it has only the name (`tokenizer.ggml.pre`).
`_SPLITS` says what the names stand for, in llama.cpp and in the models' own
tokenizer.json files.
"""

from collections.abc import Mapping
import os
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from tlt_jax.models import hf_folder

_KIND = "gpt2"  # llama.cpp's name of byte-level BPE
_CONTROL, _USER_DEFINED = 3, 4  # token types: markup; text that is never split
_ROLES = {  # transformers' name of a special token -> key of its id
  "bos_token": "bos_token_id",
  "eos_token": "eos_token_id",
  "unk_token": "unknown_token_id",
  "pad_token": "padding_token_id",
}
_QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class _Split(NamedTuple):
  """How a text is cut into words, and what else goes with it."""

  regex: str | None  # of a word; None: GPT-2's
  digits: bool = False  # whether every digit is a word, whatever is around it
  nfc: bool = False  # whether characters are composed first
  whole_words: bool = False  # whether a word that is a token needs no merges


_SPLITS = {
  "gpt-2": _Split(None),
  "smollm": _Split(None, digits=True),
  "qwen2": _Split(_QWEN2, nfc=True),
  "llama-bpe": _Split(_LLAMA3, whole_words=True),
}


def build(metadata: Mapping[str, Any]):
  """Makes the tokenizer that a GGUF file describes.

  Args:
    metadata: of the file, see `gguf_files.File`
  Returns:
    transformers.PreTrainedTokenizerFast, with the chat template if there is one
  Raises:
    CheckpointError: a kind of tokenizer that is not known, or entries that make none
  """
  kind = metadata.get("tokenizer.ggml.model")
  if kind != _KIND:
    raise hf_folder.CheckpointError(
      f"tokenizer.ggml.model={kind!r:.60} is not supported; supported: {_KIND} "
      "(byte-level BPE)"
    )
  name = metadata.get("tokenizer.ggml.pre")
  if name not in list(_SPLITS):
    raise hf_folder.CheckpointError(
      f"tokenizer.ggml.pre={name!r:.60} is not supported; supported: {', '.join(_SPLITS)}"
    )
  tokens, types, merges = (
    _entries(metadata, key, of)
    for key, of in (("tokens", str), ("token_type", int), ("merges", str))
  )
  ids = {role: token_id(metadata, key) for role, key in _ROLES.items()}
  special = {role: tokens[i] for role, i in ids.items() if i is not None}
  try:
    inner = _byte_level_bpe(tokens, types, merges, _SPLITS[name])
  except Exception as e:  # of the library's Rust part, without a class of its own
    raise hf_folder.CheckpointError(f"makes no tokenizer ({e!s:.200})") from e
  if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
    bos = special["bos_token"]
    inner.post_processor = processors.TemplateProcessing(
      single=[bos, "$A"], special_tokens=[(bos, ids["bos_token"])]
    )
  # Says that PyTorch is missing, which is as it should be.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers  # takes two seconds

  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
  tokenizer.chat_template = metadata.get("tokenizer.chat_template")
  return tokenizer


def token_id(metadata: Mapping[str, Any], key: str) -> int | None:
  """The id of a special token, such as `eos_token_id`; None: the file names none.

  Raises:
    CheckpointError: it is none of the file's tokens
  """
  i, count = metadata.get(f"tokenizer.ggml.{key}"), len(metadata["tokenizer.ggml.tokens"])
  if i is not None and (type(i) is not int or not 0 <= i < count):
    raise hf_folder.CheckpointError(
      f"tokenizer.ggml.{key}={i!r:.60} is none of its {count} tokens; download it again"
    )
  return i


def _entries(metadata: Mapping[str, Any], key: str, kind: type) -> list:
  """A list of the tokenizer, checked."""
  value = metadata.get(f"tokenizer.ggml.{key}")
  if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
    raise hf_folder.CheckpointError(
      f"tokenizer.ggml.{key} is missing or damaged; download it again"
    )
  return value


def _byte_level_bpe(
  tokens: list[str], types: list[int], merges: list[str], split: _Split
) -> tokenizers.Tokenizer:
  """Makes the tokenizer itself.

  Args:
    tokens: by id, in the alphabet that GPT-2 writes bytes in
    types: of the tokens
    merges: "left right", in the order in which they apply
    split: how text is cut into words
  """
  if len({*tokens}) != len(tokens) or len(types) != len(tokens):
    raise ValueError(
      f"{len(tokens)} tokens, {len({*tokens})} different, {len(types)} types"
    )
  vocab = {token: i for i, token in enumerate(tokens)}
  pairs = [tuple(merge.split(" ")) for merge in merges]
  inner = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words)
  )
  if split.nfc:
    inner.normalizer = normalizers.NFC()
  steps = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
  if split.regex is not None:
    steps.append(pre_tokenizers.Split(tokenizers.Regex(split.regex), "isolated"))
  steps.append(
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None)
  )
  inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
  inner.decoder = decoders.ByteLevel()
  added = {_CONTROL: [], _USER_DEFINED: []}
  for token, kind in zip(tokens, types, strict=True):
    if kind in added:
      special = kind == _CONTROL
      added[kind].append(tokenizers.AddedToken(token, normalized=False, special=special))
  inner.add_special_tokens(added[_CONTROL])
  inner.add_tokens(added[_USER_DEFINED])
  return inner
