"""Where requests run: host arithmetic, tested by hand, without a device."""

import numpy as np
import pytest

from tests import tiny
from tlt_jax.spec_decode.decoding import pages as pages_lib
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import chooser as chooser_lib
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import options as options_lib
from tlt_jax.spec_decode.rollout import running as running_lib
from tlt_jax.spec_decode.rollout import schedule as schedule_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib
from tlt_jax.spec_decode.speculation import strategy as strategy_lib


def options(**changes):
  sizes = dict(max_length=64, max_prompt=8, slots=8, buckets=(8, 4, 2), chunk=4)
  return options_lib.Options(**{**sizes, **changes})


def start(count=20, clock=None, **changes):
  """`count` requests for one slice, of one prompt token and 63 others each."""
  made = requests_lib.make_requests([[1]] * count, max_tokens=63)
  return schedule_of(made, 1, options(**changes), clock)


def schedule_of(made, slices, given, clock=None, grows=False):
  pages = pages_lib.Pages(slices, given.page_sizes(beyond=0))
  running = running_lib.Running(made, pages)
  clock = clock or clock_lib.Clock()
  return schedule_lib.Schedule(given, running, clock, clock_lib.Decisions(), grows)


def admit_all(schedule):
  """Fills the slots as a rollout does."""
  schedule.begin_chunk()
  while schedule.seat()[1]:
    pass


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("prompts, responses", [(3, 4), (3, 1), (5, 2), (8, 2), (11, 2)])
def test_no_slice_stays_empty_where_there_are_requests(prompts, responses, grows):
  """Fewer prompts begin on several slices each; else a prompt's responses stay together."""
  made = requests_lib.make_requests([[1]] * prompts, responses, max_tokens=9)
  schedule = schedule_of(made, 8, options(), grows=grows)
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


def test_the_smallest_bucket_that_holds_what_runs_is_chosen():
  schedule = start()
  assert [schedule.bucket_for(live) for live in (1, 2, 3, 5, 8)] == [2, 2, 4, 8, 8]
  schedule.excluded = {8}
  assert schedule.widest() == schedule.bucket_for(8) == 4


def test_what_has_begun_to_drain_drains():
  """Below the widest bucket nobody joins, until all are done."""
  schedule = start()
  admit_all(schedule)
  running = schedule.running
  running.owner[:, 2:] = -1
  running.resize(2)
  assert not schedule.joins() and schedule.plan().admissions == []
  running.owner[:] = -1
  schedule.begin_chunk()
  assert schedule.joins()


def test_a_chunk_is_as_long_as_its_time_allows():
  """A step of 0.9 s leaves room for two in 2 s; one step is always taken."""
  schedule = start(chunk=32)
  admit_all(schedule)
  for step_s, steps in ((0.01, 32), (0.9, 2), (30.0, 1)):
    schedule.clock.measured(schedule.running.bucket, None, step_s)
    schedule.begin_chunk()
    assert schedule.tokens == steps


def test_the_clock_books_chunks():
  """Steps are the median of late."""
  clock = clock_lib.Clock()
  assert clock.step_s(8, None) == 0
  for seconds in (2.0, 2.4, 60.0):
    clock.book(8, None, steps=4, tokens=20, longest=4, seconds=seconds)
  assert clock.step_s(8, None) == pytest.approx(0.6)
  assert (clock.seconds, clock.tokens) == (pytest.approx(64.4), 60)
  clock.begin_rollout()
  assert clock.step_s(8, None) == pytest.approx(0.6) and clock.tokens == 0


def test_a_rollout_begins_as_fast_as_the_last_one_began():
  """Caches that are nearly empty again cost less than those at its end."""
  clock, bucket = clock_lib.Clock(), 8
  assert clock.decoding_s(bucket, None, 4) == 0
  for first in (1.0, 2.0):
    clock.begin_rollout()
    for seconds in (first, 6.0, 8.0, 7.0):
      clock.book(bucket, None, steps=4, tokens=20, longest=4, seconds=seconds)
    assert clock.decoding_s(bucket, None, 4) == 7
    clock.begin_rollout()
    assert clock.decoding_s(bucket, None, 4) == first


def test_a_request_is_booked_under_its_own_number():
  """`Requests.subset` keeps noise, prompts and limits of what it picks."""
  made = tiny.requests(3, 2)
  part = made.subset(np.array([5, 0]))
  assert part.request.tolist() == [5, 0] and part.prompt_idx.tolist() == [2, 0]
  assert len(part) == 2


def test_none_joins_a_slice_whose_pages_ran_out_until_one_has_ended():
  """It would have pages for a chunk, and be sent back again soon."""
  # Pages: 16, 1, and 2 of prompts.
  sizes = dict(buckets=(), slots=4, page_tokens=4, cache_tokens=64, prompt_rows=1)
  schedule = start(9, **sizes)
  running, pages = schedule.running, schedule.running.pages

  def admitted():
    schedule.begin_chunk()
    before = set(running.seated)
    schedule.seat()
    running.take_pages(schedule.tokens)
    return sorted(set(running.seated) - before)

  seats = [admitted() for _ in range(5)]  # one prompt at a time has a row of the store
  assert seats == [[0], [1], [2], [3], []]
  running.drawn[:4] = [16, 16, 16, 15]  # 5 pages each in the next chunk; there are 19
  assert admitted() == [] and sorted(running.seated) == [0, 1, 2]
  assert pages.left(running.owner, running.end(4))[0] == 4
  running.owner[running.owner == 0] = -1
  assert admitted() == [3] and running.drawn[3] == 0


def test_requests_are_admitted_in_the_order_of_their_numbers():
  """However long their prompts are: the order of steps and of checkpoints follows."""
  made = requests_lib.make_requests([[1], [1] * 7, [1] * 3, [1] * 5], max_tokens=9)
  schedule = schedule_of(made, 1, options(slots=2, buckets=()))
  for expected in ([0, 1], [2, 3]):
    schedule.begin_chunk()
    plan = schedule.plan()
    assert [a.request for a in plan.admissions] == expected
    schedule.running.admit(plan.bucket, plan.prefills, plan.admissions)
    schedule.running.owner[:] = -1


def test_the_prompt_that_is_needed_again_last_makes_room():
  """The others' responses need no second prefill."""
  made = requests_lib.make_requests([[1]] * 3, 2, max_tokens=9)
  order = made.subset(np.array([0, 2, 4, 1, 3]))  # of prompts 0, 1, 2, 0, 1
  schedule = schedule_of(order, 1, options(slots=2, buckets=(), prompt_rows=2))
  prefilled = []
  for _ in range(2):
    schedule.begin_chunk()
    plan = schedule.plan()
    prefilled.append([p.prefix for p in plan.prefills])
    schedule.running.admit(plan.bucket, plan.prefills, plan.admissions)
    schedule.running.owner[:] = -1
  assert prefilled == [[0, 1], [2]] and set(schedule.prompt_row[0]) == {2, 0}


def test_what_ran_out_of_memory_comes_first_again_in_order():
  schedule = start(6, slots=4, buckets=(4, 2))
  admit_all(schedule)
  assert schedule.out_of_memory() == 4 and schedule.widest() == 2
  assert list(schedule.queues[0]) == [*range(6)]


def test_a_chunk_is_longer_where_slices_can_train_in_it():
  """As long as the training needs, up to its most tokens."""
  schedule = start(1)
  admit_all(schedule)
  schedule.clock.measured(schedule.running.bucket, None, 0.0625)
  for seconds, tokens in ((0.0, 4), (0.5625, 9), (9.0, 16)):
    schedule.begin_chunk(1, 16, seconds)
    assert schedule.tokens == tokens


CHAIN, SHORT = (strategy_lib.parse(name) for name in ("3_1_4", "1_1_2"))


def test_slices_that_train_know_the_steps_of_a_chunk():
  """One that decodes alone may else take as many as its tokens need."""
  schedule = start(1, chunk=8)
  admit_all(schedule)
  assert schedule.steps_within(2, CHAIN, exact_steps=True) == 2
  assert schedule.steps_within(2, CHAIN, exact_steps=False) == 8


def test_a_strategy_is_chosen_for_the_fullest_slice():
  """Plainly in a bucket whose programs have no such strategy."""
  made = requests_lib.make_requests([[1]] * 8, max_tokens=9)
  schedule = schedule_of(made, 2, options())
  selector = selector_lib.ByLiveBatch(((1, CHAIN), (3, SHORT)))
  chooser = chooser_lib.Chooser(selector, schedule.clock)
  schedule.programs = frozenset(chooser.programs(schedule.options))
  for bucket, owner, chosen in (
    (4, [[0, -1, -1, -1], [1, 2, 3, -1]], SHORT),
    (2, [[0, -1], [-1, -1]], CHAIN),
    (8, [[0, *[-1] * 7]] * 2, None),
    (4, [[0, 1, 2, 3], [4, -1, -1, -1]], None),
  ):
    schedule.running.owner = np.array(owner)
    assert schedule.running.bucket == bucket and chooser.choose(schedule) == chosen
