"""Gemma 3's decoder layer (Gemma Team 2025, https://arxiv.org/abs/2503.19786)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers


class RMSNorm(nn.Module):
  """`layers.RMSNorm` by 1 + scale, all in float32."""

  eps: float
  axis: str = "embed"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.with_logical_partitioning(nn.initializers.zeros, (self.axis,))
    scale = self.param("scale", init, (x.shape[-1],))
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)


gelu = functools.partial(jax.nn.gelu, approximate=True)


class Block(nn.Module):
  """`layers.Block` with norms before and after attention and MLP."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    by: layers.Rotation | None,
    seen: layers.Sight,
    layer_cache: cache_lib.LayerCache | None = None,
    start: jax.Array | None = None,
  ) -> tuple[jax.Array, cache_lib.LayerCache | None]:
    norm = functools.partial(RMSNorm, self.config.norm_eps)
    attention = layers.Attention(self.config, norm=RMSNorm, name="attention")
    y = norm(name="input_norm")(x)
    y, layer_cache = attention(y, by, seen, layer_cache, start)
    x = x + norm(name="post_norm")(y)
    y = norm(name="pre_mlp_norm")(x)
    y = layers.MLP(self.config, activation=gelu, name="mlp")(y)
    return x + norm(name="post_mlp_norm")(y), layer_cache
