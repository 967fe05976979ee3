"""Converts GGUF files, the format of llama.cpp, to Hugging Face folders.

Weights are dequantized in float32. What cannot be reproduced exactly is refused, never
approximated. `_SPLITS` defines the pre-tokenizers, which a file only names
(`tokenizer.ggml.pre`), as llama.cpp and the models' tokenizer.json files do.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
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

_ARCHITECTURES = {  # by llama.cpp's names
  "llama": dict(architecture="LlamaForCausalLM"),
  "qwen2": dict(architecture="Qwen2ForCausalLM", qkv_bias=True),
  "qwen3": dict(architecture="Qwen3ForCausalLM", qk_norm=True),
}
# For these, llama.cpp's RoPE rotates dimensions 2 i and 2 i + 1 of a head, not i and
# i + H / 2, and rows of q and k are stored in that order.
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
_HEAD_DIMS = ("attention.value_length", "rope.dimension_count")  # must equal head_dim
_NEUTRAL = {  # other keys, with the values that change nothing
  "attention.causal": True,
  "expert_count": 0,
  "expert_used_count": 0,
  "rope.scaling.type": "none",
}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclasses.dataclass(frozen=True)
class File:
  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, Any]  # gguf.ReaderTensor by name, memory-mapped

  def error(self, message: str) -> hf.CheckpointError:
    return hf.CheckpointError(f"{self.path}: {message}")

  def shape(self, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor, outermost axis first; None if it does not exist."""
    if name not in self.tensors:
      return None
    return tuple(int(size) for size in reversed(self.tensors[name].shape))


def library():
  """Imports the package gguf; raises CheckpointError if it is not installed."""
  try:
    import gguf
  except ImportError as e:
    raise hf.CheckpointError(
      f"GGUF files are read by the package gguf, which is missing ({e}): pip install gguf"
    ) from e
  return gguf


def open_file(path: str | pathlib.Path) -> File:
  """Reads the metadata of a GGUF file and maps its tensors into memory."""
  path, gguf = pathlib.Path(path), library()
  try:
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if reader.byte_order != "I":  # gguf would misread quantized blocks
      raise ValueError("its byte order is not this machine's")
  except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as e:
    raise hf.CheckpointError(
      f"{path} is not a GGUF file, or is damaged ({e!s:.200}); download it again"
    ) from e
  return File(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_config(file: File) -> config_lib.ModelConfig:
  """The ModelConfig of a GGUF file; raises CheckpointError if it is not supported."""
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
    raise file.error(f"invalid metadata ({e}); download it again") from e


def to_hf(
  path: str | pathlib.Path, folder: str | pathlib.Path, dtype: str = "float32"
) -> config_lib.ModelConfig:
  """Writes a GGUF file's model and tokenizer as a folder for `hf.load`, or nothing.

  Weights are stored in `dtype`, in which the model computes as well.

  Raises:
    CheckpointError: the file is damaged or not supported
    OSError: the folder cannot be written
  """
  file = open_file(path)
  config = dataclasses.replace(read_config(file), dtype=dtype)
  shapes, names = _stored(file, config)
  try:
    tokenizer = make_tokenizer(file.metadata)
  except ValueError as e:
    raise file.error(str(e)) from e
  if len(tokenizer) > config.vocab_size:
    raise file.error(
      f"{len(tokenizer)} tokens, but embeddings of {config.vocab_size}; download it again"
    )
  ends = _ends(file.metadata)
  ids = {
    "bos_token_id": _token_id(file.metadata, "bos"),
    "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    "pad_token_id": _token_id(file.metadata, "padding"),
  }
  raw = hf.unparse_config(config) | ids
  number = jnp.dtype(dtype)
  sizes = {name: number.itemsize * math.prod(shape) for name, shape in shapes.items()}

  def read(name: str) -> np.ndarray:
    return _dequantized(file, names[name], config).astype(number)

  try:
    with hf.replacing(pathlib.Path(folder)) as partial:
      _save_tokenizer(tokenizer, partial)
      hf.write_json(partial / "generation_config.json", ids)
      hf.write_json(partial / hf.CONFIG, raw)
      hf.write_weights(partial, sizes, read)
  except OSError as e:
    size = sum(sizes.values()) / 1e6
    raise OSError(f"{folder} cannot be written ({e}); it takes {size:,.1f} MB") from e
  return config


def _save_tokenizer(tokenizer, folder: pathlib.Path) -> None:
  try:
    tokenizer.save_pretrained(folder)
  except Exception as e:  # the library's Rust part raises bare Exceptions
    raise OSError(str(e)) from e


def _stored(
  file: File, config: config_lib.ModelConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
  """By Hugging Face's names: the model's shapes, and the names in the file; else raises."""
  gguf = library()
  if config.num_layers > len(file.tensors):  # abstract_params would take long
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
    # Rows of a head of 6 are stored as 0 3 1 4 2 5: RoPE rotates 0 and 3 together.
    pairs = x.reshape(heads[part], config.head_dim // 2, 2, config.width)
    x = pairs.swapaxes(1, 2).reshape(x.shape)
  return x


# --- the tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types: markup; text that is never split
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


def make_tokenizer(metadata: Mapping[str, Any]):
  """A transformers.PreTrainedTokenizerFast; ValueError if it is unknown or damaged."""
  supported = {"model": ["gpt2"], "pre": list(_SPLITS)}  # gpt2: byte-level BPE
  for key, names in supported.items():
    name = metadata.get(f"tokenizer.ggml.{key}")
    if name not in names:
      raise ValueError(
        f"tokenizer.ggml.{key}={name!r:.60} is not supported; supported: {', '.join(names)}"
      )
  try:
    tokens, types, merges = (
      metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges")
    )
    ids = {f"{role}_token": _token_id(metadata, key) for role, key in _ROLES.items()}
    special = {role: tokens[i] for role, i in ids.items() if i is not None}
    inner = _byte_level_bpe(tokens, types, merges, _SPLITS[name])
  except Exception as e:  # the library's Rust part raises bare Exceptions
    raise ValueError(f"damaged tokenizer ({e!r:.200}); download it again") from e
  if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
    bos = special["bos_token"]
    inner.post_processor = processors.TemplateProcessing(
      single=[bos, "$A"], special_tokens=[(bos, ids["bos_token"])]
    )
  import transformers  # takes two seconds

  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
  tokenizer.chat_template = metadata.get("tokenizer.chat_template")
  return tokenizer


def _ends(metadata: Mapping[str, Any]) -> list[int]:
  """Ids that end a text or a turn: by their roles, and by names that mean nothing else."""
  by_role = [_token_id(metadata, role) for role in ("eos", "eot", "eom")]
  kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  by_name = [
    i
    for i, (text, kind) in enumerate(zip(*kinds, strict=True))
    if kind == _CONTROL and text in _END_TOKENS
  ]
  return [i for i in dict.fromkeys([*by_role, *by_name]) if i is not None]


def _token_id(metadata: Mapping[str, Any], role: str) -> int | None:
  return metadata.get(f"tokenizer.ggml.{role}_token_id")


def _byte_level_bpe(
  tokens: list[str], types: list[int], merges: list[str], split: _Split
) -> tokenizers.Tokenizer:
  vocab = {token: i for i, token in enumerate(tokens)}
  pairs = [tuple(merge.split(" ")) for merge in merges]
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
  for token, kind in zip(tokens, types, strict=True):
    if kind == _CONTROL:
      inner.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
    elif kind == _USER_DEFINED:
      inner.add_tokens([tokenizers.AddedToken(token, normalized=False)])
  return inner
