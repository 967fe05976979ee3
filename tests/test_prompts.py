"""Admissions: a slot gets its prompt's KV and features, and no other slot is touched."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import prompts
from tlt_jax.spec_decode.decoding import slots as slots_lib

SLICES, BATCH, LENGTH, STORED, MOST = 2, 3, 300, 280, 3
LAYOUT = features_lib.Layout(tiny.CONFIG.width)


def filled(abstract, rng):
  """Arrays of these shapes with random numbers, and the same on the host."""
  host = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), abstract)
  put = lambda x, like: jax.device_put(jnp.array(x), like.sharding)
  return jax.tree.map(put, host, abstract), host


def test_an_admission_copies_a_prompt_block_by_block():
  """As many tokens as are known of it; other slots stay as they are."""
  mesh, rng = tiny.mesh(SLICES), np.random.default_rng(0)
  sizes = pages_lib.Sizes(pages=BATCH * MOST, most=MOST)
  args = dict(batch=BATCH, length=LENGTH, stops=1, layout=LAYOUT, sizes=sizes)
  slots = slots_lib.abstract_slots(mesh, tiny.CONFIG, **args)
  store, stored = filled(
    slots_lib.abstract_store(mesh, tiny.CONFIG, 2, STORED, LAYOUT), rng
  )
  kv, before = filled(slots.kv, rng)
  data, _ = filled(slots.features.data, rng)
  page = np.tile(np.arange(BATCH * MOST, dtype=np.int32).reshape(BATCH, MOST), (2, 1))
  put = lambda x: jax.device_put(np.asarray(x, np.int32), slots.position.sharding)
  features = pages_lib.Features(data, jax.device_put(page, slots.features.page.sharding))
  row, known = [1, 0, 0, 0, 1, 0], [279, 0, 5, 0, 130, 0]
  admit = prompts.make_admit(tiny.CONFIG, mesh, LAYOUT)
  kv, features = admit(kv, features, store, put(row), put(known))

  for new, old, from_ in zip(kv, before, stored.kv, strict=True):
    for x, was, source in zip(*map(jax.tree.leaves, (new, old, from_)), strict=True):
      by_token = lambda y: np.moveaxis(np.asarray(y), 2, 1)
      x, was, source = map(by_token, (x, was, source))
      for slot, count in enumerate(known):
        of = slot // BATCH * 2 + row[slot]
        np.testing.assert_array_equal(x[slot, :count], source[of, :count])
        rest = min(-(-count // 128) * 128, STORED)
        np.testing.assert_array_equal(x[slot, rest:], was[slot, rest:])
  data = np.asarray(features.data).reshape(SLICES * BATCH, MOST * pages_lib.PAGE, -1)
  for slot, count in enumerate(known):
    of = slot // BATCH * 2 + row[slot]
    np.testing.assert_array_equal(data[slot, :count], stored.features[of, :count])
