"""Hugging Face checkpoints: a folder of config.json and safetensors, in and out.

`load_hf` places tensor by tensor straight into the target sharding; `save_hf`
writes what transformers 4 and 5 load. What cannot be reproduced exactly is
refused, never approximated. In order: the tables, config.json, load, save.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from tlt_jax import axes as axes_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import target


class CheckpointError(ValueError):
  """A checkpoint that cannot be read or written; names the cause and the remedy."""


# Hugging Face name, path in our tree, our axes, their axes. One letter per axis;
# `NH` is one axis of N*H entries, N outermost. Rows of a tensor that a model does
# not have (a tied head, another family's bias) are not used.
_MODEL_TENSORS = (
  ("model.embed_tokens.weight", "embedding", "V D", "V D"),
  ("model.norm.weight", "final_norm/scale", "D", "D"),
  ("lm_head.weight", "head", "D V", "V D"),
)
_LAYER_TENSORS = (  # below `model.layers.{i}.` and `layer_{i}/`
  ("input_layernorm.weight", "input_norm/scale", "D", "D"),
  ("self_attn.q_proj.weight", "attention/q_proj", "D N H", "NH D"),
  ("self_attn.k_proj.weight", "attention/k_proj", "D K H", "KH D"),
  ("self_attn.v_proj.weight", "attention/v_proj", "D K H", "KH D"),
  ("self_attn.q_proj.bias", "attention/q_bias", "N H", "NH"),
  ("self_attn.k_proj.bias", "attention/k_bias", "K H", "KH"),
  ("self_attn.v_proj.bias", "attention/v_bias", "K H", "KH"),
  ("self_attn.q_norm.weight", "attention/q_norm/scale", "H", "H"),
  ("self_attn.k_norm.weight", "attention/k_norm/scale", "H", "H"),
  ("self_attn.o_proj.weight", "attention/o_proj", "N H D", "D NH"),
  ("post_attention_layernorm.weight", "post_norm/scale", "D", "D"),
  ("mlp.gate_proj.weight", "mlp/gate_proj", "D F", "F D"),
  ("mlp.up_proj.weight", "mlp/up_proj", "D F", "F D"),
  ("mlp.down_proj.weight", "mlp/down_proj", "F D", "D F"),
)
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # a buffer of old exports
_STORED_DTYPES = ("F32", "F16", "BF16")

# What a family fixes, and its defaults for keys that its config.json may lack.
_FAMILIES = {
  "Qwen2ForCausalLM": dict(
    model_type="qwen2", qkv_bias=True, qk_norm=False, head_dim=None, max_position=32768
  ),
  "Qwen3ForCausalLM": dict(
    model_type="qwen3", qkv_bias=False, qk_norm=True, head_dim=128, max_position=32768
  ),
  "LlamaForCausalLM": dict(
    model_type="llama", qkv_bias=False, qk_norm=False, head_dim=None, max_position=2048
  ),
}
# Keys of config.json that change the outputs, and the values that do not.
_NEUTRAL = {
  "hidden_act": ("silu", "swish"),
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "partial_rotary_factor": (1,),
  "quantization_config": (),
}
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_SINGLE, _SHARD = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors"
PARTIAL = ".partial"  # folder of a save that is not complete yet


@dataclasses.dataclass(frozen=True)
class _Layout:
  """One row of the table: where a tensor of ours is stored, and how."""

  name: str  # theirs
  ours: tuple[str, ...]  # e.g. ('D', 'N', 'H')
  theirs: tuple[str, ...]  # e.g. ('NH', 'D')

  @property
  def order(self) -> str:
    """Their axes with the joined ones taken apart, e.g. 'NHD'."""
    return "".join(self.theirs)

  def stored_shape(self, shape) -> tuple[int, ...]:
    """The shape in the file of a tensor of our `shape`."""
    size = dict(zip(self.ours, shape, strict=True))
    return tuple(math.prod(size[a] for a in group) for group in self.theirs)

  def store(self, x: np.ndarray) -> np.ndarray:
    """Our tensor -> theirs."""
    y = x.transpose([self.ours.index(a) for a in self.order])
    return np.ascontiguousarray(y.reshape(self.stored_shape(x.shape)))

  def load(self, stored, shape, index) -> np.ndarray:
    """Their tensor -> `ours[index]`, reading no rows or columns but those needed.

    Args:
      stored: a lazy slice of the file
      shape: of our whole tensor
      index: a slice per axis of ours
    """
    size = dict(zip(self.ours, shape, strict=True))
    span = dict(zip(self.ours, index, strict=True))
    read, inner, cut = [], [], []
    for major, *minor in self.theirs:
      step = math.prod(size[a] for a in minor)
      start, stop, _ = span[major].indices(size[major])
      read.append(slice(start * step, stop * step))
      inner += [stop - start, *(size[a] for a in minor)]
      cut += [slice(None), *(span[a] for a in minor)]
    block = stored[tuple(read)].reshape(inner)[tuple(cut)]
    return block.transpose([self.order.index(a) for a in self.ours])


def _layouts(config: config_lib.ModelConfig) -> dict[str, _Layout]:
  """The table written out: path in our tree -> layout."""
  rows = [(theirs, ours, *axes) for theirs, ours, *axes in _MODEL_TENSORS]
  rows += [
    (f"model.layers.{i}.{theirs}", f"layer_{i}/{ours}", *axes)
    for i in range(config.num_layers)
    for theirs, ours, *axes in _LAYER_TENSORS
  ]
  return {
    path: _Layout(name, tuple(ours.split()), tuple(theirs.split()))
    for name, path, ours, theirs in rows
  }


def _flat(params) -> dict:
  """Path -> leaf, without the boxes that carry axis names."""
  return traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")


# --- config.json


def load_config(path) -> config_lib.ModelConfig:
  """The model that a folder's config.json describes.

  Raises:
    CheckpointError: missing, damaged, or describing what we would compute
      differently
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise CheckpointError(
      f"{path}: no such folder; download the model first (hf download MODEL "
      f"--local-dir {path})"
    )
  if not (path / _CONFIG).is_file():
    raise CheckpointError(
      f"{path / _CONFIG} is missing; give the folder that holds config.json and "
      "the safetensors files, and download it completely"
    )
  raw = _read_json(path / _CONFIG)
  try:
    return _parse(raw)
  except CheckpointError as e:
    raise CheckpointError(f"{path / _CONFIG}: {e}") from e
  except (TypeError, ValueError, ZeroDivisionError) as e:
    raise CheckpointError(
      f"{path / _CONFIG} makes no model ({e}); restore the original"
    ) from e


def _read_json(file: pathlib.Path) -> dict:
  """A JSON object, or the file's name in the error."""
  try:
    raw = json.loads(file.read_text())
  except ValueError as e:
    raise CheckpointError(f"{file} is not JSON ({e}); download it again") from e
  if not isinstance(raw, dict):
    raise CheckpointError(f"{file} holds no JSON object; download it again")
  return raw


def _parse(raw: dict) -> config_lib.ModelConfig:
  """The content of config.json -> ModelConfig."""
  names = raw.get("architectures") or ["(none)"]
  if names[0] not in _FAMILIES:
    raise CheckpointError(
      f"architecture {names[0]} is not supported; supported: {', '.join(_FAMILIES)}"
    )
  family = _FAMILIES[names[0]]
  rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
  _refuse_unsupported(raw, rope, family)

  def need(key):
    if raw.get(key) is None:
      raise CheckpointError(f"'{key}' is missing; restore the original config.json")
    return raw[key]

  def default(key, value):
    return value if raw.get(key) is None else raw[key]

  width, num_heads = need("hidden_size"), need("num_attention_heads")
  dtype = str(default("dtype", default("torch_dtype", "float32")))
  dtype = dtype.removeprefix("torch.")
  if dtype not in _COMPUTE_DTYPES:
    raise CheckpointError(
      f"dtype {dtype} is not supported; set one of {', '.join(_COMPUTE_DTYPES)}"
    )
  return config_lib.ModelConfig(
    architecture=names[0],
    vocab_size=need("vocab_size"),
    width=width,
    mlp_width=need("intermediate_size"),
    num_layers=need("num_hidden_layers"),
    num_heads=num_heads,
    num_kv_heads=default("num_key_value_heads", num_heads),
    head_dim=default("head_dim", family["head_dim"] or width // num_heads),
    rope_theta=float(rope.get("rope_theta") or default("rope_theta", 10_000.0)),
    rope_scaling=_parse_rope_scaling(rope),
    norm_eps=default("rms_norm_eps", 1e-6),
    max_position=default("max_position_embeddings", family["max_position"]),
    qkv_bias=family["qkv_bias"],
    qk_norm=family["qk_norm"],
    tie_embeddings=default("tie_word_embeddings", False),
    dtype=dtype,
  )


def _parse_rope_scaling(rope: dict) -> config_lib.RopeScaling | None:
  """`rope_scaling` (transformers 4) or `rope_parameters` (5), either spelling."""
  if any(isinstance(value, dict) for value in rope.values()):
    raise CheckpointError(
      "RoPE parameters per layer type are not supported; use a model with one RoPE"
    )
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind == "default":
    return None
  if kind != "llama3":
    raise CheckpointError(
      f"rope_type {kind} is not supported (supported: default, llama3); use a model "
      "without it, or, where its authors call it optional, remove rope_scaling"
    )
  theirs = {"original_max_position": "original_max_position_embeddings"}
  fields = [field.name for field in dataclasses.fields(config_lib.RopeScaling)]
  missing = [theirs.get(f, f) for f in fields if rope.get(theirs.get(f, f)) is None]
  if missing:
    raise CheckpointError(
      f"rope_type llama3 lacks {', '.join(missing)}; restore the original config.json"
    )
  return config_lib.RopeScaling(**{f: rope[theirs.get(f, f)] for f in fields})


def _refuse_unsupported(raw: dict, rope: dict, family: dict) -> None:
  """Raises on a feature that would silently change the outputs."""
  for key, harmless in _NEUTRAL.items():
    if key == "attention_bias" and family["qkv_bias"]:
      continue  # Qwen2 has its biases whatever this key says
    for value in (raw.get(key), rope.get(key)):
      if value is not None and value not in harmless:
        raise CheckpointError(
          f"{key}={value!s:.60} is not supported and would change the outputs; use a model "
          "without it"
        )
  if raw.get("layer_types") is not None:
    sliding = any(kind != "full_attention" for kind in raw["layer_types"])
  else:
    sliding = (
      raw.get("use_sliding_window", False)
      and raw.get("sliding_window", 4096) is not None
      and raw.get("num_hidden_layers", 0) > raw.get("max_window_layers", 28)
    )
  if sliding:
    raise CheckpointError(
      "sliding-window attention (use_sliding_window or layer_types) is not supported "
      "and would change the outputs; use a model with full attention"
    )


def _unparse(config: config_lib.ModelConfig) -> dict:
  """ModelConfig -> config.json, in the spelling that transformers 4 and 5 read."""
  family = _FAMILIES.get(config.architecture)
  if family is None:
    raise CheckpointError(
      f"architecture {config.architecture} cannot be saved; supported: "
      f"{', '.join(_FAMILIES)}"
    )
  s = config.rope_scaling
  raw = {
    "architectures": [config.architecture],
    "model_type": family["model_type"],
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp_width,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "rope_theta": config.rope_theta,
    "rope_scaling": s
    and {
      "rope_type": "llama3",
      "factor": s.factor,
      "low_freq_factor": s.low_freq_factor,
      "high_freq_factor": s.high_freq_factor,
      "original_max_position_embeddings": s.original_max_position,
    },
    "rms_norm_eps": config.norm_eps,
    "max_position_embeddings": config.max_position,
    "tie_word_embeddings": config.tie_embeddings,
    "torch_dtype": config.dtype,
    "bos_token_id": None,  # the tokenizer's; transformers would fill in its own
    "eos_token_id": None,
  }
  read_back = _parse(raw)
  if read_back != config:
    lost = [
      f"{f.name}={getattr(config, f.name)}"
      for f in dataclasses.fields(config)
      if getattr(config, f.name) != getattr(read_back, f.name)
    ]
    raise CheckpointError(
      f"{config.architecture} cannot express {', '.join(lost)}; change the "
      "architecture or the field"
    )
  return raw


# --- load


def load_hf(path, mesh=None, rules=None, dtype=None):
  """Reads a Hugging Face folder into the tree of `target.Target`.

  Every device reads only its part of a tensor, and no more than one tensor is on
  the host at a time.

  Args:
    path: folder with config.json and model.safetensors, or shards with an index
    mesh: (data, model) mesh; None places everything on the default device
    rules: logical axis -> mesh axis, `axes.ROLLOUT` by default
    dtype: of the parameters; as stored by default
  Returns:
    ModelConfig (its `dtype`, of the computation, is the one in config.json) and
    the nested dict of parameters
  Raises:
    CheckpointError: the folder is incomplete, damaged or not supported
  """
  path = pathlib.Path(path)
  config = load_config(path)
  abstract = target.abstract_params(config)
  shapes = {name: spec.shape for name, spec in _flat(abstract).items()}
  layouts = {name: _layouts(config)[name] for name in shapes}
  shardings = dict.fromkeys(shapes)
  if mesh is not None:
    rules = axes_lib.ROLLOUT if rules is None else rules
    tree = axes_lib.shardings(mesh, rules, abstract)
    shardings = traverse_util.flatten_dict(tree, sep="/")
  with contextlib.ExitStack() as stack:
    stored = _open_tensors(path, stack)
    _check_tensors(path, stored, layouts, shapes, config.tie_embeddings)
    params = {
      name: _place(stored[layout.name], layout, shapes[name], shardings[name], dtype)
      for name, layout in layouts.items()
    }
  return config, traverse_util.unflatten_dict(params, sep="/")


def _place(stored, layout, shape, sharding, dtype) -> jax.Array:
  """One tensor, from the file to its devices."""
  blocks = {}  # replicas share one read

  def block(index):
    if str(index) not in blocks:
      x = layout.load(stored, shape, index)
      blocks[str(index)] = x if dtype is None else x.astype(jnp.dtype(dtype))
    return blocks[str(index)]

  if sharding is None:
    return jax.device_put(block((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, block)


def _open_tensors(path: pathlib.Path, stack: contextlib.ExitStack) -> dict:
  """Name -> lazy tensor, over all files of a checkpoint; reads headers only."""
  index, names = path / _INDEX, None
  if (path / _SINGLE).is_file():
    files = [_SINGLE]
  elif index.is_file():
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict):
      raise CheckpointError(f"{index} has no weight_map; download it again")
    files = sorted(set(names.values()))
  else:
    pickled = sorted(file.name for file in path.glob("*.bin"))
    raise CheckpointError(
      f"{path} holds {pickled[0]} but no safetensors, and pickles are never loaded; "
      "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
      if pickled
      else f"{path} holds neither {_SINGLE} nor {_INDEX}; download it completely"
    )
  tensors = {}
  for file in files:
    opened = _open_file(path / file, stack)
    tensors |= {name: opened.get_slice(name) for name in opened.keys()}
    for name in (name for name, of in (names or {}).items() if of == file):
      if name not in tensors:
        raise CheckpointError(
          f"{path / file} lacks tensor {name}, which {_INDEX} promises; download both again"
        )
  return tensors


def _open_file(file: pathlib.Path, stack: contextlib.ExitStack):
  """A safetensors file whose header fits its length."""
  if not file.is_file():
    raise CheckpointError(f"{file}, named in {_INDEX}, is missing; download it")
  try:
    return stack.enter_context(safetensors.safe_open(file, framework="numpy"))
  except (safetensors.SafetensorError, OSError) as e:
    raise CheckpointError(
      f"{file} is damaged or truncated ({e}); download it again (a git-lfs pointer "
      "is not the file itself)"
    ) from e


def _check_tensors(path, stored, layouts, shapes, tied: bool) -> None:
  """Raises unless the files hold exactly the tensors of the model."""
  expected = {layout.name for layout in layouts.values()}
  missing = [name for name in sorted(expected) if name not in stored]
  if missing:
    raise CheckpointError(
      f"{path} lacks {_names(missing)}; download it completely, or correct config.json"
    )
  extra = [name for name in sorted(stored) if name not in expected]
  extra = [name for name in extra if not _HARMLESS.fullmatch(name)]
  if tied and "lm_head.weight" in extra:
    extra.remove("lm_head.weight")
    _check_tied(path, stored)
  if extra:
    raise CheckpointError(
      f"{path} holds {_names(extra)}, which the model in config.json does not have; "
      "correct config.json, or use a supported model"
    )
  for name, layout in layouts.items():
    tensor = stored[layout.name]
    found, shape = tuple(tensor.get_shape()), layout.stored_shape(shapes[name])
    if found != shape:
      raise CheckpointError(
        f"{path}: tensor {layout.name} has shape {found}, config.json implies "
        f"{shape}; the two do not belong together"
      )
    if tensor.get_dtype() not in _STORED_DTYPES:
      raise CheckpointError(
        f"{path}: tensor {layout.name} is stored as {tensor.get_dtype()}, not as one "
        f"of {', '.join(_STORED_DTYPES)}; use an unquantised checkpoint"
      )


def _check_tied(path, stored, rows: int = 4096) -> None:
  """A stored head that differs from the embedding would be lost by tying."""
  head, embedding = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
  size = head.get_shape()[0]
  same = head.get_shape() == embedding.get_shape() and all(
    np.array_equal(head[i : min(i + rows, size)], embedding[i : min(i + rows, size)])
    for i in range(0, size, rows)
  )
  if not same:
    raise CheckpointError(
      f"{path}: config.json ties the head to the embedding, but lm_head.weight "
      "differs from model.embed_tokens.weight; set tie_word_embeddings to false"
    )


def _names(names: list[str], limit: int = 3) -> str:
  """'tensor a', or 'tensors a, b, c and 7 more'."""
  rest = f" and {len(names) - limit} more" if len(names) > limit else ""
  return f"tensor{'s' if names[1:] else ''} {', '.join(names[:limit])}{rest}"


# --- save


def save_hf(path, config, params, max_file_bytes: int = 4 * 10**9) -> None:
  """Writes a folder that transformers and `load_hf` read; parameters keep their dtype.

  Everything is written aside and then moved, config.json last: a save that is
  killed leaves the earlier checkpoint, or none, but never a mixture that loads.
  Tokenizer and generation_config.json are not written; other files stay.

  Args:
    path: folder, made if need be; a checkpoint in it is replaced
    config: the model; its `dtype` becomes config.json's
    params: nested dict as from `load_hf` or `target.init_params`, sharded over the
      devices of this process or not
    max_file_bytes: above it the tensors are spread over files with an index
  Raises:
    CheckpointError: params or config do not fit the architecture
  """
  path = pathlib.Path(path)
  raw = _unparse(config)
  layouts, tensors = _layouts(config), _flat(params)
  _check_params(config, tensors)
  tensors = {name: tensors[name] for name in layouts if name in tensors}
  files = _split(tensors, max_file_bytes)
  partial = path / PARTIAL
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  weight_map = {}
  for i, names in enumerate(files):
    file = _SINGLE if len(files) == 1 else _SHARD.format(i + 1, len(files))
    weight_map |= {layouts[name].name: file for name in names}
    stored = {layouts[n].name: layouts[n].store(np.asarray(tensors[n])) for n in names}
    safetensors.numpy.save_file(stored, partial / file, metadata={"format": "pt"})
  if len(files) > 1:
    total = {"total_size": sum(x.nbytes for x in tensors.values())}
    write_json(partial / _INDEX, {"metadata": total, "weight_map": weight_map})
  write_json(partial / _CONFIG, raw)
  publish(path, partial)


def _check_params(config, tensors: dict) -> None:
  """Raises unless the parameters are those of the model."""
  shapes = {name: x.shape for name, x in _flat(target.abstract_params(config)).items()}
  for name in sorted(shapes.keys() | tensors.keys()):
    found = tensors[name].shape if name in tensors else "nothing"
    shape = shapes.get(name, "nothing")
    if found != shape:
      raise CheckpointError(
        f"parameter {name}: the config implies {shape}, found {found}; save the "
        "parameters with the config they were made with"
      )


def _split(tensors: dict, max_bytes: int) -> list[list[str]]:
  """Names per file: in order, as many as fit, at least one."""
  files, room = [[]], max_bytes
  for name, x in tensors.items():
    if files[-1] and x.nbytes > room:
      files.append([])
      room = max_bytes
    files[-1].append(name)
    room -= x.nbytes
  return files


def write_json(file: pathlib.Path, raw: dict) -> None:
  file.write_text(json.dumps(raw, indent=2) + "\n")


def publish(path: pathlib.Path, partial: pathlib.Path) -> None:
  """Replaces a checkpoint by the complete one in `partial`.

  Without config.json nothing loads, so it goes first and comes back last.
  """
  (path / _CONFIG).unlink(missing_ok=True)
  for stale in (path / _SINGLE, path / _INDEX, *path.glob("model-*-of-*.safetensors")):
    stale.unlink(missing_ok=True)
  files = [file for file in partial.iterdir() if file.name != _CONFIG]
  for file in (*files, partial / _CONFIG):
    shutil.copymode(partial / _CONFIG, file)  # safetensors makes files private
    os.replace(file, path / file.name)
  partial.rmdir()
