"""Families whose layers differ: rollouts and the learner agree, and nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tlt_jax import axes
from tlt_jax import packing
from tlt_jax.models import drafter
from tlt_jax.models import hf
from tlt_jax.models import layers
from tlt_jax.models import stacked
from tlt_jax.models import target
from tlt_jax.pallas_kernels import packed_attention
from tlt_jax.rl import algorithm
from tlt_jax.rl import batch as batch_lib
from tlt_jax.rl import learner
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot

SHAPE = dict(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  max_position_embeddings=256,
)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
# Windows are smaller than trees are deep.
FAMILIES = {
  "Gemma3ForCausalLM": dict(
    num_hidden_layers=5, sliding_window_pattern=2, sliding_window=3, query_pre_attn_scalar=9
  ),
  "MistralForCausalLM": dict(sliding_window=3, rope_parameters=YARN),
  "SmolLM3ForCausalLM": dict(no_rope_layer_interval=2, tie_word_embeddings=False),
  "Qwen2ForCausalLM": dict(
    use_sliding_window=True, sliding_window=20, max_window_layers=1, rope_scaling=YARN
  ),
}
OPTIONS = rollout.Options(**tiny.SIZES, slots=24, chunk=16)


@functools.cache
def model(family):
  """A config, and parameters whose next tokens are neither flat nor certain."""
  config = hf.parse_config(SHAPE | FAMILIES[family] | {"architectures": [family]})
  made = jax.jit(lambda key: target.init_params(config, key))(jax.random.key(0))
  for i in range(config.num_layers):
    for path in ("input_norm", "post_norm"):
      scale = made[f"layer_{i}"][path]["scale"]
      key = jax.random.fold_in(jax.random.key(1), i)
      made[f"layer_{i}"][path]["scale"] = scale + jax.random.uniform(key, scale.shape)
  if config.tie_embeddings:
    made["final_norm"]["scale"] += 15.0
  else:
    made["head"] *= 20.0
  return config, made


class InTurn(selector_lib.Selector):
  """One strategy, which the test names."""

  strategies = tuple(map(strategy_lib.parse, ("5_1_6", "3_4_16", "ngram_4")))
  now = strategies[0]

  def choose(self, live, step_s):
    return self.now


@pytest.mark.parametrize("family", ["Gemma3ForCausalLM", *map(tiny.slow, [*FAMILIES][1:])])
def test_rollouts_and_the_learner_agree(family):
  """Chains, trees and n-grams draw what plain decoding draws, whose log-probabilities are
  the learner's."""
  config, params = model(family)
  limits = np.random.default_rng(3).integers(1, 80, 24)
  made = requests_lib.make_requests(
    tiny.prompts(6), 4, max_tokens=limits, stop_tokens=[3], seed=7
  )
  own = drafter.of_target(config)
  draft = spot.Frozen(own, drafter.init_params(own, jax.random.key(5)))
  plain = rollout.make(config, tiny.mesh(1), OPTIONS)(params, made)
  selector = InTurn()
  run = rollout.make(config, tiny.mesh(1), OPTIONS, draft, selector)
  for strategy in selector.strategies:
    selector.now = strategy
    result = compare.compare(config, params, made, plain, run(params, made))
    assert result.total_tokens > 400
    assert result.differing_tokens == 0, result.where
    assert result.near_ties <= 1
  made_learner = learner.make(
    config, algorithm.make("grpo"), optax.sgd(1.0), tiny.mesh(1), ((2, 64), (2, 128))
  )
  responses = [plain.response(i) for i in range(len(made))]
  buckets = [packing.Bucket(2, 64), packing.Bucket(2, 128)]
  prompts = [made.prompt(i) for i in range(len(made))]
  packed = packing.pack(prompts, responses, buckets)
  scores = made_learner.score(
    params, packing.place(packed, made_learner.mesh), np.ones(len(made), np.float32)
  )
  checked = 0
  for bucket, logp in zip(packed, scores, strict=True):
    for row in np.argwhere(bucket.mask):
      place = tuple(row)
      i = bucket.sequence_idx[place]
      t = bucket.positions[place] + 1 - len(prompts[i])
      np.testing.assert_allclose(logp[place], plain.logp[i, t], atol=5e-5)
      checked += 1
  assert checked == sum(map(len, responses))


RING = dict(page_tokens=4, chunk=8, prefill_block=6, slots=5, prompt_rows=2)


@pytest.mark.parametrize(
  ("family", "layout", "strategy", "options"),
  [
    tiny.slow("Gemma3ForCausalLM", (2, 1), None, {}),
    ("Gemma3ForCausalLM", (1, 2), "3_4_16", dict(cache_tokens=400)),
    tiny.slow("Gemma3ForCausalLM", (1, 1), "ngram_4", {}),
    tiny.slow("MistralForCausalLM", (1, 2), "5_1_6", {}),
    tiny.slow(
      "Qwen2ForCausalLM", (2, 2), "ngram_4", dict(prefill_block=40, buckets=(2, 1))
    ),
  ],
)
def test_a_window_bounds_pages(family, layout, strategy, options):
  """Of rows many windows long, layers with a window keep a few pages, and no token
  changes: with shared prompts, rejected drafts, requests that are sent back, and on
  slices of several devices."""
  config, params = model(family)
  options = rollout.Options(max_length=120, max_prompt=40, **RING | options)
  limits = np.random.default_rng(3).integers(1, 80, 24)
  made = requests_lib.make_requests(
    tiny.prompts(6, longest=40), 4, max_tokens=limits, stop_tokens=[3], seed=7
  )
  whole = rollout.Options(max_length=120, max_prompt=40, slots=24)  # a page holds a row
  plain = rollout.make(config, tiny.mesh(1), whole)(params, made)
  own = drafter.of_target(config)
  draft = spot.Frozen(own, drafter.init_params(own, jax.random.key(5)))
  selector = InTurn() if strategy else None
  if selector:
    selector.now = strategy_lib.parse(strategy)
  mesh = tiny.mesh(*layout)
  shardings = axes.shardings(mesh, axes.ROLLOUT, target.abstract_params(config))
  run = rollout.make(config, mesh, options, draft if selector else None, selector)
  found = run(jax.device_put(params, shardings), made)
  result = compare.compare(config, params, made, plain, found)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1
  sizes = run.backend.shapes.pages
  window = max(kind.window or 0 for kind in config.layers)
  written = max(options.chunk + run.backend.shapes.room.behind, options.prefill_block)
  assert 4 * (sizes.ring - 2) < window + written < sizes.length / 2
  pools = run.backend.shapes.slots(5, 1).kv.pages, run.backend.shapes.slots(5, 1).kv.pools
  for is_near, pool in zip(config.windowed, pools[1], strict=True):
    pages = sizes.near if is_near else sizes.pages
    assert len(pool.k) == mesh.shape[axes.DATA] * (pages + 1)
  assert sizes.near < 0.7 * sizes.pages


@pytest.mark.parametrize(
  "family",
  ["Gemma3ForCausalLM", tiny.slow("MistralForCausalLM"), tiny.slow("Qwen2ForCausalLM")],
)
def test_the_update_does_not_depend_on_the_layout(family):
  """Of rows that are longer than windows."""
  config, params = model(family)
  rng, prompts = np.random.default_rng(2), tiny.prompts(6)
  responses = [rng.integers(0, 64, n).astype(np.int32) for n in (50, 9, 31, 44, 22, 60)]
  scored = algorithm.Responses(
    rng.normal(size=(1, 6)).astype(np.float32), np.array([list(map(len, responses))])
  )
  batch = batch_lib.Batch(prompts, responses, np.ones(6, np.float32), scored)

  def update(data, devices, **options):
    made = learner.make(
      config,
      algorithm.make("grpo"),
      optax.sgd(1.0),
      tiny.mesh(data, devices),
      ((2, 128),),
      **options,
    )
    after, _ = made.train(made.init(jax.tree.map(jnp.copy, params)), batch)
    return jax.tree.map(lambda x, y: np.asarray(x) - y, params, after.params)

  def same(x, y):
    assert np.abs(x).max() > 1e-4
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)

  jax.tree.map(same, update(1, 1, remat=False), update(2, 2))


def gradients(config, params, runs):
  """Of the learner's loops over layers, and of the layers one by one."""
  tokens = jax.random.randint(jax.random.key(2), (2, 40), 0, config.vocab_size)
  positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
  weight = jax.random.normal(jax.random.key(3), (2, 40, config.width))

  def looped(params):
    made = stacked.stack(params, runs)
    by = layers.rotation(config, positions)
    ids = packed_attention.Segments(jnp.ones_like(tokens))
    found, _ = stacked.features(
      config, made, runs, tokens, ids, by, gather=lambda x: x, remat=True
    )
    return jnp.sum(found * weight), found

  def direct(params):
    found, _ = target.Target(config).apply({"params": params}, tokens, positions)
    return jnp.sum(found * weight), found

  @jax.jit
  def both(params):
    return [jax.grad(f, has_aux=True)(params) for f in (looped, direct)]

  return both(params)


@pytest.mark.parametrize("family", ["Gemma3ForCausalLM", *map(tiny.slow, [*FAMILIES][1:])])
def test_loops_over_layers_have_the_gradient_of_the_layers(family):
  config, params = model(family)
  runs = stacked.runs(params, config)
  (grad, found), (want_grad, want) = gradients(config, params, runs)
  np.testing.assert_allclose(found, want, atol=5e-6 * np.abs(want).max())
  for x, y in zip(*map(jax.tree.leaves, (grad, want_grad)), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())


def test_a_loop_runs_whole_periods_of_layers():
  """Then what is left; layers that train other parts are in loops of their own."""
  config, params = model("Gemma3ForCausalLM")
  assert stacked.runs(params, config) == [(range(0, 4, 2), range(1, 4, 2)), (range(4, 5),)]
  top = {f"layer_{i}": params[f"layer_{i}"] for i in (3, 4)}
  assert stacked.runs(top, config) == [
    *((range(i, i + 1),) for i in range(3)),
    (range(3, 4),),
    (range(4, 5),),
  ]
  tiny_runs = stacked.runs(tiny.params(), tiny.CONFIG)
  assert tiny_runs == [(range(2),)]
  for runs in (tiny_runs, stacked.runs(params, config)):
    given = tiny.params() if runs is tiny_runs else params
    again = stacked.unstack(stacked.stack(given, runs), runs)
    jax.tree.map(np.testing.assert_array_equal, again, given)
