"""Hugging Face's config.json <-> ModelConfig.

What cannot be reproduced exactly is refused, never approximated: `parse` raises on every
key that would change the outputs, `unparse` on every field that would be lost.
"""

import dataclasses
from typing import Any

from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import hf_folder
from tlt_jax.models import json_fields

# Keys of config.json that change the outputs, and the values that do not. `families` has
# those of one family alone.
_NEUTRAL = {
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "partial_rotary_factor": (1,),
  "quantization_config": (),
}


def parse(raw: dict) -> config_lib.ModelConfig:
  """Turns the content of config.json into a ModelConfig.

  Raises:
    CheckpointError: it describes what we would compute differently, or no model
    ValueError: it makes no model
  """
  architecture, family = _family(raw)
  rope = {**_get(raw, "rope_parameters", dict, {}), **_get(raw, "rope_scaling", dict, {})}
  _refuse_unsupported(raw, rope, family)
  dtype = _get(raw, "dtype", str, _get(raw, "torch_dtype", str, "float32"))
  dtype = dtype.removeprefix("torch.")
  if dtype not in config_lib.DTYPES:
    raise hf_folder.CheckpointError(
      f"dtype {dtype:.60} is not supported; set one of {', '.join(config_lib.DTYPES)}"
    )
  width, num_heads = _need(raw, "hidden_size"), _need(raw, "num_attention_heads")
  num_kv_heads = _get(raw, "num_key_value_heads", int, num_heads)
  if num_heads % num_kv_heads:
    raise hf_folder.CheckpointError(
      f"num_attention_heads={num_heads} must be a multiple of "
      f"num_key_value_heads={num_kv_heads}; restore the original config.json"
    )
  theta = _get(rope, "rope_theta", float, _get(raw, "rope_theta", float, 10_000.0))
  return config_lib.ModelConfig(
    architecture=architecture,
    vocab_size=_need(raw, "vocab_size"),
    width=width,
    mlp_width=_need(raw, "intermediate_size"),
    num_layers=_need(raw, "num_hidden_layers"),
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=_get(raw, "head_dim", int, family.head_dim or width // num_heads),
    rope_theta=float(theta),
    rope_scaling=_parse_rope_scaling(rope),
    norm_eps=_get(raw, "rms_norm_eps", float, 1e-6),
    max_position=_get(raw, "max_position_embeddings", int, family.max_position),
    qkv_bias=family.qkv_bias,
    qk_norm=family.qk_norm,
    tie_embeddings=_get(raw, "tie_word_embeddings", bool, False),
    dtype=dtype,
  )


def _get(raw: dict, key: str, kind: type, default: Any = None) -> Any:
  """The value of a key, of its kind; the default where it is missing or null."""
  if raw.get(key) is None:
    return default
  return json_fields.check(key, raw[key], kind)


def _need(raw: dict, key: str, kind: type = int) -> Any:
  """The value of a key that must be there, of its kind."""
  if raw.get(key) is None:
    raise hf_folder.CheckpointError(f"'{key}' is missing; restore the original config.json")
  return json_fields.check(key, raw[key], kind)


def _family(raw: dict) -> tuple[str, families.Family]:
  """The first of `architectures`, and its family, if it is supported."""
  names = _get(raw, "architectures", list) or ["(none)"]
  try:
    return names[0], families.find(str(names[0]))
  except ValueError as e:
    raise hf_folder.CheckpointError(f"{e} (architectures)") from e


def _parse_rope_scaling(rope: dict) -> config_lib.RopeScaling | None:
  """Reads `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
  if any(isinstance(value, dict) for value in rope.values()):
    raise hf_folder.CheckpointError(
      "RoPE parameters per layer type are not supported; use a model with one RoPE"
    )
  kind = _get(rope, "rope_type", str, _get(rope, "type", str, "default"))
  if kind == "default":
    return None
  if kind != "llama3":
    raise hf_folder.CheckpointError(
      f"rope_type {kind:.60} is not supported (supported: default, llama3); use a model "
      "without it, or, where its authors call it optional, remove rope_scaling"
    )
  theirs = {"original_max_position": "original_max_position_embeddings"}
  fields = dataclasses.fields(config_lib.RopeScaling)
  missing = [theirs.get(f.name, f.name) for f in fields]
  missing = [key for key in missing if rope.get(key) is None]
  if missing:
    raise hf_folder.CheckpointError(
      f"rope_type llama3 lacks {', '.join(missing)}; restore the original config.json"
    )
  scaling = config_lib.RopeScaling(
    **{f.name: _need(rope, theirs.get(f.name, f.name), f.type) for f in fields}
  )
  if scaling.low_freq_factor >= scaling.high_freq_factor:
    raise hf_folder.CheckpointError(
      f"low_freq_factor={scaling.low_freq_factor} must be below high_freq_factor="
      f"{scaling.high_freq_factor}; restore the original config.json"
    )
  return scaling


def _refuse_unsupported(raw: dict, rope: dict, family: families.Family) -> None:
  """Raises on a feature that would silently change the outputs."""
  neutral = {"hidden_act": family.hidden_act, **_NEUTRAL, **family.neutral}
  for key, harmless in neutral.items():
    if key == "attention_bias" and family.qkv_bias:
      continue  # Qwen2 has its biases whatever this key says
    for value in (raw.get(key), rope.get(key)):
      if value is not None and value not in harmless:
        raise hf_folder.CheckpointError(
          f"{key}={value!s:.60} is not supported and would change the outputs; use a model "
          "without it"
        )
  layer_types = _get(raw, "layer_types", list)
  if layer_types is not None:
    sliding = any(kind != "full_attention" for kind in layer_types)
  else:
    sliding = (
      _get(raw, "use_sliding_window", bool, False)
      and raw.get("sliding_window", 4096) is not None
      and (
        raw.get("max_window_layers") == 0
        or _need(raw, "num_hidden_layers") > _get(raw, "max_window_layers", int, 28)
      )
    )
  if sliding:
    raise hf_folder.CheckpointError(
      "sliding-window attention (use_sliding_window or layer_types) is not supported "
      "and would change the outputs; use a model with full attention"
    )


def unparse(config: config_lib.ModelConfig) -> dict:
  """Turns a ModelConfig into config.json, in the spelling that transformers 4 and 5 read.

  Raises:
    CheckpointError: its architecture cannot express it
  """
  try:
    family = families.find(config.architecture)
  except ValueError as e:
    raise hf_folder.CheckpointError(
      f"architecture {config.architecture:.60} cannot be saved: {e}"
    ) from e
  scaling = config.rope_scaling
  raw = {
    "architectures": [config.architecture],
    "model_type": family.model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp_width,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": family.hidden_act[0],
    "rope_theta": config.rope_theta,
    "rope_scaling": scaling and _unparse_rope_scaling(scaling),
    "rms_norm_eps": config.norm_eps,
    "max_position_embeddings": config.max_position,
    "tie_word_embeddings": config.tie_embeddings,
    "torch_dtype": config.dtype,
    "bos_token_id": None,  # the tokenizer's; transformers would fill in its own
    "eos_token_id": None,
  }
  _check_nothing_lost(config, parse(raw))
  return raw


def _check_nothing_lost(
  config: config_lib.ModelConfig, read_back: config_lib.ModelConfig
) -> None:
  """Raises if config.json would be read as another model."""
  lost = [
    f"{f.name}={getattr(config, f.name)}"
    for f in dataclasses.fields(config)
    if getattr(config, f.name) != getattr(read_back, f.name)
  ]
  if lost:
    raise hf_folder.CheckpointError(
      f"{config.architecture} cannot express {', '.join(lost)}; change the "
      "architecture or the field"
    )


def _unparse_rope_scaling(scaling: config_lib.RopeScaling) -> dict:
  return {
    "rope_type": "llama3",
    "factor": scaling.factor,
    "low_freq_factor": scaling.low_freq_factor,
    "high_freq_factor": scaling.high_freq_factor,
    "original_max_position_embeddings": scaling.original_max_position,
  }
