"""Families of decoders: what the name of an architecture in config.json stands for.

`FAMILIES` has those that are built in. One of your own is a module with `FAMILY`, which
config.json names in place of the architecture: `"architectures": ["my_package.my_module"]`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import flax.linen as nn

from tlt_jax import named
from tlt_jax.models import layers


@dataclasses.dataclass(frozen=True)
class Family:
  """What a family fixes, and its defaults for keys that its config.json may lack.

  A `block` is a flax module with the signature of `layers.Block`. Its parameters are found
  in the file by the table of names in `hf`, and by what `tensors` adds to it.
  """

  model_type: str  # of config.json
  qkv_bias: bool = False  # whether q, k and v have a bias
  qk_norm: bool = False  # whether q and k are normalised per head
  head_dim: int | None = None  # None: width / heads
  max_position: int = 2048  # longest sequence, in tokens
  hidden_act: tuple[str, ...] = ("silu", "swish")  # names of what `block` computes
  # Further keys of config.json that change the outputs, and the values that do not.
  neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  block: type[nn.Module] = layers.Block  # one decoder layer
  # A layer's tensors that no other family has, as in `hf`: their name, our path.
  tensors: tuple[tuple[str, str], ...] = ()


FAMILIES = {
  "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, max_position=32768),
  "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, max_position=32768),
  "LlamaForCausalLM": Family("llama"),
}


def find(architecture: str) -> Family:
  """The family of an architecture.

  Raises:
    ValueError: no such family, or a module that holds none
  """
  if architecture in FAMILIES:
    return FAMILIES[architecture]
  if "." not in architecture:
    raise ValueError(
      f"architecture {architecture:.60} is not supported; supported: "
      f"{', '.join(FAMILIES)}, and modules of one's own by their dotted names"
    )
  try:
    found = named.load(f"{architecture}.FAMILY")
  except named.NameNotFound as e:
    raise ValueError(f"no model family {architecture[:60]!r}: {e}") from e
  if not isinstance(found, Family):
    raise ValueError(f"{architecture:.60}.FAMILY is no tlt_jax.models.families.Family")
  return found
