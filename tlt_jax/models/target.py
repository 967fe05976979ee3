"""The target: the decoder-only LLM that RL trains."""

from collections.abc import Sequence
import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib


def matmul_precision(dtype: str) -> str:
  """The precision of products: by default accelerators round those of float32."""
  return "highest" if dtype == "float32" else "default"


def embed(
  config: config_lib.ModelConfig, embedding: jax.Array, tokens: jax.Array
) -> jax.Array:
  x = embedding.astype(config.dtype)[tokens]
  if families.find(config.architecture).scales_embedding:
    x = x * jnp.asarray(config.width**0.5, x.dtype)
  return x


class Target(nn.Module):
  config: config_lib.ModelConfig

  def setup(self) -> None:
    c = self.config
    V_D, axes = (c.vocab_size, c.width), ("vocab", "embed")
    self.embedding = layers.weights(self, "embedding", V_D, axes)
    family = families.find(c.architecture)
    self.blocks = [family.block(c, name=f"layer_{i}") for i in range(c.num_layers)]
    self.final_norm = family.norm(c.norm_eps)
    if not c.tie_embeddings:
      self.head = layers.weights(self, "head", V_D, axes)

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    seen: jax.Array | seen_lib.Seen | None = None,
    cache: cache_lib.KVCache | None = None,
    start: jax.Array | None = None,
  ) -> tuple[jax.Array, cache_lib.KVCache | None]:
    """Runs the decoder on i32[B T]: states after the final norm f[B T D], and the cache.

    `seen` has the slots of the cache that each token attends to; without one a mask
    bool[B T T]; None: everything up to the token itself. `start` i32[B] is the slot of each
    row's first token; None: its position.
    """
    features, _, cache = self.with_taps(tokens, positions, (), seen, cache, start)
    return features, cache

  def with_taps(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    taps: Sequence[int],
    seen: jax.Array | seen_lib.Seen | None = None,
    cache: cache_lib.KVCache | None = None,
    start: jax.Array | None = None,
    rotations: layers.Rotation | None = None,
  ) -> tuple[jax.Array, jax.Array | None, cache_lib.KVCache | None]:
    """As `__call__`, with the residual stream after layers `taps`: f[B T len(taps)*D].

    `rotations`: `layers.rotation` of positions 0, 1, ..., if precomputed.
    """
    c = self.config
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions])
    with jax.default_matmul_precision(matmul_precision(c.dtype)):
      T = tokens.shape[1]
      start = positions[:, 0] if start is None else start
      if seen is None and cache is None:
        seen = jnp.arange(T) <= positions[:, :, None]
      elif seen is None:
        seen = seen_lib.causal(start, T)
      by = layers.rotation(c, positions, rotations)
      of_kind = functools.cache(lambda kind: layers.of_kind(c, kind, by, seen, positions))
      x = embed(c, self.embedding, tokens)
      new_cache, tapped = [], []
      for i, block in enumerate(self.blocks):
        layer = None if cache is None else cache[i]
        x, layer = block(x, *of_kind(c.layer_kind(i)), layer, start)
        new_cache.append(layer)
        if i in taps:
          tapped.append(x)
      tapped = jnp.concatenate(tapped, -1) if taps else None
      if cache is not None:
        cache = cache.with_layers(new_cache)
      return self.final_norm(x), tapped, cache

  def logits(
    self,
    features: jax.Array,
    head: jax.Array | None = None,
    ids: np.ndarray | None = None,
  ) -> jax.Array:
    """f[... D] -> f32[... V]; or U, of tokens `ids` with their head from `output_head`."""
    chex.assert_axis_dimension(features, -1, self.config.width)
    if head is None:
      head = self.embedding if self.config.tie_embeddings else self.head
    with jax.default_matmul_precision(matmul_precision(self.config.dtype)):
      logits = layers.linear(features, head, jnp.float32)
    return layers.mask_unused(logits, self.config, ids)

  def features_and_logits(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    seen: jax.Array | seen_lib.Seen | None = None,
    cache: cache_lib.KVCache | None = None,
  ) -> tuple[jax.Array, jax.Array, cache_lib.KVCache | None]:
    """Runs decoder and head: features f[B T D], logits f32[B T V] and the cache."""
    features, cache = self(tokens, positions, seen, cache)
    return features, self.logits(features), cache


def output_head(
  config: config_lib.ModelConfig, params: dict, ids: np.ndarray | None = None
) -> jax.Array:
  """The head f[U D] of tokens i32[U], all if None; to be made once, outside of loops."""
  w = params["embedding" if config.tie_embeddings else "head"]
  return w if ids is None else w[ids]


def abstract_params(config: config_lib.ModelConfig) -> dict:
  """Shapes and logical axes of every parameter; traces one layer."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  shallow = Target(dataclasses.replace(config, num_layers=1))
  variables = jax.eval_shape(
    lambda t: shallow.init(jax.random.key(0), t, t, method=Target.features_and_logits),
    tokens,
  )
  params = dict(variables["params"])
  layer = params.pop("layer_0")
  return params | {f"layer_{i}": layer for i in range(config.num_layers)}


def init_params(config: config_lib.ModelConfig, key: jax.Array) -> dict:
  """Random float32 parameters (normal, std 0.02; norms one; biases zero).

  The two projections into the residual stream are scaled down by sqrt(2 L), as in GPT-2.
  """
  tokens = jnp.zeros((1, 1), jnp.int32)
  params = Target(config).init(key, tokens, tokens, method=Target.features_and_logits)[
    "params"
  ]
  params = nn.meta.unbox(params)
  scale = (2 * config.num_layers) ** -0.5
  for i in range(config.num_layers):
    layer = params[f"layer_{i}"]
    layer["attention"]["o_proj"] *= scale
    layer["mlp"]["down_proj"] *= scale
  return params
