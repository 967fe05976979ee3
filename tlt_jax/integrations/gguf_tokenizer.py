"""Makes tokenizers of the metadata of GGUF files.

`tokenizer.ggml.model` names the algorithm. `gpt2` is byte-level BPE; its pre-tokenizer is
only named (`tokenizer.ggml.pre`), and `_SPLITS` defines it, as llama.cpp and the models'
tokenizer.json files do. `llama` is SentencePiece's BPE.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

# Token types. Markup is _UNKNOWN or _CONTROL; _USER_DEFINED is text that is never split.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# Control tokens after which llama.cpp ends a response, whatever role the file gives them.
_END_TOKENS = frozenset(
  "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|>"
  " <|end_of_text|> <EOT> _<EOT> [EOT] [EOS] <\uff5cend\u2581of\u2581sentence\uff5c>"
  " <end_of_utterance> <turn|>".split()
)
# Special tokens: transformers' name -> GGUF's.
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"  # SentencePiece's


class _Split(NamedTuple):
  regex: str | None  # of a word; None: GPT-2's
  digits: bool = False  # split all digits first
  nfc: bool = False
  ignore_merges: bool = False  # a word that is a token needs no merges


_SPLITS = {
  "gpt-2": _Split(None),
  "smollm": _Split(None, digits=True),
  "qwen2": _Split(_QWEN2, nfc=True),
  "llama-bpe": _Split(_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), ignore_merges=True),
}


def make(metadata: Mapping[str, Any]):
  """A transformers.PreTrainedTokenizerFast; ValueError if it is unknown or damaged."""
  supported = {"model": [*_MODELS], "pre": [*_SPLITS]}
  if metadata.get("tokenizer.ggml.model") == "llama":
    del supported["pre"]  # it has none
  for key, names in supported.items():
    name = metadata.get(f"tokenizer.ggml.{key}")
    if name not in names:
      raise ValueError(
        f"tokenizer.ggml.{key}={name!r:.60} is not supported; supported: {', '.join(names)}"
      )
  try:
    tokens, types = _get(metadata, "tokens"), _get(metadata, "token_type")
    ids = {f"{role}_token": token_id(metadata, key) for role, key in _ROLES.items()}
    special = {role: tokens[i] for role, i in ids.items() if i is not None}
    inner = _MODELS[_get(metadata, "model")](metadata)
    added = {token: k for token, k in zip(tokens, types, strict=True) if k in _ADDED}
    for kind, add in _ADDED.items():
      found = [token for token, k in added.items() if k == kind]
      add(inner, [tokenizers.AddedToken(token, normalized=False) for token in found])
    _enclose(inner, metadata, special, ids)
  except Exception as e:  # the library's Rust part raises bare Exceptions
    raise ValueError(f"damaged tokenizer ({e!r:.200}); download it again") from e
  import transformers  # takes two seconds

  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
  tokenizer.chat_template = metadata.get("tokenizer.chat_template")
  return tokenizer


_ADDED = {
  _UNKNOWN: tokenizers.Tokenizer.add_special_tokens,
  _CONTROL: tokenizers.Tokenizer.add_special_tokens,
  _USER_DEFINED: tokenizers.Tokenizer.add_tokens,
}


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
  """Ids that end a text or a turn: by their roles, and by names that mean nothing else."""
  by_role = [token_id(metadata, role) for role in ("eos", "eot", "eom")]
  kinds = zip(_get(metadata, "tokens"), _get(metadata, "token_type"), strict=True)
  by_name = [
    i for i, (text, k) in enumerate(kinds) if k == _CONTROL and text in _END_TOKENS
  ]
  return [i for i in dict.fromkeys([*by_role, *by_name]) if i is not None]


def token_id(metadata: Mapping[str, Any], role: str) -> int | None:
  return metadata.get(f"tokenizer.ggml.{role}_token_id")


def _get(metadata: Mapping[str, Any], key: str) -> Any:
  return metadata[f"tokenizer.ggml.{key}"]


def _enclose(
  inner: tokenizers.Tokenizer,
  metadata: Mapping[str, Any],
  special: Mapping[str, str],
  ids: Mapping[str, int],
) -> None:
  """Puts the tokens of begin and end around texts, by the file or llama.cpp's default."""
  is_added = {"bos_token": _get(metadata, "model") == "llama", "eos_token": False}
  for role in is_added:
    key = f"tokenizer.ggml.add_{role}"
    is_added[role] = role in special and metadata.get(key, is_added[role])
  used = [role for role, added in is_added.items() if added]
  if used:
    text = [special[role] if role in used else None for role in is_added]
    inner.post_processor = processors.TemplateProcessing(
      single=[part for part in (text[0], "$A", text[1]) if part],
      special_tokens=[(special[role], ids[role]) for role in used],
    )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  vocab = {token: i for i, token in enumerate(_get(metadata, "tokens"))}
  pairs = [tuple(merge.split(" ")) for merge in _get(metadata, "merges")]
  split = _SPLITS[_get(metadata, "pre")]
  inner = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.ignore_merges)
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
  return inner


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """SentencePiece's BPE: the pair that makes the token of the highest score is merged.

  Where pairs tie, SentencePiece takes the first in the text, a tokenizer.json the one that
  it lists first.
  """
  tokens, types, scores = (_get(metadata, k) for k in ("tokens", "token_type", "scores"))
  unknown = token_id(metadata, "unknown")
  count = len({f"<0x{byte:02X}>" for byte in range(256)}.intersection(tokens))
  # The library puts bytes in front of an unknown character before them, and leaves out
  # those for which there is no token.
  if count not in (0, 256) or (count == 0 and unknown is None):
    raise ValueError(f"{count} tokens of bytes; 256 are needed, or none and an unknown one")
  score = {
    token: score
    for token, kind, score in zip(tokens, types, scores, strict=True)
    if kind in (_NORMAL, _USER_DEFINED)
  }
  pairs = [
    (token[:i], token[i:])
    for token in sorted(score, key=score.get, reverse=True)
    for i in range(1, len(token))
    if token[:i] in score and token[i:] in score
  ]
  inner = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=pairs,
      unk_token=None if unknown is None else tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  spaces = [normalizers.Replace(" ", _SPACE)]
  steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  if metadata.get("tokenizer.ggml.add_space_prefix", True):
    spaces.insert(0, normalizers.Prepend(_SPACE))
    steps.append(decoders.Strip(" ", left=1))
  inner.normalizer = normalizers.Sequence(spaces)
  inner.decoder = decoders.Sequence(steps)
  return inner


_MODELS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
