"""The device program of prompts: each is computed once, into pages that requests share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import few_rows as few_rows_kernels
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib


def make_prefill(
  config: config_lib.ModelConfig,
  mesh: Mesh,
  layout: features_lib.Layout | None,
  kernels: str | None = None,
  few_rows: bool = False,
) -> Callable:
  """(weights, pools, features, tables, tokens i32[r T], start i32[r]) -> pools, features.

  Computes a block of tokens of r prompts a slice, from position `start` on, into their
  pages. `tables` are i32[r M], and that of layers with a window or None. Pools and features
  are donated. With `few_rows` in as many passes as those that draw tokens take: so this
  program, too, gives a row the bits that others give it.
  """

  def whole(weights, kv, features, tokens, at):
    _, new, kv = decode.forward(
      config, layout, weights.target, kv, tokens, at, rotations=weights.rotations
    )
    return kv, _keep(features, kv, at, new)

  def in_passes(weights, kv, features, tokens, at):
    r, T = tokens.shape
    width = min(few_rows_kernels.MOST // r, T)

    def one_pass(i, carry):
      kv, features = carry
      # The last one begins earlier where less is left, and computes the same once more.
      now, place = (
        jax.lax.dynamic_slice_in_dim(x, i * width, width, 1) for x in (tokens, at)
      )
      start = place[:, 0]
      _, new, kv = decode.draw_pass(
        config,
        layout,
        weights.target,
        kv,
        now,
        place,
        few_rows_kernels.chain(start, width),
        seen_lib.causal(start, width),
        weights.rotations,
      )
      return kv, _keep(features, kv, place, new)

    return jax.lax.fori_loop(0, -(-T // width), one_pass, (kv, features))

  def prefill(weights, pools, features, tables, tokens, start):
    pages, near = tables
    kv = cache_lib.KVCache(pools, pages, kernels, near, config.windowed)
    at = start[:, None] + jnp.arange(tokens.shape[1])
    compute = in_passes if few_rows else whole
    kv, features = compute(weights, kv, features, tokens, at)
    return kv.pools, features

  specs = (slices.WHOLE, *(slices.ROWS,) * 5)
  mapped = slices.per_slice(mesh, prefill, specs, slices.ROWS, kernels)
  over = slots_lib.slots_shardings(mesh, config, layout, kernels)
  return jax.jit(
    mapped, donate_argnums=(1, 2), out_shardings=(over.kv.pools, over.features)
  )


def _keep(features, kv: cache_lib.KVCache, at: jax.Array, new: jax.Array):
  return features if features is None else pages_lib.write(features, kv.pages, at, new)
