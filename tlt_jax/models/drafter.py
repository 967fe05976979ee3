"""The drafter: one decoder layer that guesses the target's next tokens.

It reads pairs: the target's feature of token t, and the embedding of token t+1,
which together say what token t+2 may be. Where the target has not been yet, its own
output takes the feature's place. Embedding and head are the target's own, frozen,
and never copied: they are handed in with every call.

- `eagle2` (Li et al. 2024, https://arxiv.org/abs/2406.16858): the feature is the
  target's last hidden state after the final norm; `fc` joins it with the embedding;
  the layer has no norm at its input, and its output is the next feature.
- `eagle3` (Li et al. 2025, https://arxiv.org/abs/2503.01840): the feature is `fc` of
  the hidden states of three layers; embedding and feature are normed, and side by
  side what attention reads; a norm of its own comes before the head. With a
  `vocab`, it predicts only these U of the target's V tokens, by a head of its own that
  is trained with the rest; else by the target's head, a departure from the paper.
"""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.models import layers
from tlt_jax.models import target

KINDS = ("eagle2", "eagle3")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  """The shape of a drafter; `layer` is the target's config but for its one layer."""

  kind: str  # "eagle2" or "eagle3"
  layer: config_lib.ModelConfig
  taps: tuple[int, ...] = ()  # eagle3: target layers whose output it reads
  fc_bias: bool = False
  vocab: tuple[int, ...] = ()  # eagle3: target ids it predicts, increasing; (): all

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"a drafter's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
    if (self.kind == "eagle3") != bool(self.taps):
      raise ValueError(f"{self.kind} with taps {self.taps}: eagle3 has them, eagle2 not")
    self._check_vocab()

  def _check_vocab(self):
    if not self.vocab:
      return
    if self.kind != "eagle3":
      raise ValueError(f"only eagle3 drafters have a vocab of their own, not {self.kind}")
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
    """E, of what is kept of the target's hidden states."""
    return self.layer.width * max(len(self.taps), 1)

  @property
  def draft_ids(self) -> np.ndarray:
    """i32[V], of each token of the target its place in `vocab`; U: not in it."""
    U = len(self.vocab)
    ids = np.full(self.layer.vocab_size, U, np.int32)
    ids[list(self.vocab)] = np.arange(U)
    return ids


def of_target(config: config_lib.ModelConfig, kind: str = "eagle2", **changes):
  """The drafter that is customary for a target.

  Args:
    changes: other fields of `DrafterConfig`, or of its layer (e.g. `mlp_width`)
  """
  own = {f.name for f in dataclasses.fields(DrafterConfig)}
  layer = dataclasses.replace(
    config, num_layers=1, **{k: v for k, v in changes.items() if k not in own}
  )
  L = config.num_layers
  if kind == "eagle3":  # what enters layers 2, L/2 and L-3
    taps = sorted({min(max(i, 0), L - 1) for i in (1, L // 2 - 1, L - 4)})
    changes = {"taps": tuple(taps)} | changes
  fields = {k: v for k, v in changes.items() if k in own}
  return DrafterConfig(kind=kind, layer=layer, **fields)


def most_frequent(tokens, vocab_size: int, count: int) -> tuple[int, ...]:
  """The `count` ids that occur most often, increasing; of equals the smaller ones.

  How a drafter's vocab is chosen (FR-Spec, https://arxiv.org/abs/2502.14856; EAGLE-3).

  Args:
    tokens: integer arrays of any shapes, such as the responses of the target
    vocab_size: V, of the target
  """
  if not 1 <= count <= vocab_size:
    raise ValueError(f"a drafter's vocab has 1 to {vocab_size} tokens, not {count}")
  times = np.bincount(np.concatenate([np.ravel(x) for x in tokens]), minlength=vocab_size)
  if len(times) > vocab_size:
    raise ValueError(f"token {len(times) - 1} is not in a vocabulary of {vocab_size}")
  chosen = np.argsort(-times, kind="stable")[:count]
  return tuple(np.sort(chosen).tolist())


class Drafter(nn.Module):
  """See the head of this file. Shapes: h f[B T D] is what stands for the feature.

  `target_params` are the target's; of them `embedding` and `head` are used, without
  gradient. `by` is `layers.rotation` of the features' positions.
  """

  config: DrafterConfig

  def setup(self):
    c, layer = self.config, self.config.layer
    D, init = layer.width, nn.initializers.normal(0.02)
    part = nn.with_logical_partitioning
    fc_in = c.feature_width + (D if c.kind == "eagle2" else 0)
    # "fc" is kept whole: its input mixes features of all shards.
    self.fc = self.param("fc", part(init, ("fc_in", "embed")), (fc_in, D))
    if c.fc_bias:
      self.fc_b = self.param(
        "fc_bias", part(nn.initializers.zeros, ("embed",)), (D,)
      )
    wide = 2 * D if c.kind == "eagle3" else D
    self.attention = layers.Attention(layer, input_width=wide)
    self.post_norm = layers.RMSNorm(layer.norm_eps)
    self.mlp = layers.MLP(layer)
    if c.kind == "eagle3":
      self.input_norm = layers.RMSNorm(layer.norm_eps)
      self.hidden_norm = layers.RMSNorm(layer.norm_eps)
      self.norm = layers.RMSNorm(layer.norm_eps)
    if c.vocab:
      self.head = self.param("head", part(init, ("embed", "vocab")), (D, len(c.vocab)))

  def features(self, x: jax.Array) -> jax.Array:
    """What stands for the target's features f[B T E] in this drafter: f[B T D]."""
    if self.config.kind == "eagle2":
      return x
    with self._precision():
      return self._fc(x)

  def keys_values(self, target_params, h, tokens, by):
    """The KV of pairs: feature h f[B T D], and the token after it.

    All that later pairs need of a pair: neither attention nor MLP has to run.
    """
    with self._precision():
      x, _ = self._inputs(target_params, h, tokens)
      return self.attention.keys_values(x, by)

  def __call__(self, target_params, h, tokens, by, mask, cache=None, slots=None):
    """The next features, f[B T D], and the cache.

    Args:
      h: f[B T D]  from `features`, or an earlier output
      tokens: i32[B T]  token after each feature
      mask: bool[B T S]  S = T without a cache
      cache: updated if given, at `slots` i32[B T]
    """
    with self._precision():
      x, residual = self._inputs(target_params, h, tokens)
      y, cache = self.attention(x, by, mask, cache, slots)
      return self._after(residual + y), cache

  def over_cache(self, target_params, h, tokens, by, mask, cache):
    """As `__call__`, for pairs whose KV the cache holds already: f[B T D]."""
    with self._precision():
      x, residual = self._inputs(target_params, h, tokens)
      y = self.attention.attend_to(x, by, mask, cache.k, cache.v)
      return self._after(residual + y)

  def unroll(self, target_params, features, tokens, by, mask, steps: int):
    """Drafts `steps` tokens from every pair at once, as training needs it.

    Step 0 reads the target's features; step k at pair t reads what step k-1 gave at
    pair t-1, and attends to true pairs up to t-k and to the k that it drafted since
    (training-time test, EAGLE-3 section 3.2; HASS, https://arxiv.org/abs/2408.15766).
    Worked row, what pair 4 attends to at step 2:

        pair         0  1  2  3  4
        from step    0  0  0  1  2

    Args:
      features: f[B T E]  the target's
      tokens: i32[B T]  token after each
      mask: bool[B T T]  causal, within a sequence
    Returns:
      per step the next features, f[B T D]; those of step k at pairs less than k from
      their sequence's start mean nothing
    """
    with self._precision():
      h, drafted, outputs = self.features(features), [], []
      for _ in range(steps):
        x, residual = self._inputs(target_params, h, tokens)
        drafted.append(self.attention.keys_values(x, by))
        y = self.attention.attend_unrolled(x, by, mask, drafted)
        outputs.append(self._after(residual + y))
        h = jnp.roll(outputs[-1], 1, 1)
      return outputs

  def logits(self, target_params, h: jax.Array) -> jax.Array:
    """f[... D] -> f32[... V], by the target's head; f32[... U] of its own `vocab`."""
    with self._precision():
      if self.config.kind == "eagle3":
        h = self.norm(h)
      w = self.head if self.config.vocab else self._target_head(target_params)
      return jnp.dot(h, w.astype(h.dtype), preferred_element_type=jnp.float32)

  def init_all(self, target_params, features, tokens, positions, mask):
    """Touches every parameter."""
    by = layers.rotation(self.config.layer, positions)
    h, _ = self(target_params, self.features(features), tokens, by, mask)
    return self.logits(target_params, h)

  def _target_head(self, target_params):
    frozen = jax.lax.stop_gradient(target_params)
    tied = self.config.layer.tie_embeddings
    return frozen["embedding"].T if tied else frozen["head"]

  def _precision(self):
    return jax.default_matmul_precision(
      target.matmul_precision(self.config.layer.dtype)
    )

  def _fc(self, x):
    y = x @ self.fc.astype(x.dtype)
    return y + self.fc_b.astype(x.dtype) if self.config.fc_bias else y

  def _inputs(self, target_params, h, tokens):
    """What attention reads, f[B T *], and the residual stream, f[B T D]."""
    embedding = jax.lax.stop_gradient(target_params["embedding"])
    e = embedding.astype(h.dtype)[tokens]
    if self.config.kind == "eagle2":
      x = self._fc(jnp.concatenate([e, h], -1))
      return x, x
    return jnp.concatenate([self.input_norm(e), self.hidden_norm(h)], -1), h

  def _after(self, x):
    return x + self.mlp(self.post_norm(x))


def abstract_params(config: DrafterConfig):
  """Shapes and logical axes of every parameter, without making one."""
  return jax.eval_shape(lambda: _init(config, jax.random.key(0)))


def init_params(config: DrafterConfig, key: jax.Array):
  """Random float32 parameters (normal, std 0.02; norms one; biases zero)."""
  return nn.meta.unbox(_init(config, key))


def _init(config: DrafterConfig, key):
  c = config.layer
  frozen = {
    "embedding": jnp.zeros((c.vocab_size, c.width)),
    "head": jnp.zeros((c.width, c.vocab_size)),
  }
  features = jnp.zeros((1, 1, config.feature_width))
  ids = jnp.zeros((1, 1), jnp.int32)
  mask = jnp.ones((1, 1, 1), bool)
  args = (frozen, features, ids, ids, mask)
  return Drafter(config).init(key, *args, method=Drafter.init_all)["params"]


def init_cache(config: DrafterConfig, batch: int, length: int) -> cache_lib.LayerCache:
  """An empty cache of its one layer."""
  return cache_lib.init(config.layer, batch, length)[0]
