"""The device program of prompts: each is computed once, into pages that requests share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.models import cache as cache_lib
from tlt_jax.models import config as config_lib
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
) -> Callable:
  """(weights, pools, features, pages, tokens i32[r T], start i32[r]) -> pools, features.

  Computes a block of tokens of r prompts a slice, from position `start` on, into their
  pages i32[r M]. Pools and features are donated.
  """

  def prefill(weights, pools, features, pages, tokens, start):
    kv = cache_lib.KVCache(pools, pages, kernels)
    at = start[:, None] + jnp.arange(tokens.shape[1])
    _, new, kv = decode.forward(
      config, layout, weights.target, kv, tokens, at, rotations=weights.rotations
    )
    if features is not None:
      features = pages_lib.write(features, pages, at, new)
    return kv.pools, features

  specs = (slices.WHOLE, *(slices.ROWS,) * 5)
  mapped = slices.per_slice(mesh, prefill, specs, slices.ROWS, kernels)
  over = slots_lib.slots_shardings(mesh, config, layout, kernels)
  return jax.jit(
    mapped, donate_argnums=(1, 2), out_shardings=(over.kv.pools, over.features)
  )
