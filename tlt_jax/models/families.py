"""Families of decoders, by the name of an architecture in config.json.

A custom one is a module with `FAMILY`: `"architectures": ["my_package.my_module"]`.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import flax.linen as nn

from tlt_jax import named
from tlt_jax.models import gemma3
from tlt_jax.models import layers
from tlt_jax.models import moe


@dataclasses.dataclass(frozen=True)
class Windows:
  """How config.json says which layers have a sliding window."""

  size: int | None  # where `sliding_window` is missing
  # (config.json, layer) -> whether it has one, where `layer_types` is missing.
  slides: Callable[[Mapping[str, Any], int], bool]
  by_switch: bool = False  # only if `use_sliding_window` is true
  listed: bool = True  # whether `layer_types` counts


@dataclasses.dataclass(frozen=True)
class Family:
  """The fixed properties of a family, and its defaults for keys missing in config.json.

  A `block` is a flax module with the signature of `layers.Block`. Its parameters are
  found by the table of names in `hf`, which `tensors` extends.
  """

  model_type: str
  qkv_bias: bool = False
  qk_norm: bool = False
  head_dim: int | None = None  # None: width / heads
  max_position: int = 2048
  hidden_act: tuple[str, ...] = ("silu", "swish")  # names of the block's activation
  # Further keys of config.json that change the outputs unless they have these values.
  neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  block: type[nn.Module] = layers.Block
  norm: type[nn.Module] = layers.RMSNorm  # the final one
  scales_embedding: bool = False  # by the root of the width
  windows: Windows | None = None  # None: no layer has one
  # (config.json, layer) -> whether it has RoPE; None: all have.
  rotates: Callable[[Mapping[str, Any], int], bool] | None = None
  local_theta: float | None = None  # of RoPE in layers with a window; None: that of others
  # Further fields of ModelConfig that config.json has: their keys, and values if missing.
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Further tensors of a layer: name in the file, path in our tree. `*` stands for the
  # number of an expert, whose tensors are one array [E ...] of ours.
  tensors: tuple[tuple[str, str], ...] = ()
  # The architecture whose layers have a dense MLP instead of experts, as drafters do; None:
  # there are no experts.
  dense: str | None = None


def _number(raw: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
  value = default if raw.get(key) is None else raw[key]
  if type(value) is not int or value < least:
    raise ValueError(f"{key}={value!r:.60} is not a number of layers")
  return value


def _in_all(raw: Mapping[str, Any], layer: int) -> bool:
  del raw, layer
  return True


def _after_full_layers(raw: Mapping[str, Any], layer: int) -> bool:
  return layer >= _number(raw, "max_window_layers", 28, least=0)


def _but_every_sixth(raw: Mapping[str, Any], layer: int) -> bool:
  return (layer + 1) % _number(raw, "sliding_window_pattern", 6) != 0


def _with_rope(raw: Mapping[str, Any], layer: int) -> bool:
  listed = raw.get("no_rope_layers")
  if listed is None:
    return (layer + 1) % _number(raw, "no_rope_layer_interval", 4) != 0
  if not isinstance(listed, list) or len(listed) <= layer or listed[layer] not in (0, 1):
    raise ValueError(f"no_rope_layers={listed!s:.60} is not a list of 0 or 1 per layer")
  return listed[layer] == 1


def _without_rope(raw: Mapping[str, Any], layer: int) -> bool:
  return not _with_rope(raw, layer)


QWEN_WINDOWS = Windows(4096, _after_full_layers, by_switch=True)
_QWEN = dict(max_position=32768, windows=QWEN_WINDOWS)

FAMILIES = {
  "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, **_QWEN),
  "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, **_QWEN),
  "Qwen3MoeForCausalLM": Family(
    "qwen3_moe",
    qk_norm=True,
    neutral=dict(decoder_sparse_step=(1,), mlp_only_layers=([],)),
    block=moe.Block,
    tensors=moe.TENSORS,
    dense="Qwen3ForCausalLM",
    **_QWEN,
  ),
  "LlamaForCausalLM": Family("llama"),
  "MistralForCausalLM": Family(
    "mistral",
    max_position=131072,
    windows=Windows(4096, _in_all, listed=False),
  ),
  "SmolLM3ForCausalLM": Family(
    "smollm3",
    max_position=32768,
    windows=Windows(None, _without_rope, by_switch=True),
    rotates=_with_rope,
    defaults=dict(rope_theta=2e6, tie_embeddings=True),
  ),
  "Gemma3ForCausalLM": Family(
    "gemma3_text",
    qk_norm=True,
    head_dim=256,
    max_position=131072,
    hidden_act=("gelu_pytorch_tanh",),
    neutral=dict(hidden_activation=("gelu_pytorch_tanh",)),
    block=gemma3.Block,
    tensors=(
      ("pre_feedforward_layernorm.weight", "pre_mlp_norm/scale"),
      ("post_feedforward_layernorm.weight", "post_mlp_norm/scale"),
    ),
    norm=gemma3.RMSNorm,
    scales_embedding=True,
    windows=Windows(4096, _but_every_sixth),
    local_theta=10_000.0,
    keys=dict(query_scalar="query_pre_attn_scalar"),
    # Published files leave out what is as in the class of transformers.
    defaults=dict(
      vocab_size=262208,
      num_heads=8,
      num_kv_heads=4,
      query_scalar=256,
      rope_theta=1e6,
      tie_embeddings=True,
    ),
  ),
}


def find(architecture: str) -> Family:
  """The family of an architecture; raises ValueError if there is none."""
  if architecture in FAMILIES:
    return FAMILIES[architecture]
  if "." not in architecture:
    raise ValueError(
      f"architecture {architecture:.60} is not supported; supported: "
      f"{', '.join(FAMILIES)}, and custom modules by their dotted names"
    )
  try:
    found = named.load(f"{architecture}.FAMILY")
  except named.NameNotFound as e:
    raise ValueError(f"no model family {architecture[:60]!r}: {e}") from e
  if not isinstance(found, Family):
    raise ValueError(f"{architecture:.60}.FAMILY is not a tlt_jax.models.families.Family")
  return found
