import dataclasses
import functools

import hypothesis
from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tlt_jax import programs
from tlt_jax.models import layers
from tlt_jax.models import target
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import chunk as chunk_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib

OPTIONS = rollout.Options(
  max_length=64, max_prompt=12, slots=24, chunk=8, prompt_rows=4, prefill_rows=4
)


@functools.cache
def make(data, model, options):
  return rollout.make(tiny.CONFIG, tiny.mesh(data, model), options)


def run(requests, data=1, model=1, **options):
  options = dataclasses.replace(OPTIONS, **options)
  return make(data, model, options)(tiny.on(tiny.mesh(data, model)), requests)


@functools.cache
def reference(**options):
  requests = tiny.requests(**options)
  return requests, run(requests)


def assert_same(requests, a, b):
  result = compare.compare(tiny.CONFIG, tiny.params(), requests, a, b)
  assert result.total_tokens > 0
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1 + result.total_tokens // 10_000


def test_rollout_draws_what_an_uncached_forward_pass_draws():
  """Tokens, log-probabilities and finish reasons against whole-sequence passes."""
  requests, samples = reference()
  drawn = compare.redraw(tiny.CONFIG, tiny.params(), requests, samples)
  T = samples.tokens.shape[1]
  inside = np.arange(T) < samples.length[:, None]
  np.testing.assert_array_equal(
    samples.tokens[inside & (drawn.margin > 1e-4)],
    drawn.token[inside & (drawn.margin > 1e-4)],
  )
  np.testing.assert_allclose(samples.logp[inside], drawn.logp[inside], atol=1e-5)
  for i in range(len(requests)):
    response = samples.response(i)
    assert 3 not in response[:-1]
    if samples.finish_reason[i] == samples_lib.STOP:
      assert response[-1] == 3
    else:
      assert len(response) == requests.max_tokens[i]
  assert set(samples.finish_reason) == {samples_lib.STOP, samples_lib.LENGTH}


def test_who_watches_sees_responses_grow_into_what_they_end_as():
  """After every chunk; each request ends once."""
  requests, samples = reference()
  seen, ended = [[] for _ in range(len(requests))], []

  def watch(so_far, now):
    ended.extend(now)
    for i in range(len(requests)):
      seen[i].append(so_far.response(i).tolist())

  make(1, 1, OPTIONS)(tiny.on(tiny.mesh(1)), requests, watch=watch)
  assert sorted(ended) == [*range(len(requests))]
  for i, responses in enumerate(seen):
    whole = samples.response(i).tolist()
    assert responses[-1] == whole
    assert all(whole[: len(part)] == part for part in responses)
  assert any(0 < len(part) < len(s[-1]) for s in seen for part in s)


@pytest.mark.parametrize(
  ("data", "model", "options"),
  [
    tiny.slow(1, 1, dict(slots=1)),
    (1, 1, dict(slots=5, chunk=3)),
    tiny.slow(1, 1, dict(buckets=(1, 2, 4, 8, 16))),
    (1, 1, dict(buckets=(8, 4, 1), page_tokens=16)),
    (2, 1, {}),
    tiny.slow(8, 1, dict(slots=2)),
    tiny.slow(1, 2, {}),
    (2, 2, dict(buckets=(4, 2), page_tokens=8)),
    (4, 2, {}),
  ],
)
def test_tokens_do_not_depend_on_the_layout(data, model, options):
  """Batch size, buckets, slices and tensor parallelism change no token."""
  requests, samples = reference()
  assert_same(requests, samples, run(requests, data, model, **options))


@pytest.mark.parametrize("length", [24, 1056])
def test_a_table_of_rotations_has_what_a_program_would_compute(length):
  """To the last bit, however long; on every device."""
  mesh = tiny.mesh(2, 2)
  table = chunk_lib.rotations(tiny.SMOLLM2, mesh, length)
  inside = jax.jit(lambda: layers.rotation(tiny.SMOLLM2, jnp.arange(length)))()
  shapes = chunk_lib.rotations(tiny.SMOLLM2, mesh, length, abstract=True)
  for x, want, shape in zip(table, inside, shapes, strict=True):
    np.testing.assert_array_equal(x, want)
    assert x.sharding == shape.sharding and x.is_fully_replicated
    assert (x.shape, x.dtype) == (shape.shape, shape.dtype)


def test_every_program_reads_the_same_rotations(monkeypatch):
  """Those of prompts, of plain decoding, chains and trees; a drafter has its own."""
  layer = dataclasses.replace(tiny.DRAFTERS["eagle2"].layer, rope_theta=1e5)
  shape = dataclasses.replace(tiny.DRAFTERS["eagle2"], layer=layer)
  drafter = dataclasses.replace(tiny.frozen("eagle2"), config=shape)
  levels = "up to 24 live: off or 3_1_4 or 2_2_6"
  selector = selector_lib.make(levels, "predictive", has_drafter=True)
  engine = rollout.make(tiny.CONFIG, tiny.mesh(1), OPTIONS, drafter, selector)
  read = {}

  def record(name, bucket, jitted, weights, *args):
    read[name] = weights
    return print  # compiled for nothing

  monkeypatch.setattr(engine.pool, "get", record)
  monkeypatch.setattr(programs, "shapes", lambda tree: tree)  # compiled for the arrays
  engine.compile(tiny.on(tiny.mesh(1)), stop_tokens=1)
  del read["copy"]
  assert {"prefill", "chunk", "fill"} < set(read) and len(read) == 5
  assert len({id(weights.rotations.cos) for weights in read.values()}) == 1
  drafting = [w.draft_rotations for w in read.values() if w.draft is not None]
  assert len(drafting) == 3 and len({id(table.cos) for table in drafting}) == 1
  for table, config in ((drafting[0], layer), (read["chunk"].rotations, tiny.CONFIG)):
    want = layers.rotation(config, jnp.arange(engine.backend.shapes.pages.length))
    jax.tree.map(np.testing.assert_array_equal, table, want)


def test_tokens_do_not_depend_on_the_order_of_requests():
  """The same requests, shuffled, land in other slots and draw the same."""
  requests, samples = reference()
  order = np.random.default_rng(2).permutation(len(requests))
  shuffled = run(requests.subset(order), slots=7)
  back = np.argsort(order)
  again = dataclasses.replace(
    shuffled, tokens=shuffled.tokens[back], length=shuffled.length[back]
  )
  assert_same(requests, samples, again)


@pytest.mark.parametrize(
  "filters",
  [
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05),
  ],
)
def test_filters_do_not_depend_on_the_layout(filters):
  requests, samples = reference(**filters)
  assert_same(requests, samples, run(requests, 2, 2, slots=5))


def test_seeds_and_requests_draw_apart():
  """Another seed or request id gives other tokens; the same gives the same."""
  same = reference()[1].tokens
  assert (run(tiny.requests()).tokens == same).all()
  assert (run(tiny.requests(seed=8)).tokens != same).any()
  assert (run(tiny.requests(first_request=100)).tokens != same).any()


@given(
  slots=st.sampled_from([1, 3, 8, 24]),
  chunk=st.sampled_from([1, 5, 16]),
  prompt_rows=st.sampled_from([1, 3]),
  buckets=st.sampled_from([(), (3,), (1, 4)]),
  page_tokens=st.sampled_from([4, 16, 256]),
  cache_tokens=st.sampled_from([None, 200]),
  prefill_block=st.sampled_from([3, 12]),
)
def test_tokens_do_not_depend_on_the_schedule(**options):
  """Random buckets, pages, refill orders, chunk sizes, prefill blocks."""
  if options["cache_tokens"] is not None:
    each = -(-options["chunk"] // options["page_tokens"]) * options["page_tokens"]
    hypothesis.assume(options["slots"] * each <= options["cache_tokens"])
  requests, samples = reference()
  assert_same(requests, samples, run(requests, 2, **options))


@pytest.mark.parametrize(
  "options",
  [
    tiny.slow({}),
    tiny.slow(dict(page_tokens=8, chunk=5)),
    dict(page_tokens=8, chunk=5, cache_tokens=200),
  ],
)
def test_features_are_those_of_a_forward_pass(options):
  """Kept features equal the hidden states of whole sequences, prompt included."""
  requests = tiny.requests(3, 4)
  options = dict(buckets=(2, 1)) | options
  samples = run(requests, 2, features=True, **options)
  tokens = np.zeros((len(requests), OPTIONS.max_length), np.int32)
  for i, row in enumerate(tokens):
    known = np.concatenate([requests.prompt(i), samples.response(i)])
    row[: len(known)] = known
  at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  run_target = jax.jit(target.Target(tiny.CONFIG).apply)
  features, _ = run_target({"params": tiny.params()}, tokens, at)
  for i, kept in enumerate(samples.features):
    assert len(kept) == requests.total_length[i] - requests.max_tokens[i] + (
      samples.length[i] - 1
    )
    np.testing.assert_allclose(kept, features[i, : len(kept)], atol=1e-5)


def test_a_prompt_is_prefilled_once():
  """Eight responses of one prompt cost one row of one prefill."""
  engine = rollout.make(tiny.CONFIG, tiny.mesh(1), OPTIONS)
  prefilled = []
  inner = engine.pool.run

  def counted(name, key, *args, **static):
    if name == "prefill":
      sink = args[2][0].k.shape[0] - 1
      prefilled.append(int(np.sum(np.asarray(args[4][0])[:, 0] < sink)))
    return inner(name, key, *args, **static)

  engine.pool.run = counted
  engine(tiny.params(), tiny.requests(1, 8))
  assert prefilled == [1]


def test_a_memory_budget_sends_requests_back_and_loses_none(monkeypatch):
  """When lengths outgrow the budget, the youngest requests start over."""
  requests, samples = reference()
  sent_back, inner = [], running_lib.Running.send_back

  def counted(self, s):
    return sent_back.append(inner(self, s)) or sent_back[-1]

  monkeypatch.setattr(running_lib.Running, "send_back", counted)
  options = dict(slots=6, buckets=(4, 2), chunk=5, cache_tokens=100, page_tokens=8)
  options |= dict(prompt_rows=1)
  assert_same(requests, samples, run(requests, 2, **options))
  assert sent_back


def test_out_of_memory_lowers_the_bucket_and_loses_no_request(caplog, monkeypatch):
  """A program that does not fit is not used again; every request still finishes."""
  requests, samples = reference()
  options = dict(buckets=(4, 8))
  engine = rollout.make(tiny.CONFIG, tiny.mesh(2), dataclasses.replace(OPTIONS, **options))
  refused = tiny.refuse_chunks(monkeypatch, engine, most=8)
  assert_same(requests, samples, engine(tiny.on(tiny.mesh(2)), requests))
  assert refused and len(set(refused)) == len(refused)
  assert "out of memory" in caplog.text


def test_nothing_compiles_after_compiling_ahead():
  """`compile` covers every program that rollouts of these options run."""
  options = dict(slots=8, buckets=(4, 1), page_tokens=8)
  engine = rollout.make(tiny.CONFIG, tiny.mesh(2), dataclasses.replace(OPTIONS, **options))
  params, requests = tiny.on(tiny.mesh(2)), tiny.requests()
  engine.compile(params, requests.stop_tokens.shape[1])
  count = len(engine.pool)
  for first in (0, 100):
    engine(params, tiny.requests(first_request=first))
  engine(params, tiny.requests(2, 3))
  assert len(engine.pool) == count <= 8, engine.pool.report()


def test_bad_requests_name_the_cause():
  with pytest.raises(requests_lib.RequestError, match="prompt 1 has no tokens"):
    requests_lib.make_requests([[1], []], max_tokens=4)
  with pytest.raises(requests_lib.RequestError, match="0 < top_p"):
    requests_lib.make_requests([[1]], max_tokens=4, top_p=0.0)
  with pytest.raises(requests_lib.RequestError, match="prompt 0 has 13 tokens"):
    run(requests_lib.make_requests([np.ones(13)], max_tokens=4))
  with pytest.raises(requests_lib.RequestError, match="KV cache holds 64"):
    run(requests_lib.make_requests([np.ones(3)], max_tokens=62))


def test_no_request_is_no_work():
  samples = run(requests_lib.make_requests([], max_tokens=4))
  assert samples.tokens.shape[0] == 0
  assert jax.tree.leaves(samples.timeline)
