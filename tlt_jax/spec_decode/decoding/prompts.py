"""Device programs of prompts: computed once into a store, copied to the slots that ask.

Each runs once per slice on the slice's own rows, see `slices`. The arrays are in `slots`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.models import config as config_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib

_BLOCK = 128  # tokens of a prompt that are copied at a time


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
  kv = slots_lib.cache_sharding(mesh, config)
  kept = features_lib.sharding(mesh, 3, layout.size) if layout else None
  store = slots_lib.PromptStore(kv, kept)
  return jax.jit(mapped, donate_argnums=1, out_shardings=store)


def make_admit(
  config: config_lib.ModelConfig, mesh: Mesh, layout: features_lib.Layout | None
) -> Callable:
  """(kv, features, store, row i32[B], known i32[B]) -> kv, features.

  Slot b takes over KV and features of `known[b]` prompt tokens, the first of row `row[b]`
  of the prompt store, block by block. Slots with `known` 0 get no prompt: they stay as they
  are, and cost nothing. KV and features are donated.
  """

  def admit(kv, features, store, row, known):
    size = min(_BLOCK, kv[0].length, store.kv[0].length)
    blocks = -(-known // size)
    before = jnp.cumsum(blocks)  # blocks of all slots up to here

    def copy(i, arrays):
      kv, features = arrays
      slot = jnp.sum(before <= i)
      first = (i - before[slot] + blocks[slot]) * size

      def block(old, stored, axis):
        # The last block begins earlier where it would exceed the cache or the store.
        start = jnp.minimum(first, min(old.shape[axis], stored.shape[axis]) - size)
        at = [start if d == axis else 0 for d in range(1, old.ndim)]
        sizes = [size if d == axis else old.shape[d] for d in range(1, old.ndim)]
        new = jax.lax.dynamic_slice(stored, (row[slot], *at), (1, *sizes))
        return jax.lax.dynamic_update_slice(old, new, (slot, *at))

      kv = tuple(
        jax.tree.map(block, old, stored, old.slot_axis)
        for old, stored in zip(kv, store.kv, strict=True)
      )
      if features is not None:
        of_slot = features.replace(page=features.page[slot][None])
        at = first + jnp.arange(size)[None]
        of_slot = of_slot.write(at, store.features.at[row[slot], at].get(mode="clip"))
        features = features.replace(data=of_slot.data)
      return kv, features

    return jax.lax.fori_loop(0, before[-1], copy, (kv, features))

  slots = slots_lib.slots_shardings(mesh, config, layout)
  return jax.jit(
    slices.per_slice(mesh, admit, slices.ROWS, slices.ROWS),
    donate_argnums=(0, 1),
    out_shardings=(slots.kv, slots.features),
  )
