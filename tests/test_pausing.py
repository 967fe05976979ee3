"""Rollouts that end before all responses have, and those that go on with such responses."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib

OPTIONS = rollout.Options(
  max_length=64, max_prompt=12, slots=24, chunk=8, prompt_rows=3, prefill_rows=2
)


def make(data=1, strategy="", drafter=None, **options):
  selector = None
  if strategy:
    selector = selector_lib.make(f"up to 24 live: {strategy}", "predictive", drafter)
  options = dataclasses.replace(OPTIONS, **options)
  mesh = tiny.mesh(data)
  engine = rollout.make(tiny.CONFIG, mesh, options, selector=selector, drafter=drafter)
  return lambda requests, **hooks: engine(tiny.on(mesh), requests, **hooks)


def continued(requests, samples, bound):
  """Requests for what is missing of responses that were cut at `bound` i32[B] tokens."""
  at = np.minimum(samples.length, bound)
  ended = (samples.finish_reason != samples_lib.UNFINISHED) & (samples.length <= bound)
  begun = [samples.tokens[i, :n] for i, n in enumerate(at)]
  left = np.flatnonzero(~ended)
  return left, dataclasses.replace(requests, begun=begun).subset(left)


@pytest.mark.parametrize(
  ("data", "strategy", "options"),
  [
    (1, "", {}),
    (2, "", dict(slots=4, buckets=(4, 2), page_tokens=8)),
    (2, "3_1_4", dict(page_tokens=8)),
    tiny.slow(1, "ngram_3", {}),
    (1, "", dict(slots=6, page_tokens=4, cache_tokens=96)),
  ],
)
def test_a_response_that_pauses_goes_on_with_the_same_tokens(data, strategy, options):
  """Cut anywhere, and again: the noise is that of its positions."""
  requests = tiny.requests()
  drafter = tiny.frozen("eagle2") if strategy == "3_1_4" else None
  run = make(data, strategy, drafter, **options)
  whole = run(requests)
  bound = np.random.default_rng(3).integers(0, 12, len(requests))
  first = run(requests, until=lambda samples, ended: bound)
  paused = first.finish_reason == samples_lib.UNFINISHED
  assert paused.any() and (first.length[paused] >= bound[paused]).all()
  assert (first.length[bound == 0] == 0).all()
  left, rest = continued(requests, first, bound)
  more = bound[left] + 6
  second = run(rest, until=lambda samples, ended: more)
  assert (second.length >= np.minimum(more, whole.length[left])).all()
  index, rest = continued(rest, second, more)
  third = run(rest)
  assert (third.finish_reason != samples_lib.UNFINISHED).all()
  for part, of in ((first, np.arange(len(requests))), (second, left), (third, left[index])):
    for i, j in enumerate(of):
      n = part.length[i]
      np.testing.assert_array_equal(part.tokens[i, :n], whole.tokens[j, :n])
  np.testing.assert_array_equal(third.length, whole.length[left[index]])
  assert third.kept_tokens == third.length.sum() - sum(map(len, rest.begun))
  if not strategy:
    assert third.mean_acceptance_length == 1.0


def test_a_bound_that_is_lowered_late_ends_the_rollout():
  """Once some have ended, the others need not go on."""
  requests, seen = tiny.requests(max_tokens=40), []

  def until(samples, ended):
    seen.extend(ended)
    return None if len(seen) < 3 else samples.length

  samples = make(2)(requests, until=until)
  unfinished = samples.finish_reason == samples_lib.UNFINISHED
  assert 0 < unfinished.sum() <= len(requests) - 3
  assert (samples.length[unfinished] < 40).all()


def test_a_prefix_of_one_request_needs_no_copy():
  """Its pages become the request's, those of windowed layers too."""
  sizes = pages_lib.Sizes(pages=12, most=8, page=4, ring=3, near=9)
  pages = pages_lib.Pages(1, sizes)
  far, near = pages.hold(0, 0, 22)
  pages.take_over(5, 0, 0)
  np.testing.assert_array_equal(pages[5], far)
  np.testing.assert_array_equal(pages.near[5], near)
  assert pages.used == 6 and pages.near.used == 3
  pages.assign(np.array([[5]]), np.full(6, 30))
  assert pages.used == 8 and pages.near.used == 3
  pages.keep(np.array([[-1]]))
  assert pages.used == 0 and pages.near.used == 0


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(
  st.lists(st.lists(st.integers(1, 40), max_size=9), min_size=1, max_size=3),
  st.integers(1, 4),
  st.integers(1, 16),
)
def test_prompts_are_computed_block_by_block(lengths, rows, block):
  """All but the last token of each, in order; no row waits while a prompt does."""
  queues = [
    [running_lib.Prompt(np.zeros(n), [i]) for i, n in enumerate(q)] for q in lengths
  ]
  starts = [[[] for _ in queue] for queue in queues]
  waiting = [sum(n > 1 for n in queue) for queue in lengths]
  for call in running_lib.Work(queues, []).calls(rows, block):
    for s, of_slice in enumerate(call):
      assert len(of_slice) == rows
      for prompt, start in filter(None, of_slice):
        starts[s][prompt.tables[0]].append(start)
        waiting[s] -= start == 0
      assert not waiting[s] or None not in of_slice
  expected = [[list(range(0, n - 1, block)) for n in queue] for queue in lengths]
  assert starts == expected


def test_a_pause_is_no_difference():
  """The response that is longer went on as another one ended the rollout later."""
  begun = [np.zeros(2, np.int32)] * 2
  requests = dataclasses.replace(tiny.requests(1, 2, max_tokens=8), begun=begun)
  a, b = samples_lib.empty(requests), samples_lib.empty(requests)
  a.length[:], b.length[:] = (5, 4), (7, 4)
  found = compare.compare(tiny.CONFIG, None, requests, a, b)
  assert (found.total_tokens, found.where) == (3 + 2, [])
