"""GGUF files, the format of llama.cpp, as Hugging Face folders.

`to_hf` writes the folder, with weights dequantized to float32. What cannot be reproduced
exactly is refused, never approximated. The package gguf reads and dequantizes.

Of what cuts a text into words before merges apply, a GGUF file has only the name
(`tokenizer.ggml.pre`). `_SPLITS` says what the names mean, in llama.cpp and in the models'
own tokenizer.json files.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from tlt_jax.models import config as config_lib
from tlt_jax.models import hf
from tlt_jax.models import target

_ARCHITECTURES = {  # llama.cpp's names, and what each fixes
  "llama": dict(architecture="LlamaForCausalLM"),
  "qwen2": dict(architecture="Qwen2ForCausalLM", qkv_bias=True),
  "qwen3": dict(architecture="Qwen3ForCausalLM", qk_norm=True),
}
# Here llama.cpp's RoPE rotates dimensions 2 i and 2 i + 1 of a head, not i and i + H / 2,
# and rows of q and k are stored in that order.
_ROTATES_NEIGHBOURS = ("llama",)
_KEYS = {  # field of ModelConfig -> key, after the architecture's name
  "num_layers": "block_count",
  "max_position": "context_length",
  "width": "embedding_length",
  "mlp_width": "feed_forward_length",
  "num_heads": "attention.head_count",
  "num_kv_heads": "attention.head_count_kv",
  "head_dim": "attention.key_length",
  "norm_eps": "attention.layer_norm_rms_epsilon",
  "rope_theta": "rope.freq_base",
}
_HEAD_DIMS = ("attention.value_length", "rope.dimension_count")  # must be the same
_NEUTRAL = {  # values of other keys that change nothing
  "attention.causal": True,
  "expert_count": 0,
  "expert_used_count": 0,
  "rope.scaling.type": "none",
}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclasses.dataclass(frozen=True)
class File:
  """What a GGUF file holds."""

  path: pathlib.Path
  metadata: dict[str, Any]  # by key
  tensors: dict[str, Any]  # gguf.ReaderTensor by name; mapped, not read yet

  def error(self, message: str) -> hf.CheckpointError:
    """An error that names the file."""
    return hf.CheckpointError(f"{self.path}: {message}")

  def shape(self, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor, outermost axis first; None if there is none."""
    if name not in self.tensors:
      return None
    return tuple(int(size) for size in reversed(self.tensors[name].shape))


def library():
  """The package gguf.

  Raises:
    CheckpointError: it is not installed
  """
  try:
    import gguf
  except ImportError as e:
    raise hf.CheckpointError(
      f"GGUF files are read by the package gguf, which is missing ({e}): pip install gguf"
    ) from e
  return gguf


def open_file(path: str | pathlib.Path) -> File:
  """Reads what a GGUF file says of its model; tensors are mapped into memory.

  Raises:
    CheckpointError: no such file, another kind of file, or one that is damaged
  """
  path, gguf = pathlib.Path(path), library()

  class Reader(gguf.GGUFReader):
    """Stops where the file ends; the original reads on, and takes it for empty."""

    def _get(self, offset, dtype, count=1, override_order=None):
      found = super()._get(offset, dtype, count, override_order)
      if len(found) != count:
        raise EOFError("it ends early")
      return found

  try:
    reader = Reader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if reader.byte_order != "I":  # gguf would misread quantized blocks
      raise ValueError("its byte order is not this machine's")
  except (ArithmeticError, EOFError, LookupError, OSError, TypeError, ValueError) as e:
    raise hf.CheckpointError(
      f"{path} is not a GGUF file that can be read, or is damaged ({e!s:.200}); download "
      "it again"
    ) from e
  return File(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_config(file: File) -> config_lib.ModelConfig:
  """The model in a GGUF file.

  Raises:
    CheckpointError: an architecture that is not supported, or what we would compute
      differently
  """
  name = file.metadata.get("general.architecture")
  if name not in list(_ARCHITECTURES):
    raise file.error(
      f"architecture {name!s:.60} is not supported; supported: {', '.join(_ARCHITECTURES)}"
    )
  entries = {
    key.removeprefix(f"{name}."): value
    for key, value in file.metadata.items()
    if key.startswith(f"{name}.")
  }
  fields = {field: entries.pop(key) for field, key in _KEYS.items() if key in entries}
  head_dims = {key: entries.pop(key) for key in _HEAD_DIMS if key in entries}
  entries.pop("vocab_size", None)
  if type(fields.get("width")) is type(fields.get("num_heads")) is int:
    fields.setdefault("head_dim", fields["width"] // max(fields["num_heads"], 1))
    fields.setdefault("num_kv_heads", fields["num_heads"])
  unknown = {k: x for k, x in entries.items() if k not in _NEUTRAL or x != _NEUTRAL[k]}
  unknown |= {k: x for k, x in head_dims.items() if x != fields.get("head_dim")}
  for key, value in unknown.items():
    raise file.error(
      f"{name}.{key}={value!r:.60} is not supported and could change the outputs; use a "
      "model without it"
    )
  fields |= _ARCHITECTURES[name]
  fields |= {
    "vocab_size": (file.shape(_EMBEDDING) or (0,))[0],
    "tie_embeddings": _HEAD not in file.tensors,
  }
  try:
    return config_lib.make(config_lib.ModelConfig, fields, _KEYS)
  except ValueError as e:
    raise file.error(f"makes no model ({e}); download it again") from e


def to_hf(path: str | pathlib.Path, folder: str | pathlib.Path) -> config_lib.ModelConfig:
  """Writes a GGUF file's model and tokenizer as a folder that `hf.load` reads.

  All or nothing: what goes wrong, or a kill, leaves no checkpoint in `folder`.

  Args:
    path: of the file
    folder: where to, made if need be
  Returns:
    the model
  Raises:
    CheckpointError: the file is damaged, or holds what is not supported
    OSError: the folder cannot be written
  """
  file = open_file(path)
  config = read_config(file)
  shapes, names = _stored(file, config)
  try:
    tokenizer = make_tokenizer(file.metadata)
    roles = ("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id")
    bos, eos, eot, pad = (_token_id(file.metadata, key) for key in roles)
  except ValueError as e:
    raise file.error(str(e)) from e
  if len(tokenizer) > config.vocab_size:
    raise file.error(
      f"{len(tokenizer)} tokens, but embeddings of {config.vocab_size}; download it again"
    )
  # A model may end its turn with one token and a text with another.
  stop = eos if eot in (None, eos) else [eos, eot]
  ids = {"bos_token_id": bos, "eos_token_id": stop, "pad_token_id": pad}
  raw = hf.unparse_config(config) | ids
  sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
  try:
    with hf.replacing(pathlib.Path(folder)) as partial:
      _save_tokenizer(tokenizer, partial)
      hf.write_json(partial / "generation_config.json", ids)
      hf.write_json(partial / hf.CONFIG, raw)
      hf.write_weights(partial, sizes, lambda name: _dequantized(file, names[name], config))
  except OSError as e:
    size = sum(sizes.values()) / 1e6
    raise OSError(f"{folder} cannot be written ({e}); it takes {size:,.1f} MB") from e
  return config


def _save_tokenizer(tokenizer, folder: pathlib.Path) -> None:
  """Writes tokenizer.json, tokenizer_config.json and the chat template."""
  try:
    tokenizer.save_pretrained(folder)
  except Exception as e:  # of the library's Rust part, without a class of its own
    raise OSError(str(e)) from e


def _stored(
  file: File, config: config_lib.ModelConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
  """What the model has by Hugging Face's names: shapes, and the names in the file.

  Raises unless the file holds exactly these.
  """
  gguf = library()
  if config.num_layers > len(file.tensors):  # before as many are described
    raise file.error(
      f"{config.num_layers} layers, but {len(file.tensors)} tensors; download it again"
    )
  architecture = file.metadata["general.architecture"]
  kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
  theirs = gguf.get_tensor_name_map(kind, config.num_layers)
  params, named = hf.flatten(target.abstract_params(config)), hf.names(config)
  shapes = {named[path]: leaf.shape for path, leaf in params.items()}
  names = {name: theirs.get_name(name, (".weight", ".bias")) for name in shapes}
  expected = {names[name]: shape for name, shape in shapes.items()}
  for name in sorted(file.tensors.keys() | expected.keys()):
    if file.shape(name) != expected.get(name):
      raise file.error(
        f"tensor {name:.80} has shape {file.shape(name)}, the model implies "
        f"{expected.get(name)}; use another model, or download it again"
      )
  return shapes, names


def _dequantized(file: File, name: str, config: config_lib.ModelConfig) -> np.ndarray:
  """A tensor in float32, with rows in the order of Hugging Face."""
  gguf, stored = library(), file.tensors[name]
  try:
    x = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
  except NotImplementedError as e:
    raise file.error(
      f"tensor {name} is stored as {stored.tensor_type.name}, which the package gguf does "
      "not dequantize; use a file of another kind, such as Q8_0, Q4_K_M or F16"
    ) from e
  heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
  part = name.split(".")[-2]
  if file.metadata["general.architecture"] in _ROTATES_NEIGHBOURS and part in heads:
    # Rows of a head of 6: they have 0 3 1 4 2 5, as RoPE turns 0 and 3 together.
    pairs = x.reshape(heads[part], config.head_dim // 2, 2, config.width)
    x = pairs.swapaxes(1, 2).reshape(x.shape)
  return x


# --- the tokenizer

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
  "llama-bpe": _Split(_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), whole_words=True),
}


def make_tokenizer(metadata: Mapping[str, Any]):
  """Makes the tokenizer of a GGUF file as the Hugging Face one that it was made of.

  Args:
    metadata: of the file
  Returns:
    transformers.PreTrainedTokenizerFast, with the chat template if there is one
  Raises:
    ValueError: a kind of tokenizer that is not known, or entries that make none
  """
  supported = {"model": ["gpt2"], "pre": list(_SPLITS)}  # gpt2: byte-level BPE
  for key, names in supported.items():
    name = metadata.get(f"tokenizer.ggml.{key}")
    if name not in names:
      raise ValueError(
        f"tokenizer.ggml.{key}={name!r:.60} is not supported; supported: {', '.join(names)}"
      )
  tokens, types, merges = (
    _entries(metadata, key, of)
    for key, of in (("tokens", str), ("token_type", int), ("merges", str))
  )
  ids = {role: _token_id(metadata, key) for role, key in _ROLES.items()}
  special = {role: tokens[i] for role, i in ids.items() if i is not None}
  try:
    inner = _byte_level_bpe(tokens, types, merges, _SPLITS[name])
  except Exception as e:  # of the library's Rust part, without a class of its own
    raise ValueError(f"makes no tokenizer ({e!s:.200})") from e
  if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
    bos = special["bos_token"]
    inner.post_processor = processors.TemplateProcessing(
      single=[bos, "$A"], special_tokens=[(bos, ids["bos_token"])]
    )
  import transformers  # takes two seconds

  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
  tokenizer.chat_template = metadata.get("tokenizer.chat_template")
  return tokenizer


def _token_id(metadata: Mapping[str, Any], key: str) -> int | None:
  """The id of a special token, such as `eos_token_id`; None: the file names none."""
  i, count = metadata.get(f"tokenizer.ggml.{key}"), len(metadata["tokenizer.ggml.tokens"])
  if i is not None and (type(i) is not int or not 0 <= i < count):
    raise ValueError(
      f"tokenizer.ggml.{key}={i!r:.60} is none of its {count} tokens; download it again"
    )
  return i


def _entries(metadata: Mapping[str, Any], key: str, kind: type) -> list:
  value = metadata.get(f"tokenizer.ggml.{key}")
  if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
    raise ValueError(f"tokenizer.ggml.{key} is missing or damaged; download it again")
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
  for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    added = [token for token, of in zip(tokens, types, strict=True) if of == kind]
    made = [tokenizers.AddedToken(t, normalized=False, special=special) for t in added]
    (inner.add_special_tokens if special else inner.add_tokens)(made)
  return inner
