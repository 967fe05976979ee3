"""verify_sample for TPUs, in Pallas (Mosaic): one pass over the logits, 8 rows at a time.

Exact noise is computed for few blocks of tokens. A token can win only if its noise, which
is below -log(v), lifts it above the best so far: if v < exp(x - best), where v is the
uniform number of its hash. The softmax needs that exponential anyway, and the upper half
of the hash is a lower bound of v.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax.pallas_kernels.verify_sample import parts

# Fixed, so that a row is split and summed in the same way in every batch.
ROWS, LANES = 8, 128
TILE = 2048  # tokens of a block

_MOST = 60.0  # exp(60) * 2^32 is finite in float32
# Above the rounding error of a perturbed logit.
_SLACK, _ULPS = 1e-4, 1e-6


def sample_part(
  logits: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
  cut: jax.Array | None,
  offset: jax.Array,
  interpret: bool = False,
) -> parts.Part:
  R, V = logits.shape
  tile = min(TILE, pl.cdiv(V, LANES) * LANES)
  key = jax.lax.bitcast_convert_type(key, jnp.int32)
  cut = jnp.full_like(temperature, -jnp.inf) if cut is None else cut
  of_rows = key[:, 0], key[:, 1], temperature, cut
  columns = (jnp.broadcast_to(x[:, None], (R, LANES)) for x in of_rows)
  row = pl.BlockSpec((ROWS, LANES), lambda i, j, offset: (i, 0))
  f32, i32 = (jax.ShapeDtypeStruct((R, LANES), x) for x in (jnp.float32, jnp.int32))
  out = pl.pallas_call(
    functools.partial(_kernel, V=V),
    out_shape=parts.Part(f32, i32, f32, f32, f32, f32),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(pl.cdiv(R, ROWS), pl.cdiv(V, tile)),
      in_specs=[pl.BlockSpec((ROWS, tile), lambda i, j, offset: (i, j))] + [row] * 4,
      out_specs=parts.Part(*[row] * 6),
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    interpret=interpret,
    name="verify_sample",
  )(jnp.reshape(offset, (1,)).astype(jnp.int32), logits, *columns)
  return jax.tree.map(lambda x: x[:, 0], out)


def _kernel(offset, logits, k0, k1, temperature, cut, *out, V):
  """Folds a block of tokens into the parts of some rows; all lanes of `out` are equal."""
  out = parts.Part(*out)
  block = pl.program_id(1)

  @pl.when(block == 0)
  def _():
    empty = parts.Part(-jnp.inf, parts.NO_TOKEN, 0.0, parts.LEAST, 0.0, 0.0)
    for ref, value in zip(out, empty, strict=True):
      ref[...] = jnp.full_like(ref, value)

  t, least = temperature[:, :1], cut[:, :1]
  random = t > 0
  divisor = jnp.where(random, t, 1.0)
  place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
  place += block * logits.shape[1]
  inside = place < V  # the rest of a block is undefined
  raw = jnp.where(inside, logits[...], -jnp.inf)
  keep = inside & (raw >= least)
  # Precise enough for the sums; the sampled token's logit is divided below.
  x = raw * (1.0 / divisor)
  m = jnp.maximum(out.top[...], jnp.max(x, -1, keepdims=True))
  weight = jnp.exp(x - m[:, :1])
  old = jnp.exp(out.top[...] - m)
  kept = jnp.where(keep, weight, 0.0)
  out.total[...] = out.total[...] * old + jnp.sum(weight, -1, keepdims=True)
  out.kept[...] = out.kept[...] * old + jnp.sum(kept, -1, keepdims=True)
  out.top[...] = m

  ids = offset[0] + place
  upper = noise.high(k0[:, :1], k1[:, :1], ids)
  m = m[:, :1]
  lift = m - out.best[:, :1] + (_SLACK + _ULPS * jnp.abs(m))
  bound = weight * jnp.exp(jnp.minimum(lift, _MOST))
  may_win = keep & (_shifted(upper, 8).astype(jnp.float32) * 2.0**-24 <= bound)

  @pl.when(jnp.max(jnp.where(may_win | (keep & ~random), 1.0, 0.0)) > 0)
  def _():
    exact = raw / divisor
    perturbed = exact + jnp.where(random, _gumbel(upper), 0.0)
    perturbed = jnp.where(keep, perturbed, -jnp.inf)
    best = jnp.max(perturbed, -1, keepdims=True)
    first = jnp.where(perturbed == best, ids, parts.NO_TOKEN)
    token = jnp.min(first, -1, keepdims=True)
    at = jnp.max(jnp.where(ids == token, exact, -jnp.inf), -1, keepdims=True)
    won = best > out.best[...]
    out.at[...] = jnp.where(won, at, out.at[...])
    out.token[...] = jnp.where(won, token, out.token[...])
    out.best[...] = jnp.where(won, best, out.best[...])


def _gumbel(upper):
  lower = noise.mix(upper ^ noise.LOW)
  v = _unsigned(upper) * 2.0**-32 + (_unsigned(lower) + 0.5) * 2.0**-64
  v = jnp.minimum(v, 1.0 - 2.0**-24)
  small = noise.small_exponential(v)
  return -jnp.log(jnp.where(v < 0.125, small, -jnp.log(1.0 - v)))


def _shifted(x, count):
  return jax.lax.shift_right_logical(x, jnp.full_like(x, count))


def _unsigned(x):
  return _shifted(x, 16).astype(jnp.float32) * 65536.0 + (x & 0xFFFF).astype(jnp.float32)
