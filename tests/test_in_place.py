"""The compiled decoding loop: the KV cache is written in place, slices run apart.

What is asked of the program text holds a positive control each: the same detector
finds the fault in a program that has it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
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
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import decode
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import sampling
from tlt_jax.spec_decode.decoding import slots as slots_lib
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import speculate
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import spot as spot_lib
from tlt_jax.spec_decode.spot import state as state_lib

ROWS, LENGTH = 4, 512  # per slice; long enough that nothing else is as large as KV
# So many that a pool is larger than all rows put together, which the reference reads: those
# of the rows, one more, and those of prompts, which are half as long.
PAGES = pages_lib.Sizes(pages=ROWS * 12 + 1, most=LENGTH // 64, page=64)


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


def arguments(mesh, layout: features_lib.Layout | None):
  """What a plain chunk takes, as shapes and shardings."""
  slots = slots_lib.abstract_slots(
    mesh, tiny.CONFIG, batch=ROWS, stops=2, layout=layout, sizes=PAGES
  )
  limits = chunk_lib.Limits(jax.ShapeDtypeStruct((), jnp.int32))
  rotations = chunk_lib.rotations(tiny.CONFIG, mesh, LENGTH, abstract=True)
  weights = chunk_lib.Weights(tiny.on(mesh), rotations=rotations)
  return weights, slots, None, limits, None


def plain_chunk(mesh, config=tiny.CONFIG):
  run = chunk_lib.without_training(decode.decode(config, 8, None))
  slots = slots_lib.slots_shardings(mesh, config, None)
  return chunk_lib.make(mesh, run, chunk_lib.Done(slots, None, None))


def compiled(program, mesh):
  return program.lower(*arguments(mesh, None)).compile()


def pool_size(model: int) -> int:
  """Elements of one layer's keys on one device, or of the kept features."""
  return (PAGES.pages + 1) * PAGES.page * tiny.CONFIG.width // model


class Recorded(programs.Pool):
  """A pool that keeps what it compiles."""

  def __init__(self):
    super().__init__()
    self.compiled = {}

  def get(self, name, bucket, jitted, *args, **static):
    program = super().get(name, bucket, jitted, *args, **static)
    self.compiled[name] = program
    return program


@functools.cache
def rollout_programs(data, model):
  """Every program of a rollout by chains, trees and plainly, in which slices train."""
  mesh, pool = tiny.mesh(data, model), Recorded()
  options = rollout.Options(
    **dict(max_length=LENGTH - 8, max_prompt=LENGTH // 2),
    **dict(prefill_rows=2, prefill_block=16),
    **dict(slots=ROWS, chunk=8, page_tokens=PAGES.page),
  )
  weights = tiny.draft_params("eagle2", 5)
  train = spot_lib.Options(row_tokens=16, context_tokens=4, rows=2, carried_rows=1)
  spot = spot_lib.Spot(trainer(mesh, train, LENGTH), train, weights)
  selector = selector_lib.make("up to 4 live: off or 2_1_3 or 2_2_3", "predictive", True)
  made = rollout.make(tiny.CONFIG, mesh, options, spot, selector, pool)
  made.compile(jax.eval_shape(lambda x: x, tiny.on(mesh)), 2)
  return pool.compiled


MESHES = pytest.mark.parametrize(("data", "model"), [tiny.slow(1, 1), (2, 2)])


@MESHES
def test_no_program_copies_a_pool(data, model):
  """Nor are donated buffers copied on entry, or fresh ones made for results."""
  found, size = rollout_programs(data, model), pool_size(model)
  chunks = {"chunk", "speculate_model_1_3", "speculate_model_2_3"}  # chain and tree
  if data > 1:  # one slice alone is never idle
    chunks = {f"{name}+training" for name in chunks}
  assert set(found) >= {"prefill", "copy", "fill", "store", *chunks}
  for name, program in found.items():
    text = program.as_text()
    assert hlo_counts.large_copies(text, size, in_entry=True) == [], name
    kept = 1 if name in ("store", "fill") else 0  # features, which they only read
    assert len(hlo.unaliased(text, size)) == kept, name
    assert program.memory_analysis().temp_size_in_bytes < 4 * size, name


@MESHES
def test_slices_do_not_wait_for_each_other(data, model):
  """No collective over `data`; over `model`, none nearly as large as a pool."""
  for name, program in rollout_programs(data, model).items():
    text = program.as_text()
    if name == "exchange":  # of what slices have learnt
      continue
    assert across_slices(text, tiny.mesh(data, model)) == [], name
    exchanged = [i.num_elements for i in hlo_counts.collectives(text)]
    assert max(exchanged, default=0) < pool_size(model) / 8, name
    if model > 1 and "chunk" in name:
      assert exchanged  # tensor parallelism is there, and seen


def test_the_detector_sees_a_pool_that_is_not_donated():
  """The same program under a jit without donation: copied on entry, in new buffers."""
  mesh = tiny.mesh(1)
  inner = plain_chunk(mesh)
  text = compiled(jax.jit(lambda *args: inner(*args)), mesh).as_text()
  pools = 2 * tiny.CONFIG.num_layers
  assert len(hlo.unaliased(text, pool_size(1))) == pools
  assert len(hlo_counts.large_copies(text, pool_size(1), in_entry=True)) >= pools


def scanned_chunk(weights, slots, draft_state, limits, training):
  """The loop with layers under `lax.scan`, the pools among its inputs and outputs."""
  config, params = tiny.CONFIG, weights.target
  names = [f"layer_{i}" for i in range(config.num_layers)]

  def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)

  blocks = stack([params[name] for name in names])
  table = slots.kv.pages

  def step(carry):
    i, pools, slots = carry
    seen = seen_lib.causal(slots.position, 1)
    by = layers.rotation(config, slots.position[:, None])

    def layer(x, scanned):
      block, pool = scanned
      args = x, by, seen, cache_lib.LayerCache(pool, table), slots.position
      x, new = layers.Block(config).apply({"params": block}, *args)
      return x, new.pool

    x = params["embedding"][slots.pending[:, None]]
    x, pools = jax.lax.scan(layer, x, (blocks, pools))
    drawn = sampling.sample(x[:, 0] @ params["head"].T, slots.sampling, slots.position + 1)
    slots = slots.replace(pending=drawn.token, position=slots.position + 1)
    return i + 1, pools, slots

  init = jnp.int32(0), stack(slots.kv.pools), slots.replace(kv=None)
  _, pools, rest = jax.lax.while_loop(lambda carry: carry[0] < limits.tokens, step, init)
  pools = tuple(jax.tree.map(lambda x, i=i: x[i], pools) for i in range(len(names)))
  return rest.replace(kv=slots.kv.replace(pools=pools))


def test_the_detector_sees_pools_that_are_scanned_over_layers():
  """Copies of the stack in the loop, and of a layer in the loop inside that."""
  program = compiled(jax.jit(scanned_chunk, donate_argnums=1), tiny.mesh(1))
  assert hlo.unaliased(program.as_text(), pool_size(1)) == []
  copies = hlo_counts.large_copies(program.as_text(), pool_size(1))
  assert len({line.split(":")[0] for line in copies}) == 2
  assert program.memory_analysis().temp_size_in_bytes > 4 * pool_size(1)


def test_kept_features_are_split_within_a_slice():
  """A device has its part of each token's numbers; they are not whole in between."""
  features = arguments(tiny.mesh(2, 2), LAYOUT)[1].features
  P, L, E = features.shape
  assert features.sharding.shard_shape(features.shape) == (P // 2, L, E // 2)
  text = rollout_programs(2, 2)["prefill"].as_text()
  made = [i.num_elements for _, i in hlo_counts.made(text, in_entry=True)]
  assert max(made) <= pool_size(2)
  odd = features_lib.abstract(tiny.mesh(2, 2), 4, "float32", 2, 3)
  assert odd.sharding.shard_shape(odd.shape) == (4, 2, 3)


def test_no_logits_are_gathered_where_tokens_are_filtered():
  """Of a vocabulary that two devices share: a few numbers per row are exchanged."""
  mesh, V = tiny.mesh(1, 2), 4096
  config = dataclasses.replace(tiny.CONFIG, vocab_size=V)
  made = axes.with_shardings(mesh, axes.ROLLOUT, target.abstract_params(config))
  weights, *others = arguments(mesh, None)
  args = weights.replace(target=made), *others
  text = plain_chunk(mesh, config).lower(*args).compile().as_text()
  exchanged = hlo_counts.collectives(text)
  assert exchanged and max(i.num_elements for i in exchanged) < ROWS * V / 8


def whole_chunk(mesh):
  """One loop over the whole batch, left to the compiler, that asks for whole caches."""

  def run(weights, slots, draft_state, limits, training):
    def step(carry):
      i, slots = carry
      rows = axes.sharding(mesh, axes.DATA)
      slots = slots.replace(kv=jax.lax.with_sharding_constraint(slots.kv, rows))
      params, rotations = weights.target, weights.rotations
      slots, _ = decode.decode_step(tiny.CONFIG, None, params, slots, rotations)
      return i + 1, slots

    def running(carry):
      return (carry[0] < limits.tokens) & jnp.any(carry[1].remaining > 0)

    return jax.lax.while_loop(running, step, (jnp.int32(0), slots))[1]

  shardings = jax.tree.map(lambda x: x.sharding, arguments(mesh, None)[1])
  return jax.jit(run, donate_argnums=1, out_shardings=shardings)


def test_the_detector_sees_slices_that_wait_for_each_other():
  """A loop for all slices asks them all whether any still runs, and gathers caches."""
  mesh = tiny.mesh(2, 2)
  text = compiled(whole_chunk(mesh), mesh).as_text()
  assert across_slices(text, mesh)
  gathers = [i for i in hlo_counts.collectives(text) if i.opcode.startswith("all-gather")]
  assert max(i.num_elements for i in gathers) >= pool_size(2)


DRAFTER = tiny.DRAFTERS["eagle2"]
STRATEGIES = {
  "chain": strategy_lib.Strategy(depth=2, width=1, verify=3),
  "tree": strategy_lib.Strategy(depth=2, width=2, verify=3),
}


def source_of(name, mesh):
  """The drafter as a source of drafts."""
  setting = source_lib.Setting(
    config=tiny.CONFIG,
    mesh=mesh,
    pool=programs.Pool(),
    room=strategy_lib.Room.of([STRATEGIES[name]]),
    strategies=(STRATEGIES[name],),
    pages=PAGES,
    drafter=DRAFTER,
    layout=features_lib.of_drafter(DRAFTER),
  )
  return source_lib.make("model", setting)


def speculative(name, mesh):
  """A chunk that drafts, and what it takes."""
  source = source_of(name, mesh)
  weights, slots, *_ = arguments(mesh, source.setting.layout)
  own = chunk_lib.rotations(DRAFTER.layer, mesh, LENGTH, abstract=True)
  weights = weights.replace(draft=tiny.draft_params("eagle2", 5), draft_rotations=own)
  state, one = source.ready(weights, slots), jax.ShapeDtypeStruct((), jnp.int32)
  run = speculate.decode(source, STRATEGIES[name], tokens=8)
  over = slots_lib.slots_shardings(mesh, tiny.CONFIG, source.setting.layout)
  shardings = chunk_lib.Done(over, source.state_shardings, None)
  program = chunk_lib.make(mesh, chunk_lib.without_training(run), shardings)
  return program, (weights, slots, state, chunk_lib.Limits(one, one, one), None)


def copies_of_speculation(name) -> list[str]:
  program, args = speculative(name, tiny.mesh(1))
  text = program.lower(*args).compile().as_text()
  return hlo_counts.large_copies(text, pool_size(1), in_entry=True)


def test_the_detector_sees_pools_that_are_written_by_page_and_head(monkeypatch):
  """A scatter into slots within pages, instead of into a matrix, makes them anew."""

  def by_slots(pool, new, start, pages):
    slots = start[:, None] + jnp.arange(new.shape[2])
    page = jnp.take_along_axis(pages, slots // pool.shape[2], 1)
    moved = pool.swapaxes(1, 2).at[page, slots % pool.shape[2]].set(new.swapaxes(1, 2))
    return moved.swapaxes(1, 2)

  monkeypatch.setattr(cache_write_ref, "cache_write", by_slots)
  assert copies_of_speculation("chain")


def moved_by_permutation(layer, source, start):
  """`LayerCache.move`, for all slots of a row at once."""
  K, L, H = layer.k.shape[1:]
  B, moved = source.shape
  S = layer.pages.shape[1] * L
  at = jnp.broadcast_to(jnp.arange(S), (B, S))
  slots = start[:, None] + jnp.arange(moved)
  at = at.at[jnp.arange(B)[:, None], slots].set(source, mode="drop")

  def take(pool):
    rows = pool[layer.pages].swapaxes(2, 3).reshape(B, S, K, H)
    rows = jnp.take_along_axis(rows, at[..., None, None], 1)
    pages = rows.reshape(B, -1, L, K, H).swapaxes(2, 3)
    return pool.at[layer.pages].set(pages)

  return layer.replace(pool=cache_lib.Pool(take(layer.k), take(layer.v)))


def test_the_detector_sees_an_accepted_path_that_moves_with_all_else(monkeypatch):
  """Keys and values of every layer of the target, made anew in each iteration."""
  monkeypatch.setattr(cache_lib.LayerCache, "move", moved_by_permutation)
  program, args = speculative("tree", tiny.mesh(1))
  text, rows = program.lower(*args).compile().as_text(), ROWS * LENGTH * 32
  assert len(hlo_counts.large_copies(text, rows)) >= 2 * tiny.CONFIG.num_layers


def test_the_detector_sees_a_drafter_that_forgets_its_guesses(monkeypatch):
  """Its pool as it was before it drafted: drafting then writes into a copy."""
  draft_chain = draft_lib.draft_chain

  def forgetful(draft, state, slots, *args):
    tree, _ = draft_chain(draft, state, slots, *args)
    _, before = draft_lib.extend(draft, state, slots)
    return tree, before

  monkeypatch.setattr(draft_lib, "draft_chain", forgetful)
  assert len(copies_of_speculation("chain")) >= 2


def trainer(mesh, options, longest):
  return spot_lib.make_trainer(
    *(tiny.CONFIG, DRAFTER, mesh),
    optimizer=optax.adam(1e-3),
    longest=longest,
    loss=draft_loss.Loss(steps=2),
    options=options,
  )


@pytest.mark.slow
def test_the_detector_sees_gradients_that_are_exchanged_in_the_loop(monkeypatch):
  """As they would be if slices trained one drafter together."""
  update = state_lib.update

  def together(optimizer, state, loss, metrics, grads, *others):
    grads = jax.lax.psum(grads, axes.DATA)
    return update(optimizer, state, loss, metrics, grads, *others)

  monkeypatch.setattr(state_lib, "update", together)
  text = rollout_programs.__wrapped__(2, 1)["chunk+training"].as_text()
  assert across_slices(text, tiny.mesh(2, 1))
