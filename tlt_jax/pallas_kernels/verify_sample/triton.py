"""verify_sample for NVIDIA GPUs, in Triton: one pass over the logits, in 8 tiles a program.

The pass is bound by instructions. As in `pallas`, most tokens need only the hash and one
exponential, and exact noise is computed for tiles in which a token may win.
"""

import types

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from tlt_jax import noise
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.pallas_kernels.verify_sample import parts

# Fixed, so that a row is split and summed in the same way in every batch.
TILE = 1024  # tokens
TILES = 8  # of a program
NUM_WARPS, NUM_STAGES = 4, 3


def _callable(f):
  """Makes a function of another module callable from this module's kernels."""
  return triton.jit(types.FunctionType(f.__code__, globals()))


mix, high = _callable(noise.mix), _callable(noise.high)  # `high` looks for `mix` here
small_exponential = _callable(noise.small_exponential)


@triton.jit
def unsigned(x):
  """The float32 of the unsigned integer with these bits."""
  return x.to(tl.uint32, bitcast=True).to(tl.float32)


@triton.jit
def gumbel(upper, lower):
  """The noise of tokens from the two halves of their hashes; see `noise.gumbel`."""
  v = unsigned(upper) * (2.0**-32) + (unsigned(lower) + 0.5) * (2.0**-64)
  v = tl.minimum(v, 1.0 - 2.0**-24)
  return -tl.log(tl.where(v < 0.125, small_exponential(v), -tl.log(1.0 - v)))


# Arguments, since Triton's interpreter does not read constants of a module.
CONSTANTS = dict(LOW=noise.LOW, LEAST=parts.LEAST, NO_TOKEN=parts.NO_TOKEN)


def sample_part(
  logits: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
  cut: jax.Array | None,
  offset: jax.Array,
) -> parts.Part:
  R, V = logits.shape
  programs = triton.cdiv(V, TILE * TILES)
  f32, i32 = (jax.ShapeDtypeStruct((programs, R), x) for x in (jnp.float32, jnp.int32))
  out = triton_call.triton_call(
    logits,
    jax.lax.bitcast_convert_type(key, jnp.int32),
    temperature,
    temperature if cut is None else cut,
    jnp.reshape(offset, (1,)).astype(jnp.int32),
    kernel=verify_sample_kernel,
    out_type=[f32, i32, f32, f32, f32, f32],
    grid=(programs, R),
    name="verify_sample",
    num_warps=NUM_WARPS,
    num_stages=NUM_STAGES,
    R=R,
    V=V,
    TILE=TILE,
    TILES=TILES,
    FILTERS=cut is not None,
    **CONSTANTS,
  )
  return parts.combine_all(parts.Part(*out))


@triton.jit
def verify_sample_kernel(
  logits_ptr,
  key_ptr,
  temperature_ptr,
  cut_ptr,  # not read without FILTERS
  offset_ptr,
  best_ptr,
  token_ptr,
  at_ptr,
  top_ptr,
  total_ptr,
  kept_ptr,
  R: tl.constexpr,
  V: tl.constexpr,
  TILE: tl.constexpr,
  TILES: tl.constexpr,
  FILTERS: tl.constexpr,
  LOW: tl.constexpr,
  LEAST: tl.constexpr,
  NO_TOKEN: tl.constexpr,
):
  program, row = tl.program_id(0), tl.program_id(1)
  k0 = tl.load(key_ptr + row * 2)
  k1 = tl.load(key_ptr + row * 2 + 1)
  temperature = tl.load(temperature_ptr + row)
  cut = -float("inf")
  if FILTERS:
    cut = tl.load(cut_ptr + row)
  offset = tl.load(offset_ptr)
  random = temperature > 0
  divisor = tl.where(random, temperature, 1.0)
  inverse = 1.0 / divisor
  filtered = cut > -float("inf")
  logits_ptr += row.to(tl.int64) * V
  best, token, at = -float("inf"), NO_TOKEN, 0.0
  top, total, kept = LEAST, 0.0, 0.0
  start = program * (TILE * TILES)
  for first in range(start, min(start + TILE * TILES, V), TILE):
    place = first + tl.arange(0, TILE)
    inside = place < V
    raw = tl.load(logits_ptr + place, mask=inside, other=-float("inf"))
    # Precise enough for the sums; the sampled token's logit is divided below.
    x = raw * inverse
    m = tl.maximum(top, tl.max(x, 0))
    weight = tl.exp2((x - m) * 1.4426950408889634)  # log2(e)
    old = tl.exp(top - m)
    total = total * old + tl.sum(weight, 0)
    if filtered:
      kept = kept * old + tl.sum(tl.where(raw >= cut, weight, 0.0), 0)
    top = m
    ids = offset + place
    upper = high(k0, k1, ids)
    # Above the rounding error of a perturbed logit; and exp(60) * 2^32 is finite.
    lift = m - best + (1e-4 + 1e-6 * tl.abs(m))
    bound = weight * (tl.exp(tl.minimum(lift, 60.0)) * 4294967296.0)
    may_win = unsigned(upper) <= bound
    if (tl.max(may_win.to(tl.int32), 0) > 0) | (temperature <= 0):
      keep = inside & (raw >= cut)
      exact = tl.div_rn(raw, divisor)
      perturbed = exact + tl.where(random, gumbel(upper, mix(upper ^ LOW)), 0.0)
      perturbed = tl.where(keep, perturbed, -float("inf"))
      highest = tl.max(perturbed, 0)
      winner = tl.min(tl.where(perturbed == highest, ids, NO_TOKEN), 0)
      its_logit = tl.max(tl.where(ids == winner, exact, -float("inf")), 0)
      won = highest > best
      at = tl.where(won, its_logit, at)
      token = tl.where(won, winner, token)
      best = tl.where(won, highest, best)
  if not filtered:
    kept = total
  out = program.to(tl.int64) * R + row
  tl.store(best_ptr + out, best)
  tl.store(token_ptr + out, token)
  tl.store(at_ptr + out, at)
  tl.store(top_ptr + out, top)
  tl.store(total_ptr + out, total)
  tl.store(kept_ptr + out, kept)
