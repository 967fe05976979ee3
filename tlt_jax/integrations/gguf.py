"""Converts GGUF files, the format of llama.cpp, to Hugging Face folders.

Weights are dequantized in float32. What cannot be reproduced exactly is refused, never
approximated.
"""

import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tlt_jax.integrations import gguf_tokenizer
from tlt_jax.models import config as config_lib
from tlt_jax.models import hf
from tlt_jax.models import target


class _Architecture(NamedTuple):
  """What llama.cpp makes of an architecture of transformers."""

  theirs: str
  # RoPE rotates dimensions 2 i and 2 i + 1 of a head, not i and i + H / 2, and rows of q
  # and k are stored in that order.
  rotates_neighbours: bool = False
  norm_offset: float = 0.0  # added to the weights of norms
  has_windows: bool = False


_ARCHITECTURES = {  # by llama.cpp's names
  "llama": _Architecture("LlamaForCausalLM", rotates_neighbours=True),
  "qwen2": _Architecture("Qwen2ForCausalLM"),
  "qwen3": _Architecture("Qwen3ForCausalLM"),
  "gemma3": _Architecture("Gemma3ForCausalLM", norm_offset=1.0, has_windows=True),
}
_KEYS = {  # key of config.json -> key, after the architecture's name
  "num_hidden_layers": "block_count",
  "max_position_embeddings": "context_length",
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL_KEYS = {
  "num_key_value_heads": "attention.head_count_kv",
  "head_dim": "attention.key_length",
  "rope_theta": "rope.freq_base",
}
_WINDOW_KEYS = {"sliding_window": "attention.sliding_window"}
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
  kind = _ARCHITECTURES[name]
  entries = {
    key.removeprefix(f"{name}."): value
    for key, value in file.metadata.items()
    if key.startswith(f"{name}.")
  }
  required = _KEYS | (_WINDOW_KEYS if kind.has_windows else {})
  for key in required.values():
    if key not in entries:
      raise file.error(f"{name}.{key} is missing; download it again")
  layers = entries[_KEYS["num_hidden_layers"]]
  if type(layers) is not int or layers > len(file.tensors):
    raise file.error(
      f"{layers!s:.60} layers, but {len(file.tensors)} tensors; download it again"
    )
  keys = required | _OPTIONAL_KEYS
  raw = {"architectures": [kind.theirs], "rope_theta": 10_000.0}
  raw |= {theirs: entries.pop(key) for theirs, key in keys.items() if key in entries}
  head_dims = {key: entries.pop(key) for key in _HEAD_DIMS if key in entries}
  entries.pop("vocab_size", None)
  raw |= {
    "vocab_size": (file.shape(_EMBEDDING) or (0,))[0],
    "tie_word_embeddings": _HEAD not in file.tensors,
  }
  if entries.get("rope.scaling.type") == "linear":
    del entries["rope.scaling.type"]
    factor = entries.pop("rope.scaling.factor", None)
    raw["rope_scaling"] = {"rope_type": "linear", "factor": factor}
  try:
    sizes = [raw[key] for key in ("hidden_size", "num_attention_heads")]
    if [type(size) for size in sizes] == [int, int]:
      raw.setdefault("head_dim", sizes[0] // max(sizes[1], 1))
    if kind.has_windows:
      raw |= _windows(raw, entries)
    _refuse(file, name, entries, head_dims, raw.get("head_dim"))
    return hf.parse_config(raw)
  except hf.CheckpointError:
    raise
  except (ArithmeticError, TypeError, ValueError) as e:
    raise file.error(
      f"the model of its metadata is not supported, or they are damaged ({e}); use another "
      "model, or download it again"
    ) from e


def _refuse(
  file: File,
  name: str,
  entries: dict[str, Any],
  head_dims: dict[str, int],
  head_dim: int | None,
) -> None:
  """Raises CheckpointError if an entry of which nothing was made has an effect."""
  unknown = {k: x for k, x in entries.items() if k not in _NEUTRAL or x != _NEUTRAL[k]}
  unknown |= {k: x for k, x in head_dims.items() if x != head_dim}
  for key, value in unknown.items():
    raise file.error(
      f"{name}.{key}={value!r:.60} is not supported and could change the outputs; use a "
      "model without it"
    )


def _windows(raw: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
  """Gemma 3's layers, where llama.cpp has most in its code; takes them out of `entries`."""
  layers, width, heads = (
    raw[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
  )
  slides = entries.pop("attention.sliding_window_pattern", 6)  # or the period of full ones
  if type(slides) is int:
    slides = [(i + 1) % slides != 0 for i in range(layers)]
  return {
    "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
    "rope_local_base_freq": entries.pop("rope.freq_base_swa", 10_000.0),
    # That of 27B is not its head_dim.
    "query_pre_attn_scalar": width // heads if layers == 62 else raw["head_dim"],
  }


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
    tokenizer = gguf_tokenizer.make(file.metadata)
  except ValueError as e:
    raise file.error(str(e)) from e
  if len(tokenizer) > config.vocab_size:
    raise file.error(
      f"{len(tokenizer)} tokens, but embeddings of {config.vocab_size}; download it again"
    )
  ends = gguf_tokenizer.end_tokens(file.metadata)
  ids = {
    "bos_token_id": gguf_tokenizer.token_id(file.metadata, "bos"),
    "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    "pad_token_id": gguf_tokenizer.token_id(file.metadata, "padding"),
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
  """A tensor in float32, as Hugging Face has it."""
  gguf, stored = library(), file.tensors[name]
  try:
    x = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
  except NotImplementedError as e:
    raise file.error(
      f"tensor {name} is stored as {stored.tensor_type.name}, which the package gguf does "
      "not dequantize; use a file of another kind, such as Q8_0, Q4_K_M or F16"
    ) from e
  kind = _ARCHITECTURES[file.metadata["general.architecture"]]
  heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
  part = name.split(".")[-2]
  if part.endswith("norm"):
    x = x - np.float32(kind.norm_offset)
  elif kind.rotates_neighbours and part in heads:
    # Rows of a head of 6 are stored as 0 3 1 4 2 5: RoPE rotates 0 and 3 together.
    pairs = x.reshape(heads[part], config.head_dim // 2, 2, config.width)
    x = pairs.swapaxes(1, 2).reshape(x.shape)
  return x
