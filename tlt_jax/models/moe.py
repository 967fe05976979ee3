"""A mixture of experts: a token's MLP is a weighted sum of a few of many small ones.

No token is dropped, so that an output depends on no other token but for rounding. Routing
is that of Qwen3-MoE (https://arxiv.org/abs/2505.09388), as transformers' Qwen3MoeTopKRouter
computes it.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from tlt_jax import expert_products
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

ROUTING = "routing"  # flax's collection of what routers give, for programs that ask for it
TENSORS = (  # see `families.Family`
  ("mlp.gate.weight", "mlp/router"),
  ("mlp.experts.*.gate_proj.weight", "mlp/gate_proj"),
  ("mlp.experts.*.up_proj.weight", "mlp/up_proj"),
  ("mlp.experts.*.down_proj.weight", "mlp/down_proj"),
)


def route(experts: config_lib.Experts, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Chooses experts for rows, by the router's logits f[R E]: i32[R k], and weights f[R k].

  Of equal probabilities the lower index counts as the larger.
  """
  probabilities = jax.nn.softmax(logits.astype(jnp.float32), -1)
  weight, chosen = jax.lax.top_k(probabilities, experts.per_token)
  if experts.norm_weights:
    weight = weight / jnp.sum(weight, -1, keepdims=True)
  return chosen, weight.astype(logits.dtype)


class Load(NamedTuple):
  """What a layer's router gave tokens, added up."""

  chosen: jax.Array  # f32[E]  tokens that take each expert
  probability: jax.Array  # f32[E]  before k of them are chosen


def load(experts: config_lib.Experts, sown: dict, is_token: jax.Array) -> Load | None:
  """The load of tokens bool[B T]; None if the block has put nothing into `ROUTING`."""
  if not sown:
    return None
  (logits,), (chosen,) = (sown[ROUTING]["mlp"][x] for x in ("logits", "chosen"))
  probabilities = jax.nn.softmax(logits.astype(jnp.float32), -1)
  is_token = is_token.reshape(-1, 1)
  takes = chosen[..., None] == jnp.arange(experts.count)  # [R k E]
  return Load(
    jnp.sum(takes & is_token[..., None], (0, 1)).astype(jnp.float32),
    jnp.sum(jnp.where(is_token, probabilities, 0.0), 0),
  )


class MLP(nn.Module):
  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    experts, D = self.config.experts, self.config.width
    E, F = experts.count, experts.width
    router = layers.weights(self, "router", (E, D), ("expert", "embed"))
    matrices = (
      layers.weights(self, "gate_proj", (E, F, D), ("expert", "mlp", "embed")),
      layers.weights(self, "up_proj", (E, F, D), ("expert", "mlp", "embed")),
      layers.weights(self, "down_proj", (E, D, F), ("expert", "embed", "mlp")),
    )
    rows = x.reshape(-1, D)
    logits = layers.linear(rows, router)
    chosen, weight = route(experts, logits)
    self.sow(ROUTING, "logits", logits)
    self.sow(ROUTING, "chosen", chosen)
    y = expert_products.mix(rows, *(w.astype(x.dtype) for w in matrices), chosen, weight)
    return y.reshape(x.shape)


class Block(nn.Module):
  """`layers.Block` with experts."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    by: layers.Rotation,
    seen: jax.Array | seen_lib.Seen | packed_attention.Segments,
    layer_cache: cache_lib.LayerCache | None = None,
    start: jax.Array | None = None,
  ) -> tuple[jax.Array, cache_lib.LayerCache | None]:
    eps = self.config.norm_eps
    y, layer_cache = layers.Attention(self.config, name="attention")(
      layers.RMSNorm(eps, name="input_norm")(x), by, seen, layer_cache, start
    )
    x = x + y
    y = layers.RMSNorm(eps, name="post_norm")(x)
    return x + MLP(self.config, name="mlp")(y), layer_cache
