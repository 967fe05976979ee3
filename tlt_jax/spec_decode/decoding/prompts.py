"""Device programs of prompts: computed once into a store, copied to the slots that ask.

Each runs once per slice on the slice's own rows, see `slices`. The arrays are in `slots`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax import axes
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
  """(params, store, tokens i32[r T], start i32[r], row i32[r]) -> store.

  Computes a block of prompt tokens and writes it into rows of the prompt store
  (donated). Rows outside the store are computed and dropped.

  Args:
    config, mesh: of the target
    layout: of the features that are kept; None: none are
    kernels: those of the store's caches
  """

  def prefill(params, store, tokens, start, row):
    gathered = jax.tree.map(lambda x: x.at[row].get(mode="clip"), store)
    at = start[:, None] + jnp.arange(tokens.shape[1])
    _, features, kv = decode.forward(config, layout, params, gathered.kv, tokens, at)
    kept = gathered.features
    if kept is not None:
      b = jnp.arange(tokens.shape[0])[:, None]
      kept = kept.at[b, at].set(features.astype(kept.dtype), mode="drop")
    updated = slots_lib.PromptStore(kv, kept)
    return jax.tree.map(lambda x, y: x.at[row].set(y, mode="drop"), store, updated)

  rows = slices.ROWS
  specs = (slices.WHOLE, rows, rows, rows, rows)
  mapped = slices.per_slice(mesh, prefill, specs, rows, kernels)
  kv, over = slots_lib.cache_sharding(mesh, config), axes.sharding(mesh, axes.DATA)
  store = slots_lib.PromptStore(kv, over if layout else None)
  return jax.jit(mapped, donate_argnums=1, out_shardings=store)


def make_admit(
  config: config_lib.ModelConfig, mesh: Mesh, layout: features_lib.Layout | None
) -> Callable:
  """(kv, features, store, row i32[B]) -> kv, features.

  Slots whose `row` is not negative take over that row of the prompt store; the others
  stay as they are. KV and features are donated.
  """

  def admit(kv, features, store, row):
    taken = row >= 0

    def copy(old, stored, axis):
      prompt = stored[jnp.maximum(row, 0)]
      size = min(old.shape[axis], prompt.shape[axis])
      prompt = jax.lax.slice_in_dim(prompt, 0, size, axis=axis)
      head = jax.lax.slice_in_dim(old, 0, size, axis=axis)
      mask = taken.reshape((-1,) + (1,) * (old.ndim - 1))
      return jax.lax.dynamic_update_slice_in_dim(
        old, jnp.where(mask, prompt, head), 0, axis
      )

    kv = tuple(
      jax.tree.map(copy, old, stored, old.slot_axis)
      for old, stored in zip(kv, store.kv, strict=True)
    )
    if features is not None:
      nowhere = features.page.shape[1] * pages_lib.PAGE
      at = jnp.where(taken[:, None], jnp.arange(store.features.shape[1]), nowhere)
      features = features.write(at, store.features[jnp.maximum(row, 0)])
    return kv, features

  slots = slots_lib.slots_shardings(mesh, config, layout)
  return jax.jit(
    slices.per_slice(mesh, admit, slices.ROWS, slices.ROWS),
    donate_argnums=(0, 1),
    out_shardings=(slots.kv, slots.features),
  )
