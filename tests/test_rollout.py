import dataclasses
import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode import compare
from tlt_jax.spec_decode import requests as requests_lib
from tlt_jax.spec_decode import rollout

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
    if samples.finish_reason[i] == requests_lib.STOP:
      assert response[-1] == 3
    else:
      assert len(response) == requests.max_tokens[i]
  assert set(samples.finish_reason) == {requests_lib.STOP, requests_lib.LENGTH}


@pytest.mark.parametrize(
  ("data", "model", "options"),
  [
    (1, 1, dict(slots=1)),
    (1, 1, dict(slots=5, chunk=3)),
    (1, 1, dict(batch_buckets=(1, 2, 4, 8, 16), cache_buckets=(16, 32))),
    (2, 1, {}),
    (8, 1, dict(slots=2)),
    (1, 2, {}),
    (2, 2, dict(batch_buckets=(2, 4), cache_buckets=(24,))),
    (4, 2, {}),
  ],
)
def test_tokens_do_not_depend_on_the_layout(data, model, options):
  """Batch size, buckets, slices and tensor parallelism change no token."""
  requests, samples = reference()
  assert_same(requests, samples, run(requests, data, model, **options))


def test_tokens_do_not_depend_on_the_order_of_requests():
  """The same requests, shuffled, land in other slots and draw the same."""
  requests, samples = reference()
  order = np.random.default_rng(2).permutation(len(requests))
  arrays = {
    f.name: getattr(requests, f.name)[order]
    for f in dataclasses.fields(requests)
    if f.name != "prompts"
  }
  shuffled = run(dataclasses.replace(requests, **arrays), slots=7)
  back = np.argsort(order)
  again = dataclasses.replace(
    shuffled, tokens=shuffled.tokens[back], length=shuffled.length[back]
  )
  assert_same(requests, samples, again)


@pytest.mark.parametrize(
  "filters",
  [
    dict(temperature=0.0),
    dict(temperature=0.6, top_k=5),
    dict(top_p=0.8),
    dict(min_p=0.1),
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


@settings(max_examples=12, deadline=None)
@given(
  slots=st.sampled_from([1, 3, 8, 24]),
  chunk=st.sampled_from([1, 5, 16]),
  prompt_rows=st.sampled_from([1, 3]),
  batch_buckets=st.sampled_from([(), (2, 8), (1, 4)]),
  cache_buckets=st.sampled_from([(), (16, 32)]),
  prefill_block=st.sampled_from([3, 12]),
)
def test_tokens_do_not_depend_on_the_schedule(**options):
  """Random bucket schedules, refill orders, chunk sizes and prefill blocks."""
  requests, samples = reference()
  assert_same(requests, samples, run(requests, 2, **options))


def test_features_are_those_of_a_forward_pass():
  """Kept features equal the hidden states of whole sequences, prompt included."""
  from tlt_jax.models import target

  requests = tiny.requests(3, 2)
  samples = run(requests, 2, features=True, batch_buckets=(1, 2), cache_buckets=(16,))
  for i in range(len(requests)):
    prompt = requests.prompts[requests.prompt_idx[i]]
    tokens = np.concatenate([prompt, samples.response(i)])[None, :-1]
    features, _ = target.Target(tiny.CONFIG).apply(
      {"params": tiny.params()}, tokens, np.arange(tokens.shape[1])[None]
    )
    np.testing.assert_allclose(samples.features[i], features[0], atol=1e-5)


def test_a_prompt_is_prefilled_once():
  """Eight responses of one prompt cost one row of one prefill."""
  engine = rollout.make(tiny.CONFIG, tiny.mesh(1), OPTIONS)
  rows = []
  inner = engine._prefill

  def counted(params, store, tokens, start, row):
    rows.append(int(np.sum(np.asarray(row) < OPTIONS.prompt_rows)))
    return inner(params, store, tokens, start, row)

  engine._prefill = counted
  engine(tiny.params(), tiny.requests(1, 8))
  assert rows == [1]


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
