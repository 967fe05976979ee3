"""Initializes a larger model that computes the same function as a smaller one.

As in Net2Net (Chen et al. 2016, https://arxiv.org/abs/1511.05641), but padded instead of
copied: width (the scales of norms are adapted), heads and MLP are padded, and layers are
added whose output is zero. The function is the same up to rounding. New weights that read
from the residual stream are random, those that write to it are zero: all zeros would get no
gradient.
"""

import functools
import logging
import pathlib

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import config as config_lib
from tlt_jax.models import hf
from tlt_jax.models import target

_WRITE = ("o_proj", "down_proj", "embedding")  # into the residual stream


def _embed(small: dict, random: dict, times: float) -> dict:
  """Embeds the smaller model's parameters in the larger one's random ones."""
  flat = traverse_util.flatten_dict(small, sep="/")
  found = {}
  for path, like in traverse_util.flatten_dict(random, sep="/").items():
    found[path] = np.zeros_like(like) if path.endswith(_WRITE) else np.array(like)
    if path in flat:  # else an added layer: it adds zero to the residual stream
      x = np.asarray(flat[path])
      if path.endswith("scale") and x.shape != like.shape:
        x, found[path] = x / times**0.5, found[path] / times**0.5
      found[path][tuple(map(slice, x.shape))] = x
  return traverse_util.unflatten_dict(found, sep="/")


def logits(config: config_lib.ModelConfig, params) -> jax.Array:
  """f32[1 32 V] after some tokens."""

  @jax.jit
  def run(params):
    at = jnp.arange(32)[None]
    apply = functools.partial(target.Target(config).apply, {"params": params})
    features, _ = apply(at % config.vocab_size, at)
    return apply(features, method=target.Target.logits)

  return run(params)


def begin_as(folder: str | pathlib.Path, model: config_lib.ModelConfig, random) -> dict:
  """Parameters of a larger model that computes the same as a smaller policy.

  Args:
    folder: of the smaller policy
    model: the larger one's shape
    random: its random parameters
  Raises:
    ValueError: a model of this shape cannot compute the same
  """
  small, params = hf.load(folder)
  same = ("architecture", "vocab_size", "head_dim", "rope_theta", "qk_norm")
  same += ("qkv_bias", "rope_scaling", "layers", "tie_embeddings")
  larger = ("width", "mlp_width", "num_layers", "num_heads", "num_kv_heads")
  wrong = [name for name in same if getattr(small, name) != getattr(model, name)]
  wrong += [name for name in larger if getattr(small, name) > getattr(model, name)]
  groups = [c.num_heads // c.num_kv_heads for c in (small, model)]
  if groups[0] != groups[1]:
    wrong.append("num_heads / num_kv_heads")
  if wrong:
    raise ValueError(
      f"a model cannot begin as {folder}: {', '.join(wrong)} must be as there, or larger "
      f"where they are sizes (config.model)"
    )
  grown = _embed(params, random, model.width / small.width)
  apart = float(jnp.max(jnp.abs(logits(small, params) - logits(model, grown))))
  logging.info("logits of the two differ by at most %.1e", apart)
  if apart > 1e-3:
    raise ValueError(f"the larger policy's logits differ by {apart:.1e} from the policy's")
  return grown
