"""The KV cache in pages: whose they are, and that rollouts draw what they draw without."""

import dataclasses
import functools
import itertools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib

SLICES, BATCH, ROWS, PAGE, LONGEST = 2, 3, 2, 4, 18
SIZES = pages_lib.Sizes(pages=BATCH * 5 + ROWS * 2 + 1, most=5, page=PAGE)


class World:
  """Requests of prompts that are held; they come, grow, and go."""

  def __init__(self):
    self.pages = pages_lib.Pages(SLICES, SIZES, beyond=2)
    self.owner = np.full((SLICES, BATCH), -1)
    self.tokens = np.zeros(1000, int)  # of each request
    self.prompt = np.zeros(1000, int)  # of these, its prompt's
    self.held: dict[tuple[int, int], int] = {}  # slice and row -> tokens of the prompt
    self.next = 0

  def begin(self, s: int, row: int, prompt: int | None) -> None:
    """A request gets a slot of a slice, and the row's prompt, or a new one of so many."""
    free = np.flatnonzero(self.owner[s] < 0)
    if not len(free) or (prompt is None and (s, row) not in self.held):
      return
    before = self.pages.left(self.owner, self.tokens)[s]
    is_new = prompt is not None
    if is_new:
      self.held[s, row] = prompt
      held = self.pages.hold(s, row, prompt)
      assert (held < SIZES.pages).sum() == -(-prompt // PAGE)
    known, i = self.held[s, row], self.next
    copies = self.pages.share(i, s, row, known)
    assert len(copies) == (known % PAGE > 0)
    assert all(self.pages._users[s, goal] == 1 for _, goal in copies)
    self.owner[s, free[0]], self.next = i, i + 1
    self.prompt[i], self.tokens[i] = known, known + 1
    added = self.pages.added(known + 1, known, is_new)
    assert self.pages.left(self.owner, self.tokens)[s] >= before - added

  def check(self) -> None:
    """Every page has as many users as say so; only full pages of prompts have several."""
    users = np.zeros_like(self.pages._users)
    shared = set()
    for (s, row), tokens in self.held.items():
      held = self.pages._held[s, row]
      users[s, held] += 1
      shared |= {(s, page) for page in held[: tokens // PAGE]}
    for s, row in enumerate(self.owner):
      for i in row[row >= 0]:
        of, table = self.pages[int(i)]
        mine = table[table < SIZES.pages]
        assert of == s and len(mine) == self.pages.count(self.tokens[i])
        full = self.prompt[i] // PAGE
        users[s, mine] += 1
        shared |= {(s, page) for page in mine[:full]}
        written = {(s, page) for page in mine[full:]}
        assert not written & shared and (users[s, mine[full:]] == 1).all()
    np.testing.assert_array_equal(users, self.pages._users)
    for s, free in enumerate(self.pages._free):
      assert sorted(free) == np.flatnonzero(users[s] == 0).tolist()


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.sampled_from(["end", "grow", "same", "new", "new"]),
      st.integers(0, SLICES - 1),
      st.integers(0, BATCH - 1),
      st.integers(0, 8),
    ),
    max_size=40,
  )
)
def test_no_page_has_two_writers_and_all_come_back(steps):
  """Requests share full pages of prompts alone; once all have gone, every page is free."""
  world = World()
  for step in steps:
    what, s, slot, size = step
    if what == "end":
      world.owner[s, slot] = -1
      world.pages.keep(world.owner)
    elif what == "grow" and world.owner[s, slot] >= 0:
      i = world.owner[s, slot]
      world.tokens[i] = min(world.tokens[i] + size, LONGEST)
    elif what in ("same", "new"):
      world.begin(s, slot % ROWS, size if what == "new" else None)
    expected = world.pages.left(world.owner, world.tokens)
    assert world.pages.assign(world.owner, world.tokens) == []
    np.testing.assert_array_equal(SIZES.pages - world.pages.used, expected)
    world.check()
  world.pages.keep(np.full_like(world.owner, -1))
  for s, row in world.held:
    world.pages.hold(s, row, 0)
  assert not world.pages.used.any()


CHAIN, TREE = map(strategy_lib.parse, ("3_1_4", "3_2_6"))
OPTIONS = rollout.Options(
  max_length=64, max_prompt=12, slots=24, chunk=8, prompt_rows=4, prefill_rows=4
)


class Chosen(selector_lib.Selector):
  """Draws plainly, along a chain or along a tree, from chunk to chunk as `rule` says."""

  strategies = (CHAIN, TREE)
  rule = itertools.repeat(None)

  def choose(self, live, step_s):
    return next(self.rule)

  def arms(self, live):
    return None, CHAIN, TREE


def guarded(run):
  """`Chunks.run`; raises where it changes pages that are shared, prompts', or nobody's."""

  def chunk(batch, *args):
    pages = batch.running.kv_pages
    fixed = np.pad(pages._users > 1, ((0, 0), (0, 1)), constant_values=True)
    for (s, _), held in pages._held.items():
      fixed[s, held] = True
    read = lambda: [np.asarray(x)[fixed.reshape(-1)] for x in jax.tree.leaves(pools())]
    pools = lambda: batch.slots.kv.pools
    before = read()
    ran = run(batch, *args)
    for old, new in zip(before, read(), strict=True):
      np.testing.assert_array_equal(old, new)
    return ran

  return chunk


@functools.cache
def make(data, options, drafts):
  drafter, selector = (tiny.DRAFTERS["eagle2"], Chosen()) if drafts else (None, None)
  made = rollout.make(tiny.CONFIG, tiny.mesh(data), options, drafter, selector)
  if options.kv_page_tokens:
    made.parts.chunks.run = guarded(made.parts.chunks.run)
  return made


def run(requests, data, rule=None, **options):
  """A rollout; with a rule, one that drafts."""
  made = make(data, dataclasses.replace(OPTIONS, **options), rule is not None)
  if rule is not None:
    made.selector.rule = itertools.cycle(rule)
  draft = tiny.draft_params("eagle2", 5) if rule is not None else None
  return made(tiny.on(tiny.mesh(data)), requests, draft)


@functools.cache
def reference():
  requests = tiny.requests()
  return requests, run(requests, 1)


def assert_same(samples):
  requests, want = reference()
  result = compare.compare(tiny.CONFIG, tiny.params(), requests, want, samples)
  assert result.total_tokens > 0
  assert result.differing_tokens == 0, result.where
  assert result.near_ties <= 1 + result.total_tokens // 10_000


TIGHT = dict(kv_page_tokens=8, slots=6, prompt_rows=1, chunk=5, cache_tokens=100)


@pytest.mark.parametrize(
  "data, rule, options",
  [
    (2, None, TIGHT | dict(buckets=((6, 16), (2, 32)))),
    (1, (TREE,), dict(kv_page_tokens=4, slots=8)),
    tiny.slow(1, (CHAIN, TREE, None), dict(kv_page_tokens=4, slots=8)),
    tiny.slow(2, (TREE,), TIGHT),
    tiny.slow(2, (CHAIN,), dict(kv_page_tokens=64, buckets=((4, 32),))),
    tiny.slow(1, None, dict(kv_page_tokens=16, slots=1)),
  ],
)
def test_rollouts_with_pages_draw_the_same(data, rule, options, monkeypatch):
  """Plainly and with drafts; where the budget is tight, requests start over."""
  sent_back = []
  inner = running_lib.Running.send_back
  counted = lambda self, s: sent_back.append(inner(self, s)) or sent_back[-1]
  monkeypatch.setattr(running_lib.Running, "send_back", counted)
  assert_same(run(reference()[0], data, rule, **options))
  made = make(data, dataclasses.replace(OPTIONS, **options), rule is not None)
  assert "resize" not in made.pool.report()
  assert bool(sent_back) == ("cache_tokens" in options)


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(
  data=st.sampled_from([1, 2]),
  rule=st.none() | st.lists(st.sampled_from([None, CHAIN, TREE]), min_size=1, max_size=5),
  options=st.fixed_dictionaries(
    dict(
      kv_page_tokens=st.sampled_from([4, 16, 64]),
      slots=st.sampled_from([1, 3, 8]),
      chunk=st.sampled_from([4, 7, 16]),
      prompt_rows=st.sampled_from([1, 3]),
      buckets=st.sampled_from([(), ((8, 64), (3, 16)), rollout.grid((1, 4), (16, 64))]),
      prefill_block=st.sampled_from([3, 12]),
    )
  ),
  tight=st.booleans(),
)
def test_tokens_do_not_depend_on_pages_whatever_the_schedule(data, rule, options, tight):
  """Random pages, budgets, buckets, refill orders, chunk sizes, and ways to draft."""
  if tight:  # a chunk in every slot, and no more
    page, tokens = options["kv_page_tokens"], options["chunk"] + TREE.verify
    least = options["slots"] * pages_lib.pages_for(tokens, page) * page
    options = options | {"cache_tokens": max(least, OPTIONS.max_length)}
  assert_same(run(reference()[0], data, rule, **options))


@pytest.mark.slow
def test_heads_may_be_split():
  """Each device of a slice writes and reads the pages of its own heads."""
  mesh = tiny.mesh(1, 2)
  made = rollout.make(tiny.CONFIG, mesh, dataclasses.replace(OPTIONS, kv_page_tokens=8))
  assert_same(made(tiny.on(mesh), reference()[0]))


@pytest.mark.parametrize("page", [16, 64, 256])
def test_features_have_pages_for_whatever_kv_has(page):
  """Requests that share the KV of a long prompt each have its features."""
  given = rollout.Options(
    *(4096, 1000, 16), cache_tokens=8192, kv_page_tokens=page, prompt_rows=1
  )
  beyond = 48
  kv = pages_lib.Pages(1, given.kv_page_sizes(beyond), beyond)
  features = pages_lib.Pages(1, given.page_sizes)
  owner = np.arange(16)[None]
  kv.hold(0, 0, 999)
  for i in range(16):
    kv.share(i, 0, 0, 999)
  for tokens in range(1000, 4097):
    if kv.left(owner, np.full(16, tokens)).min() < 0:
      break
    features.assign(owner, np.full(16, tokens))
  assert 1000 < tokens < 4096


@pytest.mark.slow
def test_nothing_compiles_after_compiling_ahead():
  """`compile` covers every program of rollouts, and of timing their steps."""
  options = dict(kv_page_tokens=8, slots=8, buckets=((8, 24), (4, 64), (1, 64)))
  made = make(1, dataclasses.replace(OPTIONS, **options), False)
  params, requests = tiny.on(tiny.mesh(1)), tiny.requests(2, 3)
  made.compile(params, requests.stop_tokens.shape[1])
  count = len(made.pool)
  made(params, requests)
  made.time_step(params, (8, 24), stop_tokens=requests.stop_tokens.shape[1])
  assert len(made.pool) == count


@pytest.mark.slow
def test_out_of_memory_lowers_the_bucket_and_loses_no_request(monkeypatch):
  """The pools are made anew, prompts computed again; every request still finishes."""
  options = dict(kv_page_tokens=8, buckets=rollout.grid((4, 8, 24), (16, 32, 64)))
  made = make(2, dataclasses.replace(OPTIONS, **options), False)
  refused = tiny.refuse_chunks(monkeypatch, made, most=8 * 32)
  assert_same(made(tiny.on(tiny.mesh(2)), reference()[0]))
  assert refused


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(rebalance=True), "cannot move pages: set kv_page_tokens to None"),
    (dict(cache_tokens=64), "no room for a chunk of 8 tokens in each of 24 slots"),
    (dict(kernels="interpret"), "pages must have 64, 128, 256, ... slots, not 8"),
  ],
)
def test_pages_that_cannot_be_are_refused(options, message):
  """At once, with a remedy."""
  with pytest.raises(ValueError, match=message):
    options = dataclasses.replace(OPTIONS, kv_page_tokens=8, **options)
    rollout.make(tiny.CONFIG, tiny.mesh(1), options)
