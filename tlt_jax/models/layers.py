"""The layers of a decoder, with their logical axis names."""

from collections.abc import Callable
import itertools
import math
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax import few_rows_matmul
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.pallas_kernels import tree_attention
from tlt_jax.pallas_kernels.tree_attention import ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib

_MASKED = -1e30  # finite: no NaN in a fully masked row, or in 0 * log 0 of an entropy
_BLOCK = 512  # queries, about, with the same keys; the loop over blocks is unrolled


def _param(module: nn.Module, name: str, init, shape, axes) -> jax.Array:
  return module.param(name, nn.with_logical_partitioning(init, axes), shape)


def weights(
  module: nn.Module, name: str, shape: tuple[int, int], axes: tuple[str, str]
) -> jax.Array:
  """Makes a matrix for `linear` of shape (outputs, inputs), as in Hugging Face's files."""
  return _param(module, name, nn.initializers.normal(0.02), shape, axes)


linear = few_rows_matmul.linear


def mask_unused(
  logits: jax.Array, config: config_lib.ModelConfig, ids: np.ndarray | None = None
) -> jax.Array:
  """Rules out tokens that the tokenizer does not have.

  `logits` f32[... U] of tokens `ids` i32[U], all V if None. The rows of a padded embedding
  are like any other to the model, but no text.
  """
  for start, end in config.unused_rows:
    token = jnp.arange(logits.shape[-1]) if ids is None else jnp.asarray(ids)
    logits = jnp.where((start <= token) & (token < end), _MASKED, logits)
  return logits


class RMSNorm(nn.Module):
  """Root-mean-square norm, computed in float32 (Zhang & Sennrich 2019)."""

  eps: float
  axis: str = "embed"

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = _param(self, "scale", nn.initializers.ones, (x.shape[-1],), (self.axis,))
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def rope_frequencies(rope: config_lib.Rope, head_dim: int) -> jax.Array:
  """Radians per position of each pair, f32[H/2].

  As transformers computes them (modeling_rope_utils.py).
  """
  H, scaling = head_dim, rope.scaling
  freq = rope.theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
  if scaling is None:
    return freq
  if isinstance(scaling, config_lib.LinearScaling):
    return freq / scaling.factor
  if isinstance(scaling, config_lib.YarnScaling):
    keep = 1 - _yarn_ramp(rope.theta, scaling, H)
  else:
    turns = scaling.original_max_position * freq / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (
      scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = jnp.clip(keep, 0.0, 1.0)
  return freq * (keep + (1 - keep) / scaling.factor)


def _yarn_ramp(theta: float, scaling: config_lib.YarnScaling, H: int) -> np.ndarray:
  """How far each pair is on the way from kept to stretched, f32[H/2]."""

  def pair(turns):  # the one that turns so often in the original context
    length = scaling.original_max_position / (turns * 2 * math.pi)
    return H * math.log(length) / (2 * math.log(theta))

  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, H - 1)
  high += 0.001 if low == high else 0
  ramp = (np.arange(H // 2, dtype=np.float32) - low) / (high - low)
  return np.clip(ramp, 0, 1).astype(np.float32)


class Rotation(NamedTuple):
  """Of positions, and of each of `ModelConfig.ropes`; R is absent if that is one."""

  cos: jax.Array  # f32[R ... H/2]
  sin: jax.Array  # f32[R ... H/2]

  def at(self, positions: jax.Array) -> "Rotation":
    """Those of positions i32[B T], if self is a table of positions 0, 1, ..."""

    def take(x):
      return x.at[..., positions, :].get(mode="clip")

    return Rotation(*map(take, self))


def rotation(
  config: config_lib.ModelConfig, positions: jax.Array, table: Rotation | None = None
) -> Rotation:
  """The rotation of tokens at positions i32[...].

  XLA fuses it into its uses, and recomputes it for every layer and head: a loop is
  faster with a `table` made outside of it.
  """
  if table is not None:
    return table.at(positions)
  made = [_rotation(rope, config.head_dim, positions) for rope in config.ropes]
  return made[0] if len(made) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *made)


def _rotation(rope: config_lib.Rope, head_dim: int, positions: jax.Array) -> Rotation:
  angle = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
  made = Rotation(jnp.cos(angle), jnp.sin(angle))
  if isinstance(rope.scaling, config_lib.YarnScaling):
    made = Rotation(*(x * rope.scaling.attention_factor for x in made))
  return made


Sight = jax.Array | seen_lib.Seen | packed_attention.Segments  # what tokens attend to


def of_kind(
  config: config_lib.ModelConfig,
  kind: config_lib.LayerKind,
  by: Rotation,
  seen: Sight,
  positions: jax.Array | None = None,
) -> tuple[Rotation | None, Sight]:
  """What layers of a kind rotate by and see, of what the whole model does.

  `positions` i32[B T] are those of the tokens; not needed for segments.
  """
  if kind.rope is None:
    by = None
  elif len(config.ropes) > 1:
    by = Rotation(*(x[config.ropes.index(kind.rope)] for x in by))
  if kind.window is None:
    return by, seen
  if isinstance(seen, packed_attention.Segments):
    return by, seen.replace(window=kind.window)
  if isinstance(seen, seen_lib.Seen):
    return by, seen.within(positions, kind.window)
  return by, seen & seen_lib.near(positions, kind.window)


def apply_rope(x: jax.Array, by: Rotation | None) -> jax.Array:
  """Rotates f[B T N H]; pairs are (h, h + H/2)."""
  if by is None:
    return x
  cos, sin = by.cos[:, :, None], by.sin[:, :, None]
  x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
  y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
  return y.astype(x.dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
  count = max(round(length / _BLOCK), 1)
  ends = [length * i // count for i in range(count + 1)]
  return list(itertools.pairwise(ends))


def attend_causal(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """`ref.attend` where no query attends past its own index (S = T).

  Each block of queries attends only to keys up to its end, up to half the work.
  """
  return jnp.concatenate(
    [
      ref.attend(q[:, start:end], k[:, :, :end], v[:, :, :end], mask[:, start:end, :end])
      for start, end in _blocks(q.shape[1])
    ],
    1,
  )


class Attention(nn.Module):
  config: config_lib.ModelConfig
  input_width: int | None = None  # of what is projected to q, k and v, if not D
  norm: type[nn.Module] = RMSNorm  # of q and k

  def setup(self) -> None:
    c = self.config
    D, N, K, H = c.width, c.num_heads, c.num_kv_heads, c.head_dim
    zeros = nn.initializers.zeros
    width = self.input_width or D
    for name, heads, axis in (("q", N, "heads"), ("k", K, "kv"), ("v", K, "kv")):
      w = weights(self, f"{name}_proj", (heads * H, width), (axis, "embed"))
      setattr(self, f"{name}_proj", w)
      if c.qkv_bias:
        bias = _param(self, f"{name}_bias", zeros, (heads * H,), (axis,))
        setattr(self, f"{name}_bias", bias)
    if c.qk_norm:
      self.q_norm = self.norm(c.norm_eps, "head")
      self.k_norm = self.norm(c.norm_eps, "head")
    self.o_proj = weights(self, "o_proj", (D, N * H), ("embed", "heads"))

  def _project(self, name: str, x: jax.Array) -> jax.Array:
    y = linear(x, getattr(self, f"{name}_proj"))
    if self.config.qkv_bias:
      y = y + getattr(self, f"{name}_bias").astype(x.dtype)
    return y.reshape(*x.shape[:2], -1, self.config.head_dim)

  def keys_values(self, x: jax.Array, by: Rotation | None) -> tuple[jax.Array, jax.Array]:
    """Keys, rotated, and values of tokens f[B T *]: f[B K T H]."""
    k, v = self._project("k", x), self._project("v", x)
    if self.config.qk_norm:
      k = self.k_norm(k)
    return apply_rope(k, by).swapaxes(1, 2), v.swapaxes(1, 2)

  def _queries(self, x: jax.Array, by: Rotation | None) -> jax.Array:
    q = self._project("q", x)
    if self.config.qk_norm:
      q = self.q_norm(q)
    q = apply_rope(q, by)
    scalar = self.config.query_scalar
    # Attention divides by the root of H.
    return q if scalar is None else q * (self.config.head_dim / scalar) ** 0.5

  def attend_to(
    self,
    x: jax.Array,
    by: Rotation | None,
    seen: seen_lib.Seen,
    layer_cache: cache_lib.LayerCache,
  ) -> jax.Array:
    k, v = layer_cache.k.astype(x.dtype), layer_cache.v.astype(x.dtype)
    args = self._queries(x, by), k, v, seen, layer_cache.pages
    return self._output(tree_attention.tree_attention(*args, impl=layer_cache.kernels))

  def _output(self, out: jax.Array) -> jax.Array:
    return linear(out.reshape(*out.shape[:2], -1), self.o_proj)

  def attend_unrolled(
    self,
    x: jax.Array,
    by: Rotation | None,
    mask: jax.Array,
    drafted: list[tuple[jax.Array, jax.Array]],
  ) -> jax.Array:
    """Attends in step n of drafting from every position at once: f[B T D].

    Position t was drafted from position t-n: it attends to the keys of step 0 up to t-n,
    and for each later step j to the key of step j at t-n+j. Worked row: the step whose key
    position 4 attends to at each position, for n = 2 and one sequence:

        position     0  1  2  3  4
        step         0  0  0  1  2

    Rolled by n, row t of `mask` is row t-n (far, step 0); rolled by n-j, the keys of
    step j have at t those of t-n+j (one each).
    """
    c, n = self.config, len(drafted) - 1
    B, T, _ = x.shape
    chex.assert_shape(mask, (B, T, T))
    q = self._queries(x, by).reshape(B, T, c.num_kv_heads, -1, c.head_dim)
    k, v = drafted[0]
    far = jnp.roll(mask, n, 1) & (jnp.arange(T) >= n)[:, None]
    later = [
      (jnp.roll(k, n - j, 2), jnp.roll(v, n - j, 2)) for j, (k, v) in enumerate(drafted)
    ][1:]

    def attend_block(start: int, end: int) -> jax.Array:
      far_scores = jnp.einsum("btkgh,bksh->bkgts", q[:, start:end], k[:, :, :end])
      shown = far[:, None, None, start:end, :end]
      scores = [jnp.where(shown, far_scores, _MASKED)]
      for k_j, _ in later:
        own = jnp.einsum("btkgh,bkth->bkgt", q[:, start:end], k_j[:, :, start:end])
        scores.append(own[..., None])
      scores = jnp.concatenate(scores, -1).astype(jnp.float32) * c.head_dim**-0.5
      weights = jax.nn.softmax(scores, -1).astype(v.dtype)
      out = jnp.einsum("bkgts,bksh->btkgh", weights[..., :end], v[:, :, :end])
      for j, (_, v_j) in enumerate(later):
        out += jnp.einsum("bkgt,bkth->btkgh", weights[..., end + j], v_j[:, :, start:end])
      return out

    out = jnp.concatenate([attend_block(start, end) for start, end in _blocks(T)], 1)
    return self._output(out.reshape(B, T, c.num_heads, c.head_dim))

  def attend_blocks(
    self,
    x: jax.Array,
    by: Rotation | None,
    context: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    size: int,
  ) -> jax.Array:
    """Attends in blocks of `size` tokens to a context, by a mask, and within the block.

    Takes f[B T *], of blocks one after the other, the keys and values f[B K S H] of the
    context, and a mask bool[B T S]. Returns f[B T D].
    """
    c, (B, T, _), (k, v) = self.config, x.shape, context
    M, S, K = T // size, mask.shape[2], c.num_kv_heads
    q = self._queries(x, by).reshape(B, M, size, K, -1, c.head_dim)
    own_k, own_v = (y.reshape(B, K, M, size, c.head_dim) for y in self.keys_values(x, by))
    far = jnp.einsum("bmjkgh,bksh->bkgmjs", q, k)
    far = jnp.where(mask.reshape(B, 1, 1, M, size, S), far, _MASKED)
    own = jnp.einsum("bmjkgh,bkmih->bkgmji", q, own_k)
    scores = jnp.concatenate([far, own], -1).astype(jnp.float32) * c.head_dim**-0.5
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    out = jnp.einsum("bkgmjs,bksh->bmjkgh", weights[..., :S], v)
    out += jnp.einsum("bkgmji,bkmih->bmjkgh", weights[..., S:], own_v)
    return self._output(out.reshape(B, T, c.num_heads, c.head_dim))

  def __call__(
    self,
    x: jax.Array,
    by: Rotation | None,
    seen: Sight,
    layer_cache: cache_lib.LayerCache | None = None,
    start: jax.Array | None = None,
  ) -> tuple[jax.Array, cache_lib.LayerCache | None]:
    """Attends to its own tokens f[B T *], or writes them to a cache and attends to that.

    `seen` has the slots of the cache; without one the segments of the rows, or a mask
    bool[B T T]. `start` i32[B] is the slot of each row's first token.
    """
    k, v = self.keys_values(x, by)
    if isinstance(seen, packed_attention.Segments):
      found = packed_attention.packed_attention(self._queries(x, by), k, v, seen)
      return self._output(found), None
    if layer_cache is None:
      return self._output(attend_causal(self._queries(x, by), k, v, seen)), None
    layer_cache = layer_cache.write(k, v, start)
    return self.attend_to(x, by, seen, layer_cache), layer_cache


class MLP(nn.Module):
  config: config_lib.ModelConfig
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    D, F = self.config.width, self.config.mlp_width
    gate = weights(self, "gate_proj", (F, D), ("mlp", "embed"))
    up = weights(self, "up_proj", (F, D), ("mlp", "embed"))
    down = weights(self, "down_proj", (D, F), ("embed", "mlp"))
    return linear(self.activation(linear(x, gate)) * linear(x, up), down)


class Block(nn.Module):
  config: config_lib.ModelConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    by: Rotation | None,
    seen: Sight,
    layer_cache: cache_lib.LayerCache | None = None,
    start: jax.Array | None = None,
  ) -> tuple[jax.Array, cache_lib.LayerCache | None]:
    eps = self.config.norm_eps
    y, layer_cache = Attention(self.config, name="attention")(
      RMSNorm(eps, name="input_norm")(x), by, seen, layer_cache, start
    )
    x = x + y
    x = x + MLP(self.config, name="mlp")(RMSNorm(eps, name="post_norm")(x))
    return x, layer_cache
