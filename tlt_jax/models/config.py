"""The shape of a decoder: one frozen description for Qwen2, Qwen3 and Llama 3."""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any, Literal

import pydantic

from tlt_jax import ranges

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")  # that we compute in


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3.1's frequency rescaling of RoPE (`rope_type: llama3`).

  Wavelengths longer than `original_max_position / low_freq_factor` are
  stretched by `factor`, those shorter than `original_max_position /
  high_freq_factor` are kept, and the band between is interpolated.
  """

  factor: ranges.Positive
  low_freq_factor: ranges.Positive
  high_freq_factor: ranges.Positive
  original_max_position: ranges.Tokens

  def __post_init__(self):
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor="
        f"{self.high_freq_factor}"
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A pre-norm decoder with GQA, RoPE, RMSNorm and a SwiGLU MLP.

  The three supported families differ only in two switches: Qwen2 adds a bias
  to q, k and v; Qwen3 normalises q and k per head; Llama 3 does neither. A family
  of one's own is named by its module (`families`).
  `head_dim` is free: it need not be `width / num_heads`.
  """

  __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

  architecture: str  # name of the model's class in Hugging Face, or of a module
  vocab_size: ranges.Count  # size V of the vocabulary, in tokens
  width: ranges.Count  # width D of the residual stream
  mlp_width: ranges.Count  # width F of the MLP's hidden layer
  num_layers: ranges.Count  # number L of decoder layers
  num_heads: ranges.Count  # number N of query heads
  num_kv_heads: ranges.Count  # number K of heads of keys and values
  head_dim: ranges.Count  # width H of each head
  rope_theta: ranges.Base = 10_000.0  # base of the rotary frequencies
  rope_scaling: RopeScaling | None = None
  norm_eps: ranges.ShareAboveZero = 1e-6  # number added to the mean square in RMSNorm
  max_position: ranges.Tokens = 4096  # longest sequence, in tokens
  qkv_bias: bool = False  # whether q, k and v have a bias
  qk_norm: bool = False  # whether q and k are normalised per head
  tie_embeddings: bool = False  # whether the embedding is the output head too
  # number format of the computation; parameters keep their own
  dtype: Literal[DTYPES] = "float32"

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
        f"({self.num_kv_heads})"
      )
    if self.head_dim % 2:
      raise ValueError(f"RoPE needs an even head_dim, got {self.head_dim}")

  def check_split(self, devices: int) -> None:
    """Raises ValueError unless the heads can be shared out over the devices of a slice."""
    for kind, heads in (("query", self.num_heads), ("key/value", self.num_kv_heads)):
      if heads % devices:
        raise ValueError(
          f"tensor_parallel={devices} does not divide the policy's {heads} {kind} heads: "
          "each device would hold and compute all of them; take a divisor of "
          f"{math.gcd(self.num_heads, self.num_kv_heads)}"
        )


def make(
  cls: type, fields: Mapping[str, Any], keys: Mapping[str, str] | None = None
) -> Any:
  """An instance of a config's dataclass from values of JSON.

  Args:
    cls: the dataclass
    fields: by name; of a field that is a dataclass again, a mapping
    keys: what fields are called in the file, for the error
  Raises:
    ValueError: names a field that is missing, unknown, of another type or out of range
  """
  try:
    return pydantic.TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
  except pydantic.ValidationError as e:
    (error, *_), keys = e.errors(), keys or {}
    path = ".".join(keys.get(str(part), str(part)) for part in error["loc"])
    if error["type"] not in ("missing", "value_error"):
      path += f"={error['input']!r:.60}"
    message = error["msg"].removeprefix("Value error, ")
    raise ValueError(f"{path}: {message}" if path else message) from None
