"""Arcee's models: Llama with a squared ReLU (no gate) instead of SwiGLU.

Its config.json says `"architectures": ["my_package.arcee"]`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from tlt_jax.models import config as config_lib
from tlt_jax.models import families
from tlt_jax.models import layers


class MLP(nn.Module):
  """`down(relu(up(x))^2)`."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    D, F = self.config.width, self.config.mlp_width
    up = layers.weights(self, "up_proj", (F, D), ("mlp", "embed"))
    down = layers.weights(self, "down_proj", (D, F), ("embed", "mlp"))
    return layers.linear(jnp.square(jax.nn.relu(layers.linear(x, up))), down)


class Block(nn.Module):
  """One decoder layer; see `layers.Block`."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x, by, seen, layer_cache=None, start=None):
    eps = self.config.norm_eps
    y = layers.RMSNorm(eps, name="input_norm")(x)
    y, layer_cache = layers.Attention(self.config, name="attention")(
      y, by, seen, layer_cache, start
    )
    x = x + y
    y = layers.RMSNorm(eps, name="post_norm")(x)
    return x + MLP(self.config, name="mlp")(y), layer_cache


FAMILY = families.Family(
  model_type="arcee", max_position=4096, hidden_act=("relu2",), block=Block
)
