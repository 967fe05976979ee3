"""How much idle slices train, on the host: hand numbers, without a device."""

import types

import numpy as np

from tests import test_schedule
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import harvest as harvest_lib
from tlt_jax.spec_decode.rollout import running as running_lib


def harvest(owner, added=None):
  """Of three slices with these requests, and data to train on; what it asks and stores."""
  made = requests_lib.make_requests([[1]] * 6, max_tokens=40)
  schedule = test_schedule.schedule_of(made, 3, test_schedule.options())
  schedule.running.owner = np.array(owner)
  for queue in schedule.queues:
    queue.clear()
  nothing = types.SimpleNamespace(begin_rollout=list, in_idle_slices=True)

  def add(s, prompt, response):
    added.append(len(response))
    return []

  buffer = types.SimpleNamespace(begin_rollout=list, holds_any=True, add=add)
  spot = types.SimpleNamespace(
    buffer=buffer,
    investment=nothing,
    options=types.SimpleNamespace(chunk_tokens=16, min_micro_batches=3),
    training=lambda most, expected, midway=0: (most, midway),
    most_pieces=lambda slots, length: slots,
  )
  return harvest_lib.Harvest(spot, None, schedule)


def test_chunks_are_longer_only_where_a_slice_can_train():
  made = harvest([[-1], [1], [2]])
  made.clock.micro_batch_s = 0.5
  assert made.long_chunk() == (16, 1.5)
  made.schedule.queues[0].append(0)  # who waits would wait longer
  assert made.long_chunk() == (0, 0.0)
  assert harvest([[0], [1], [2]]).long_chunk() == (0, 0.0)


def test_a_slice_that_runs_dry_trains_only_while_another_decodes():
  """Where it decodes alone, the chunk is over then."""
  assert harvest([[-1], [1], [2]]).training(None, 4, tried=True) == (1, 1)
  assert harvest([[-1], [1], [-1]]).training(None, 4, tried=True) == (1, 0)


def test_the_longest_responses_are_stored_first():
  """None makes room for one that follows."""
  added = []
  made = harvest([[0], [1], [2]], added)
  made.running.drawn[:3] = made.samples.length[:3] = [5, 30, 9]
  pages = np.zeros(made.running.pages.sizes.most, np.int32)
  made.store([running_lib.Ended(i, i, pages) for i in range(3)])
  assert added == [30, 9, 5]
