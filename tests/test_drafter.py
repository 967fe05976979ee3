"""Drafters: what training unrolls is what drafting does, and training trains."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests import tiny
from tlt_jax import packing
from tlt_jax.models import cache as cache_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import drafters
from tlt_jax.models import hf
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.pallas_kernels.tree_attention import seen as seen_lib
from tlt_jax.rl import optimizer
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import features as features_lib
from tlt_jax.spec_decode.decoding import sampling as sampling_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import loss as draft_loss
from tlt_jax.spec_decode.spot import offline as draft_learner
from tlt_jax.spec_decode.spot import spot as spot_lib

VOCAB = tiny.DRAFT_VOCAB
CONFIGS = tiny.DRAFTERS | {
  "mtp": drafter_lib.of_target(tiny.CONFIG, "my_package.mtp", taps=(0, 1)),
}


@functools.cache
def params(kind):
  return drafter_lib.init_params(CONFIGS[kind], jax.random.key(1))


def by(positions):
  return layers.rotation(tiny.CONFIG, positions)


def apply(kind, *args, method):
  module = drafter_lib.Drafter(CONFIGS[kind])
  method = getattr(drafter_lib.Drafter, method)
  return module.apply({"params": params(kind)}, *args, method=method)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "mtp"])
def test_the_unrolled_steps_are_those_of_drafting(kind):
  """Step k at pair t equals k steps over a cache that holds the true pairs to t-k."""
  T, steps, frozen = 12, 4, tiny.params()
  tokens = np.random.default_rng(0).integers(0, 64, (1, T + 1)).astype(np.int32)
  positions, method = jnp.arange(T)[None], target.Target.with_taps
  run = functools.partial(target.Target(tiny.CONFIG).apply, method=method)
  final, tapped, _ = run({"params": frozen}, tokens[:, :T], positions, CONFIGS[kind].taps)
  states = final if tapped is None else tapped
  mask = jnp.tril(jnp.ones((1, T, T), bool))
  following = tokens[:, 1:]
  unrolled = apply(
    kind, frozen, states, following, by(positions), mask, steps, method="unroll"
  )
  h = apply(kind, states, method="features")
  empty = cache_lib.init(CONFIGS[kind].layer, 1, T)[0]
  pairs = (frozen, h, following, by(positions))
  k, v = apply(kind, *pairs, method="keys_values")
  for start in (3, 7):  # the last true pair
    known = slice(start + 1)
    first = jnp.zeros(1, jnp.int32)
    cache = empty.write(k[:, :, known], v[:, :, known], first)
    at = jnp.full((1, 1), start)
    args = (frozen, h[:, start][:, None], following[:, start][:, None], by(at))
    out = apply(kind, *args, seen_lib.causal(at[:, 0], 1), cache, method="over_cache")
    np.testing.assert_allclose(out[0, 0], unrolled[0][0, start], atol=1e-5)
    for step in range(1, steps):
      at = at + 1
      token = following[:, start + step][:, None]
      seen = seen_lib.causal(at[:, 0], 1)
      args = (frozen, out, token, by(at), seen, cache, at[:, 0])
      out, cache = apply(kind, *args, method="__call__")
      np.testing.assert_allclose(out[0, 0], unrolled[step][0, start + step], atol=1e-5)


@functools.cache
def sequences(count=48, seed=0):
  """Prompts and responses that the target itself draws, at random lengths."""
  made = tiny.requests(count // 4, 4, max_tokens=24, stop_tokens=[3], seed=seed)
  options = rollout.Options(max_length=40, max_prompt=12, slots=count, prompt_rows=16)
  samples = rollout.make(tiny.CONFIG, tiny.mesh(1), options)(tiny.params(), made)
  prompts = [made.prompts[p] for p in made.prompt_idx]
  return prompts, [samples.response(i) for i in range(count)]


def speculative(drafter, params, mesh, options, strategy):
  """An engine in which a drafter drafts by the same strategy all the time."""
  always = selector_lib.always(strategy)
  frozen = spot_lib.Frozen(drafter, params)
  return rollout.make(tiny.CONFIG, mesh, options, frozen, always)


def learner(kind, data=1, **loss):
  return draft_learner.make(
    tiny.CONFIG,
    CONFIGS[kind],
    draft_loss.Loss(**{"steps": 3, **loss}),
    optimizer.make("adamw", 1e-2, warmup=2),
    tiny.mesh(data),
    [(8, 48)],
  )


def test_features_computed_once_train_like_those_of_each_update():
  kind = "eagle3"
  made, (prompts, responses) = learner(kind), sequences()
  features = made.features(tiny.params(), prompts, responses)
  sizes = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
  assert [x.shape for x in features] == [(n, made.layout.size) for n in sizes]
  chosen = [3, 0, 5]  # the rows of this update are not those that they were made in
  batch = [[x[i] for i in chosen] for x in (prompts, responses)]
  kept = [features[i] for i in chosen]
  state, metrics = made.train(made.init(params(kind)), tiny.params(), *batch, kept)
  expected, theirs = made.train(made.init(params(kind)), tiny.params(), *batch)
  assert metrics == pytest.approx(theirs, rel=1e-5)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
  jax.tree.map(close, state.params, expected.params)


@pytest.mark.parametrize(
  ("kind", "distance"),
  [
    ("mtp", "cross_entropy"),
    tiny.slow("eagle2_vocab", "total_variation"),
    tiny.slow("eagle3_vocab", "total_variation"),
  ],
)
def test_training_raises_agreement_and_acceptance(kind, distance):
  """Each drafting step agrees more with the target; a rollout accepts more drafts."""
  made, batch = learner(kind, distance=distance), sequences()
  state, history = made.init(params(kind)), []
  for _ in range(40):
    state, metrics = made.train(state, tiny.params(), *batch)
    history.append(metrics)
  for k in (1, 2, 3):
    name = f"drafter/agreement_{k}"
    assert history[-1][name] > history[0][name] + 0.05, name
  options = rollout.Options(max_length=40, max_prompt=12, slots=48, chunk=16)
  chain = strategy_lib.Strategy(3, 1, 4)
  run = speculative(CONFIGS[kind], params(kind), tiny.mesh(1), options, chain)
  requests = tiny.requests(8, 4, max_tokens=24, stop_tokens=[3], seed=5)
  before = run(tiny.params(), requests).mean_acceptance_length
  run.drafter.params = state.params
  assert run(tiny.params(), requests).mean_acceptance_length > before + 0.1


def test_packing_and_slices_do_not_change_the_update():
  """Packed rows give the gradient of single sequences; two slices that of one."""
  prompts, responses = sequences(16)
  results = []
  for data, buckets in ((1, [(16, 40)]), (1, [(4, 96)]), (2, [(4, 96)])):
    made = dataclasses.replace(
      learner("eagle2", data), buckets=tuple(packing.Bucket(*b) for b in buckets)
    )
    state, metrics = made.train(
      made.init(params("eagle2")), tiny.on(tiny.mesh(data)), prompts, responses
    )
    results.append((metrics, jax.device_get(state.params)))
  for metrics, after in results[1:]:
    for name, value in results[0][0].items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), after, results[0][1]
    )


def test_the_target_gets_no_gradient():
  """Embedding and head are frozen: the loss does not depend on them for training."""
  prompts, responses = sequences(8)
  packed = packing.pack(prompts, responses, [packing.Bucket(8, 48)])[0].micro_batch(0)
  shape = (8, 48, tiny.CONFIG.width)
  features = jax.random.normal(jax.random.key(0), shape)

  def loss(frozen):
    kept = features_lib.Kept(features, features)
    args = (params("eagle2"), frozen, packed, kept)
    return draft_loss.loss(draft_loss.Loss(), CONFIGS["eagle2"], tiny.CONFIG, *args)[0]

  for x in jax.tree.leaves(jax.grad(loss)(tiny.params())):
    assert not x.any()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_drafter_loads_bit_for_bit(kind, tmp_path):
  drafter_files.save(tmp_path / "d", CONFIGS[kind], params(kind))
  config, loaded = drafter_files.load(tmp_path / "d", tiny.CONFIG, tiny.mesh(1, 2))
  assert config == CONFIGS[kind]
  jax.tree.map(np.testing.assert_array_equal, loaded, params(kind))


def test_settings_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match="distance"):
    draft_loss.Loss(distance="l2")
  for kind, fields, message in (
    ("eagle4", {}, "eagle3"),
    ("tests.tiny", {}, "KIND"),
    ("eagle2", dict(taps=(1,)), "taps"),
    ("eagle3", dict(taps=()), "taps"),
    ("eagle2", dict(vocab=(1, 1)), "increase"),
    ("eagle3", dict(vocab=(1, 64)), "64"),
  ):
    with pytest.raises(ValueError, match=message):
      drafter_lib.of_target(tiny.CONFIG, kind, **fields)
  for name in ("experiments/drafters/countdown", "eagle4", "../eagle2", ""):
    assert not drafters.is_kind(name)


def test_the_most_frequent_tokens_make_a_vocabulary():
  """Counted over all arrays; of equally frequent ones the smaller ids."""
  tokens = [np.array([5, 5, 2]), np.array([[2, 7], [9, 1]], np.int32)]
  assert drafter_lib.most_frequent(tokens, 64, 3) == (1, 2, 5)
  assert drafter_lib.most_frequent(tokens, 64, 64) == tuple(range(64))
  with pytest.raises(ValueError, match="token 9"):
    drafter_lib.most_frequent(tokens, 9, 3)


def drafting(kind, own):
  config = CONFIGS[kind]
  rotations = layers.rotation(config.layer, jnp.arange(16))
  return draft_lib.Draft(
    config, features_lib.of_drafter(config), tiny.params(), own, rotations
  )


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_draft_vocabulary_restricts_the_head(kind):
  """Its logits are the whole head's at its tokens; eagle3 trains a head of its own."""
  h = jax.random.normal(jax.random.key(0), (3, 5, tiny.CONFIG.width))
  shared, ids = params(kind), np.array(VOCAB)
  columns = {"head": tiny.params()["head"][ids]} if kind == "eagle3" else {}
  whole = drafting(kind, shared)
  part = drafting(f"{kind}_vocab", shared | columns)
  made = part.logits(h)
  assert made.shape == (3, 5, len(VOCAB))
  np.testing.assert_allclose(made, whole.logits(h)[..., ids], rtol=1e-5)
  np.testing.assert_array_equal(part.tokens(jnp.arange(len(VOCAB))), VOCAB)
  assert ("head" in params(f"{kind}_vocab")) == (kind == "eagle3")


def test_drafts_are_perturbed_by_the_noise_of_their_ids():
  """Logits of some tokens win as they do among all, the others being out of the race."""
  B, ids = 64, np.array(VOCAB)
  logits = jax.random.normal(jax.random.key(0), (B, tiny.CONFIG.vocab_size))
  sampling = sampling_lib.Sampling(
    seed=jnp.full(B, 3, jnp.uint32),
    request=jnp.arange(B, dtype=jnp.uint32),
    temperature=jnp.full(B, 0.7, jnp.float32),
    top_k=jnp.full(B, 0, jnp.int32),
    top_p=jnp.full(B, 1.0, jnp.float32),
    min_p=jnp.full(B, 0.0, jnp.float32),
  )
  position = jnp.full(B, 5, jnp.int32)
  every = sampling_lib.contest(logits, sampling, position)
  some = sampling_lib.contest(logits[:, ids], sampling, position, ids)
  np.testing.assert_array_equal(some, every[:, ids])


def random_batch(kind, scale=1.0):
  """Packed random sequences, and states of no model: read f[8 48 *] and final f[8 48 D]."""
  rng = np.random.default_rng(0)
  prompts, responses = (
    [rng.integers(0, 64, n).astype(np.int32) for n in rng.integers(2, 16, 12)]
    for _ in range(2)
  )
  packed = packing.pack(prompts, responses, [packing.Bucket(8, 48)])[0].micro_batch(0)

  def draw(*shape):
    return rng.normal(0, 1, (8, 48, *shape)).astype(np.float32)

  final = scale * draw(tiny.CONFIG.width)
  read = draw(CONFIGS[kind].feature_width) if CONFIGS[kind].taps else final
  return packed, features_lib.Kept(read, final)


@pytest.mark.parametrize(
  ("kind", "distance"),
  [
    ("mtp", "cross_entropy"),
    ("eagle2_vocab", "cross_entropy"),
    ("eagle3_vocab", "total_variation"),
  ],
)
def test_the_loss_is_what_is_documented(kind, distance):
  """Summed up by hand, in f64, over the drafter's tokens where one of them was drawn."""
  packed, (states, final) = random_batch(kind)
  options = draft_loss.Loss(steps=2, distance=distance, temperature=0.8)
  frozen, ids = tiny.params(), CONFIGS[kind].target_ids
  args = (params(kind), frozen, packed, features_lib.Kept(states, final))
  loss = functools.partial(draft_loss.loss, options, CONFIGS[kind], tiny.CONFIG)
  total, metrics = jax.jit(loss)(*args)

  def softmax(x):
    e = np.exp(np.float64(x - x.max(-1, keepdims=True)) / options.temperature)
    return e / e.sum(-1, keepdims=True)

  ahead = functools.partial(np.roll, shift=-1, axis=1)
  p = ahead(softmax(np.asarray(final @ frozen["head"].T)[..., ids]))
  following = ahead(packed.mask) & (ahead(packed.positions) > 0)
  known = np.isin(ahead(packed.targets), ids)
  assert 0 < known[following].mean() < 1 or len(ids) == 64
  mask = packing.segment_mask(packed.segments, packed.positions)
  inputs = (frozen, states, packed.targets, by(packed.positions), mask)
  head = apply(kind, frozen, method="output_head")
  unroll = jax.jit(lambda *args: apply(kind, *args, options.steps, method="unroll"))
  expected = 0.0
  for k, h in enumerate(unroll(*inputs)):
    counts = following & (packed.positions >= k)
    q = softmax(np.asarray(apply(kind, head, h, method="logits")))
    variation = np.where(known, 0.5 * np.abs(p - q).sum(-1), 1.0)
    cross_entropy = -(p * np.log(q)).sum(-1) * known
    share = cross_entropy if distance == "cross_entropy" else variation
    if CONFIGS[kind].predicts_features:
      error = np.abs(np.asarray(h) - ahead(final))
      smooth = np.where(error < 1, 0.5 * error**2, error - 0.5)
      share = share + draft_loss.REGRESSION * smooth.mean(-1)
    share = share[counts].sum()
    expected += draft_loss.DECAY**k * share
    np.testing.assert_allclose(metrics[f"loss_{k + 1}"], share, rtol=1e-4)
    np.testing.assert_allclose(
      metrics[f"agreement_{k + 1}"], (1 - variation)[counts].sum(), rtol=1e-3
    )
  np.testing.assert_allclose(total, expected, rtol=1e-4)


@pytest.mark.parametrize(
  ("updates", "distance"), [(0, "cross_entropy"), (2, "total_variation")]
)
def test_the_first_updates_train_cross_entropy(updates, distance):
  packed, kept = random_batch("eagle2_vocab")

  def made(updates, **options):
    def loss(own):
      args = (own, tiny.params(), packed, kept, None, updates)
      of = draft_loss.Loss(steps=1, **options)
      return draft_loss.loss(of, CONFIGS["eagle2_vocab"], tiny.CONFIG, *args)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params("eagle2_vocab"))

  first = made(updates, distance="total_variation", cross_entropy_updates=2)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, first, made(None, distance=distance))


def test_blocks_of_positions_give_the_same_loss(monkeypatch):
  """And the same gradient; with a rest that is no whole block."""
  kind, distance = "eagle3_vocab", "total_variation"
  packed, kept = random_batch(kind)
  options = draft_loss.Loss(steps=2, distance=distance)

  def loss(own):
    args = (own, tiny.params(), packed, kept)
    return draft_loss.loss(options, CONFIGS[kind], tiny.CONFIG, *args)

  def make():
    return jax.jit(jax.value_and_grad(lambda own: loss(own), has_aux=True))

  whole = make()(params(kind))
  rows, T = packed.tokens.shape
  monkeypatch.setattr(draft_loss, "_LOGITS", 0)
  monkeypatch.setattr(draft_loss, "_POSITIONS", rows * 10)
  assert T == 48  # in blocks of 10
  in_blocks = make()
  assert "scan" in str(jax.make_jaxpr(in_blocks)(params(kind)))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  jax.tree.map(close, in_blocks(params(kind)), whole)


@pytest.mark.parametrize("distance", draft_loss.DISTANCES)
def test_gradients_are_finite_where_the_target_wants_no_drafted_token(distance):
  """At some positions all of its probability is outside, to the last bit."""
  packed, kept = random_batch("eagle3_vocab", scale=100.0)
  mass = jax.nn.softmax(kept.final @ tiny.params()["head"].T, -1)[..., list(VOCAB)].sum(-1)
  assert (mass == 0).any()
  options = draft_loss.Loss(steps=2, distance=distance)

  def loss(own):
    args = (own, tiny.params(), packed, kept)
    return draft_loss.loss(options, CONFIGS["eagle3_vocab"], tiny.CONFIG, *args)[0]

  grads = jax.jit(jax.grad(loss))(params("eagle3_vocab"))
  assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(grads))


def test_a_draft_vocabulary_is_stored_as_in_published_files(tmp_path):
  """config.json has its size; d2t and t2d say which tokens."""
  drafter_files.save(tmp_path / "d", CONFIGS["eagle3_vocab"], params("eagle3_vocab"))
  raw = json.loads((tmp_path / "d" / "config.json").read_text())
  assert raw["draft_vocab_size"] == len(VOCAB) and "vocab" not in raw
  stored = safetensors.numpy.load_file(tmp_path / "d" / "model.safetensors")
  assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == bool
  np.testing.assert_array_equal(np.arange(len(VOCAB)) + stored["d2t"], VOCAB)
  np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), VOCAB)


@pytest.mark.parametrize(
  ("named", "x"),
  [
    ("d2t", None),
    ("d2t", np.full(32, 1)),  # other tokens than t2d
    ("t2d", np.ones(65, bool)),
    ("head", None),
  ],
)
def test_a_damaged_draft_vocabulary_is_named(named, x, tmp_path):
  drafter_files.save(tmp_path / "d", CONFIGS["eagle3_vocab"], params("eagle3_vocab"))
  file = tmp_path / "d" / "model.safetensors"
  stored = safetensors.numpy.load_file(file) | {named: x}
  stored = {name: x for name, x in stored.items() if x is not None}
  safetensors.numpy.save_file(stored, file)
  with pytest.raises(hf.CheckpointError, match=f"model.safetensors.*{named}"):
    drafter_files.load(tmp_path / "d", tiny.CONFIG)


@pytest.mark.parametrize(
  ("kind", "strategy"),
  [
    ("eagle2_vocab", "3_4_12"),
    tiny.slow("eagle3_vocab", "3_4_12"),
    tiny.slow("mtp", "3_2_7"),
  ],
)
def test_no_token_depends_on_the_kind_or_vocabulary_of_a_drafter(kind, strategy):
  """Trees of more children than filters leave tokens, over slices with sharded heads.

  Half of the tokens that the target draws are none that could be drafted.
  """
  mesh = tiny.mesh(2, 2)
  options = rollout.Options(max_length=40, max_prompt=12, slots=16, chunk=8)
  made = tiny.requests(4, 4, max_tokens=24, top_k=3)
  plain = rollout.make(tiny.CONFIG, mesh, options)(tiny.on(mesh), made)
  drawn = np.concatenate([plain.response(i) for i in range(len(made))])
  assert 0.2 < np.isin(drawn, VOCAB).mean() < 0.8
  parsed = strategy_lib.parse(strategy)
  drawn = speculative(CONFIGS[kind], params(kind), mesh, options, parsed)(
    tiny.on(mesh), made
  )
  result = compare.compare(tiny.CONFIG, tiny.params(), made, plain, drawn)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1
  assert drawn.mean_acceptance_length > 1
