"""Drafters: a few layers that guess the target's next tokens, their config and parameters.

`Drafter` is one layer that guesses token by token; that of `drafters/block.py` guesses a
block in one pass. A `Drafter` reads pairs, the target's feature of token t and the
embedding of token t+1, and predicts token t+2. For drafted tokens its own output replaces
the feature. Embedding and head are the target's, frozen, and passed with every call.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from tlt_jax import axes
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafters
from tlt_jax.models import families
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib


@dataclasses.dataclass(frozen=True)
class Block:
  """How a drafter guesses a block of tokens in one pass, see `drafters/block.py`."""

  __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

  size: int = 8  # K, places of a block
  # Whether place k guesses the token after it, so that a block has K guesses, not K - 1
  # (DSpark; DFlash's guess their own).
  shifted: bool = True
  # Whose embedding unknown places have; None: each place has one that is trained.
  mask_token: int | None = None
  # Whether the context of the last token is an input of each place, not of attention only.
  anchored: bool = True
  window: int | None = 256  # last tokens that a place sees, up to its own; None: all
  rank: int = 32  # of the scores of a token by the one before it; 0: there are none

  def __post_init__(self):
    at_least = dict(size=1 if self.shifted else 2, window=self.size + 1, rank=0)
    for name, least in at_least.items():
      value = getattr(self, name)
      if value is not None and value < least:
        raise ValueError(f"a drafter's block.{name} is at least {least}, not {value}")

  @property
  def guesses(self) -> int:
    return self.size if self.shifted else self.size - 1

  def first(self, guesses: int) -> "Block":
    """What is computed for the first guesses: places after theirs are left out.

    Where the context is an input of each place, a place does as well without those after
    it. Blocks of other drafters stay as they were trained.
    """
    spare = max(self.guesses - guesses, 0) if self.anchored else 0
    return dataclasses.replace(self, size=self.size - spare)


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

  kind: str  # see `drafters.find`
  layer: config_lib.ModelConfig
  taps: tuple[int, ...] = ()  # target layers after which it reads; (): the final norm
  fc_bias: bool = False
  vocab: tuple[int, ...] = ()  # target ids it predicts, increasing; (): all
  block: Block | None = None  # None: it guesses token by token

  def __post_init__(self):
    kind = drafters.find(self.kind)
    if (self.block is None) != (kind.new_block is None):
      needs = "need a" if kind.new_block else "have no"
      raise ValueError(f"{self.kind} drafters {needs} block")
    if not self.block and self.layer.num_layers != 1:
      raise ValueError(f"num_layers={self.layer.num_layers}, but such a drafter has 1")
    if self.block and not 0 <= (self.block.mask_token or 0) < self.layer.vocab_size:
      raise ValueError(
        f"block.mask_token={self.block.mask_token} is none of the target's "
        f"{self.layer.vocab_size} tokens"
      )
    if self.layer.layers:
      raise ValueError("drafters have neither sliding windows nor other kinds of layers")
    if self.taps and kind.customary_taps is None:
      raise ValueError(f"{self.kind} drafters have no taps; leave out {self.taps}")
    if not self.taps and kind.customary_taps is not None:
      raise ValueError(f"{self.kind} drafters need taps: target layers to read after")
    if self.fc_bias and kind.fc_width is None:
      raise ValueError(f"{self.kind} drafters have no fc that could have a bias")
    if self.vocab:
      self._check_vocab()

  def _check_vocab(self) -> None:
    if any(a >= b for a, b in itertools.pairwise(self.vocab)):
      raise ValueError("the ids of a drafter's vocab must increase, each once")
    for id in (self.vocab[0], self.vocab[-1]):
      if not 0 <= id < self.layer.vocab_size:
        raise ValueError(
          f"a drafter's vocab holds {id}; the target has tokens 0 to "
          f"{self.layer.vocab_size - 1}"
        )

  @property
  def feature_width(self) -> int:
    return self.layer.width * max(len(self.taps), 1)

  @property
  def predicts_features(self) -> bool:
    return drafters.find(self.kind).predicts_features

  @property
  def has_own_head(self) -> bool:
    return bool(self.vocab) and drafters.find(self.kind).own_head

  @property
  def target_ids(self) -> np.ndarray:
    """i32[U], the target's ids of the drafter's tokens; U = V without a `vocab`."""
    return np.array(self.vocab or range(self.layer.vocab_size), np.int32)


def of_target(
  config: config_lib.ModelConfig, kind: str = "eagle2", **changes
) -> DrafterConfig:
  """The default drafter for a target; `changes` are fields of it, or of its layer."""
  own = {field.name for field in dataclasses.fields(DrafterConfig)}
  of_layer = {name: value for name, value in changes.items() if name not in own}
  fields = {name: value for name, value in changes.items() if name in own}
  customary_taps = drafters.find(kind).customary_taps
  if customary_taps is not None:
    fields = {"taps": customary_taps(config.num_layers)} | fields
  if new_block := drafters.find(kind).new_block:
    fields = {"block": new_block(config)} | fields
  num_layers = 2 if new_block else 1
  alike = {"num_layers": num_layers, "layers": (), "query_scalar": None}
  if dense := families.find(config.architecture).dense:
    alike |= {"architecture": dense, "experts": None}
  layer = dataclasses.replace(config, **alike | of_layer)
  return DrafterConfig(kind=kind, layer=layer, **fields)


def most_frequent(
  tokens: Iterable[np.ndarray],
  vocab_size: int,
  count: int,
  first: Sequence[int] = (),
  then: Sequence[int] = (),
) -> tuple[int, ...]:
  """A drafter's vocab: the `count` most frequent ids, increasing; ties go to smaller ids.

  FR-Spec (https://arxiv.org/abs/2502.14856); EAGLE-3.

  Args:
    first: ids that it has however rare they are
    then: of the ids that `tokens` lack, those that it has first
  """
  if not 1 <= count <= vocab_size:
    raise ValueError(f"a drafter's vocab has 1 to {vocab_size} tokens, not {count}")
  seen = np.concatenate([np.zeros(0, np.int32), *map(np.ravel, tokens)])
  times = 2 * np.bincount(seen, minlength=vocab_size)
  if len(times) > vocab_size:
    raise ValueError(f"token {len(times) - 1} is not in a vocabulary of {vocab_size}")
  times[list(then)] = np.maximum(times[list(then)], 1)
  times[list(first)] = np.iinfo(times.dtype).max
  chosen = np.argsort(-times, kind="stable")[:count]
  return tuple(np.sort(chosen).tolist())


def shared_head(config: DrafterConfig, target_params: dict) -> jax.Array:
  """The target's head f[U D], of the drafter's tokens, without gradient."""
  ids = config.target_ids if config.vocab else None
  return target.output_head(config.layer, jax.lax.stop_gradient(target_params), ids)


def affine(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
  y = layers.linear(x, w)
  return y if bias is None else y + bias.astype(x.dtype)


class Drafter(nn.Module):
  """The module of a drafter, which its kind's functions take as their first argument.

  Arguments of the methods:

    target_params: `embedding` and `head` are used, without gradient
    h: f[B T D], from `features`, or an earlier output
    tokens: i32[B T], the token after each feature
    by: `layers.rotation` of the features' positions
    seen: which slots of the cache each pair attends to; without a cache a mask,
      bool[B T T]
  """

  config: DrafterConfig
  # How it multiplies: (x f[... I], fc f[D I], its bias or None), (h f[... D], head f[U D]).
  fc_by: Callable[..., jax.Array] = affine
  head_by: Callable[..., jax.Array] = functools.partial(layers.linear, dtype=jnp.float32)

  def setup(self) -> None:
    c, layer, kind = self.config, self.config.layer, drafters.find(self.config.kind)
    D = layer.width
    if kind.fc_width is not None:
      # Not sharded: the input of "fc" mixes features of all shards.
      self.fc = layers.weights(self, "fc", (D, kind.fc_width(c)), ("embed", "fc_in"))
    if c.fc_bias:
      zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("embed",))
      self.fc_b = self.param("fc_bias", zeros, (D,))
    width = D if kind.attention_width is None else kind.attention_width(c)
    self.attention = layers.Attention(layer, input_width=width)
    self.post_norm = layers.RMSNorm(layer.norm_eps)
    self.mlp = layers.MLP(layer)
    kind.setup(self)
    if c.has_own_head:
      self.head = layers.weights(self, "head", (len(c.vocab), D), ("vocab", "embed"))

  def features(self, x: jax.Array) -> jax.Array:
    """Maps the target's features f[... E] to `h`, f[... D]."""
    chex.assert_axis_dimension(x, -1, self.config.feature_width)
    with self._precision():
      return drafters.find(self.config.kind).feature(self, x)

  def inputs(
    self, target_params: dict, h: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The input of attention, f[B T *], and the residual stream, f[B T D]."""
    chex.assert_shape(h, (*tokens.shape, self.config.layer.width))
    embedding = jax.lax.stop_gradient(target_params["embedding"])
    e = embedding.astype(h.dtype)[tokens]
    return drafters.find(self.config.kind).inputs(self, e, h)

  def keys_values(
    self, target_params: dict, h: jax.Array, tokens: jax.Array, by: layers.Rotation
  ) -> tuple[jax.Array, jax.Array]:
    """Keys and values of pairs, which are all that later pairs need of them."""
    with self._precision():
      x, _ = self.inputs(target_params, h, tokens)
      return self.attention.keys_values(x, by)

  def __call__(
    self,
    target_params: dict,
    h: jax.Array,
    tokens: jax.Array,
    by: layers.Rotation,
    seen: jax.Array | seen_lib.Seen,
    cache: cache_lib.LayerCache | None = None,
    start: jax.Array | None = None,
  ) -> tuple[jax.Array, cache_lib.LayerCache | None]:
    """The next features f[B T D], and the cache; `start` i32[B]: first pairs' slots."""
    with self._precision():
      x, residual = self.inputs(target_params, h, tokens)
      y, cache = self.attention(x, by, seen, cache, start)
      return self._after_attention(residual + y), cache

  def over_cache(
    self,
    target_params: dict,
    h: jax.Array,
    tokens: jax.Array,
    by: layers.Rotation,
    seen: seen_lib.Seen,
    cache: cache_lib.LayerCache,
  ) -> jax.Array:
    """Runs the layer for pairs whose keys and values are in the cache: f[B T D]."""
    with self._precision():
      x, residual = self.inputs(target_params, h, tokens)
      y = self.attention.attend_to(x, by, seen, cache)
      return self._after_attention(residual + y)

  def unroll(
    self,
    target_params: dict,
    features: jax.Array,
    tokens: jax.Array,
    by: layers.Rotation,
    mask: jax.Array,
    steps: int,
  ) -> list[jax.Array]:
    """Drafts `steps` tokens from every pair at once, for training.

    Step 0 reads the target's features; step k at pair t reads the output of step k-1 at
    pair t-1, and attends to true pairs up to t-k and to the k that it drafted since
    (training-time test, EAGLE-3 section 3.2; HASS, https://arxiv.org/abs/2408.15766;
    `layers.Attention.attend_unrolled` has a worked row).

    Takes f[B T E] and a mask bool[B T T], causal within a sequence. Returns
    f[B T D] per step; those of step k at pairs less than k from their start are undefined.
    """
    chex.assert_shape(mask, (*tokens.shape, tokens.shape[1]))
    with self._precision():
      h, drafted, outputs = self.features(features), [], []
      for _ in range(steps):
        x, residual = self.inputs(target_params, h, tokens)
        drafted.append(self.attention.keys_values(x, by))
        y = self.attention.attend_unrolled(x, by, mask, drafted)
        outputs.append(self._after_attention(residual + y))
        h = jnp.roll(outputs[-1], 1, 1)
      return outputs

  def output_head(self, target_params: dict) -> jax.Array:
    """The head f[U D] for `logits`, to be made once, outside of loops."""
    return (
      self.head if self.config.has_own_head else shared_head(self.config, target_params)
    )

  def before_head(self, h: jax.Array) -> jax.Array:
    """The input of the head, f[... D]."""
    chex.assert_axis_dimension(h, -1, self.config.layer.width)
    return drafters.find(self.config.kind).before_head(self, h)

  def logits(self, head: jax.Array, h: jax.Array) -> jax.Array:
    """f[... D] -> f32[... U], of the tokens `config.target_ids`, by `output_head`."""
    with self._precision():
      logits = self.head_by(self.before_head(h), head)
    ids = self.config.target_ids if self.config.vocab else None
    return layers.mask_unused(logits, self.config.layer, ids)

  def apply_fc(self, x: jax.Array) -> jax.Array:
    return self.fc_by(x, self.fc, self.fc_b if self.config.fc_bias else None)

  def init_all(
    self,
    target_params: dict,
    features: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
  ) -> jax.Array:
    by = layers.rotation(self.config.layer, positions)
    h, _ = self(target_params, self.features(features), tokens, by, mask)
    return self.logits(self.output_head(target_params), h)

  def _precision(self):
    return jax.default_matmul_precision(target.matmul_precision(self.config.layer.dtype))

  def _after_attention(self, x):
    return x + self.mlp(self.post_norm(x))


def module(config: DrafterConfig) -> nn.Module:
  return (drafters.find(config.kind).module or Drafter)(config)


def abstract_params(config: DrafterConfig) -> dict:
  return jax.eval_shape(lambda: _init(config, jax.random.key(0)))


def init_params(config: DrafterConfig, key: jax.Array) -> dict:
  """Random float32 parameters (normal, std 0.02; norms one; biases zero)."""
  return nn.meta.unbox(_init(config, key))


def new_params(config: DrafterConfig, mesh: jax.sharding.Mesh, seed: int) -> dict:
  layout = axes.shardings(mesh, axes.ROLLOUT, abstract_params(config))
  init = jax.jit(lambda key: init_params(config, key), out_shardings=layout)
  return init(jax.random.key(seed))


def _init(config: DrafterConfig, key):
  c = config.layer
  frozen = {
    "embedding": jnp.zeros((c.vocab_size, c.width)),
    "head": jnp.zeros((c.vocab_size, c.width)),
  }
  variables = module(config).init(
    key,
    target_params=frozen,
    features=jnp.zeros((1, 1, config.feature_width)),
    tokens=jnp.zeros((1, 1), jnp.int32),
    positions=jnp.zeros((1, 1), jnp.int32),
    mask=jnp.ones((1, 1, 1), bool),
    method="init_all",
  )
  return variables["params"]
