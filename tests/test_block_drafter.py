"""Drafters of blocks: what training computes is what drafting does, and nothing differs."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import blocks
from tests import tiny
from tlt_jax import packing
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import layers
from tlt_jax.models.drafters import block as block_lib
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import source as source_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.speculation.sources import model as model_source
from tlt_jax.spec_decode.spot import block_loss
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import offline as draft_learner
from tlt_jax.spec_decode.spot import spot as spot_lib

BLOCK = drafter_lib.Block(size=4, window=9, rank=0)
KINDS = {
  "plain": BLOCK,
  "whole": dataclasses.replace(BLOCK, window=None),
  "selector": dataclasses.replace(BLOCK, rank=6),
  "unshifted": dataclasses.replace(BLOCK, shifted=False, mask_token=63, anchored=False),
}
CONFIGS = {
  name: drafter_lib.of_target(tiny.CONFIG, "block", taps=(0, 1), block=block)
  for name, block in KINDS.items()
} | {
  "vocab": drafter_lib.of_target(
    tiny.CONFIG, "block", taps=(0, 1), block=KINDS["selector"], vocab=tiny.DRAFT_VOCAB
  )
}


@functools.cache
def params(kind):
  made = drafter_lib.init_params(CONFIGS[kind], jax.random.key(1))
  if "after" in made:  # which is zero in a new drafter
    made["after"] = jax.random.normal(jax.random.key(2), made["after"].shape)
  return made


def apply(kind, *args, method):
  module = drafter_lib.module(CONFIGS[kind])
  return module.apply({"params": params(kind)}, *args, method=method)


def by(positions):
  return layers.rotation(tiny.CONFIG, positions)


def by_hand(kind, features, pending, start):
  embedding = tiny.params()["embedding"]
  return blocks.definition(CONFIGS[kind], params(kind), embedding, features, pending, start)


@pytest.mark.parametrize("kind", ["plain", "whole", "unshifted"])
def test_training_and_drafting_compute_the_definition(kind):
  T, starts, rng = 20, (1, 6, 15), np.random.default_rng(0)
  tokens = rng.integers(0, 64, T + 1).astype(np.int32)
  features = rng.normal(0, 1, (T, CONFIGS[kind].feature_width)).astype(np.float32)
  expected = [by_hand(kind, features, tokens[s], s) for s in starts]
  block = CONFIGS[kind].block
  anchors = np.array(starts) - 1
  behind = anchors[:, None] - np.arange(T)
  ahead = behind[:, None] + 1 + np.arange(block.size)[:, None]
  mask = (behind[:, None] >= 0) & (ahead < (block.window or 2 * T))
  mask = mask.reshape(-1, T)
  at = (np.array(starts)[:, None] + np.arange(block.size)).reshape(1, -1)
  rotations = by(jnp.arange(T)[None]), by(jnp.asarray(at))
  pending = tokens[None, list(starts)]
  args = tiny.params(), features[None], anchors[None], pending, rotations, mask[None]
  trained = apply(kind, *args, method="of_anchors")[0]
  np.testing.assert_allclose(trained, expected, atol=1e-5)

  h = apply(kind, features[None], method="features")
  written = apply(kind, h, rotations[0], method="keys_values")
  for start, of_start in zip(starts, expected, strict=True):
    first, position = jnp.zeros(1, jnp.int32), jnp.full(1, start)
    caches = [
      cache_lib.init(CONFIGS[kind].layer, 1, T + 4, page=4)[0].write(k, v, first)
      for k, v in written  # with what comes later, which must not be seen
    ]
    at = position[:, None] + jnp.arange(block.size)
    last = h[:, start - 1]
    args = tiny.params(), tokens[start : start + 1], last, by(at), caches, position
    x, _ = apply(kind, *args, method="__call__")
    np.testing.assert_allclose(x[0], of_start, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "selector"])
def test_the_first_guesses_are_those_of_a_shorter_block(kind):
  T, rng = 12, np.random.default_rng(1)
  tokens = rng.integers(0, 64, T + 1).astype(np.int32)
  features = rng.normal(0, 1, (T, CONFIGS[kind].feature_width)).astype(np.float32)
  config, cut = block_lib.first(CONFIGS[kind], params(kind), 2)
  assert (config.block.size, len(cut["mask"])) == (2, 1)
  embedding = tiny.params()["embedding"]
  expected = blocks.definition(config, cut, embedding, features, tokens[T], T)
  h = apply(kind, features[None], method="features")
  position = jnp.full(1, T)
  caches = [
    cache_lib.init(config.layer, 1, T + 4, page=4)[0].write(k, v, position - T)
    for k, v in apply(kind, h, by(jnp.arange(T)[None]), method="keys_values")
  ]
  at = position[:, None] + jnp.arange(2)
  args = tiny.params(), tokens[T:], h[:, -1], by(at), caches, position
  x, _ = drafter_lib.module(config).apply({"params": cut}, *args)
  np.testing.assert_allclose(x[0], expected, atol=1e-5)


def test_blocks_are_shortened_only_if_their_places_read_the_context():
  """Others are trained to see all places, such as those of published drafters."""
  for kind, guesses, size in (("plain", 9, 4), ("plain", 1, 1), ("unshifted", 1, 4)):
    config, cut = block_lib.first(CONFIGS[kind], params(kind), guesses)
    assert config.block.size == size
    assert ("mask" not in cut) or len(cut["mask"]) == size - 1


@functools.cache
def sequences(count=48, seed=0):
  made = tiny.requests(count // 4, 4, max_tokens=24, stop_tokens=[3], seed=seed)
  options = rollout.Options(max_length=40, max_prompt=12, slots=count, prompt_rows=16)
  samples = rollout.make(tiny.CONFIG, tiny.mesh(1), options)(tiny.params(), made)
  prompts = [made.prompts[p] for p in made.prompt_idx]
  return prompts, [samples.response(i) for i in range(count)]


@pytest.mark.parametrize(
  ("kind", "data", "model", "shape"),
  [
    ("plain", 1, 1, (4, 1, 5)),
    ("plain", 2, 1, (3, 3, 8)),
    ("selector", 1, 1, (4, 1, 5)),
    ("vocab", 2, 2, (4, 2, 7)),
    tiny.slow("unshifted", 1, 1, (3, 1, 4)),
    tiny.slow("selector", 2, 1, (4, 3, 10)),
    tiny.slow("vocab", 1, 1, (4, 1, 5)),
  ],
)
def test_no_token_differs(kind, data, model, shape):
  mesh, made = tiny.mesh(data, model), tiny.requests(8, 4, max_tokens=24, seed=2)
  options = rollout.Options(max_length=40, max_prompt=12, slots=8, chunk=8)
  plain = rollout.make(tiny.CONFIG, mesh, options)(tiny.on(mesh), made)
  always = selector_lib.always(strategy_lib.Strategy(*shape))
  drafter = spot_lib.Frozen(CONFIGS[kind], params(kind))
  drafted = rollout.make(tiny.CONFIG, mesh, options, drafter, always)(tiny.on(mesh), made)
  np.testing.assert_array_equal(plain.length, drafted.length)
  for i in range(len(made)):
    np.testing.assert_array_equal(plain.response(i), drafted.response(i))


@pytest.mark.parametrize(("kind", "first"), [("plain", 45), ("whole", 0)])
def test_no_more_than_the_window_is_filled(kind, first):
  """Of 60 tokens the chunk computes 6 itself; a window of 9 needs those from 45 on."""
  request = source_lib.Progress(3, 0, np.arange(50), np.arange(10), np.zeros(1, int))
  room = strategy_lib.Room(longest=5)
  setting = types.SimpleNamespace(fill_block=8, drafter=CONFIGS[kind], room=room)
  source = types.SimpleNamespace(setting=setting, _filled={})
  blocks = model_source.Model._missing(source, [[request, None]])
  begun = [at for of_slices in blocks for row in of_slices for _, at in row]
  assert begun == list(range(first, 54, 8))


def test_a_block_is_not_shorter_than_what_is_drafted():
  options = rollout.Options(max_length=40, max_prompt=12, slots=8)
  for kind, depth in (("plain", 5), ("unshifted", 4)):
    always = selector_lib.always(strategy_lib.Strategy(depth, 1, depth + 1))
    drafter = spot_lib.Frozen(CONFIGS[kind], params(kind))
    with pytest.raises(ValueError, match=f"the drafter's block has {depth - 1}"):
      rollout.make(tiny.CONFIG, tiny.mesh(1), options, drafter, always)


def test_settings_that_make_no_sense_are_refused():
  for name, fields, message in (
    ("eagle3", dict(block=BLOCK), "have no block"),
    ("block", dict(block=None), "need a block"),
    ("block", dict(block=dataclasses.replace(BLOCK, mask_token=64)), "mask_token=64"),
  ):
    with pytest.raises(ValueError, match=message):
      drafter_lib.of_target(tiny.CONFIG, name, **fields)
  for fields in (dict(size=0), dict(size=1, shifted=False), dict(window=8), dict(rank=-1)):
    with pytest.raises(ValueError, match=f"block.{next(iter(fields))}"):
      drafter_lib.Block(**fields)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_drafter_loads_bit_for_bit(kind, tmp_path):
  drafter_files.save(tmp_path / "d", CONFIGS[kind], params(kind))
  config, loaded = drafter_files.load(tmp_path / "d", tiny.CONFIG, tiny.mesh(1, 2))
  assert config == CONFIGS[kind]
  jax.tree.map(np.testing.assert_array_equal, loaded, params(kind))


def batch(kind, rows=4, T=48):
  rng = np.random.default_rng(0)
  prompts, responses = (
    [rng.integers(0, 64, n).astype(np.int32) for n in rng.integers(2, 16, 12)]
    for _ in range(2)
  )
  packed = packing.pack(prompts, responses, [packing.Bucket(rows, T)])[0].micro_batch(0)
  shape = *packed.tokens.shape, tiny.CONFIG.width
  final = rng.normal(0, 1, shape).astype(np.float32)
  read = rng.normal(0, 1, (*shape[:2], CONFIGS[kind].feature_width)).astype(np.float32)
  return packed, features_lib.Kept(read, final)


@pytest.mark.parametrize("kind", ["plain", "unshifted", "vocab"])
@pytest.mark.parametrize("distance", draft_loss.DISTANCES)
def test_the_loss_is_what_is_documented(kind, distance):
  """Summed up by hand over anchors and guesses, each block computed alone, in float64."""
  config, (packed, kept) = CONFIGS[kind], batch(kind)
  block = config.block
  options = draft_loss.Loss(steps=block.guesses, distance=distance, temperature=0.8)
  updates = jnp.int32(500)
  frozen, ids = tiny.params(), np.array(config.target_ids)
  args = params(kind), frozen, packed, kept, None, updates
  loss = functools.partial(block_loss.loss, options, config, tiny.CONFIG)
  total, metrics = jax.jit(loss)(*args)
  count = block_loss.num_anchors(block.size, packed.tokens.shape[1])
  anchors, valid = map(np.asarray, block_loss._anchors(packed, count, updates))
  head = np.asarray(frozen["head"], np.float64)

  def softmax(x):
    e = np.exp((x - x.max(-1, keepdims=True)) / options.temperature)
    return e / e.sum(-1, keepdims=True)

  of_step = {k: [] for k in range(block.guesses)}
  for row, anchor in zip(*np.nonzero(valid), strict=True):
    t = anchors[row, anchor]
    segment = packed.segments[row]
    first = int(np.flatnonzero(segment == segment[t])[0])
    start = t + 1 - first
    pending = packed.targets[row, t]
    x = by_hand(kind, np.asarray(kept.drafter_input[row, first:], float), pending, start)
    for k in range(block.guesses):
      goal = t + 1 + k
      if goal >= len(segment) or segment[goal] != segment[t] or not packed.mask[row, goal]:
        continue
      logits = x[k] @ head[ids].T
      if block.rank:
        before = np.asarray(params(kind)["before"])[packed.targets[row, goal - 1]]
        logits = logits + np.asarray(params(kind)["after"], np.float64) @ before
      q = softmax(logits)
      p = softmax(np.asarray(kept.final[row, goal], np.float64) @ head[ids].T)
      known = packed.targets[row, goal] in ids
      variation = 0.5 * np.abs(p - q).sum() if known else 1.0
      cross_entropy = -(p * np.log(q)).sum() * known
      share = cross_entropy if distance == "cross_entropy" else variation
      of_step[k].append((share, 1 - variation))
  expected = sum(
    draft_loss.DECAY**k * sum(share for share, _ in found) for k, found in of_step.items()
  )
  np.testing.assert_allclose(total, expected, rtol=1e-4)
  assert metrics["tokens"] == valid.sum() == len(of_step[0]) > 0
  for k, found in of_step.items():
    means = np.mean(found, 0) * valid.sum()
    np.testing.assert_allclose(metrics[f"loss_{k + 1}"], means[0], rtol=1e-4)
    np.testing.assert_allclose(metrics[f"agreement_{k + 1}"], means[1], rtol=1e-3)


def test_anchors_are_drawn_from_places_before_response_tokens():
  """Without replacement, others in every update; all, if there are fewer than wanted."""
  packed, _ = batch("plain")
  following = np.roll(packed.mask & (packed.positions > 0), -1, 1)
  drawn = set()
  for update in range(30):
    anchors, valid = block_loss._anchors(packed, 6, jnp.int32(update))
    for row, (of_row, is_any) in enumerate(zip(anchors, valid, strict=True)):
      chosen = np.asarray(of_row)[np.asarray(is_any)].tolist()
      assert len(set(chosen)) == len(chosen) == min(6, following[row].sum())
      drawn |= {(row, t) for t in chosen}
  assert drawn == set(zip(*np.nonzero(following), strict=True))


def test_only_the_blocks_of_anchors_get_a_gradient():
  """Goals and features that no block reads or is compared with have no influence."""
  kind = "plain"
  (packed, kept), options = batch(kind), draft_loss.Loss(steps=4)
  config, block = CONFIGS[kind], CONFIGS[kind].block
  anchors, valid = block_loss._anchors(packed, 1, jnp.int32(7))

  def grads(kept, monkeypatch=None):
    def loss(own):
      args = own, tiny.params(), packed, kept, None, jnp.int32(7)
      return block_loss.loss(options, config, tiny.CONFIG, *args)[0]

    return jax.grad(loss)(params(kind))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(block_loss, "num_anchors", lambda *_: 1)
    expected = grads(kept)
    read, final = (np.array(x) for x in kept)
    at = np.arange(packed.tokens.shape[1])
    for row, (t, is_any) in enumerate(zip(anchors[:, 0], valid[:, 0], strict=True)):
      assert is_any
      segment = packed.segments[row]
      near = (at <= t) & (at > t + 1 - block.window) & (segment == segment[t])
      read[row, ~near] = 1e3
      final[row, ~((at > t) & (at <= t + block.guesses))] = 1e3
    changed = grads(features_lib.Kept(read, final))
  jax.tree.map(np.testing.assert_array_equal, changed, expected)
  assert all(np.any(x) for x in jax.tree.leaves(expected))


@pytest.mark.parametrize("kind", ["plain", tiny.slow("selector"), tiny.slow("vocab")])
def test_training_raises_agreement_and_acceptance(kind):
  made = draft_learner.make(
    tiny.CONFIG,
    CONFIGS[kind],
    draft_loss.Loss(),
    optimizer.make("adamw", 1e-2, warmup=2),
    tiny.mesh(1),
    [(8, 48)],
  )
  prompts, responses = sequences()
  own = drafter_lib.init_params(CONFIGS[kind], jax.random.key(1))
  state, history = made.init(own), []
  for _ in range(40):
    state, metrics = made.train(state, tiny.params(), prompts, responses)
    history.append(metrics)
  for k in (1, 2, 3, 4):
    name = f"drafter/agreement_{k}"
    assert history[-1][name] > history[0][name] + 0.05, name
  options = rollout.Options(max_length=40, max_prompt=12, slots=48, chunk=16)
  always = selector_lib.always(strategy_lib.Strategy(4, 1, 5))
  drafter = spot_lib.Frozen(CONFIGS[kind], own)
  run = rollout.make(tiny.CONFIG, tiny.mesh(1), options, drafter, always)
  requests = tiny.requests(8, 4, max_tokens=24, stop_tokens=[3], seed=5)
  before = run(tiny.params(), requests).mean_acceptance_length
  run.drafter.params = state.params
  assert run(tiny.params(), requests).mean_acceptance_length > before + 0.1


def test_a_published_kind_needs_a_token_to_spare():
  with pytest.raises(ValueError, match="use kind block"):
    drafter_lib.of_target(tiny.CONFIG, "dspark")
  target = dataclasses.replace(tiny.CONFIG, unused_rows=((60, 64),))
  block = drafter_lib.of_target(target, "dspark").block
  assert (block.mask_token, block.anchored, block.window) == (60, False, None)
