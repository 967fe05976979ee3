"""Where requests run: host arithmetic, tested by hand, without a device."""

import numpy as np
import pytest

from tests import tiny
from tlt_jax import programs
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib

Bucket = options_lib.Bucket
LADDER = ((8, 16), (8, 32), (4, 32), (4, 64), (2, 64))


def options(**changes):
  sizes = dict(max_length=64, max_prompt=8, slots=8, buckets=LADDER, chunk=4)
  return options_lib.Options(**{**sizes, **changes})


def start(count=20, clock=None, **changes):
  """`count` requests for one slice, of one prompt token and 63 others each."""
  made = requests_lib.make_requests([[1]] * count, max_tokens=63)
  clock = clock or clock_lib.Clock()
  running = running_lib.Running(made, slices=1)
  return schedule_lib.Schedule(options(**changes), running, clock, clock_lib.Decisions())


def admit_all(schedule):
  """Fills the slots as a rollout does."""
  schedule.begin_chunk()
  plan = schedule.plan()
  schedule.running.open(plan.bucket, None)
  for admission in plan.admissions:
    schedule.running.seat(admission.slice, admission.request)
  return plan.admissions


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("prompts, responses", [(3, 4), (3, 1), (5, 2), (8, 2), (11, 2)])
def test_no_slice_stays_empty_where_there_are_requests(prompts, responses, grows):
  """Fewer prompts begin on several slices each; else a prompt's responses stay together."""
  made = requests_lib.make_requests([[1]] * prompts, responses, max_tokens=9)
  running = running_lib.Running(made, slices=8)
  schedule = schedule_lib.Schedule(
    options(), running, clock_lib.Clock(), clock_lib.Decisions(), grows
  )
  if grows:
    schedule.ask(prompts)
  queued = [list(queue) for queue in schedule.queues]
  assert sorted(sum(queued, [])) == list(range(prompts * responses))
  homes = [{int(made.prompt_idx[i]) for i in queue} for queue in queued]
  slices_of = [sum(p in of for of in homes) for p in range(prompts)]
  if prompts < 8:
    assert sum(map(bool, queued)) == min(prompts * responses, 8)
  else:
    assert all(queued) and slices_of == [1] * prompts


def test_the_ladder_halves_the_slots_for_twice_the_tokens():
  rungs = options_lib.ladder(16, 512, 128)
  assert rungs == ((16, 128), (16, 256), (8, 256), (8, 512), (4, 512), (2, 512))
  kv = [b.batch * b.length for b in rungs]
  assert max(kv) <= 2 * min(kv[:4])


def test_the_ladder_of_a_single_slot_has_every_length():
  rungs = options_lib.ladder(1, 1024, 128)
  assert rungs == ((1, 128), (1, 256), (1, 512), (1, 1024))


def test_a_path_goes_through_neighbours_and_otherwise_in_one_step():
  """Fewer slots and more tokens rung by rung; back up at once."""
  o = options()
  path = o.path(Bucket(8, 16), Bucket(2, 64))
  assert path == [(8, 32), (4, 32), (4, 64), (2, 64)]
  edges = set(o.edges)
  assert all(step in edges for step in zip([Bucket(8, 16), *path], path, strict=False))
  assert o.path(Bucket(2, 64), Bucket(8, 16)) == [(8, 16)]


def test_buckets_with_more_slots_than_the_largest_are_dropped_and_longer_ones_cut():
  """So a config keeps its ladder where responses may have fewer tokens."""
  o = options(buckets=((8, 16), (9, 16), (8, 65), (2, 65)))
  assert o.buckets == ((2, 64), (8, 16), (8, 64))  # of one size fewer slots first


def test_the_smallest_bucket_that_holds_what_runs_is_chosen():
  schedule = start()
  assert schedule.choose(8, 10) == (8, 16)
  assert schedule.choose(3, 20) == (4, 32)
  assert schedule.choose(2, 40) == (2, 64)
  assert schedule.choose(9, 10) is None


def spent(seconds, tokens):
  """A clock that has seen chunks of so many seconds and tokens."""
  clock = clock_lib.Clock()
  book = dict(steps=10, tokens=tokens, longest=10, seconds=seconds)
  clock.book(Bucket(4, 32), None, **book)
  return clock


@pytest.mark.parametrize(("step_s", "joins"), [(0.7, True), (0.9, False)])
def test_requests_join_when_their_tokens_are_no_dearer_than_tokens_were(step_s, joins):
  """Six of eight slots are free. Alone, two requests take a step of 0.2 s, and a token
  has cost 0.1 s so far: six more tokens may cost 0.6 s."""
  clock = spent(seconds=10.0, tokens=100)
  schedule = start(clock=clock)
  assert len(admit_all(schedule)) == 8
  schedule.running.owner[0, 2:] = -1
  schedule.options = options(buckets=((8, 16), (2, 16)))
  clock.measured(Bucket(8, 16), None, step_s)
  clock.measured(Bucket(2, 16), None, 0.2)
  assert schedule.joins() == joins


def test_what_has_begun_to_drain_drains():
  """Below the widest bucket nobody joins, until all are done."""
  schedule = start(clock=spent(seconds=10.0, tokens=100))
  admit_all(schedule)
  running = schedule.running
  running.move(Bucket(2, 64))
  running.owner[:] = running.owner[:, :2]
  assert not schedule.joins() and schedule.plan().admissions == []
  running.owner[:] = -1
  schedule.begin_chunk()
  assert running.bucket is None and schedule.joins()


def test_a_chunk_is_as_long_as_its_time_allows():
  """A step of 0.9 s leaves room for two in 2 s; one step is always taken."""
  schedule = start(chunk=32)
  admit_all(schedule)
  for step_s, steps in ((0.01, 32), (0.9, 2), (30.0, 1)):
    schedule.clock.measured(schedule.running.bucket, None, step_s)
    schedule.begin_chunk()
    assert schedule.tokens == steps
    assert schedule.need([0]) == schedule.running.position[0] + steps


def test_the_clock_books_chunks():
  """Steps are the median of late; an unknown bucket is guessed from a known one."""
  clock = clock_lib.Clock()
  assert clock.step_s(Bucket(8, 16), None) == 0
  for seconds in (2.0, 2.4, 60.0):
    clock.book(Bucket(8, 16), None, steps=4, tokens=20, longest=4, seconds=seconds)
  assert clock.step_s(Bucket(8, 16), None) == pytest.approx(0.6)
  assert (clock.seconds, clock.tokens) == (pytest.approx(64.4), 60)
  assert clock.estimate(Bucket(2, 16), Bucket(8, 16)) == pytest.approx(0.15)
  clock.begin_rollout()
  assert clock.step_s(Bucket(8, 16), None) == pytest.approx(0.6) and clock.tokens == 0


def test_micro_batches_that_never_fit_are_timed_again():
  """What they take was measured in a pause of the machine; nothing would train again."""
  clock, bucket = clock_lib.Clock(), Bucket(4, 64)
  clock.trained(60.0)
  clock.book(bucket, None, steps=10, tokens=10, longest=10, seconds=1.0)
  fitting = [clock.micro_batches_within(bucket, None, steps=10) for _ in range(65)]
  assert not any(fitting) and clock.micro_batch_s == 0
  clock.trained(0.1)
  assert clock.micro_batches_within(bucket, None, steps=10) == 9


def test_a_rollout_begins_as_fast_as_the_last_one_began():
  """Caches that are nearly empty again cost less than those at its end."""
  clock, bucket = clock_lib.Clock(), Bucket(8, 16)
  assert clock.decoding_s(bucket, None, 4) == 0
  for first in (1.0, 2.0):
    clock.begin_rollout()
    for seconds in (first, 6.0, 8.0, 7.0):
      clock.book(bucket, None, steps=4, tokens=20, longest=4, seconds=seconds)
    assert clock.decoding_s(bucket, None, 4) == 7
    clock.begin_rollout()
    assert clock.decoding_s(bucket, None, 4) == first


@pytest.mark.slow
def test_the_budget_leaves_buckets_out(caplog):
  """The largest bucket stays; fewer programs draw the same."""
  sizes = dict(max_length=64, max_prompt=12, slots=8, chunk=8, buckets=LADDER)
  made = tiny.requests(2, 4)
  found = []
  for budget in (programs.Budget(programs=5), programs.Budget()):
    engine = rollout.make(
      tiny.CONFIG, tiny.mesh(1), rollout.Options(**sizes, budget=budget)
    )
    engine.compile(tiny.params(), made.stop_tokens.shape[1])
    assert budget.programs is None or len(engine.pool) <= budget.programs
    assert Bucket(8, 64) in engine.options.buckets
    found.append(engine(tiny.params(), made))
  assert "no room for the programs of 8 slots x 16 tokens" in caplog.text
  np.testing.assert_array_equal(found[0].tokens, found[1].tokens)


def test_a_request_is_booked_under_its_own_number():
  """`Requests.subset` keeps noise, prompts and limits of what it picks."""
  made = tiny.requests(3, 2)
  part = made.subset(np.array([5, 0]))
  assert part.request.tolist() == [5, 0] and part.prompt_idx.tolist() == [2, 0]
  assert len(part) == 2


def test_none_joins_a_slice_whose_pages_ran_out_until_one_has_ended():
  """It would have pages for a chunk, and be sent back again soon."""
  given = options(buckets=(), slots=4, kv_page_tokens=4, cache_tokens=64, prompt_rows=1)
  pages = pages_lib.Pages(1, given.kv_page_sizes(beyond=0))  # 16, 1, and 2 of prompts
  made = requests_lib.make_requests([[1]] * 9, max_tokens=63)
  running = running_lib.Running(made, 1, pages)
  schedule = schedule_lib.Schedule(
    given, running, clock_lib.Clock(), clock_lib.Decisions()
  )

  def admitted():
    schedule.begin_chunk()
    plan = schedule.plan()
    if running.bucket is None:
      running.open(plan.bucket, None)
    for p in plan.prefills:
      running.hold(p.slice, p.row, p.prompt)
    for a in plan.admissions:
      running.share(a.slice, a.row, a.request)
      running.seat(a.slice, a.request)
    pages.assign(running.owner, running.end(schedule.tokens))
    return [a.request for a in plan.admissions]

  seats = [admitted() for _ in range(5)]  # one prompt at a time has a row of the store
  assert seats == [[0], [1], [2], [3], []]
  running.drawn[:4] = [16, 16, 16, 15]  # 5 pages each in the next chunk; there are 19
  assert admitted() == [] and sorted(running.seated) == [0, 1, 2]
  assert pages.left(running.owner, running.end(4))[0] == 4
  running.owner[running.owner == 0] = -1
  assert admitted() == [3] and running.drawn[3] == 0
