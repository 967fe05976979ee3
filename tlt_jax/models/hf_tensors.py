"""The tensors of a Hugging Face checkpoint, and where each is in our parameter tree.

One table for all families, and how a row of it turns a stored tensor into ours and back.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from tlt_jax.models import config as config_lib
from tlt_jax.models import families

# Hugging Face name, path in our tree, our axes, their axes. One letter per axis;
# `NH` is one axis of N*H entries, N outermost. Rows of a tensor that a model does
# not have (a tied head, another family's bias) are not used.
_MODEL_TENSORS = (
  ("model.embed_tokens.weight", "embedding", "V D", "V D"),
  ("model.norm.weight", "final_norm/scale", "D", "D"),
  ("lm_head.weight", "head", "D V", "V D"),
)
LAYER_TENSORS = (  # below `model.layers.{i}.` and `layer_{i}/`
  ("input_layernorm.weight", "input_norm/scale", "D", "D"),
  ("self_attn.q_proj.weight", "attention/q_proj", "D N H", "NH D"),
  ("self_attn.k_proj.weight", "attention/k_proj", "D K H", "KH D"),
  ("self_attn.v_proj.weight", "attention/v_proj", "D K H", "KH D"),
  ("self_attn.q_proj.bias", "attention/q_bias", "N H", "NH"),
  ("self_attn.k_proj.bias", "attention/k_bias", "K H", "KH"),
  ("self_attn.v_proj.bias", "attention/v_bias", "K H", "KH"),
  ("self_attn.q_norm.weight", "attention/q_norm/scale", "H", "H"),
  ("self_attn.k_norm.weight", "attention/k_norm/scale", "H", "H"),
  ("self_attn.o_proj.weight", "attention/o_proj", "N H D", "D NH"),
  ("post_attention_layernorm.weight", "post_norm/scale", "D", "D"),
  ("mlp.gate_proj.weight", "mlp/gate_proj", "D F", "F D"),
  ("mlp.up_proj.weight", "mlp/up_proj", "D F", "F D"),
  ("mlp.down_proj.weight", "mlp/down_proj", "F D", "D F"),
)


@dataclasses.dataclass(frozen=True)
class Layout:
  """One row of the table: where a tensor of ours is stored, and how."""

  name: str  # theirs
  ours: tuple[str, ...]  # e.g. ('D', 'N', 'H')
  theirs: tuple[str, ...]  # e.g. ('NH', 'D')

  @property
  def order(self) -> str:
    """Their axes with the joined ones taken apart, e.g. 'NHD'."""
    return "".join(self.theirs)

  @property
  def permutation(self) -> tuple[int, ...]:
    """Our axes in their order; of a matrix, they have the axes of its output first."""
    return tuple(self.ours.index(a) for a in self.order)

  def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the file of a tensor of our `shape`."""
    size = dict(zip(self.ours, shape, strict=True))
    return tuple(math.prod(size[a] for a in group) for group in self.theirs)

  def store(self, x: np.ndarray) -> np.ndarray:
    """Turns our tensor into theirs."""
    y = x.transpose(self.permutation)
    return np.ascontiguousarray(y.reshape(self.stored_shape(x.shape)))

  def load(
    self, stored: Any, shape: tuple[int, ...], index: tuple[slice, ...]
  ) -> np.ndarray:
    """Turns their tensor into `ours[index]`, reading no more rows and columns than that.

    Args:
      stored: a lazy tensor, see `hf_folder.open_tensors`
      shape: of our whole tensor
      index: a slice per axis of ours
    """
    size = dict(zip(self.ours, shape, strict=True))
    span = dict(zip(self.ours, index, strict=True))
    read, inner, cut = [], [], []
    for major, *minor in self.theirs:
      step = math.prod(size[a] for a in minor)
      start, stop, _ = span[major].indices(size[major])
      read.append(slice(start * step, stop * step))
      inner += [stop - start, *(size[a] for a in minor)]
      cut += [slice(None), *(span[a] for a in minor)]
    block = stored[tuple(read)].reshape(inner)[tuple(cut)]
    return block.transpose([self.order.index(a) for a in self.ours])


def layouts(config: config_lib.ModelConfig) -> dict[str, Layout]:
  """Writes the table out for a model: path in our tree -> layout."""
  rows = [(theirs, ours, *axes) for theirs, ours, *axes in _MODEL_TENSORS]
  of_layer = (*LAYER_TENSORS, *families.find(config.architecture).tensors)
  rows += [
    (f"model.layers.{i}.{theirs}", f"layer_{i}/{ours}", *axes)
    for i in range(config.num_layers)
    for theirs, ours, *axes in of_layer
  ]
  return {
    path: Layout(name, tuple(ours.split()), tuple(theirs.split()))
    for name, path, ours, theirs in rows
  }
