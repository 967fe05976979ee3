"""Hugging Face's config.json <-> ModelConfig.

What cannot be reproduced exactly is refused, never approximated: `parse` raises on every
key that would change the outputs, `unparse` on every field that would be lost.
"""

import dataclasses

from tlt_jax.models import config as config_lib
from tlt_jax.models import hf_folder

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


def parse(raw: dict) -> config_lib.ModelConfig:
  """Turns the content of config.json into a ModelConfig.

  Raises:
    CheckpointError: it describes what we would compute differently
    TypeError, ValueError, ZeroDivisionError: it makes no model
  """
  names = raw.get("architectures") or ["(none)"]
  if names[0] not in _FAMILIES:
    raise hf_folder.CheckpointError(
      f"architecture {names[0]} is not supported; supported: {', '.join(_FAMILIES)}"
    )
  family = _FAMILIES[names[0]]
  rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
  _refuse_unsupported(raw, rope, family)

  def need(key):
    if raw.get(key) is None:
      raise hf_folder.CheckpointError(
        f"'{key}' is missing; restore the original config.json"
      )
    return raw[key]

  def default(key, value):
    return value if raw.get(key) is None else raw[key]

  width, num_heads = need("hidden_size"), need("num_attention_heads")
  dtype = str(default("dtype", default("torch_dtype", "float32")))
  dtype = dtype.removeprefix("torch.")
  if dtype not in _COMPUTE_DTYPES:
    raise hf_folder.CheckpointError(
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
  """Reads `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
  if any(isinstance(value, dict) for value in rope.values()):
    raise hf_folder.CheckpointError(
      "RoPE parameters per layer type are not supported; use a model with one RoPE"
    )
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind == "default":
    return None
  if kind != "llama3":
    raise hf_folder.CheckpointError(
      f"rope_type {kind} is not supported (supported: default, llama3); use a model "
      "without it, or, where its authors call it optional, remove rope_scaling"
    )
  theirs = {"original_max_position": "original_max_position_embeddings"}
  fields = [field.name for field in dataclasses.fields(config_lib.RopeScaling)]
  missing = [theirs.get(f, f) for f in fields if rope.get(theirs.get(f, f)) is None]
  if missing:
    raise hf_folder.CheckpointError(
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
        raise hf_folder.CheckpointError(
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
    raise hf_folder.CheckpointError(
      "sliding-window attention (use_sliding_window or layer_types) is not supported "
      "and would change the outputs; use a model with full attention"
    )


def unparse(config: config_lib.ModelConfig) -> dict:
  """Turns a ModelConfig into config.json, in the spelling that transformers 4 and 5 read.

  Raises:
    CheckpointError: its architecture cannot express it
  """
  family = _FAMILIES.get(config.architecture)
  if family is None:
    raise hf_folder.CheckpointError(
      f"architecture {config.architecture} cannot be saved; supported: "
      f"{', '.join(_FAMILIES)}"
    )
  scaling = config.rope_scaling
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
