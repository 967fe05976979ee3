"""Hugging Face folders: config.json and safetensors <-> ModelConfig and parameters.

`load` places tensor by tensor straight into the target sharding; `save` writes what
transformers loads. What would change the outputs is refused. Pickles are never loaded.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from typing import Any

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from tlt_jax import axes as axes_lib
from tlt_jax import json_objects
from tlt_jax import memory
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax import writing
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import target

CONFIG = "config.json"
SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # of stored weights
MAX_FILE_BYTES = 4 * 10**9  # of a shard
PARTIAL = ".partial"  # folder of an incomplete save


class CheckpointError(ValueError):
  """A checkpoint that cannot be read or written; names the cause and the remedy."""


# --- the files of a folder


def read_json(file: pathlib.Path) -> dict:
  """Reads a JSON object; raises CheckpointError if it is missing or damaged."""
  if not file.exists():
    raise CheckpointError(
      f"{file} is missing; give a folder with config.json and safetensors (a model's: hf "
      "download MODEL --local-dir FOLDER)"
    )
  try:
    return json_objects.parse(file.read_bytes())
  except ValueError as e:
    raise CheckpointError(f"{file} {e}; download it again") from e


@dataclasses.dataclass
class Tensors:
  lazy: dict[str, Any]  # read when they are sliced
  file: dict[str, pathlib.Path]

  def check(self, name: str, shape: tuple[int, ...] | None) -> None:
    """Raises CheckpointError unless a tensor has this shape; None: must not exist."""
    tensor, file = self.lazy.get(name), self.file.get(name, next(iter(self.file.values())))
    if tensor is None or shape is None:
      fault = "lacks" if tensor is None else "holds"
      raise CheckpointError(
        f"{file} {fault} tensor {name:.100}, unlike the model in config.json; the two do "
        "not belong together, or are not downloaded completely"
      )
    found, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if found != shape or dtype not in DTYPES:
      raise CheckpointError(
        f"{file}: tensor {name} is {dtype} of shape {found!s:.100}, config.json says "
        f"{shape}, as one of {', '.join(DTYPES)}; use the files of one unquantised model"
      )


def open_tensors(path: pathlib.Path, stack: contextlib.ExitStack) -> Tensors:
  """Opens all safetensors files of a folder; `stack` closes them."""
  if (path / SINGLE).exists():
    names = {SINGLE: ()}
  elif (path / _INDEX).exists():
    names = _read_index(path / _INDEX)
  else:
    kinds = ("*.bin", "*.pt", "*.pth", "*.ckpt")
    pickles = sorted(file.name for kind in kinds for file in path.glob(kind))
    if pickles:
      raise CheckpointError(
        f"{path} holds {pickles[0]!r:.80} but no safetensors; pickles are never loaded: "
        "convert it with PyTorch: safetensors.torch.save_file(torch.load(FILE, "
        f"weights_only=True), {SINGLE!r})"
      )
    raise CheckpointError(
      f"{path} holds neither {SINGLE} nor {_INDEX}; download it completely"
    )
  tensors = Tensors({}, {})
  for file, promised in names.items():
    try:
      opened = stack.enter_context(safetensors.safe_open(path / file, framework="numpy"))
    except (safetensors.SafetensorError, OSError) as e:
      where = f", which {_INDEX} names," if promised else ""
      raise CheckpointError(
        f"{path / file}{where} is missing, damaged or truncated ({e!s:.120}); download it "
        "again (a git-lfs pointer is not the file itself)"
      ) from e
    found = {name: opened.get_slice(name) for name in opened.keys()}
    missing = [name for name in promised if name not in found]
    if missing or not found:
      what = f"tensor {missing[0]:.100}, which {_INDEX} promises" if missing else "tensors"
      raise CheckpointError(f"{path / file} lacks {what}; download it again")
    tensors.lazy.update(found)
    tensors.file.update(dict.fromkeys(found, path / file))
  return tensors


# Where models that also read images have that of text, as transformers 4 and 5 name it.
_TEXT = {"language_model.": "", "model.language_model.": "model."}
_IMAGES = ("vision_tower.", "multi_modal_projector.")


def _text_tensors(tensors: Tensors) -> Tensors:
  """Renames what reads text, and leaves out what reads images, if there is such."""
  if not any(name.startswith(tuple(_TEXT)) for name in tensors.lazy):
    return tensors
  renamed = Tensors({}, {})
  for name, tensor in tensors.lazy.items():
    if name.removeprefix("model.").startswith(_IMAGES):
      continue
    prefix = next(filter(name.startswith, _TEXT), "")
    ours = _TEXT.get(prefix, "") + name.removeprefix(prefix)
    renamed.lazy[ours], renamed.file[ours] = tensor, tensors.file[name]
  return renamed


def _read_index(index: pathlib.Path) -> dict[str, list[str]]:
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise CheckpointError(f"{index} has no weight_map; download it again")
  names = {}
  for name, file in weight_map.items():
    if not isinstance(file, str) or not re.fullmatch(r"[^/\0]{1,200}\.safetensors", file):
      raise CheckpointError(
        f"{index}: weight_map names {file!r:.60}, which is not a safetensors file in that "
        "folder; download it again"
      )
    names.setdefault(file, []).append(name)
  return dict(sorted(names.items()))


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields an empty folder whose files replace the checkpoint in `path` on success.

  A killed save leaves the earlier checkpoint, or none, but never a mixture that loads.
  Other files stay; what was written is removed on an error.
  """
  partial = path / PARTIAL
  shutil.rmtree(partial, ignore_errors=True)
  with writing.to(path):
    partial.mkdir(parents=True)
    try:
      yield partial
    except BaseException:
      shutil.rmtree(partial, ignore_errors=True)
      raise
    # Without config.json nothing loads, so it goes first and comes back last.
    (path / CONFIG).unlink(missing_ok=True)
    for stale in (path / SINGLE, path / _INDEX, *path.glob("model-*-of-*.safetensors")):
      stale.unlink(missing_ok=True)
    for file in sorted(partial.iterdir(), key=lambda file: file.name == CONFIG):
      shutil.copymode(partial / CONFIG, file)  # safetensors makes files private
      os.replace(file, path / file.name)
    partial.rmdir()


def write_json(file: pathlib.Path, raw: dict) -> None:
  file.write_text(json.dumps(raw, indent=2) + "\n")


def write_tensors(file: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
  # transformers needs the format.
  safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def write_weights(
  folder: pathlib.Path | None,
  sizes: Mapping[str, int],
  read: Callable[[str], np.ndarray],
  max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
  """Writes model.safetensors, or shards with an index; one file at a time is in memory.

  `read` is called for each tensor in the order of `sizes` (bytes). `folder` is None where
  another process writes.
  """
  files, room = [[]], max_file_bytes
  for name, size in sizes.items():
    if files[-1] and size > room:
      files.append([])
      room = max_file_bytes
    files[-1].append(name)
    room -= size
  weight_map = {}
  for i, members in enumerate(files, 1):
    file = f"model-{i:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
    if folder:
      write_tensors(folder / file, {name: read(name) for name in members})
    else:
      for name in members:
        read(name)
    weight_map |= dict.fromkeys(members, file)
  if folder and len(files) > 1:
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_json(folder / _INDEX, index)


# --- config.json

_KEYS = {  # field of ModelConfig -> key with the same value
  "vocab_size": "vocab_size",
  "width": "hidden_size",
  "mlp_width": "intermediate_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "norm_eps": "rms_norm_eps",
  "max_position": "max_position_embeddings",
  "tie_embeddings": "tie_word_embeddings",
}
_SCALINGS = {  # rope_type -> class, with the same of its fields
  "llama3": config_lib.RopeScaling,
  "linear": config_lib.LinearScaling,
  "yarn": config_lib.YarnScaling,
}
_EXPERT_KEYS = {  # the same of Experts
  "count": "num_experts",
  "per_token": "num_experts_per_tok",
  "width": "moe_intermediate_size",
  "norm_weights": "norm_topk_prob",
}
_ROPE_KEYS = {"original_max_position": "original_max_position_embeddings"}
_SLIDING, _FULL = "sliding_attention", "full_attention"  # in layer_types
# Keys that change the outputs unless they have these values; `Family.neutral` adds to them.
_NEUTRAL = {
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "partial_rotary_factor": (1,),
  "quantization_config": (),
  "attn_logit_softcapping": (),
  "final_logit_softcapping": (),
  "use_bidirectional_attention": (False,),
}


def load_config(path: str | pathlib.Path) -> config_lib.ModelConfig:
  """Reads config.json; raises CheckpointError if it is damaged or not supported."""
  file = pathlib.Path(path) / CONFIG
  raw = read_json(file)
  try:
    config = parse_config(raw)
  except ValueError as e:
    raise CheckpointError(f"{file}: {e}; use another model, or its original file") from e
  tokenizer = file.with_name("tokenizer.json")
  if not tokenizer.is_file():
    return config
  rows = _unused_rows(tokenizer, tokenizer.stat().st_mtime_ns, config.vocab_size)
  return dataclasses.replace(config, unused_rows=rows)


@functools.lru_cache(maxsize=8)
def _unused_rows(path: pathlib.Path, mtime: int, rows: int) -> tuple[tuple[int, int], ...]:
  """Ranges of `rows` that are no token of a tokenizer.json."""
  del mtime  # of the cache's key
  try:
    vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab()
  except Exception:  # damaged: whatever loads the tokenizer says so
    return ()
  is_unused = np.ones(rows + 2, bool)
  is_unused[[0, -1]] = False  # a border on each side
  ids = np.array([*vocabulary.values()], int)
  is_unused[1 + ids[ids < rows]] = False
  borders = np.flatnonzero(np.diff(is_unused))
  return tuple(map(tuple, borders.reshape(-1, 2).tolist()))


def parse_config(raw: dict) -> config_lib.ModelConfig:
  """Parses the content of config.json; raises ValueError if it is not supported."""
  raw = _text_part(raw)
  given, raw = raw, {key: value for key, value in raw.items() if value is not None}
  names = raw.get("architectures", ["(none)"])
  if not isinstance(names, list) or not names or not isinstance(names[0], str):
    raise ValueError(f"architectures={names!r:.60} is not a list of names")
  try:
    family = families.find(names[0])
  except ValueError as e:
    raise ValueError(f"{e} (architectures)") from e
  rope = {}  # transformers 4 wrote rope_scaling and rope_theta, 5 writes rope_parameters
  for key in ("rope_parameters", "rope_scaling"):
    if not isinstance(raw.get(key, {}), dict):
      raise ValueError(f"{key}={raw[key]!r:.60} is not an object")
    rope |= raw.get(key, {})
  ropes = _ropes(raw, rope, family)
  _refuse_unsupported(raw, ropes, family)
  keys = _KEYS | family.keys
  fields = {name: raw[key] for name, key in keys.items() if key in raw}
  fields = dict(family.defaults) | fields
  heads = fields.get("num_heads")
  defaults = {"max_position": family.max_position, "num_kv_heads": heads}
  if family.head_dim is not None:
    defaults["head_dim"] = family.head_dim
  elif type(heads) is int and heads > 0 and type(fields.get("width")) is int:
    defaults["head_dim"] = fields["width"] // heads
  fields = {name: x for name, x in defaults.items() if x is not None} | fields
  dtype = raw.get("dtype", raw.get("torch_dtype", "float32"))
  full = {kind: _parse_rope(rope, fields) for kind, rope in ropes.items()}
  fields |= {
    "architecture": names[0],
    "qkv_bias": family.qkv_bias,
    "qk_norm": family.qk_norm,
    "rope_theta": full[_FULL]["theta"],
    "rope_scaling": full[_FULL]["scaling"],
    "dtype": dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype,
  }
  if family.dense:
    raw = {"num_experts": raw.get("num_local_experts"), **raw}  # as transformers 5 writes
    fields["experts"] = {
      n: raw[k] for n, k in _EXPERT_KEYS.items() if raw.get(k) is not None
    }
  config = config_lib.make(config_lib.ModelConfig, fields, keys | _ROPE_KEYS | _EXPERT_KEYS)
  return dataclasses.replace(config, layers=_layers(given, config, family, full))


def _text_part(raw: dict) -> dict:
  """The config of what reads text in a model that reads images, too."""
  if raw.get("architectures") != ["Gemma3ForConditionalGeneration"]:
    return raw
  text = raw.get("text_config")
  if not isinstance(text, dict):
    raise ValueError(f"text_config={text!r:.60} is not an object")
  of_all = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
  whole = {key: raw[key] for key in of_all if key in raw}
  return whole | text | {"architectures": ["Gemma3ForCausalLM"]}


def _ropes(raw: dict, rope: dict, family: families.Family) -> dict[str, dict]:
  """The parameters of RoPE in layers of each type."""
  of_all = {key: x for key, x in rope.items() if key not in (_FULL, _SLIDING)}
  theta = raw.get("rope_theta", family.defaults.get("rope_theta", 10_000.0))
  of_all = {"rope_theta": theta} | of_all
  found = {_FULL: of_all, _SLIDING: of_all}
  if family.local_theta is not None:
    theta = raw.get("rope_local_base_freq", family.local_theta)
    found[_SLIDING] = {"rope_theta": theta}
  own = {kind: rope.get(kind) or {} for kind in found}
  if any(isinstance(x, dict) for x in of_all.values()) or (
    family.windows is None and any(own.values())
  ):
    raise ValueError("RoPE parameters per layer type are not supported")
  return {kind: found[kind] | own[kind] for kind in found}


def _parse_rope(rope: dict, fields: dict) -> dict:
  """The fields of `config_lib.Rope`."""
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return {"theta": rope["rope_theta"], "scaling": None}
  if kind not in _SCALINGS:
    raise ValueError(
      f"rope_type {kind!s:.60} is not supported (only default, {', '.join(_SCALINGS)})"
    )
  cls = _SCALINGS[kind]
  known = {_ROPE_KEYS["original_max_position"]: fields.get("max_position")}
  if kind == "yarn":
    known |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    known["attention_factor"] = _yarn_attention_factor(rope)
  known |= {key: x for key, x in rope.items() if x is not None}
  names = [field.name for field in dataclasses.fields(cls)]
  scaling = {name: known.get(_ROPE_KEYS.get(name, name)) for name in names}
  made = config_lib.make(cls, scaling, _ROPE_KEYS)
  return {"theta": rope["rope_theta"], "scaling": dataclasses.asdict(made)}


def _yarn_attention_factor(rope: dict) -> float:
  """What transformers takes if there is no `attention_factor`."""
  factor, one, all_dims = (rope.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
  for key in ("factor", "mscale", "mscale_all_dim"):
    if not isinstance(rope.get(key, 1.0) or 1.0, int | float):
      raise ValueError(f"{key}={rope[key]!r:.60} is not a number")

  def scale(by):
    return 0.1 * by * math.log(factor) + 1.0 if factor and factor > 1 else 1.0

  return scale(one) / scale(all_dims) if one and all_dims else scale(1.0)


def _layers(
  raw: dict, config: config_lib.ModelConfig, family: families.Family, ropes: dict
) -> tuple[config_lib.LayerKind, ...]:
  """What config.json says of each layer; null is not a missing `sliding_window`."""
  slides, window = _sliding(raw, config.num_layers, family)
  all_rotate = family.rotates is None
  rotates = [all_rotate or family.rotates(raw, i) for i in range(config.num_layers)]

  @functools.cache
  def make(slides, rotates):
    fields = {
      "window": window if slides else None,
      "rope": ropes[_SLIDING if slides else _FULL] if rotates else None,
    }
    names = {"window": "sliding_window", "theta": "rope_theta"}
    return config_lib.make(config_lib.LayerKind, fields, names)

  return tuple(map(make, slides, rotates))


def _sliding(
  raw: dict, num_layers: int, family: families.Family
) -> tuple[list[bool], int | None]:
  """Whether each layer has a sliding window, and its size."""
  # A file of another family may have Qwen's keys; they would change the outputs.
  windows = family.windows or families.QWEN_WINDOWS
  is_used = raw.get("use_sliding_window") or False
  if not isinstance(is_used, bool):
    raise ValueError(f"use_sliding_window={is_used!r:.60} is neither true nor false")
  window = None
  if is_used or not windows.by_switch:
    window = raw.get("sliding_window", windows.size)
  usual = [window is not None and windows.slides(raw, i) for i in range(num_layers)]
  slides, kinds = usual, raw.get("layer_types")
  if kinds is not None:
    known = isinstance(kinds, list) and all(kind in (_SLIDING, _FULL) for kind in kinds)
    if not known or len(kinds) != num_layers:
      raise ValueError(
        f"layer_types={kinds!s:.60} is not {_SLIDING} or {_FULL} for each layer"
      )
    slides = [kind == _SLIDING for kind in kinds]
  if any(slides) and family.windows is None:
    raise ValueError("sliding windows are not supported for this architecture")
  if (any(slides) and window is None) or (slides != usual and not windows.listed):
    raise ValueError(
      "the sliding windows of layer_types do not fit sliding_window and use_sliding_window"
    )
  return slides, window


def _refuse_unsupported(raw: dict, ropes: dict, family: families.Family) -> None:
  neutral = {"hidden_act": family.hidden_act, **_NEUTRAL, **family.neutral}
  if family.qkv_bias:  # Qwen2 ignores this key
    del neutral["attention_bias"]
  for key, harmless in neutral.items():
    for value in (raw.get(key), *(rope.get(key) for rope in ropes.values())):
      if value is not None and value not in harmless:
        raise ValueError(
          f"{key}={value!s:.60} is not supported and would change the outputs"
        )


def unparse_config(config: config_lib.ModelConfig) -> dict:
  """Makes config.json for transformers 4 and 5; CheckpointError if it cannot express it."""
  try:
    family = families.find(config.architecture)
  except ValueError as e:
    raise CheckpointError(f"{config.architecture:.60} cannot be saved: {e}") from e
  raw = {
    "architectures": [config.architecture],
    "model_type": family.model_type,
    **{key: getattr(config, name) for name, key in (_KEYS | family.keys).items()},
    "hidden_act": family.hidden_act[0],
    **{key: values[0] for key, values in family.neutral.items() if values},
    "rope_theta": config.rope_theta,
    "rope_scaling": _unparse_scaling(config.rope_scaling),
    **_unparse_layers(config, family),
    "torch_dtype": config.dtype,
    "bos_token_id": None,  # the tokenizer's; transformers would fill in its own
    "eos_token_id": None,
    "pad_token_id": None,
  }
  if config.experts:
    raw |= {key: getattr(config.experts, name) for name, key in _EXPERT_KEYS.items()}
  ours, read_back = dataclasses.asdict(config), dataclasses.asdict(parse_config(raw))
  del ours["unused_rows"]  # the tokenizer's
  lost = [f"{name}={x}" for name, x in ours.items() if read_back[name] != x]
  if lost:
    raise CheckpointError(
      f"{config.architecture} cannot express {', '.join(lost)}; change the architecture or "
      "the field"
    )
  return raw


def _unparse_scaling(scaling: config_lib.Scaling | None) -> dict | None:
  if scaling is None:
    return None
  kind = next(kind for kind, cls in _SCALINGS.items() if isinstance(scaling, cls))
  fields = dataclasses.asdict(scaling).items()
  return {"rope_type": kind} | {_ROPE_KEYS.get(name, name): x for name, x in fields}


def _unparse_layers(config: config_lib.ModelConfig, family: families.Family) -> dict:
  """The keys of sliding windows and of layers without RoPE, where the family has them."""
  kinds, raw = [config.layer_kind(i) for i in range(config.num_layers)], {}
  if family.rotates is not None:
    raw["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
  slides = [kind.window is not None for kind in kinds]
  if family.windows is None or not (any(slides) or family.windows.size):
    return raw
  raw["sliding_window"] = next((kind.window for kind in kinds if kind.window), None)
  if family.windows.by_switch:
    raw["use_sliding_window"] = any(slides)
    raw["max_window_layers"] = [*slides, True].index(True)  # for transformers < 4.53
  if family.windows.listed:
    raw["layer_types"] = [_SLIDING if slide else _FULL for slide in slides]
  if family.local_theta is not None:
    local = [kind.rope.theta for kind in kinds if kind.window and kind.rope]
    raw["rope_local_base_freq"] = (local or [family.local_theta])[0]
  return raw


# --- names of tensors: theirs, and the path in our tree

_MODEL_TENSORS = (
  ("model.embed_tokens.weight", "embedding"),
  ("model.norm.weight", "final_norm/scale"),
  ("lm_head.weight", "head"),
)
# Below `model.layers.{i}.` and `layer_{i}/`. A model may have only some of them.
LAYER_TENSORS = (
  ("input_layernorm.weight", "input_norm/scale"),
  ("self_attn.q_proj.weight", "attention/q_proj"),
  ("self_attn.k_proj.weight", "attention/k_proj"),
  ("self_attn.v_proj.weight", "attention/v_proj"),
  ("self_attn.q_proj.bias", "attention/q_bias"),
  ("self_attn.k_proj.bias", "attention/k_bias"),
  ("self_attn.v_proj.bias", "attention/v_bias"),
  ("self_attn.q_norm.weight", "attention/q_norm/scale"),
  ("self_attn.k_norm.weight", "attention/k_norm/scale"),
  ("self_attn.o_proj.weight", "attention/o_proj"),
  ("post_attention_layernorm.weight", "post_norm/scale"),
  ("mlp.gate_proj.weight", "mlp/gate_proj"),
  ("mlp.up_proj.weight", "mlp/up_proj"),
  ("mlp.down_proj.weight", "mlp/down_proj"),
)


def names(config: config_lib.ModelConfig) -> dict[str, str]:
  """Path in our tree -> Hugging Face's name, of all tensors that a model may have."""
  of_layer = (*LAYER_TENSORS, *families.find(config.architecture).tensors)
  return {ours: theirs for theirs, ours in _MODEL_TENSORS} | {
    f"layer_{i}/{ours}": f"model.layers.{i}.{theirs}"
    for i in range(config.num_layers)
    for theirs, ours in of_layer
  }


def flatten(params: Any) -> dict[str, Any]:
  """Path -> leaf, without the boxes that carry axis names."""
  return traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")


def unflatten(params: dict[str, Any]) -> dict:
  return traverse_util.unflatten_dict(params, sep="/")


# --- tensors of experts, which are one array in our tree


@dataclasses.dataclass
class _Rows:
  """Rows from `start` on of each matrix of a stored f[E O I]."""

  stored: Any
  start: int
  count: int

  def get_shape(self) -> list[int]:
    E, _, *inputs = self.stored.get_shape()
    return [E, self.count, *inputs]

  def get_dtype(self) -> str:
    return self.stored.get_dtype()

  def __getitem__(self, spans: tuple[slice, ...]) -> np.ndarray:
    experts, rows, *inputs = spans
    rows = slice(self.start + rows.start, self.start + rows.stop)
    return self.stored[(experts, rows, *inputs)]


@dataclasses.dataclass
class _Joined:
  """Stored tensors of one shape as one array; read expert by expert."""

  parts: list[Any]

  def get_shape(self) -> list[int]:
    return [len(self.parts), *self.parts[0].get_shape()]

  def get_dtype(self) -> str:
    return self.parts[0].get_dtype()

  def __getitem__(self, spans: tuple[slice, ...]) -> np.ndarray:
    experts, *spans = spans
    return np.stack([part[tuple(spans)] for part in self.parts[experts]])


def _join_experts(stored: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Replaces the tensors of experts by one for each name in `shapes` with `*`.

  Published files have a tensor per expert. transformers 5 may write those of its modules,
  of all experts: `down_proj`, and `gate_up_proj` with the rows of one after the other's.
  """
  joined = {}
  for name in filter(lambda name: "*" in name, shapes):
    (E, rows, *inputs), (before, after) = shapes[name], name.split("*")
    kind = after.split(".")[1]
    fused = before + ("down_proj" if kind == "down_proj" else "gate_up_proj")
    if fused in stored.lazy:
      all_rows = rows if kind == "down_proj" else 2 * rows
      stored.check(fused, (E, all_rows, *inputs))
      start = rows if kind == "up_proj" else 0
      joined[name] = _Rows(stored.lazy[fused], start, rows), [fused]
      continue
    parts = [f"{before}{e}{after}" for e in range(E)]
    for part in parts:
      stored.check(part, (rows, *inputs))
    joined[name] = _Joined([stored.lazy[part] for part in parts]), parts
  for name, (tensor, parts) in joined.items():
    stored.file[name] = stored.file[parts[0]]
    stored.lazy[name] = tensor
    for part in parts:
      stored.lazy.pop(part, None)  # one fused tensor is in two


# --- in and out


def load(
  path: str | pathlib.Path,
  mesh: jax.sharding.Mesh | None = None,
  rules: axes_lib.Rules = axes_lib.ROLLOUT,
  dtype: str | None = None,
) -> tuple[config_lib.ModelConfig, dict]:
  """Reads a folder into the tree of `target.Target`.

  Every device reads only its part of a tensor, and no more than one tensor is on the host
  at a time. None: the default device, and the dtypes as stored.

  Raises:
    CheckpointError: the folder is incomplete, damaged or not supported
  """
  path = pathlib.Path(path)
  config = load_config(path)
  with contextlib.ExitStack() as stack:
    stored = _text_tensors(open_tensors(path, stack))
    if config.num_layers > len(stored.lazy):  # abstract_params would take long
      raise CheckpointError(
        f"{path / CONFIG}: num_hidden_layers={config.num_layers}, but there are "
        f"{len(stored.lazy)} tensors; restore the original config.json"
      )
    abstract, theirs = target.abstract_params(config), names(config)
    shapes = {ours: spec.shape for ours, spec in flatten(abstract).items()}
    stored_shapes = {theirs[ours]: shape for ours, shape in shapes.items()}
    _join_experts(stored, stored_shapes)
    _check_tensors(stored, stored_shapes, config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = dict.fromkeys(shapes, device)
    if mesh is not None:
      shardings = flatten(axes_lib.shardings(mesh, rules, abstract))
    made = {
      ours: jax.ShapeDtypeStruct(
        shape,
        dtype or DTYPES[stored.lazy[theirs[ours]].get_dtype()],
        sharding=shardings[ours],
      )
      for ours, shape in shapes.items()
    }
    memory.announce(
      f"the weights of {path} ({', '.join(sorted({str(x.dtype) for x in made.values()}))})",
      list(made.values()),
      smaller="policy, tensor_parallel",
    )
    params = {}
    with progress.counted(f"reading the weights of {path}, tensor", [*made]) as each:
      for ours in each:
        params[ours] = _place(stored.lazy[theirs[ours]], made[ours])
  return config, unflatten(params)


def _place(stored: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
  parts = {}

  def part(index):
    spans = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, like.shape, strict=True))
    if str(spans) not in parts:
      parts[str(spans)] = stored[spans].astype(like.dtype, copy=False)
    return parts[str(spans)]

  return jax.make_array_from_callback(like.shape, like.sharding, part)


def _check_tensors(
  stored: Tensors, shapes: dict[str, tuple[int, ...]], config: config_lib.ModelConfig
) -> None:
  head, embedding = "lm_head.weight", "model.embed_tokens.weight"
  for name in sorted(stored.lazy.keys() | shapes.keys()):
    is_copy = name == head and config.tie_embeddings
    is_buffer = name.endswith("rotary_emb.inv_freq")  # of old exports
    if not is_copy and not is_buffer:
      stored.check(name, shapes.get(name))
  if config.tie_embeddings and head in stored.lazy:
    stored.check(head, shapes[embedding])
    head, embedding = stored.lazy[head], stored.lazy[embedding]
    for i in range(0, config.vocab_size, 4096):
      rows = slice(i, min(i + 4096, config.vocab_size))
      if not np.array_equal(head[rows], embedding[rows]):
        raise CheckpointError(
          f"{stored.file['lm_head.weight']}: config.json ties the head to the embedding, "
          "but lm_head.weight differs from it; set tie_word_embeddings to false"
        )


def save(
  path: str | pathlib.Path,
  config: config_lib.ModelConfig,
  params: dict,
  max_file_bytes: int = MAX_FILE_BYTES,
  dtype: str | None = None,
) -> None:
  """Writes a folder that transformers and `load` read; see `replacing`.

  Without tokenizer and generation_config.json. Every process calls, the first one writes.
  Models larger than `max_file_bytes` are split into shards with an index. The config's
  dtype is config.json's; `dtype` is that of the stored weights, None: each parameter's.

  Raises:
    CheckpointError: params or config do not fit the architecture
  """
  raw, theirs, tensors = unparse_config(config), names(config), flatten(params)
  shapes = {name: x.shape for name, x in flatten(target.abstract_params(config)).items()}
  for name in sorted(shapes.keys() | tensors.keys()):
    found = tensors[name].shape if name in tensors else "nothing"
    if found != shapes.get(name, "nothing"):
      raise CheckpointError(
        f"parameter {name}: the config implies {shapes.get(name, 'nothing')}, found "
        f"{found}; save the parameters with the config they were made with"
      )
  stored = {}  # name -> the array, and which expert's part of it
  for ours, name in theirs.items():
    if ours in tensors:
      experts = range(len(tensors[ours])) if "*" in name else (None,)
      stored |= {name.replace("*", str(e)): (tensors[ours], e) for e in experts}
  dtypes = {name: jnp.dtype(dtype or x.dtype) for name, (x, _) in stored.items()}
  sizes = {
    name: x.size // (1 if e is None else len(x)) * dtypes[name].itemsize
    for name, (x, e) in stored.items()
  }

  def read(name):
    x, e = stored[name]
    return processes.fetch(x if e is None else x[e]).astype(dtypes[name], copy=False)

  if not processes.is_first():  # takes part in `fetch`
    return write_weights(None, sizes, read, max_file_bytes)
  with progress.shown(f"writing {path}"), replacing(pathlib.Path(path)) as folder:
    write_weights(folder, sizes, read, max_file_bytes)
    write_json(folder / CONFIG, raw)
