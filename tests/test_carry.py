"""Responses that are carried over: which tokens are drawn when, and what is trained on."""

import dataclasses
import functools
import json
import shutil

import hypothesis
from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from tests import commands
from tests import test_dynamic_sampling
from tests import tiny
from tlt_jax import metrics
from tlt_jax.rl import carry as carry_lib
from tlt_jax.spec_decode import rollout as rollout_lib
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import quorum as quorum_lib
from tlt_jax.spec_decode.speculation import selector as selector_lib

home = commands.home
P, R, MOST_TOKENS = 2, 2, 30


@dataclasses.dataclass(frozen=True)
class Batch:
  prompts: int = P
  responses: int = R
  most_prompts: int = 0


def make(prompts=4, versions=3, batch=None):
  return carry_lib.make(
    carry_lib.Options(prompts=prompts, versions=versions), batch or Batch()
  )


class Pretended:
  """A rollout that draws chunks of any size, in any order; token t of a request is its
  number * 1000 + t, and its log-probability says which step drew it."""

  def __init__(self, lengths, rng, step):
    self.lengths, self.rng, self.step, self.drawn = lengths, rng, step, 0

  def __call__(self, params, requests, until, score):
    samples = samples_lib.empty(requests)
    length = np.array([self.lengths(int(i)) for i in requests.request], np.int32)
    live = np.ones(len(requests), bool)
    bound = until(samples, [])
    for _ in range(10_000):
      paused = np.zeros_like(live) if bound is None else samples.length >= bound
      going = np.flatnonzero(live & ~paused)
      if not len(going):
        break
      some = going[self.rng.random(len(going)) < 0.6]
      for i in some:
        n = samples.length[i]
        more = min(int(self.rng.integers(1, 9)), length[i] - n)
        samples.tokens[i, n : n + more] = requests.request[i] * 1000 + np.arange(
          n, n + more
        )
        samples.logp[i, n : n + more] = -self.step
        samples.length[i] += more
        self.drawn += more
      ended = [int(i) for i in some if samples.length[i] == length[i]]
      live[ended] = False
      samples.finish_reason[ended] = samples_lib.STOP
      bound = until(samples, ended)
    score(samples)
    return samples


def run(lengths, steps, prompts, versions, batch, seed):
  """Steps of a pretended run, its state saved and read after each: what each trains on."""
  rng, records = np.random.default_rng(seed), ({"prompt": str(k)} for k in range(10**6))
  carry, every = make(prompts, versions, batch), []
  for step in range(steps):
    carry = carry.asking([next(records) for _ in range(carry.missing)])
    before = carry
    tokens = [np.array([1, int(g.record["prompt"])], np.int32) for g in carry.groups]
    asked = carry.asked(tokens, max_tokens=MOST_TOKENS)
    rollout = Pretended(lengths, rng, step)
    samples = quorum_lib.draw(rollout, None, asked.requests, asked.quorum)
    carry, trained = carry.after(asked, samples, tokens, max_tokens=MOST_TOKENS)
    every.append((before, trained, rollout.drawn))
    saved = json.loads(json.dumps(carry.state()))
    again = make(prompts, versions, batch).restored(saved, MOST_TOKENS)
    assert again.state() == saved
    carry = again
  return carry, every


def in_step(carry, lengths):
  """n by the words of `quorum`: all draw a token at a time until it is enough."""
  begun = [[len(r.tokens) for r in group.responses] for group in carry.groups]
  for n in range(MOST_TOKENS + 1):
    complete, must = 0, True
    for group, have in zip(carry.groups, begun, strict=True):
      left = [
        lengths(group.number * carry.responses + r) - have[r]
        for r in range(carry.responses)
      ]
      complete += all(x <= n for x in left)
      for x, response in zip(left, group.responses, strict=True):
        if x > 0 and carry._is_last(response):
          must &= x <= n
    if complete >= carry.prompts and must:
      return n
  raise AssertionError


@hypothesis.settings(max_examples=60, deadline=None)
@given(
  seed=st.integers(0, 10**6),
  batch=st.builds(Batch, st.integers(1, 3), st.integers(1, 3)),
  more=st.integers(1, 5),
  versions=st.integers(2, 4),
  longest=st.sampled_from([3, MOST_TOKENS]),
)
def test_every_prompt_is_trained_on_once_and_no_token_is_lost(
  seed, batch, more, versions, longest
):
  """Whole groups, the oldest complete first; n is what drawing in step would give."""
  drawn_lengths = np.random.default_rng(seed).integers(1, longest + 1, 10_000)
  lengths = lambda i: int(drawn_lengths[i])
  steps, prompts = 6, batch.prompts + more
  last, every = run(lengths, steps, prompts, versions, batch, seed)
  _, same = run(lengths, steps, prompts, versions, batch, seed + 1)
  numbers = []
  for (before, trained, _), (_, again, _) in zip(every, same, strict=True):
    n = in_step(before, lengths)
    assert trained.metrics["carry/tokens"] <= n
    requests = trained.requests
    numbers += (requests.request // batch.responses).tolist()
    assert len(requests) == batch.prompts * batch.responses
    for i, number in enumerate(requests.request):
      response = trained.samples.response(i)
      assert response.tolist() == [number * 1000 + t for t in range(lengths(number))]
      spans = trained.samples.logp[i, : len(response)]
      assert np.all(np.diff(spans) <= 0) and spans[0] - spans[-1] < versions
    np.testing.assert_array_equal(trained.samples.tokens, again.samples.tokens)
    np.testing.assert_array_equal(trained.samples.logp, again.samples.logp)
    ages = [trained.metrics[f"carry/age_{age}"] for age in range(4)]
    assert sum(ages) == pytest.approx(1)
  trained_on = np.array(numbers).reshape(-1, batch.responses)
  assert (trained_on == trained_on[:, :1]).all()
  in_flight = [group.number for group in last.groups]
  assert sorted([*trained_on[:, 0], *in_flight]) == list(range(last.numbered))
  assert len(in_flight) == more


@pytest.mark.parametrize(
  ("options", "batch", "message"),
  [
    (dict(prompts=2), Batch(), "none would be carried over"),
    (dict(prompts=4, versions=1), Batch(), "spans 2 policy versions"),
    (dict(prompts=4), Batch(most_prompts=8), "most_prompts=8"),
  ],
)
def test_what_cannot_be_carried_over_is_refused(options, batch, message):
  with pytest.raises(ValueError, match=message):
    make(**options, batch=batch)


def test_a_state_goes_on_only_with_as_many_responses(caplog):
  carry = make().asking([{"prompt": "1"}] * 4)
  with pytest.raises(ValueError, match="batch.responses=2"):
    carry_lib.restored(make(batch=Batch(responses=3)), carry.state(), 1, MOST_TOKENS)
  begun = carry_lib.restored(make(), None, 5, MOST_TOKENS)  # a fork of a run without
  assert (begun.version, begun.numbered) == (5, 10)
  assert carry_lib.restored(None, carry.state(), 1, MOST_TOKENS) is None
  assert "4 prompts were in flight" in caplog.text


def test_a_fork_may_change_what_fits_what_is_in_flight():
  """Fewer prompts in flight are no harm; shorter responses are."""
  carry = make().asking([{"prompt": "1", "answer": 2, "made": object()}] * 4)
  record = {"prompt": "1", "answer": 2}
  assert [group.record for group in carry.groups] == [record] * 4
  drawn = carry_lib.Response(*(np.zeros(9, d) for d in (np.int32, np.float32, np.int32)))
  groups = [group._replace(responses=(drawn,) * R) for group in carry.groups]
  state = dataclasses.replace(carry, groups=tuple(groups)).state()
  assert make(prompts=3).restored(state, max_tokens=9).missing == 0
  with pytest.raises(ValueError, match="max_tokens=9 or more"):
    carry_lib.restored(make(), state, 1, max_tokens=8)


@functools.cache
def policy(seed):
  params = tiny.params()
  noise = 0.05 * jax.random.normal(jax.random.key(seed), params["head"].shape)
  return params | {"head": params["head"] + noise}


class Numbers(test_dynamic_sampling.Numbers):
  stop_tokens = (3, 11, 24, 47)  # so that lengths differ


@functools.cache
def sampler_of(slices, drafts=False, **sizes):
  drafter = tiny.frozen("eagle2") if drafts else None
  selector = (
    selector_lib.make("up to 8 live: 3_1_4", "predictive", True) if drafts else None
  )
  options = tiny.SIZES | dict(slots=8, chunk=8, buckets=(8, 2)) | sizes
  engine = rollout_lib.make(
    tiny.CONFIG,
    tiny.mesh(slices),
    rollout_lib.Options(**options),
    selector=selector,
    drafter=drafter,
  )
  like = test_dynamic_sampling.sampler(slices)
  return dataclasses.replace(like, rollout=engine, tokenizer=Numbers())


def steps_of(slices, changing, **sizes):
  """What a sampler trains on in six steps, of one policy or of one that changes."""
  sampler = sampler_of(slices, **sizes)
  records, carry, every = test_dynamic_sampling.records(40), make(), []
  for step in range(6):
    params = tiny.on(tiny.mesh(slices))
    if changing:
      params = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), policy(step), params
      )
    new = records[carry.numbered : carry.numbered + carry.missing]
    every.append(sampler(params, new, R, seed=0, carry=carry, train=False))
    carry = every[-1].carry
  return every


@functools.cache
def reference(changing):
  return steps_of(1, changing)


def test_with_one_policy_they_are_the_responses_that_are_drawn_at_once():
  """Text, tokens and log-probabilities, whichever step drew them."""
  sampler, params = sampler_of(1), tiny.on(tiny.mesh(1))
  whole = sampler(params, test_dynamic_sampling.records(40), R, seed=0)
  carried = 0
  for scored in reference(changing=False):
    carried += scored.trained.metrics["carry/versions_max"] > 1
    for i, k in enumerate(scored.requests.request):
      assert scored.text[i] == whole.text[k] and scored.records[i] == whole.records[k]
      n = whole.samples.length[k]
      assert scored.samples.length[i] == n
      assert scored.samples.finish_reason[i] == whole.samples.finish_reason[k]
      ours, theirs = scored.samples.logp[i, :n], whole.samples.logp[k, :n]
      np.testing.assert_allclose(ours, theirs, atol=1e-5)
  assert carried > 1
  batch = scored.batch(R)
  assert batch.scored.reward.shape == (P, R)
  assert scored.metrics()["carry/age_mean"] >= 0


def test_a_step_that_draws_nothing_has_no_tokens_per_pass():
  """So that no 0 is shown, or enters a mean."""
  scored = reference(changing=False)[-1]
  key = "rollout/mean_acceptance_length"
  assert scored.metrics()[key] == 1
  samples = dataclasses.replace(scored.samples, chunks=())
  assert key not in dataclasses.replace(scored, samples=samples).metrics()


@pytest.mark.parametrize(
  ("slices", "sizes"),
  [
    (1, dict(slots=2, buckets=(2,), chunk=3)),
    (2, dict(slots=4, buckets=(4, 2), chunk=5)),
    (2, dict(drafts=True)),
  ],
)
def test_what_is_trained_on_does_not_depend_on_the_layout(slices, sizes):
  """Of a policy that changes: tokens, and which policy drew each; speculation, too."""
  spans = 0
  for ours, theirs in zip(
    steps_of(slices, True, **sizes), reference(changing=True), strict=True
  ):
    np.testing.assert_array_equal(ours.requests.request, theirs.requests.request)
    np.testing.assert_array_equal(ours.samples.tokens, theirs.samples.tokens)
    np.testing.assert_allclose(ours.samples.logp, theirs.samples.logp, atol=1e-5)
    ours, theirs = ours.trained.metrics, theirs.trained.metrics
    names = [name for name in ours if "dropped" not in name]
    assert [ours[x] for x in names] == [theirs[x] for x in names]
    spans = max(spans, ours["carry/versions_max"])
  assert spans > 1


@pytest.mark.slow
def test_a_run_that_carries_over_speculates_and_resumes_exactly(home, tmp_path):
  """What is trained on depends neither on speculation nor on a drafter's training; a run
  that was interrupted with responses in flight ends the same, without its schedule."""
  overrides = {
    "rollout.carry.prompts": 8,
    "rollout.carry.versions": 2,
    "algorithm.importance_cap": 2.0,
    "steps": 4,
    "checkpoint.every": 1,
    "evaluation.every": 0,
    "compare.every": 2,
  }
  plain, whole, again = (tmp_path / name for name in ("plain", "whole", "again"))
  args = commands.tiny_run(home, *overrides.items())
  commands.succeed(commands.run(home, "train", *args, f"--workdir={plain}"))
  steps = metrics.read(plain / "metrics.jsonl")[:-1]
  assert max(m["carry/versions_max"] for m in steps) == 2
  assert any(m["policy/importance_weight"] != 1 for m in steps)
  args = commands.tiny_run(home, *overrides.items(), *commands.DRAFTING.items())
  commands.succeed(commands.run(home, "train", *args, f"--workdir={whole}"))
  repeated = [m for m in metrics.read(whole / "metrics.jsonl") if "plain/tokens" in m]
  assert len(repeated) == 2 and all(m["plain/differing_tokens"] == 0 for m in repeated)
  assert commands.responses(whole) == commands.responses(plain)
  assert commands.weights(whole / "policy") == commands.weights(plain / "policy")
  shutil.copytree(whole, again)
  for step in ("3", "4"):
    shutil.rmtree(again / "checkpoints" / step, ignore_errors=True)
  (again / "rollouts.jsonl").unlink()
  commands.succeed(commands.run(home, "train", *args, f"--workdir={again}"))
  assert commands.weights(again / "policy") == commands.weights(whole / "policy")
