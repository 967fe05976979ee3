"""Device programs of prompts: computed once into a store, copied to the slots that ask.

Where KV lies in pages, a prompt's are computed where they stay: of the KV, slots get a
copy of no more than a page.

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
  paged: bool = False,
) -> Callable:
  """(params, store, tokens i32[r T], start i32[r], row i32[r]) -> store.

  Computes a block of prompt tokens and writes it into rows of the prompt store
  (donated). Rows outside the store are computed and dropped. KV in pages is written to
  those of its table, which has the prompts in the order of `tokens`.

  Args:
    config, mesh: of the target
    layout: of the features that are kept; None: none are
    kernels: those of the store's caches
    paged: whether KV lies in pages
  """

  def rows(stored, row):
    return jax.tree.map(lambda x: x.at[row].get(mode="clip"), stored)

  def with_rows(stored, new, row):
    return jax.tree.map(lambda x, y: x.at[row].set(y, mode="drop"), stored, new)

  def prefill(params, store, tokens, start, row):
    at = start[:, None] + jnp.arange(tokens.shape[1])
    old = store.kv if paged else rows(store.kv, row)
    _, features, kv = decode.forward(config, layout, params, old, tokens, at)
    kept = rows(store.features, row)
    if kept is not None:
      b = jnp.arange(tokens.shape[0])[:, None]
      kept = kept.at[b, at].set(features.astype(kept.dtype), mode="drop")
    kv = kv if paged else with_rows(store.kv, kv, row)
    return slots_lib.PromptStore(kv, with_rows(store.features, kept, row))

  specs = (slices.WHOLE, *(slices.ROWS,) * 4)
  mapped = slices.per_slice(mesh, prefill, specs, slices.ROWS, kernels)
  kv = slots_lib.slots_shardings(mesh, config, layout, kernels, paged).kv
  over = features_lib.sharding(mesh, 3, layout.size) if layout else None
  store = slots_lib.PromptStore(kv, over)
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
    length = min(kv[0].length, store.kv[0].length)
    size = min(_BLOCK, length)

    def copy(slot, first, arrays):
      kv, features = arrays
      # The last block begins earlier where it would exceed the cache or the store.
      start = jnp.minimum(first, length - size)

      def block(old, stored):
        sizes = 1, old.shape[1], size, old.shape[3]
        new = jax.lax.dynamic_slice(stored, (row[slot], 0, start, 0), sizes)
        return jax.lax.dynamic_update_slice(old, new, (slot, 0, start, 0))

      kv = jax.tree.map(block, kv, store.kv)
      return kv, _with_features(features, store, row[slot], slot, first, size)

    return _by_blocks(copy, known, size, (kv, features))

  slots = slots_lib.slots_shardings(mesh, config, layout)
  return jax.jit(
    slices.per_slice(mesh, admit, slices.ROWS, slices.ROWS),
    donate_argnums=(0, 1),
    out_shardings=(slots.kv, slots.features),
  )


def make_admit_to_pages(
  config: config_lib.ModelConfig,
  mesh: Mesh,
  layout: features_lib.Layout | None,
  kernels: str | None = None,
) -> Callable:
  """(kv, features, store, row, known, source, goal, all i32[B]) -> kv, features.

  Where KV lies in pages. Page `source[i]` of a slice is copied to page `goal[i]`; behind
  the last copy, goals are nobody's page. Features are copied as by `make_admit`. KV and
  features are donated.
  """

  def admit(kv, features, store, row, known, source, goal):
    nobodys = kv[0].v.shape[0] - 1

    def copy_page(i, pools):
      def copy(pool):
        page = jax.lax.dynamic_slice_in_dim(pool, source[i], 1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, goal[i], 0)

      return jax.tree.map(copy, pools)

    def copy_features(slot, first, features):
      return _with_features(features, store, row[slot], slot, first, _BLOCK)

    pools = jax.lax.fori_loop(0, jnp.sum(goal < nobodys), copy_page, kv.pools)
    if features is not None:
      features = _by_blocks(copy_features, known, _BLOCK, features)
    return kv.replace(pools=pools), features

  slots = slots_lib.slots_shardings(mesh, config, layout, kernels, paged=True)
  return jax.jit(
    slices.per_slice(mesh, admit, slices.ROWS, slices.ROWS),
    donate_argnums=(0, 1),
    out_shardings=(slots.kv, slots.features),
  )


def _by_blocks(copy: Callable, known: jax.Array, size: int, arrays):
  """`copy(slot, first, arrays)` for every block of the tokens known[slot] i32[B]."""
  blocks = -(-known // size)
  before = jnp.cumsum(blocks)  # blocks of all slots up to here

  def of_slot(i, arrays):
    slot = jnp.sum(before <= i)
    first = (i - before[slot] + blocks[slot]) * size
    return copy(slot, first, arrays)

  return jax.lax.fori_loop(0, before[-1], of_slot, arrays)


def _with_features(features, store, row, slot, first, size: int):
  """A slot's features, with `size` tokens from `first` on of a row of the store."""
  if features is None:
    return None
  of_slot = features.replace(page=features.page[slot][None])
  at = first + jnp.arange(size)[None]
  of_slot = of_slot.write(at, store.features.at[row, at].get(mode="clip"))
  return features.replace(data=of_slot.data)
