"""The shape of a decoder: one frozen description for Qwen2, Qwen3 and Llama 3."""

import dataclasses

DTYPES = ("float32", "bfloat16", "float16")  # that we compute in


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3.1's frequency rescaling of RoPE (`rope_type: llama3`).

  Wavelengths longer than `original_max_position / low_freq_factor` are
  stretched by `factor`, those shorter than `original_max_position /
  high_freq_factor` are kept, and the band between is interpolated.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A pre-norm decoder with GQA, RoPE, RMSNorm and a SwiGLU MLP.

  The three supported families differ only in two switches: Qwen2 adds a bias
  to q, k and v; Qwen3 normalises q and k per head; Llama 3 does neither.
  `head_dim` is free: it need not be `width / num_heads`.
  """

  architecture: str  # the Hugging Face class, e.g. 'Qwen3ForCausalLM'
  vocab_size: int  # V
  width: int  # D
  mlp_width: int  # F
  num_layers: int  # L
  num_heads: int  # N
  num_kv_heads: int  # K
  head_dim: int  # H
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  max_position: int = 4096
  qkv_bias: bool = False
  qk_norm: bool = False
  tie_embeddings: bool = False
  dtype: str = "float32"  # of the computation; parameters keep their own

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
        f"({self.num_kv_heads})"
      )
    if self.head_dim % 2:
      raise ValueError(f"RoPE needs an even head_dim, got {self.head_dim}")
