"""The shape of a decoder: one frozen description for all families."""

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
class LinearScaling:
  """All wavelengths are stretched by `factor` (`rope_type: linear`)."""

  factor: ranges.Positive


@dataclasses.dataclass(frozen=True)
class YarnScaling:
  """YaRN (`rope_type: yarn`; Peng et al. 2023, https://arxiv.org/abs/2309.00071).

  Wavelengths that turn more often than `beta_fast` times in `original_max_position` tokens
  are kept, those that turn less often than `beta_slow` times are stretched by `factor`, and
  others interpolated, by their index. With `truncate`, the range of those indices is
  rounded outwards. Rotated queries and keys are longer by `attention_factor`.
  """

  factor: ranges.Positive
  beta_fast: ranges.Positive
  beta_slow: ranges.Positive
  attention_factor: ranges.Positive
  original_max_position: ranges.Tokens
  truncate: bool


Scaling = RopeScaling | LinearScaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

  theta: ranges.Base
  scaling: Scaling | None = None

  def __post_init__(self):
    if isinstance(self.scaling, YarnScaling) and self.theta == 1:
      raise ValueError("YaRN needs a rope_theta above 1: else all wavelengths are equal")


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What may differ between the layers of a model."""

  window: ranges.Tokens | None = None  # tokens that each sees, itself included; None: all
  rope: Rope | None = None  # None: queries and keys are not rotated


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A pre-norm decoder with GQA, RoPE, RMSNorm and a gated MLP.

  Qwen2 adds a bias to q, k and v; Qwen3 and Gemma 3 normalise q and k per head.
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
  rope_scaling: Scaling | None = None
  # Layer i is of kind i % len(layers); (): all see everything, and rotate as above. Kept
  # as the shortest tuple that says the same.
  layers: tuple[LayerKind, ...] = ()
  query_scalar: ranges.Count | None = None  # scores / its root; None: that of head_dim
  norm_eps: ranges.ShareAboveZero = 1e-6
  max_position: ranges.Tokens = 4096  # see `context`
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
    given, count = self.layers, len(self.layers)
    period = next((n for n in range(1, count) if given[n:] == given[: count - n]), count)
    shortest = () if given[:period] == (self._uniform,) else given[:period]
    object.__setattr__(self, "layers", shortest)

  @property
  def context(self) -> int:
    """Longest sequence, in tokens; files with YaRN may still name that of before."""
    scaling = self.rope_scaling
    if not isinstance(scaling, YarnScaling):
      return self.max_position
    return max(self.max_position, int(scaling.factor * scaling.original_max_position))

  @property
  def _uniform(self) -> LayerKind:
    return LayerKind(rope=Rope(self.rope_theta, self.rope_scaling))

  def layer_kind(self, layer: int) -> LayerKind:
    return self.layers[layer % len(self.layers)] if self.layers else self._uniform

  @property
  def windowed(self) -> tuple[bool, ...]:
    """By layer, whether it has a window."""
    return tuple(self.layer_kind(i).window is not None for i in range(self.num_layers))

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Those of the layers, each once; at least one."""
    found = {kind.rope: None for kind in self.layers if kind.rope}
    return tuple(found) or (self._uniform.rope,)

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
