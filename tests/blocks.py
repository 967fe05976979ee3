"""What a drafter of blocks computes, by its definition, in NumPy."""

import jax
import numpy as np


def _attention(q, k, v, mask):
  """Of heads [T N H] to [S K H], in float64."""
  group = q.shape[1] // k.shape[1]
  k, v = (np.repeat(x, group, 1) for x in (k, v))
  scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
  scores = np.where(mask, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


def _rotate(x, positions, theta):
  half = x.shape[-1] // 2
  angle = np.asarray(positions)[:, None, None] * theta ** (-np.arange(half) / half)
  x1, x2 = x[..., :half], x[..., half:]
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def definition(config, params, embedding, features, pending, start):
  """The head's input of the guesses after `start` tokens and `pending`: f64[G D].

  `features` f[T E] are those of the tokens, `embedding` f[V D] is the target's.
  """
  c, block = config.layer, config.block
  own = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  embedding = np.asarray(embedding, np.float64)

  def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * scale

  trained = block.mask_token is None
  masks = own["mask"] if trained else embedding[[block.mask_token] * (block.size - 1)]
  x = np.concatenate([embedding[pending][None], masks])
  h = norm(features[:start] @ own["fc"].T, own["hidden_norm"]["scale"])
  if block.anchored:
    last = np.repeat(h[-1:], block.size, 0)
    x = np.concatenate([norm(x, own["input_norm"]["scale"]), last], -1) @ own["join"].T
  at = start + np.arange(block.size)
  places = np.concatenate([np.arange(start), at])
  for i in range(c.num_layers):
    w = own[f"layers_{i}"]
    a = w["attention"]

    def project(y, name, a=a):
      y = y @ a[f"{name}_proj"].T
      y = y.reshape(len(y), -1, c.head_dim)
      return norm(y, a[f"{name}_norm"]["scale"]) if name in "qk" else y

    y = norm(x, w["input_norm"]["scale"])
    both = np.concatenate([h, y])
    k, v = _rotate(project(both, "k"), places, c.rope_theta), project(both, "v")
    seen = at[:, None] - places < (block.window or len(places))
    out = _attention(_rotate(project(y, "q"), at, c.rope_theta), k, v, seen)
    x = x + out.reshape(block.size, -1) @ a["o_proj"].T
    y, m = norm(x, w["post_norm"]["scale"]), w["mlp"]
    gate = y @ m["gate_proj"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up_proj"].T)) @ m["down_proj"].T
  return norm(x, own["norm"]["scale"])[block.size - block.guesses :]
