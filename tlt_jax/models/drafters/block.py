"""Drafters that guess a block of tokens in one pass, after DFlash and DSpark.

Chen et al. 2026 (https://arxiv.org/abs/2602.06036). The *context* is `hidden_norm(fc(x))`
of the hidden states after several layers of the target; every layer of the drafter projects
it to keys and values, and nothing else ever transforms it. A *block* is the last known
token and masks, at the positions that follow the context. Its tokens attend to the context,
and to each other in both directions, so all guesses come from one pass, and the cache holds
what the target has committed: nothing is rolled back.

    position   0  1  2  3 | 4  5  6        context of tokens 0 to 3, a block of three
    token      a  b  c  d | e  .  .        e is pending; . is a mask
    guesses               | f  g  h        shifted: each place guesses the token after it

Guesses of one pass do not know of each other. With a `rank` the scores of token b after
token a, `before[a] @ after[b]`, are added, as in DSpark (https://arxiv.org/abs/2607.05147).

Departures from the papers, which make it learn faster in a rollout's idle time; kind
"dspark" has none but the first:
- The layers are of the target's family (with its biases, norms of q and k, and RoPE).
- Each place also reads the context of the last token, joined with its embedding as in
  EAGLE (`Block.anchored`).
- Each place has a mask of its own, which is trained, not the embedding of a token.
- Blocks see a window, as long as a training row, not all tokens.
"""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafters
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

KeysValues = tuple[jax.Array, jax.Array]  # f[B K T H] each


class _Layer(nn.Module):
  config: config_lib.ModelConfig

  def setup(self) -> None:
    eps = self.config.norm_eps
    self.input_norm, self.post_norm = layers.RMSNorm(eps), layers.RMSNorm(eps)
    self.attention = layers.Attention(self.config)
    self.mlp = layers.MLP(self.config)

  def keys_values(self, h: jax.Array, by: layers.Rotation) -> KeysValues:
    return self.attention.keys_values(h, by)

  def __call__(self, x, by, seen, cache, start):
    y, cache = self.attention(self.input_norm(x), by, seen, cache, start)
    return self._after(x + y), cache

  def with_context(self, x, by, context: KeysValues, mask, size: int) -> jax.Array:
    y = self.attention.attend_blocks(self.input_norm(x), by, context, mask, size)
    return self._after(x + y)

  def _after(self, x):
    return x + self.mlp(self.post_norm(x))


class BlockDrafter(nn.Module):
  """The drafter; D is the target's width, E that of its features, K a block's size.

  Arguments of the methods:

    target_params: `embedding` and `head` are used, without gradient
    by: `layers.rotation` of the tokens' positions
  """

  config: drafter_lib.DrafterConfig

  def setup(self) -> None:
    c, layer = self.config, self.config.layer
    D, rank = layer.width, self.config.block.rank
    self.fc = layers.weights(self, "fc", (D, c.feature_width), ("embed", "fc_in"))
    self.hidden_norm = layers.RMSNorm(layer.norm_eps)
    self.layers = [_Layer(layer) for _ in range(layer.num_layers)]
    self.norm = layers.RMSNorm(layer.norm_eps)
    normal = nn.initializers.normal(0.02)
    if c.block.mask_token is None:
      init = nn.with_logical_partitioning(normal, (None, "embed"))
      self.mask = self.param("mask", init, (c.block.size - 1, D))
    if c.block.anchored:
      self.input_norm = layers.RMSNorm(layer.norm_eps)
      self.join = layers.weights(self, "join", (D, 2 * D), ("embed", "fc_in"))
    if rank:
      V, U = layer.vocab_size, len(c.target_ids)
      self.before = layers.weights(self, "before", (V, rank), ("vocab", "rank"))
      zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab", "rank"))
      self.after = self.param("after", zeros, (U, rank))

  def features(self, x: jax.Array) -> jax.Array:
    """Maps the target's features f[... E] to the context, f[... D]."""
    chex.assert_axis_dimension(x, -1, self.config.feature_width)
    with self._precision():
      return self.hidden_norm(layers.linear(x, self.fc))

  def keys_values(self, h: jax.Array, by: layers.Rotation) -> list[KeysValues]:
    """Each layer's keys and values of a context f[B T D]."""
    with self._precision():
      return [layer.keys_values(h, by) for layer in self.layers]

  def inputs(self, target_params: dict, pending: jax.Array, h: jax.Array) -> jax.Array:
    """Blocks f[B M*K D] that begin with tokens i32[B M], after contexts f[B M D]."""
    c, (B, M) = self.config, pending.shape
    block, shape = c.block, (B, M, c.block.size, c.layer.width)
    embedding = jax.lax.stop_gradient(target_params["embedding"]).astype(c.layer.dtype)
    mask = embedding[block.mask_token] if block.mask_token is not None else self.mask
    masks = jnp.broadcast_to(mask.astype(c.layer.dtype), (B, M, block.size - 1, shape[-1]))
    x = jnp.concatenate([embedding[pending][:, :, None], masks], 2)
    if block.anchored:
      h = jnp.broadcast_to(h[:, :, None], shape)
      x = layers.linear(jnp.concatenate([self.input_norm(x), h], -1), self.join)
    return x.reshape(B, -1, shape[-1])

  def __call__(
    self,
    target_params: dict,
    pending: jax.Array,
    h: jax.Array,
    by: layers.Rotation,
    caches: list[cache_lib.LayerCache],
    start: jax.Array,
  ) -> tuple[jax.Array, list[cache_lib.LayerCache]]:
    """The input of the head, f[B G D], of the G guesses after tokens `pending` i32[B].

    Of the token before `pending`, `h` f[B D] is the context.
    The context is in the caches, in slots before `start` i32[B], to which blocks are
    written.
    """
    with self._precision():
      x = self.inputs(target_params, pending[:, None], h[:, None])
      near, seen, start = self._near(caches[0], start)
      written = []
      for layer, cache in zip(self.layers, caches, strict=True):
        x, wrote = layer(x, by, seen, cache.replace(pages=near), start)
        written.append(cache.replace(pool=wrote.pool))
      return self._before_head(x), written

  def _near(
    self, cache: cache_lib.LayerCache, start: jax.Array
  ) -> tuple[jax.Array, seen_lib.Seen, jax.Array]:
    """The pages of the window, what places see in them, and the first place's slot there.

    Bits for all of the slots: kernels know no lower bound of the slots before `start`.
    """
    block, pages, (P, _, L, _) = self.config.block, cache.pages, cache.k.shape
    places = jnp.arange(block.size)
    if block.window is None:
      every = jnp.ones((len(start), block.size, block.size), bool)
      return pages, seen_lib.of_mask(start, every), start
    count = min(-(-(block.window + block.size - 1) // L) + 1, pages.shape[1])
    first = jnp.maximum(start - block.window + 1, 0) // L
    at = first[:, None] + jnp.arange(count)
    near = jnp.take_along_axis(pages, at, 1, mode="fill", fill_value=P - 1)
    start = start - first * L
    slot, own = jnp.arange(count * L), (start[:, None] + places)[..., None]
    shown = (slot > own - block.window) & (slot < (start + block.size)[:, None, None])
    return near, seen_lib.of_mask(jnp.zeros_like(start), shown), start

  def of_anchors(
    self,
    target_params: dict,
    features: jax.Array,
    anchors: jax.Array,
    pending: jax.Array,
    by: tuple[layers.Rotation, layers.Rotation],
    mask: jax.Array,
  ) -> jax.Array:
    """The input of the head of M blocks of each row at once, for training: f[B M G D].

    Args:
      features: f[B T E]
      anchors: i32[B M], the last token of each block's context
      pending: i32[B M]
      by: of the features' positions, and of those of the blocks, [B M*K]
      mask: bool[B M*K T], the context that each place sees
    """
    with self._precision():
      h = self.features(features)
      context = self.keys_values(h, by[0])
      h = jnp.take_along_axis(h, anchors[..., None], 1)
      x = self.inputs(target_params, pending, h)
      for layer, of_layer in zip(self.layers, context, strict=True):
        x = layer.with_context(x, by[1], of_layer, mask, self.config.block.size)
      x = x.reshape(*pending.shape, self.config.block.size, -1)
      return self._before_head(x)

  def _before_head(self, x: jax.Array) -> jax.Array:
    """f[... K D] -> f[... G D]."""
    block = self.config.block
    return self.norm(x[..., block.size - block.guesses :, :])

  def output_head(self, target_params: dict) -> jax.Array:
    """The head f[U D] for `logits`, to be made once, outside of loops."""
    return drafter_lib.shared_head(self.config, target_params)

  def logits(self, head: jax.Array, x: jax.Array) -> jax.Array:
    """f[... D] -> f32[... U], of the tokens `config.target_ids`, without the selector's."""
    c = self.config
    with self._precision():
      logits = layers.linear(x, head, dtype=jnp.float32)
    return layers.mask_unused(logits, c.layer, c.target_ids if c.vocab else None)

  def selector(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What scores a token after tokens i32[...]: f[... r], and f[U r] of all it may be."""
    dtype = self.config.layer.dtype
    return self.before.astype(dtype)[tokens], self.after.astype(dtype)

  def init_all(
    self,
    target_params: dict,
    features: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
  ) -> jax.Array:
    c = self.config
    at = positions + jnp.arange(c.block.size)
    by = layers.rotation(c.layer, positions), layers.rotation(c.layer, at)
    if c.block.rank:
      self.selector(tokens)
    anchors, mask = jnp.zeros_like(tokens), jnp.repeat(mask, c.block.size, 1)
    return self.of_anchors(target_params, features, anchors, tokens, by, mask)

  def _precision(self):
    return jax.default_matmul_precision(target.matmul_precision(self.config.layer.dtype))


def first(
  config: drafter_lib.DrafterConfig, params: dict, guesses: int
) -> tuple[drafter_lib.DrafterConfig, dict]:
  """The drafter that makes the first guesses only, see `drafter.Block.first`."""
  config = dataclasses.replace(config, block=config.block.first(guesses))
  if "mask" in params:
    params = params | {"mask": params["mask"][: config.block.size - 1]}
  return config, params


def taps(num_layers: int) -> tuple[int, ...]:
  """Three layers, evenly from the second to the third last but one (DFlash's rule)."""
  at = (round(1 + i * (num_layers - 4) / 2) for i in range(3))
  return tuple(sorted({min(max(i, 0), num_layers - 1) for i in at}))


KIND = drafters.Kind(
  new_block=lambda target: drafter_lib.Block(),
  module=BlockDrafter,
  customary_taps=taps,
)
