"""The shape of a decoder: one frozen description for Qwen2, Qwen3 and Llama 3."""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any, Literal

import pydantic

from tlt_jax import ranges

DTYPES = ("float32", "bfloat16", "float16")  # of the computation


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3.1's frequency rescaling of RoPE (`rope_type: llama3`).

  Wavelengths above `original_max_position / low_freq_factor` are stretched by `factor`,
  those below `original_max_position / high_freq_factor` kept, and others interpolated.
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
class Experts:
  """The MLPs of a layer of which each token takes a few; see `moe`."""

  count: ranges.Count  # E
  per_token: ranges.Count  # k
  width: ranges.Count  # F of each
  norm_weights: bool = False  # whether a token's weights add up to one

  def __post_init__(self):
    if self.per_token > self.count:
      raise ValueError(
        f"per_token={self.per_token} experts cannot be chosen from count={self.count}"
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A pre-norm decoder with GQA, RoPE, RMSNorm and a SwiGLU MLP.

  Qwen2 adds a bias to q, k and v; Qwen3 normalises q and k per head; Llama 3 does neither.
  """

  __pydantic_config__ = ranges.STRICT

  architecture: str  # class in Hugging Face, or a custom module, see `families`
  vocab_size: ranges.Count  # V
  width: ranges.Count  # D
  mlp_width: ranges.Count  # F; of dense MLPs
  num_layers: ranges.Count  # L
  num_heads: ranges.Count  # N
  num_kv_heads: ranges.Count  # K
  head_dim: ranges.Count  # H; need not be D / N
  rope_theta: ranges.Base = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: ranges.ShareAboveZero = 1e-6
  max_position: ranges.Tokens = 4096  # longest sequence, in tokens
  qkv_bias: bool = False
  qk_norm: bool = False
  tie_embeddings: bool = False
  dtype: Literal[DTYPES] = "float32"  # of the computation; parameters keep their own
  # Ranges [start, end) of rows that are no token of the tokenizer, and are never drawn.
  unused_rows: tuple[tuple[int, int], ...] = ()
  experts: Experts | None = None  # instead of a dense MLP

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
        f"({self.num_kv_heads})"
      )
    if self.head_dim % 2:
      raise ValueError(f"RoPE needs an even head_dim, got {self.head_dim}")

  def check_split(self, devices: int) -> None:
    """Raises ValueError unless the heads divide evenly over the devices of a slice."""
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
  """Makes a config dataclass from (nested) JSON values; `keys` names fields in errors.

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
