"""Converts the configs and parameters of google-tunix's models, without importing tunix.

Those of tunix 0.1.7 have other names, and matrices of (inputs, outputs) with separate axes
for heads and head_dim. Back: `nnx.update(model, to_tunix(model_config(model), params))`.
"""

import logging
from typing import Any

from flax import nnx
from flax import traverse_util
import flax.linen as nn
import jax

from tlt_jax.models import config as config_lib
from tlt_jax.models import target

# Class of tunix's model -> architecture, and the field for a tied head.
_FAMILIES = {
  "Qwen2": ("Qwen2ForCausalLM", "use_tied_embedding"),
  "Qwen3": ("Qwen3ForCausalLM", "use_tied_embedding"),
  "Llama3": ("LlamaForCausalLM", "weight_tying"),
}
# Their layers ignore the config's rope_theta.
_FIXED_BASE = {"Qwen3": 1e6, "Llama3": 1e6}

# Path in our tree -> path in tunix's. A model may have only some of them.
_OF_MODEL = {
  "embedding": "embedder/input_embedding",
  "final_norm/scale": "final_norm/w",
  "head": "lm_head/w",
}
_OF_LAYER = {  # below `layer_{i}/` and `layers/{i}/`
  "input_norm/scale": "input_layernorm/w",
  "attention/q_proj": "attn/q_proj/w",
  "attention/k_proj": "attn/k_proj/w",
  "attention/v_proj": "attn/v_proj/w",
  "attention/q_bias": "attn/q_bias",
  "attention/k_bias": "attn/k_bias",
  "attention/v_bias": "attn/v_bias",
  "attention/q_norm/scale": "attn/q_norm/w",
  "attention/k_norm/scale": "attn/k_norm/w",
  "attention/o_proj": "attn/o_proj/w",
  "post_norm/scale": "post_attention_layernorm/w",
  "mlp/gate_proj": "mlp/gate_proj/kernel",
  "mlp/up_proj": "mlp/up_proj/kernel",
  "mlp/down_proj": "mlp/down_proj/kernel",
}


def model_config(model: Any, dtype: str | None = None) -> config_lib.ModelConfig:
  """The ModelConfig of tunix's Qwen2, Qwen3 or Llama3; `dtype` None: the model's.

  Raises:
    ValueError: another model, one with experts, or an unsupported dtype
  """
  name, theirs = type(model).__name__, getattr(model, "config", None)
  if name not in _FAMILIES or getattr(theirs, "num_experts", None):
    what = f"{name} with experts" if name in _FAMILIES else name
    raise ValueError(
      f"tlt_jax has rollouts for tunix's dense {', '.join(_FAMILIES)}, not for {what}; use "
      "another rollout_engine"
    )
  architecture, tied = _FAMILIES[name]
  base = _FIXED_BASE.get(name, theirs.rope_theta)
  if base != theirs.rope_theta:
    logging.warning(
      f"tunix trains this {name} with RoPE's base at {base:g}, not at the "
      f"{theirs.rope_theta:g} of its config; rollouts follow the trainer"
    )
  stored = model.embedder.input_embedding.dtype
  dtype = dtype or jax.numpy.dtype(getattr(theirs, "dtype", stored)).name
  if dtype not in config_lib.DTYPES:
    raise ValueError(
      f"rollouts compute in {', '.join(config_lib.DTYPES)}, not in {dtype}: set data_type "
      "in the RolloutConfig"
    )
  return config_lib.ModelConfig(
    architecture=architecture,
    vocab_size=theirs.vocab_size,
    width=theirs.embed_dim,
    mlp_width=theirs.hidden_dim,
    num_layers=theirs.num_layers,
    num_heads=theirs.num_heads,
    num_kv_heads=theirs.num_kv_heads,
    head_dim=theirs.head_dim,
    rope_theta=float(base),
    norm_eps=theirs.norm_eps,
    qkv_bias=name == "Qwen2",
    qk_norm=name == "Qwen3",
    tie_embeddings=getattr(theirs, tied),
    dtype=dtype,
  )


def from_tunix(config: config_lib.ModelConfig, params: Any) -> dict:
  """Converts `nnx.state(model, nnx.Param)` to `Policy.params`, on the same devices.

  Raises:
    ValueError: parameters are unknown (such as LoRA's), missing, or of other shapes
  """
  params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
  flat = traverse_util.flatten_dict(params)
  theirs = {"/".join(map(str, path)): x for path, x in flat.items()}
  shapes, names = _shapes(config), _names(config)
  if unknown := sorted(theirs.keys() - set(names.values())):
    lora = any("lora" in name for name in unknown)
    raise ValueError(
      f"tunix's model has unknown parameters, such as {unknown[0]}; "
      + ("merge LoRA's into the weights" if lora else "is it one of tunix 0.1.7?")
    )
  if missing := sorted(set(names.values()) - theirs.keys()):
    raise ValueError(
      f"tunix's model lacks {len(missing)} parameters, such as {missing[0]}; rollouts need "
      "all parameters of the model (without LoRA)"
    )
  mapped = {}
  for ours, name in names.items():
    x, shape = theirs[name], shapes[ours]
    expected = _stored(config, ours, shape)
    if x.shape != expected:
      raise ValueError(f"tunix's {name} has the shape {x.shape}, not {expected}")
    mapped[ours] = x.reshape(shape[::-1]).T if _is_transposed(ours, shape) else x
  return traverse_util.unflatten_dict(mapped, "/")


def to_tunix(config: config_lib.ModelConfig, params: dict) -> dict:
  """Converts our parameters, nested as `Policy.params`, to tunix's for `nnx.update`."""
  flat = traverse_util.flatten_dict(nn.meta.unbox(params), sep="/")
  theirs = {}
  for ours, name in _names(config).items():
    path = tuple(int(part) if part.isdigit() else part for part in name.split("/"))
    x = flat[ours]
    x = x.T if _is_transposed(ours, x.shape) else x
    theirs[path] = x.reshape(_stored(config, ours, flat[ours].shape))
  return traverse_util.unflatten_dict(theirs)


def _shapes(config: config_lib.ModelConfig) -> dict[str, tuple[int, ...]]:
  abstract = nn.meta.unbox(target.abstract_params(config))
  flat = traverse_util.flatten_dict(abstract, sep="/")
  return {path: x.shape for path, x in flat.items()}


def _names(config: config_lib.ModelConfig) -> dict[str, str]:
  rows = dict(_OF_MODEL)
  for i in range(config.num_layers):
    rows |= {f"layer_{i}/{o}": f"layers/{i}/{name}" for o, name in _OF_LAYER.items()}
  return {ours: rows[ours] for ours in _shapes(config)}


def _is_transposed(path: str, shape: tuple[int, ...]) -> bool:
  return len(shape) == 2 and path != "embedding"


def _stored(
  config: config_lib.ModelConfig, path: str, shape: tuple[int, ...]
) -> tuple[int, ...]:
  if not _is_transposed(path, shape):
    return shape
  outputs, inputs = shape
  if path.endswith(("q_proj", "k_proj", "v_proj")):
    return inputs, outputs // config.head_dim, config.head_dim
  if path.endswith("o_proj"):
    return inputs // config.head_dim, config.head_dim, outputs
  return inputs, outputs
