"""Speculative rollouts draw, token for token, what plain ones draw."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest

from tests import commands
from tests import tiny
from tlt_jax import axes
from tlt_jax import data
from tlt_jax import tokenization
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import draft as draft_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot as spot_lib

OPTIONS = rollout.Options(**tiny.SIZES, slots=32, chunk=16, buckets=(8,))
NARROW = dataclasses.replace(OPTIONS, slots=8, buckets=())  # one bucket: half the programs
CHAIN = strategy_lib.Strategy(depth=4, width=1, verify=9)
TREE = strategy_lib.Strategy(depth=3, width=2, verify=7)
TREES = ("3_4_16", "8_4_48")


class Chosen(selector_lib.Selector):
  """Lets the test say what runs; one engine, and its programs, serve many tests."""

  strategies = (CHAIN, TREE, *map(strategy_lib.parse, TREES), strategy_lib.parse("ngram_4"))

  def __init__(self):
    self.rule = None

  def choose(self, live, step_s):
    return self.rule(live)

  def arms(self, live):
    of_any_depth = (dataclasses.replace(CHAIN, depth=d) for d in range(1, CHAIN.verify))
    return None, *self.strategies, *of_any_depth


@functools.cache
def engine(data=1, model=1, kind=None):
  drafter, selector = (tiny.frozen(kind), Chosen()) if kind else (None, None)
  usual = (data, model) == (1, 1) and kind != "eagle3"
  mesh, options = tiny.mesh(data, model), OPTIONS if usual else NARROW
  return rollout.make(tiny.CONFIG, mesh, options, drafter, selector)


def always(strategy):
  return lambda live: strategy


def requests(**options):
  """1,000 to 2,000 tokens; lengths from a stop token and from limits of their own."""
  limits = np.random.default_rng(3).integers(1, 80, 48)
  return tiny.requests(8, 6, **{"max_tokens": limits, "stop_tokens": [3], **options})


@functools.cache
def plain(**options):
  made = requests(**options)
  return made, engine()(tiny.on(tiny.mesh(1)), made)


def speculate(made, choose, kind="eagle2", data=1, model=1):
  run = engine(data, model, kind)
  run.selector.rule = choose
  return run(tiny.on(tiny.mesh(data, model)), made)


def assert_same(made, a, b):
  result = compare.compare(tiny.CONFIG, tiny.params(), made, a, b)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1 + result.total_tokens // 10_000
  np.testing.assert_array_equal(a.finish_reason, b.finish_reason)
  same = (a.tokens == b.tokens).all(1)
  np.testing.assert_allclose(a.logp[same], b.logp[same], atol=1e-5)
  np.testing.assert_allclose(a.logp_filtered[same], b.logp_filtered[same], atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3, 8, *map(tiny.slow, (2, 4, 5, 6, 7))])
def test_a_chain_of_any_depth_draws_the_same(depth):
  made, samples = plain()
  strategy = dataclasses.replace(CHAIN, depth=depth)
  assert_same(made, samples, speculate(made, always(strategy)))


@pytest.mark.parametrize(
  ("kind", "tree"),
  [tiny.slow("eagle2", "3_4_16"), tiny.slow("eagle2", "8_4_48"), ("eagle3", "3_4_16")],
)
def test_a_tree_of_any_shape_draws_the_same(kind, tree):
  made, samples = plain()
  drawn = speculate(made, always(strategy_lib.parse(tree)), kind)
  assert_same(made, samples, drawn)
  assert drawn.mean_acceptance_length > 1


SAMPLING = [
  dict(temperature=0.0),
  dict(temperature=0.6),
  dict(top_k=5),
  dict(top_p=0.8),
  dict(min_p=0.1),
  dict(temperature=0.6, top_k=9, top_p=0.9, min_p=0.05),
  dict(stop_tokens=[3, 9, 17]),
  dict(seed=11, stop_tokens=[]),
]


@pytest.mark.parametrize(
  ("sampling", "strategy"),
  [
    *((sampling, CHAIN) for sampling in SAMPLING[:6]),
    *((sampling, TREE) for sampling in SAMPLING[5:6]),
    *(tiny.slow(sampling, CHAIN) for sampling in SAMPLING[6:]),
    *(tiny.slow(sampling, TREE) for sampling in [*SAMPLING[:5], *SAMPLING[6:]]),
  ],
  ids=str,
)
def test_sampling_parameters_act_as_in_plain_decoding(sampling, strategy):
  made = requests(**sampling)
  samples = engine()(tiny.on(tiny.mesh(1)), made)
  assert_same(made, samples, speculate(made, always(strategy)))


@pytest.mark.parametrize(
  ("data", "model", "strategy"),
  [tiny.slow(2, 1, CHAIN), tiny.slow(8, 1, TREE), tiny.slow(2, 2, CHAIN), (2, 2, TREE)],
)
def test_the_layout_changes_no_token(data, model, strategy):
  made, samples = plain()
  assert_same(made, samples, speculate(made, always(strategy), "eagle2", data, model))


def test_rows_that_are_no_token_are_never_drawn():
  """Nor drafted, on a vocabulary split over devices either; the learner agrees."""
  unused = ((20, 30), (50, 64))
  config = dataclasses.replace(tiny.CONFIG, unused_rows=unused)
  drafter = drafter_lib.of_target(config)
  frozen = spot_lib.Frozen(drafter, tiny.draft_params("eagle2", 5))
  made, mesh = requests(), tiny.mesh(1, 2)
  drawn = []
  for of in (None, frozen):
    selector = selector_lib.always(TREE) if of else None
    run = rollout.make(config, mesh, NARROW, of, selector)
    drawn.append(run(tiny.on(mesh), made))
  result = compare.compare(config, tiny.params(), made, *drawn)
  assert result.differing_tokens == 0, result.where
  used = np.concatenate(
    [t[:n] for t, n in zip(drawn[1].tokens, drawn[1].length, strict=True)]
  )
  likely = np.bincount(used, minlength=64)
  assert len(used) > 900 and not any(likely[a:b].any() for a, b in unused)
  for i in range(3):
    prompt, n = made.prompts[made.prompt_idx[i]], drawn[1].length[i]
    tokens = np.concatenate([prompt, drawn[1].tokens[i, :n]])[None]
    _, logits, _ = target.Target(config).apply(
      {"params": tiny.params()},
      tokens,
      np.arange(tokens.shape[1])[None],
      method=target.Target.features_and_logits,
    )
    logp = jax.nn.log_softmax(logits[0, len(prompt) - 1 : -1])
    expected = np.take_along_axis(np.asarray(logp), tokens[0, len(prompt) :, None], 1)[:, 0]
    np.testing.assert_allclose(drawn[1].logp[i, :n], expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle2", tiny.slow("eagle3")])
def test_speculation_switches_on_and_off_at_any_chunk(kind):
  """In both directions, between strategies too, without touching the target's cache."""
  made, samples = plain()
  ngram = strategy_lib.parse("ngram_4")
  turns = itertools.cycle([None, CHAIN, TREE, CHAIN, None, ngram, TREE])
  assert_same(made, samples, speculate(made, lambda live: next(turns), kind))


def test_small_live_batches_speculate_and_large_ones_do_not():
  made, samples = plain()
  selector = selector_lib.ByLiveBatch(((4, TREE), (16, CHAIN)))
  drawn = speculate(made, selector.choose)
  assert_same(made, samples, drawn)
  assert drawn.mean_acceptance_length > 1


def test_a_drafter_that_is_always_wrong_changes_no_token(monkeypatch):
  """It guesses the rarest of all tokens: a pass yields one token, with few exceptions.

  `compile` covers the programs of speculation: nothing compiles after it.
  """
  made, samples = plain()
  rarest = int(np.argmin(np.bincount(samples.tokens.ravel(), minlength=64)))

  def logits(self, h):
    tokens = jax.numpy.full(h.shape[:-1], rarest)
    return 100.0 * jax.nn.one_hot(tokens, tiny.CONFIG.vocab_size)

  monkeypatch.setattr(draft_lib.Draft, "logits", logits)
  selector = selector_lib.ByLiveBatch(((99, CHAIN),))
  drafter = tiny.frozen("eagle2")
  run = rollout.make(tiny.CONFIG, tiny.mesh(1), NARROW, drafter, selector)
  params = tiny.on(tiny.mesh(1))
  run.compile(params, made.stop_tokens.shape[1])
  count = len(run.pool)
  drawn = run(params, made)
  assert len(run.pool) == count, run.pool.report()
  assert_same(made, samples, drawn)
  assert drawn.mean_acceptance_length < 1.05


def test_n_grams_draw_the_same_and_learn_from_siblings():
  """Without any drafter; a second epoch over the same prompts accepts more."""
  made, samples = plain()
  selector = selector_lib.ByLiveBatch(((99, strategy_lib.parse("ngram_4")),))
  run = rollout.make(tiny.CONFIG, tiny.mesh(2), NARROW, None, selector)
  first = run(tiny.on(tiny.mesh(2)), made)
  assert_same(made, samples, first)
  again = run(tiny.on(tiny.mesh(2)), made)
  assert_same(made, samples, again)
  assert again.mean_acceptance_length > first.mean_acceptance_length > 1
  resumed = rollout.make(tiny.CONFIG, tiny.mesh(2), NARROW, None, selector)
  resumed.restore(json.loads(json.dumps(run.state())))
  assert resumed.state() == run.state()


@functools.cache
def default_task():
  """The small policy and its drafter, 256 responses and what plain decoding draws."""
  run = commands.read_run("countdown.py:small")
  mesh = tiny.mesh(2)
  model, params = hf.load(run.policy, mesh, axes.ROLLOUT)
  loaded = drafter_files.load("experiments/drafters/countdown", model, mesh)
  drafter = spot_lib.Frozen(*loaded)
  tokenizer = tokenization.Tokenizer.load(run.policy)
  records = data.source(**run.held_out | {"size": 128})
  made = requests_lib.make_requests(
    [tokenizer.encode(r["prompt"]) for r in records],
    responses=2,
    max_tokens=320,
    stop_tokens=tokenizer.stop_tokens,
  )
  options = rollout.Options(max_length=352, max_prompt=32, slots=64, prompt_rows=8)
  make = functools.partial(rollout.make, model, mesh, options)
  return model, params, drafter, made, make, make()(params, made)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["5_1_6", "3_4_16"])
def test_a_trained_drafter_draws_the_same_in_fewer_passes(strategy):
  """More than 30,000 tokens of the default task."""
  model, params, drafter, made, make, samples = default_task()
  selector = selector_lib.always(strategy_lib.parse(strategy))
  drawn = make(drafter, selector)(params, made)
  result = compare.compare(model, params, made, samples, drawn)
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 3
  assert result.total_tokens > 30_000
  assert drawn.mean_acceptance_length > 2.5


def test_features_are_kept_alike():
  """Features of a speculative rollout equal those of a plain one."""
  made, selector = requests(), Chosen()
  keep = dataclasses.replace(NARROW, features=True)
  run = rollout.make(tiny.CONFIG, tiny.mesh(1), keep, tiny.frozen("eagle2"), selector)
  drawn = []
  for strategy in (TREE, None):
    selector.rule = always(strategy)
    drawn.append(run(tiny.on(tiny.mesh(1)), made))
  with_draft, without = drawn
  assert without.mean_acceptance_length == 1
  for a, b in zip(with_draft.features, without.features, strict=True):
    if a.shape == b.shape:
      np.testing.assert_allclose(a, b, atol=1e-4)
