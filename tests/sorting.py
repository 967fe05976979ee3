"""What the filters keep, by sorting each row: what searches for a cut are compared with."""

import jax
import numpy as np
from scipy import special

from tlt_jax.pallas_kernels.find_cut import ref

OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
# What few blocks of the largest logits decide, in rows where some stand out; and what
# needs all.
FEW = (
  dict(top_p=0.5),
  dict(top_k=50, temperature=0.7),
  dict(top_k=40, top_p=0.95, min_p=0.01, temperature=0.7),
  dict(top_k=1),
  dict(top_k=12, top_p=0.6, temperature=1.3),
  dict(min_p=0.05),
)
MANY = (
  {},
  dict(top_p=0.9, temperature=0.0),
  dict(top_p=0.999),
  dict(top_k=20_000),
  dict(top_k=10**6),
  dict(min_p=1.0, temperature=1.7),
)
FEW, MANY = ([{**OFF, **s} for s in settings] for settings in (FEW, MANY))


def columns(settings):
  """The arguments of `find_cut` behind the logits, a row per setting."""
  dtypes = dict(temperature=np.float32, top_k=np.int32, top_p=np.float32, min_p=np.float32)
  return tuple(np.array([s[k] for s in settings], dtype) for k, dtype in dtypes.items())


def some_logits(V, spread, rows=6, peak=12.0):
  """Normally distributed; in every other row a few stand out."""
  rng = np.random.default_rng(7)
  logits = rng.normal(0, spread, (rows, V)).astype(np.float32)
  logits[::2, rng.integers(0, V, 8)] += peak
  return logits


def num_kept(logits, temperature, top_k, top_p, min_p):
  """How many tokens the filters leave, one after the other on the sorted row."""
  x = np.sort(logits.astype(np.float64))[::-1] / (temperature or 1.0)
  p = special.softmax(x[: top_k or None])
  kept = np.cumsum(p) - p < top_p if top_p < 1 else np.ones(len(p), bool)
  return max(np.sum(kept & (p >= min_p * p[0])), 1)


def assert_kept(cut, logits, settings):
  """But for the mass of tokens at the edge of top-p, whose sums are rounded."""
  for row, s in enumerate(settings):
    kept = np.sum(logits[row] >= cut[row])
    rounded = 1e-6 * (s["top_p"] < 1)
    least, most = (
      num_kept(logits[row], **{**s, "top_p": s["top_p"] + sign * rounded})
      for sign in (-1, 1)
    )
    assert least <= kept <= most, (s, kept, least, most)


def find(*args, search=ref.find_cut, **options):
  """A search step by step, which takes less time than to compile it."""
  with jax.disable_jit():
    return np.asarray(search(*args, **options))
