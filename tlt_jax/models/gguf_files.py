"""GGUF files, the format of llama.cpp, as folders in the format of Hugging Face.

`open_file` reads what a file says, `to_hf` writes the folder, with weights dequantized to
float32, tensor by tensor. What cannot be reproduced exactly is refused, never
approximated. The package gguf reads and dequantizes; only this file needs it.
"""

import dataclasses
import math
import pathlib
from typing import Any

from flax import traverse_util
import flax.linen as nn
import numpy as np

from tlt_jax.models import config as config_lib
from tlt_jax.models import gguf_tokenizer
from tlt_jax.models import hf_config
from tlt_jax.models import hf_folder
from tlt_jax.models import hf_tensors
from tlt_jax.models import target

_ARCHITECTURES = {  # llama.cpp's names, and what each fixes
  "llama": dict(architecture="LlamaForCausalLM"),
  "qwen2": dict(architecture="Qwen2ForCausalLM", qkv_bias=True),
  "qwen3": dict(architecture="Qwen3ForCausalLM", qk_norm=True),
}
# Here llama.cpp's RoPE rotates dimensions 2 i and 2 i + 1 of a head, not i and i + H / 2,
# and rows of q and k are stored in that order.
_ROTATES_NEIGHBOURS = ("llama",)
_READ = (  # keys below the architecture's name that `read_config` reads
  "block_count",
  "context_length",
  "embedding_length",
  "feed_forward_length",
  "attention.head_count",
  "attention.head_count_kv",
  "attention.key_length",
  "attention.value_length",
  "attention.layer_norm_rms_epsilon",
  "rope.dimension_count",
  "rope.freq_base",
  "vocab_size",
)
_NEUTRAL = {  # and values of others that change nothing
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

  def error(self, message: str) -> hf_folder.CheckpointError:
    """An error that names the file."""
    return hf_folder.CheckpointError(f"{self.path}: {message}")

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor, outermost axis first; () if there is none."""
    if name not in self.tensors:
      return ()
    return tuple(int(size) for size in reversed(self.tensors[name].shape))


def library():
  """The package gguf.

  Raises:
    CheckpointError: it is not installed
  """
  try:
    import gguf
  except ImportError as e:
    raise hf_folder.CheckpointError(
      f"GGUF files are read by the package gguf, which is missing ({e}): pip install gguf"
    ) from e
  return gguf


def open_file(path: str | pathlib.Path) -> File:
  """Reads what a GGUF file says of its model; tensors are mapped into memory.

  Raises:
    CheckpointError: no such file, another kind of file, or one that is damaged
  """
  path, gguf = pathlib.Path(path), library()
  if not path.is_file():
    raise hf_folder.CheckpointError(f"{path}: no such file")

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
  except (ArithmeticError, EOFError, LookupError, TypeError, ValueError) as e:
    raise hf_folder.CheckpointError(
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
  _refuse_unsupported(file, f"{name}.")

  def get(key: str, kind: type, default: Any = None):
    value = file.metadata.get(f"{name}.{key}", default)
    if type(value) is not kind or not 0 < value < 2**31:
      what = "a size" if kind is int else "a number above 0"
      raise file.error(f"{name}.{key}={value!r:.60} is not {what}; download it again")
    return value

  width, num_heads = get("embedding_length", int), get("attention.head_count", int)
  head_dim = get("attention.key_length", int, width // num_heads)
  for key in ("attention.value_length", "rope.dimension_count"):
    size = get(key, int, head_dim)
    if size != head_dim:
      raise file.error(
        f"{name}.{key}={size} is not supported and would change the outputs: heads have "
        f"{head_dim} dimensions; use a model where the two agree"
      )
  fields = _ARCHITECTURES[name] | dict(
    vocab_size=(file.shape(_EMBEDDING) or (1,))[0],
    width=width,
    mlp_width=get("feed_forward_length", int),
    num_layers=get("block_count", int),
    num_heads=num_heads,
    num_kv_heads=get("attention.head_count_kv", int, num_heads),
    head_dim=head_dim,
    rope_theta=get("rope.freq_base", float, 10_000.0),
    norm_eps=get("attention.layer_norm_rms_epsilon", float),
    max_position=get("context_length", int),
    tie_embeddings=_HEAD not in file.tensors,
  )
  try:
    return config_lib.ModelConfig(**fields)
  except ValueError as e:
    raise file.error(f"makes no model ({e}); download it again") from e


def _refuse_unsupported(file: File, prefix: str) -> None:
  """Raises on a key of the architecture that could change the outputs."""
  for key, value in file.metadata.items():
    rest = key.removeprefix(prefix)
    known = rest in _READ or (rest in _NEUTRAL and value == _NEUTRAL[rest])
    if key.startswith(prefix) and not known:
      raise file.error(
        f"{key}={value!r:.60} is not supported and could change the outputs; use a model "
        "without it"
      )


def to_hf(file: File, folder: str | pathlib.Path) -> config_lib.ModelConfig:
  """Writes a model with its tokenizer as a folder that `hf.load` reads.

  All or nothing: what goes wrong, or a kill, leaves no checkpoint in `folder`.

  Args:
    file: see `open_file`
    folder: where to, made if need be
  Returns:
    the model
  Raises:
    CheckpointError: the file holds what is not supported, or does not fit together
    OSError: the folder cannot be written
  """
  config = read_config(file)
  shapes, names = _stored(file, config)
  try:
    tokenizer = gguf_tokenizer.build(file.metadata)
    roles = ("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id")
    bos, eos, eot, pad = (gguf_tokenizer.token_id(file.metadata, key) for key in roles)
  except hf_folder.CheckpointError as e:
    raise file.error(str(e)) from e
  if len(tokenizer) > config.vocab_size:
    raise file.error(
      f"{len(tokenizer)} tokens, but embeddings of {config.vocab_size}; download it again"
    )
  # A model may end its turn with one token and a text with another.
  stop = eos if eot in (None, eos) else [eos, eot]
  ids = {"bos_token_id": bos, "eos_token_id": stop, "pad_token_id": pad}
  raw = hf_config.unparse(config) | ids
  tensors = (_dequantized(file, names[name], config) for name in shapes)
  try:
    with hf_folder.replacing(pathlib.Path(folder)) as partial:
      _save_tokenizer(tokenizer, partial)
      hf_folder.write_json(partial / "generation_config.json", ids)
      hf_folder.write_json(partial / hf_folder.CONFIG, raw)
      hf_folder.write_float32(partial, shapes, tensors)
  except OSError as e:
    size = 4 * sum(map(math.prod, shapes.values()))
    raise OSError(f"{folder} cannot be written ({e}); it takes {size / 1e6:,.1f} MB") from e
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
  table = hf_tensors.layouts(config)
  params = traverse_util.flatten_dict(
    nn.meta.unbox(target.abstract_params(config)), sep="/"
  )
  shapes = {
    table[path].name: table[path].stored_shape(leaf.shape) for path, leaf in params.items()
  }
  names = {name: theirs.get_name(name, (".weight", ".bias")) for name in shapes}
  for name, shape in shapes.items():
    found = file.shape(names[name]) or "nothing"
    if found != shape:
      raise file.error(
        f"tensor {names[name]}: the model implies {shape}, found {found}; download it again"
      )
  extra = sorted(file.tensors.keys() - names.values())
  if extra:
    raise file.error(
      f"tensor {extra[0]:.80} belongs to no {architecture} that is supported, and could "
      "change the outputs; use a model without it"
    )
  return shapes, names


def _dequantized(file: File, name: str, config: config_lib.ModelConfig) -> np.ndarray:
  """A tensor in float32, with rows in the order of Hugging Face."""
  gguf, stored = library(), file.tensors[name]
  try:
    x = gguf.dequantize(stored.data, stored.tensor_type)
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
