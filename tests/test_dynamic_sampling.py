"""Dynamic sampling: what is kept depends on responses, not on when they end."""

import functools
import shutil

import numpy as np
import pytest

from experiments import outcomes
from tests import commands
from tests import tiny
from tlt_jax import data
from tlt_jax import metrics
from tlt_jax.rl import algorithm as algorithm_lib
from tlt_jax.rl import dynamic_sampling
from tlt_jax.rl import judge
from tlt_jax.rl import sample
from tlt_jax.spec_decode import rollout

home = commands.home
P, R, MOST = 3, 2, 12
DAPO = algorithm_lib.make("dapo")


class Numbers:
  """A tokenizer whose text is the token ids."""

  stop_tokens = (3,)

  def encode(self, prompt, system, chat):
    return np.array([int(number) for number in prompt.split()], np.int32)

  def decode(self, ids):
    return " ".join(map(str, ids))


def divisible(prompt, response, answer):
  """Solved by responses whose sum is a multiple of four, about a quarter of all."""
  return float(sum(map(int, response.split())) % 4 == 0)


def records(count):
  prompts = tiny.prompts(count, seed=5)
  return [
    {"prompt": " ".join(map(str, p)), "answer": str(i)} for i, p in enumerate(prompts)
  ]


@functools.cache
def sampler(slices, **changes):
  sizes = dict(slots=8, chunk=8, buckets=(8, 2)) | changes
  engine = rollout.make(
    tiny.CONFIG, tiny.mesh(slices), rollout.Options(**tiny.SIZES | sizes)
  )
  return sample.Sampler(
    rollout=engine,
    tokenizer=Numbers(),
    judge=judge.Judge(f"{__name__}.divisible", options=judge.Options(processes=0)),
    sampling={"temperature": 1.0, "max_tokens": 30},
  )


def draw(slices=1, most=MOST, replaces=True, first_request=0, **changes):
  """The responses of a rollout that may ask so many prompts."""
  return sampler(slices, **changes)(
    tiny.on(tiny.mesh(slices)),
    records(most),
    R,
    seed=0,
    first_request=first_request,
    replace=dynamic_sampling.make(DAPO, P, most) if replaces else None,
  )


@functools.cache
def expected(first_request):
  """By the rule's words, of a rollout that asks everybody: the mask of useful prompts, and
  how many must be asked for P useful ones."""
  whole = draw(replaces=False, first_request=first_request)
  useful = np.asarray(DAPO.keeps(whole.batch(R).scored))
  n = P
  while n < P + np.sum(~useful[:n]):
    n = P + np.sum(~useful[:n])
  return whole, useful, n


# Numbered so, requests need 10 and 5 prompts for 3 useful ones.
@pytest.mark.parametrize("first_request", (600, 800))
@pytest.mark.parametrize(
  "slices, changes", [(1, {}), (1, {"chunk": 3}), (2, {"slots": 2, "buckets": ()})]
)
def test_the_first_useful_prompts_are_kept_whatever_the_timing(
  slices, changes, first_request
):
  """For other chunks, slots and slices; the others are left as if never asked."""
  whole, useful, n = expected(first_request)
  assert P < n < MOST  # else this says nothing
  found = draw(slices, first_request=first_request, **changes)
  kept = np.flatnonzero(useful)[:P]
  assert found.choice.kept.tolist() == kept.tolist()
  assert (found.choice.asked, found.choice.useless) == (n, n - P)
  assert found.text == whole.text[: n * R] and found.records == whole.records[: n * R]
  np.testing.assert_array_equal(found.reward, whole.reward[: n * R])
  of = (kept[:, None] * R + np.arange(R)).reshape(-1)
  batch, everybody = found.batch(R), whole.batch(R)
  assert np.asarray(DAPO.keeps(batch.scored)).all()
  for i, j in enumerate(of):
    np.testing.assert_array_equal(batch.prompts[i], everybody.prompts[j])
    np.testing.assert_array_equal(batch.responses[i], everybody.responses[j])
  logp = everybody.scored.logp.reshape(len(everybody.responses), -1)[of]
  np.testing.assert_allclose(batch.scored.logp.reshape(len(of), -1), logp, atol=1e-5)
  said = found.metrics()
  assert said["rollout/prompts_asked"] == n
  assert said["rollout/useless_groups"] == pytest.approx((n - P) / n)
  assert 0 < said["rollout/replacement_s"] < said["rollout/seconds_s"]


def test_a_spent_budget_fills_the_batch_with_useless_prompts():
  """The first of them, in the queue's order."""
  _, useful, n = expected(600)
  most = n - 1
  found = draw(most=most, first_request=600)
  assert found.choice.asked == most
  good, bad = np.flatnonzero(useful[:most]), np.flatnonzero(~useful[:most])
  assert len(good) < P
  assert found.choice.kept.tolist() == sorted([*good, *bad[: P - len(good)]])
  assert len(found.batch(R).responses) == P * R


def test_a_queue_goes_on_where_it_was_left():
  """Its records are the iterator's; its state goes back to any of them."""

  def iterator():
    return data.prompt_iterator(records(10), 4, 0)

  batches, queue = iterator(), dynamic_sampling.Queue(iterator())
  stream = [record for _ in range(10) for record in next(batches)]
  at, states = 0, []
  for count in (3, 1, 9, 4, 7, 8):
    states.append((at, queue.get_state()))
    assert queue.peek(count + 5) == stream[at : at + count + 5]
    queue.take(count)
    at += count
  for at, state in states:
    for other in (queue, dynamic_sampling.Queue(iterator())):
      other.set_state(state)
      assert other.get_state() == state
      assert other.peek(6) == stream[at : at + 6]


@pytest.mark.slow
def test_a_run_with_replacements_speculates_and_resumes_exactly(home, tmp_path):
  """Which prompts replace others depends neither on speculation nor on a drafter's training
  in idle slices; following its own schedule, a run that was interrupted ends the same."""
  overrides = {
    "algorithm.name": "dapo",
    "batch.most_prompts": 12,
    "steps": 3,
    "checkpoint.every": 1,
    "evaluation.every": 0,
  }
  plain, whole, again = (tmp_path / name for name in ("plain", "whole", "again"))
  args = commands.tiny_run(home, *overrides.items())
  commands.succeed(commands.run(home, "train", *args, f"--workdir={plain}"))
  asked = [m["rollout/prompts_asked"] for m in metrics.read(plain / "metrics.jsonl")[:-1]]
  assert max(asked) > 4 and any(n % 4 for n in asked[:2])
  args = commands.tiny_run(home, *overrides.items(), *commands.DRAFTING.items())
  commands.succeed(commands.run(home, "train", *args, f"--workdir={whole}"))
  assert outcomes.updates(whole) > 0
  assert commands.responses(whole) == commands.responses(plain)
  assert commands.weights(whole / "policy") == commands.weights(plain / "policy")
  shutil.copytree(whole, again)
  shutil.rmtree(again / "checkpoints" / "3")
  args += [f"--workdir={again}", f"--schedule={whole / 'rollouts.jsonl'}"]
  result = commands.succeed(commands.run(home, "train", *args))
  assert "restored" in result.stderr
  assert outcomes.of(again) == outcomes.of(whole)
