"""The compiled decoding loop: the KV cache is written in place, slices run apart.

What is asked of the program text holds a positive control each: the same detector
finds the fault in a program that has it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dev import hlo_counts
from tests import hlo
from tests import tiny
from tlt_jax import axes
from tlt_jax import programs
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels.cache_write import ref as cache_write_ref
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import prompts
from tlt_jax.spec_decode.decoding import sampling
from tlt_jax.spec_decode.decoding import slices
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import fused as fused_lib
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import state as state_lib

ROWS, LENGTH = 4, 512  # per slice; long enough that nothing else is as large as KV


def is_across(i: hlo_counts.Instruction, mesh) -> bool:
  """Whether the devices of a collective are not all of one slice."""
  tensor, groups = mesh.shape[axes.MODEL], hlo.device_groups(i)
  return not groups or any(len({d // tensor for d in group}) > 1 for group in groups)


def across_slices(text: str, mesh) -> list[str]:
  """Collectives between slices."""
  return [
    f"{i.name} {i.type} {hlo.device_groups(i)}"
    for body in hlo_counts.computations(text).values()
    for i in body
    if hlo_counts.is_collective(i) and is_across(i, mesh)
  ]


LAYOUT = features_lib.Layout(tiny.CONFIG.width)


def arguments(mesh, layout: features_lib.Layout | None, kv_pages=None, rows=ROWS):
  """What a plain chunk takes, as shapes and shardings."""
  slots = slots_lib.abstract_slots(
    mesh,
    tiny.CONFIG,
    batch=rows,
    length=LENGTH,
    stops=2,
    layout=layout,
    sizes=pages_lib.Sizes(rows * LENGTH // pages_lib.PAGE, 4),
    kv_pages=kv_pages,
  )
  limits = chunk_lib.Limits(jax.ShapeDtypeStruct((), jnp.int32))
  return chunk_lib.Weights(tiny.on(mesh)), slots, None, limits, None


def compiled(program, mesh, layout=None, rows=ROWS):
  return program.lower(*arguments(mesh, layout, rows=rows)).compile()


@functools.cache
def chunk(data, model, layout, rows=ROWS):
  mesh = tiny.mesh(data, model)
  return compiled(decode.make_chunk(tiny.CONFIG, mesh, 8, layout), mesh, layout, rows)


def layer_size(model: int, rows: int = ROWS) -> int:
  """Elements of one layer's keys on one device."""
  return rows * tiny.CONFIG.num_kv_heads // model * LENGTH * tiny.CONFIG.head_dim


@pytest.mark.parametrize(
  ("data", "model", "layout", "rows"),
  [(1, 1, None, ROWS), (1, 1, None, 1), (2, 2, LAYOUT, ROWS)],
)
def test_the_loop_copies_no_layer_of_the_cache(data, model, layout, rows):
  """Nor are the donated buffers copied before it, or fresh ones made for the result."""
  program, size = chunk(data, model, layout, rows), layer_size(model, rows)
  assert hlo_counts.large_copies(program.as_text(), size, in_entry=True) == []
  assert hlo.unaliased(program.as_text(), size) == []
  assert program.memory_analysis().temp_size_in_bytes < 4 * size


def test_the_detector_sees_a_cache_that_is_not_donated():
  """The same program under a jit without donation: copied on entry, in new buffers."""
  mesh = tiny.mesh(1)
  inner = decode.make_chunk(tiny.CONFIG, mesh, 8, None)
  text = compiled(jax.jit(lambda *args: inner(*args)), mesh).as_text()
  caches = 2 * tiny.CONFIG.num_layers
  assert len(hlo.unaliased(text, layer_size(1))) == caches
  assert len(hlo_counts.large_copies(text, layer_size(1), in_entry=True)) >= caches


def scanned_chunk(weights, slots, draft_state, limits, training):
  """The loop with layers under `lax.scan`, the cache among its inputs and outputs."""
  config, params = tiny.CONFIG, weights.target
  names = [f"layer_{i}" for i in range(config.num_layers)]
  stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  blocks = stack([params[name] for name in names])

  def step(carry):
    i, kv, slots = carry
    positions = slots.position[:, None]
    seen = seen_lib.causal(slots.position, 1)
    by = layers.rotation(config, positions)

    def layer(x, scanned):
      block, layer_cache = scanned
      args = x, by, seen, layer_cache, slots.position
      return layers.Block(config).apply({"params": block}, *args)

    x = params["embedding"][slots.pending[:, None]]
    x, kv = jax.lax.scan(layer, x, (blocks, kv))
    drawn = sampling.draw(x[:, 0] @ params["head"].T, slots.sampling, slots.position + 1)
    slots = slots.replace(pending=drawn.token, position=slots.position + 1)
    return i + 1, kv, slots

  rest = slots.replace(kv=None)
  init = jnp.int32(0), stack(slots.kv), rest
  _, kv, rest = jax.lax.while_loop(lambda carry: carry[0] < limits.tokens, step, init)
  unstacked = tuple(jax.tree.map(lambda x, i=i: x[i], kv) for i in range(len(names)))
  return rest.replace(kv=unstacked)


def test_the_detector_sees_a_cache_that_is_scanned_over_layers():
  """Copies of the stack in the loop, and of a layer in the loop inside that."""
  program = compiled(jax.jit(scanned_chunk, donate_argnums=1), tiny.mesh(1))
  assert hlo.unaliased(program.as_text(), layer_size(1)) == []
  copies = hlo_counts.large_copies(program.as_text(), layer_size(1))
  assert len({line.split(":")[0] for line in copies}) == 2
  assert program.memory_analysis().temp_size_in_bytes > 4 * layer_size(1)


def test_slices_do_not_wait_for_each_other():
  """No collective over `data`; over `model`, none as large as a layer of the cache."""
  text = chunk(2, 2, LAYOUT).as_text()
  assert across_slices(text, tiny.mesh(2, 2)) == []
  assert hlo_counts.collectives(text)  # tensor parallelism is there, and seen
  assert max(i.num_elements for i in hlo_counts.collectives(text)) < layer_size(2) / 8


def test_kept_features_are_split_within_a_slice():
  """A device has its part of each token's numbers; they are not whole in between."""
  features = arguments(tiny.mesh(2, 2), LAYOUT)[1].features.data
  rows, size = features.sharding.shard_shape(features.shape)
  assert (rows, size) == (features.shape[0] // 2, LAYOUT.size // 2)
  made = hlo_counts.made(chunk(2, 2, LAYOUT).as_text(), in_entry=True)
  assert max(i.num_elements for _, i in made) <= max(rows * size, layer_size(2))
  odd = features_lib.abstract(tiny.mesh(2, 2), 4, "float32", 3)
  assert odd.sharding.shard_shape(odd.shape) == (4, 3)


def test_no_logits_are_gathered_where_tokens_are_filtered():
  """Of a vocabulary that two devices share: a few numbers per row are exchanged."""
  mesh, V = tiny.mesh(1, 2), 4096
  config = dataclasses.replace(tiny.CONFIG, vocab_size=V)
  made = axes.with_shardings(mesh, axes.ROLLOUT, target.abstract_params(config))
  args = chunk_lib.Weights(made), *arguments(mesh, None)[1:]
  text = decode.make_chunk(config, mesh, 8, None).lower(*args).compile().as_text()
  exchanged = hlo_counts.collectives(text)
  assert exchanged and max(i.num_elements for i in exchanged) < ROWS * V / 8


def whole_chunk(mesh):
  """One loop over the whole batch, left to the compiler, that asks for whole caches."""

  def run(weights, slots, draft_state, limits, training):
    rotations = layers.rotation(tiny.CONFIG, jnp.arange(LENGTH))

    def step(carry):
      i, slots = carry
      rows = axes.sharding(mesh, axes.DATA)
      slots = slots.replace(kv=jax.lax.with_sharding_constraint(slots.kv, rows))
      params = weights.target
      slots, _ = decode.decode_step(tiny.CONFIG, None, params, slots, rotations)
      return i + 1, slots

    running = lambda carry: (carry[0] < limits.tokens) & jnp.any(
      carry[1].remaining > 0
    )
    return jax.lax.while_loop(running, step, (jnp.int32(0), slots))[1]

  shardings = jax.tree.map(lambda x: x.sharding, arguments(mesh, None)[1])
  return jax.jit(run, donate_argnums=1, out_shardings=shardings)


def test_the_detector_sees_slices_that_wait_for_each_other():
  """A loop for all slices asks them all whether any still runs, and gathers caches."""
  mesh = tiny.mesh(2, 2)
  text = compiled(whole_chunk(mesh), mesh).as_text()
  assert across_slices(text, mesh)
  gathers = [i for i in hlo_counts.collectives(text) if i.opcode.startswith("all-gather")]
  assert max(i.num_elements for i in gathers) >= layer_size(2)


DRAFTER = tiny.DRAFTERS["eagle2"]
# So few nodes that their attention scores, twice, are smaller than a layer's keys.
STRATEGIES = {
  "chain": strategy_lib.Strategy(depth=2, width=1, verify=3),
  "tree": strategy_lib.Strategy(depth=2, width=2, verify=3),
}
# Bytes of the rotations of all positions, by the target and by the drafter.
TABLES = 2 * 4 * LENGTH * tiny.CONFIG.head_dim
# What a speculative chunk must not copy: KV of target and drafter, and the features.
CACHES = 2 * tiny.CONFIG.num_layers + 2 + 1


def source_of(name, mesh):
  """The drafter as a source of drafts."""
  setting = source_lib.Setting(
    config=tiny.CONFIG,
    mesh=mesh,
    pool=programs.Pool(),
    room=strategy_lib.Room.of([STRATEGIES[name]]),
    strategies=(STRATEGIES[name],),
    drafter=DRAFTER,
    layout=features_lib.of_drafter(DRAFTER),
  )
  return source_lib.make("model", setting)


def speculative_arguments(source, mesh, kv_pages=None):
  """What a chunk that drafts takes."""
  weights, slots, *_ = arguments(mesh, source.setting.layout, kv_pages)
  weights = weights.replace(draft=tiny.draft_params("eagle2", 5))
  state = source.ready((), weights, slots)
  one = jax.ShapeDtypeStruct((), jnp.int32)
  return weights, slots, state, chunk_lib.Limits(one, one, one), None


def speculative(name, mesh, kv_pages=None):
  """A chunk that drafts, and what it takes."""
  source = source_of(name, mesh)
  layout, paged = source.setting.layout, kv_pages is not None
  slots = slots_lib.slots_shardings(mesh, tiny.CONFIG, layout, None, paged)
  run = speculate.decode(source, STRATEGIES[name], tokens=8)
  shardings = chunk_lib.Done(slots, source.state_shardings, None)
  program = chunk_lib.make(mesh, chunk_lib.without_training(run), shardings)
  return program, speculative_arguments(source, mesh, kv_pages)


@functools.cache
def speculative_chunk(name, data, model):
  program, args = speculative(name, tiny.mesh(data, model))
  return program.lower(*args).compile()


@pytest.mark.parametrize(("data", "model"), [(1, 1), tiny.slow(2, 2)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_speculation_copies_no_cache(name, data, model):
  """Neither the target's KV, nor the kept features, nor the drafter's KV."""
  program = speculative_chunk(name, data, model)
  size = layer_size(model)
  assert hlo_counts.large_copies(program.as_text(), size, in_entry=True) == []
  assert hlo.unaliased(program.as_text(), size) == []
  assert program.memory_analysis().temp_size_in_bytes < 4 * size + TABLES


@pytest.mark.parametrize("name", STRATEGIES)
def test_slices_speculate_without_waiting_for_each_other(name):
  text = speculative_chunk(name, 2, 2).as_text()
  assert across_slices(text, tiny.mesh(2, 2)) == []
  assert hlo_counts.collectives(text)
  assert max(i.num_elements for i in hlo_counts.collectives(text)) < layer_size(2) / 8


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_detector_sees_caches_that_speculation_does_not_donate(name):
  inner, args = speculative(name, tiny.mesh(1))
  text = jax.jit(lambda *args: inner(*args)).lower(*args).compile().as_text()
  assert len(hlo.unaliased(text, layer_size(1))) == CACHES
  assert len(hlo_counts.large_copies(text, layer_size(1), in_entry=True)) >= CACHES


# So many that a pool is larger than all rows put together, which the reference reads.
KV_PAGES = pages_lib.Sizes(pages=3 * ROWS * LENGTH // 64, most=LENGTH // 64, page=64)


def paged_chunk(name, data, model):
  """A chunk over KV in pages, plain or drafting; and the elements of a pool's keys."""
  mesh = tiny.mesh(data, model)
  if name == "plain":
    program = decode.make_chunk(tiny.CONFIG, mesh, 8, None, paged=True)
    args = arguments(mesh, None, KV_PAGES)
  else:
    program, args = speculative(name, mesh, kv_pages=KV_PAGES)
  return program, args, args[1].kv[0].k.size // (data * model)


@pytest.mark.parametrize(
  ("name", "data", "model"),
  [("plain", 2, 2), *(tiny.slow(*case) for case in (("tree", 1, 1), ("chain", 2, 2)))],
)
def test_no_pool_of_pages_is_copied(name, data, model):
  """It is written in place, and read page by page; pools stay on their slices."""
  program, args, size = paged_chunk(name, data, model)
  text = program.lower(*args).compile().as_text()
  assert hlo_counts.large_copies(text, size, in_entry=True) == []
  assert hlo.unaliased(text, size) == []
  assert across_slices(text, tiny.mesh(data, model)) == []
  exchanged = [i.num_elements for i in hlo_counts.collectives(text)]
  assert max(exchanged, default=0) < size / 8


def test_an_admission_to_pages_copies_no_pool():
  """Of a pool, single pages are copied; the pools that go in come out."""
  mesh = tiny.mesh(2)
  _, slots, *_ = arguments(mesh, LAYOUT, KV_PAGES)
  store = slots_lib.abstract_store(mesh, tiny.CONFIG, 2, 64, LAYOUT, paged=True)
  admit = prompts.make_admit_to_pages(tiny.CONFIG, mesh, LAYOUT)
  args = slots.kv, slots.features, store, *(slots.position,) * 4
  text, size = admit.lower(*args).compile().as_text(), slots.kv[0].k.size // 2
  assert hlo_counts.large_copies(text, size, in_entry=True) == []
  assert hlo.unaliased(text, size) == []


def test_the_detector_sees_pools_that_are_written_by_page_and_head(monkeypatch):
  """A scatter into slots within pages, instead of into a matrix, makes them anew."""

  def by_slots(pool, new, start, pages):
    slots = start[:, None] + jnp.arange(new.shape[2])
    page = jnp.take_along_axis(pages, slots // pool.shape[2], 1)
    moved = pool.swapaxes(1, 2).at[page, slots % pool.shape[2]].set(new.swapaxes(1, 2))
    return moved.swapaxes(1, 2)

  monkeypatch.setattr(cache_write_ref, "cache_write", by_slots)
  program, args, size = paged_chunk("plain", 1, 1)
  text = program.lower(*args).compile().as_text()
  assert hlo_counts.large_copies(text, size, in_entry=True)


def moved_by_permutation(layer, source, start):
  """`LayerCache.move`, for all slots of a row at once."""
  B, moved = source.shape
  slots = start[:, None] + jnp.arange(moved)
  at = jnp.broadcast_to(jnp.arange(layer.length), (B, layer.length))
  at = at.at[jnp.arange(B)[:, None], slots].set(source, mode="drop")
  take = lambda x: jnp.take_along_axis(x, at[:, None, :, None], 2)
  return layer.replace(k=take(layer.k), v=take(layer.v))


def test_the_detector_sees_an_accepted_path_that_moves_with_all_else(monkeypatch):
  """Keys and values of every layer of the target, made anew in each iteration."""
  monkeypatch.setattr(cache_lib.LayerCache, "move", moved_by_permutation)
  program, args = speculative("tree", tiny.mesh(1))
  text = program.lower(*args).compile().as_text()
  copies = hlo_counts.large_copies(text, layer_size(1))
  assert len(copies) >= 2 * tiny.CONFIG.num_layers


def test_the_detector_sees_a_drafter_that_forgets_its_guesses(monkeypatch):
  """Its cache as it was before it drafted: drafting then writes into a copy."""
  draft_chain = draft_lib.draft_chain

  def forgetful(draft, state, slots, *args):
    tree, _ = draft_chain(draft, state, slots, *args)
    _, before = draft_lib.extend(draft, state, slots.pending, slots.position)
    return tree, before

  monkeypatch.setattr(draft_lib, "draft_chain", forgetful)
  program, args = speculative("chain", tiny.mesh(1))
  text = program.lower(*args).compile().as_text()
  copies = hlo_counts.large_copies(text, layer_size(1))
  assert len(copies) >= 2


def fused(mesh):
  """A chunk that drafts and trains, and what it takes."""
  source = source_of("chain", mesh)
  weights, slots, state, limits, _ = speculative_arguments(source, mesh)
  options = spot_lib.Options(row_tokens=16, context_tokens=4, rows=2, carried_rows=1)
  trainer = spot_lib.make_trainer(
    *(tiny.CONFIG, DRAFTER, mesh),
    optimizer=optax.adam(1e-3),
    longest=32,
    loss=draft_loss.Loss(steps=2),
    options=options,
  )
  spot = spot_lib.Spot(trainer, options, weights.draft)
  run = speculate.decode(source, STRATEGIES["chain"], tokens=8)
  over = slots_lib.slots_shardings(mesh, tiny.CONFIG, source.setting.layout)
  shardings = chunk_lib.Done(over, source.state_shardings, None)
  program = fused_lib.make(spot.trainer, run, shardings)
  training = spot.training(most=1, expected_steps=1)
  return program, (weights.replace(draft=spot.params), slots, state, limits, training)


def test_slices_train_without_waiting_for_each_other():
  """No collective over `data`, in the loops or behind them; no cache is copied."""
  mesh = tiny.mesh(2, 2)
  program, args = fused(mesh)
  text = program.lower(*args).compile().as_text()
  assert across_slices(text, mesh) == []
  assert hlo_counts.large_copies(text, layer_size(2), in_entry=True) == []


@pytest.mark.slow
def test_the_detector_sees_gradients_that_are_exchanged_in_the_loop(monkeypatch):
  """As they would be if slices trained one drafter together."""
  mesh, update = tiny.mesh(2, 1), state_lib.update
  program, args = fused(mesh)

  def together(optimizer, state, loss, metrics, grads, *others):
    grads = jax.lax.psum(grads, axes.DATA)
    return update(optimizer, state, loss, metrics, grads, *others)

  monkeypatch.setattr(state_lib, "update", together)
  assert across_slices(program.lower(*args).compile().as_text(), mesh)


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    ("replica_groups={{0,1},{2,3}}, x={1}", [[0, 1], [2, 3]]),
    ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
    ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
    ("source_target_pairs={{0,1},{1,0}}, x={{7,8}}", [[0, 1], [1, 0]]),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=1] {'b'}, x={1}", [[0, 1], [2, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
    ("replica_groups={}", []),
  ],
)
def test_device_groups_are_read_in_every_notation(text, groups):
  """As the compiler prints them; an empty list stands for all devices."""
  exchange = hlo_counts.Instruction("x", "f32[]", "all-reduce", False, text)
  assert hlo.device_groups(exchange) == groups


def resized(mesh, resize, layer, row):
  return resize.lower(layer, slices.place(mesh, row), length=LENGTH).compile()


def test_rows_change_their_slice_one_by_one():
  """Each lies where it should; nothing larger than a row crosses slices, or is made."""
  mesh, rng = tiny.mesh(4, 2), np.random.default_rng(0)
  config = dataclasses.replace(tiny.CONFIG, dtype="bfloat16")
  shapes = slots_lib.abstract_cache(mesh, config, ROWS, LENGTH)[0]
  filled = lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)
  layer = jax.tree.map(filled, shapes)
  row = np.full((4, 3), -1, np.int32)
  row[[0, 0, 1, 3, 3], [0, 2, 1, 0, 2]] = [13, 1, 2, 15, 6]  # of 16; three move
  resize = decode.make_resize(mesh, config, move=True)
  program = resized(mesh, resize, layer, row)
  found = program(layer, slices.place(mesh, row))
  for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(layer), strict=True):
    asked = row.reshape(-1) >= 0
    taken = row.reshape(-1)[asked]
    np.testing.assert_array_equal(np.asarray(new)[asked], np.asarray(old)[taken])

  def largest(program):
    bodies = hlo_counts.computations(program.as_text()).values()
    crossing = [i for body in bodies for i in body if hlo_counts.is_collective(i)]
    return max(i.num_elements for i in crossing)

  assert largest(program) <= layer_size(2) // ROWS
  at_once = jax.jit(
    lambda layer, row, length: jax.tree.map(lambda x: x[row], layer),
    static_argnames="length",
    out_shardings=slots_lib.cache_sharding(mesh, config),
  )
  assert largest(resized(mesh, at_once, layer, np.maximum(row, 0))) >= layer_size(2)
