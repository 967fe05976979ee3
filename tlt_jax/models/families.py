"""Families of decoders, by the name of an architecture in config.json.

A custom one is a module with `FAMILY`: `"architectures": ["my_package.my_module"]`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import flax.linen as nn

from tlt_jax import named
from tlt_jax.models import layers
from tlt_jax.models import moe


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
  # Further tensors of a layer: name in the file, path in our tree. `*` stands for the
  # number of an expert, whose tensors are one array [E ...] of ours.
  tensors: tuple[tuple[str, str], ...] = ()
  # The architecture whose layers have a dense MLP instead of experts, as drafters do; None:
  # there are no experts.
  dense: str | None = None


FAMILIES = {
  "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, max_position=32768),
  "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, max_position=32768),
  "Qwen3MoeForCausalLM": Family(
    "qwen3_moe",
    qk_norm=True,
    max_position=32768,
    neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    block=moe.Block,
    tensors=moe.TENSORS,
    dense="Qwen3ForCausalLM",
  ),
  "LlamaForCausalLM": Family("llama"),
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
