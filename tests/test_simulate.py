"""The simulator: what it counts is what rollouts count; its clock; its scenarios."""

import dataclasses
import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tests import commands
from tests import tiny
from tlt_jax.models import config as config_lib
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.simulate import acceptance as acceptance_lib
from tlt_jax.simulate import costs as costs_lib
from tlt_jax.simulate import rollout as simulated
from tlt_jax.simulate import scenario as scenario_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import requests as requests_lib
from tlt_jax.spec_decode.rollout import clock
from tlt_jax.spec_decode.speculation import selector
from tlt_jax.spec_decode.speculation import strategy as strategy_lib
from tlt_jax.spec_decode.spot import spot

command = commands.module("simulate")
CHAIN = strategy_lib.Strategy(3, 1, 4)
DEVICE = costs_lib.Device("test", 1e9, 1e12, 1e-6, 1e9, 1e-5)
COSTS = costs_lib.Roofline(tiny.CONFIG, DEVICE, host_s=1e-4)
SPOT = spot.Options(row_tokens=32, context_tokens=4, rows=8, carried_rows=4)
SCENARIOS = sorted(command.SCENARIOS.glob("*.json"))


def options(slots: int = 8, chunk: int = 16, single: bool = False) -> rollout.Options:
  buckets = () if single else (max(slots // 2, 1), 2)
  return rollout.Options(**tiny.SIZES, slots=slots, buckets=buckets, chunk=chunk)


def simulate(slices, lengths, slots=8, costs=COSTS, **changes):
  """A simulated rollout of responses of these lengths, each of a prompt of its own."""
  prompts = [np.ones(5, np.int32)] * len(lengths)
  return simulated.simulate(
    simulated.Machine(slices, costs),
    tiny.CONFIG,
    options(slots),
    requests_lib.make_requests(prompts, max_tokens=80),
    np.asarray(lengths),
    **changes,
  )


def counts(samples) -> list[tuple]:
  """What chunks count, in order."""
  return [
    (c.batch, c.strategy, c.live, c.steps, c.tokens, c.passes) for c in samples.chunks
  ]


ON = [2, *(tiny.slow(n) for n in (1, 4, 8))]


def follow(real, requests, slices, sizes, **changes):
  """Simulates a rollout that has run, decision by decision."""
  return simulated.simulate(
    simulated.Machine(slices, COSTS),
    tiny.CONFIG,
    sizes,
    requests,
    real.length,
    decide=clock.Decisions(real.decisions),
    **changes,
  )


@pytest.mark.parametrize("slices", ON)
def test_chunks_and_passes_of_plain_decoding_are_those_of_a_rollout(slices):
  """Bucket, live requests, steps, tokens and passes of every chunk, and all lengths."""
  mesh, sizes = tiny.mesh(slices), options(slots=4)
  requests = tiny.requests()
  real = rollout.make(tiny.CONFIG, mesh, sizes)(tiny.on(mesh), requests)
  again = follow(real, requests, slices, sizes)
  assert counts(again) == counts(real)
  assert again.length.tolist() == real.length.tolist()


@pytest.mark.parametrize("slices", ON)
def test_chunks_and_passes_of_speculation_are_those_of_a_rollout(slices, monkeypatch):
  """With what stood in each pass replayed, of chunks of a single pass."""
  mesh, requests = tiny.mesh(slices), tiny.requests()

  def speculative(sizes):
    return rollout.make(
      tiny.CONFIG, mesh, sizes, tiny.frozen("eagle2", 0), selector.always(CHAIN)
    )

  accepted, one = {}, speculative(options(4, CHAIN.depth + 1, single=True))
  run = one.backend.run

  def watched(*args):
    running = one.backend._running
    owner, drawn = running.owner.reshape(-1), running.drawn.copy()
    result = run(*args)
    for i, count in zip(owner, result.emitted.count, strict=True):
      if i >= 0:
        accepted[int(i), int(drawn[i])] = int(count) - 1
    return result

  monkeypatch.setattr(one.backend, "run", watched)
  one(tiny.on(mesh), requests)
  sizes = options(4, single=slices < 4)
  real = speculative(sizes)(tiny.on(mesh), requests)
  replayed = acceptance_lib.Replay(accepted)
  how = dict(selector=selector.always(CHAIN), acceptance=replayed)
  again = follow(real, requests, slices, sizes, **how)
  assert counts(again) == counts(real)
  assert again.accepted.tolist() == real.accepted.tolist()


LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=24)
fast = hypothesis.settings(deadline=None, max_examples=15, derandomize=True)


@fast
@hypothesis.given(LENGTHS, st.sampled_from([1, 2, 3, 8]), st.floats(0, 1), st.booleans())
def test_no_request_is_lost_and_time_only_passes(lengths, slices, rate, train):
  """Whatever is accepted and trained, all responses come out, chunk behind chunk."""
  samples = simulate(
    slices,
    lengths,
    slots=4,
    selector=selector.make("up to 4 live: off or 3_1_4 or 4_2_6", "predictive", True),
    acceptance=acceptance_lib.Rates([rate]),
    spot=SPOT if train else None,
  )
  assert samples.length.tolist() == lengths
  assert sum(c.tokens for c in samples.chunks) == sum(lengths)
  times = [t for c in samples.chunks for t in (c.start_s, c.end_s)]
  assert times[0] >= 0 and np.all(np.diff(times) >= 0)
  assert samples.passes <= sum(lengths)


def test_idle_slices_train_and_frozen_ones_do_not():
  """By the real quota: slices without a request, for as long as a chunk has time."""
  how = dict(
    selector=selector.always(CHAIN), acceptance=acceptance_lib.Rates([0.8]), rollouts=2
  )
  lengths = [80, 5, 5, 5]
  frozen, trained = simulate(2, lengths, **how), simulate(2, lengths, spot=SPOT, **how)
  assert frozen.harvested_s == 0 and trained.harvested_s > 0
  for chunk in trained.chunks:
    assert all(
      not n or not live or s < max(chunk.steps)
      for n, live, s in zip(chunk.trained, chunk.live, chunk.steps, strict=True)
    )
  assert trained.harvested_s <= trained.idle_s * 1.5
  assert counts(frozen)[0] == counts(trained)[0]


class MadeUp(costs_lib.Costs):
  """Costs of a machine on which an empty cache costs next to nothing."""

  host_s = 0.0

  def step_s(self, bucket, arm, seen, alone=False):
    return (0.002 + 0.01 * seen / bucket / 2048) * (1 if arm is None else 2)

  def prefill_s(self, tokens):
    return 0.0

  def fill_s(self, tokens):
    return 0.0

  def micro_batch_s(self, tokens):
    return 0.01

  def exchange_s(self, slices):
    return 0.001


@pytest.mark.parametrize(("rate", "rollouts"), [(0.0, 1), (0.7, 1), (0.0, 6)])
def test_training_fills_the_time_of_decoding_and_does_not_lengthen_it(rate, rollouts):
  """Even where steps were timed with full caches, and while they get slower.

  Without acceptance it decodes plainly, else by chains.
  """
  sizes = rollout.Options(max_length=2048, max_prompt=12, slots=4, chunk=32, buckets=(2,))

  def run(**changes):
    return simulated.simulate(
      simulated.Machine(2, MadeUp()),
      tiny.CONFIG,
      sizes,
      requests_lib.make_requests([np.ones(5, np.int32)] * 4, max_tokens=2000),
      np.array([1900, 5, 6, 7]),
      selector=selector.make("up to 4 live: off or 3_1_4", "predictive", True),
      acceptance=acceptance_lib.Rates([rate]),
      rollouts=rollouts,
      **changes,
    )

  train = spot.Options(row_tokens=128, chunk_tokens=64, rows=8, carried_rows=4)
  frozen, trained = run(), run(spot=train)
  drafted = sum(c.strategy == "3_1_4" for c in trained.chunks[-9:])
  assert drafted == 9 if rate else drafted <= 1  # to try it

  def seconds(samples):
    return sum(c.end_s - c.start_s for c in samples.chunks)

  assert seconds(trained) < 1.03 * seconds(frozen)
  assert trained.harvested_s > 0.8 * trained.idle_s


def test_a_pass_reads_the_experts_that_its_tokens_choose():
  """One of four computes a token: two tokens read 1.75 if they choose at random."""
  experts = config_lib.Experts(count=4, per_token=1, width=24)
  config = dataclasses.replace(tiny.CONFIG, experts=experts, num_layers=1)
  ideal = dataclasses.replace(DEVICE, launch_s=0.0, bandwidth_share=1.0)
  costs = costs_lib.Roofline(config, ideal)
  attention, expert = 2 * 32 * 64 + 2 * 32 * 32, 3 * 32 * 24

  def pass_s(tokens, read):
    weights = 2 * (attention + read * expert + 4 * 32 + 64 * 32)
    return pytest.approx((weights + 2 * 4 * 64 * tokens) / 1e9)

  assert costs.pass_s(1, 0) == pass_s(1, 1)
  assert costs.pass_s(2, 0) == pass_s(2, 1.75)
  assert costs.draft_weights == costs_lib.Roofline(tiny.CONFIG, ideal).draft_weights


def test_a_pass_reads_its_weights_and_caches():
  """A hand number: one token, memory-bound, on a device of 1 GB/s."""
  ideal = dataclasses.replace(DEVICE, launch_s=0.0, bandwidth_share=1.0)
  costs = costs_lib.Roofline(tiny.CONFIG, ideal)
  layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48
  weights = 2 * (2 * layer + 64 * 32)
  caches = 2 * 2 * 2 * 16 * 2 * 10  # layers, k and v, heads, size, bytes, tokens
  assert costs.pass_s(1, 10) == pytest.approx((weights + caches + 2 * 4 * 64) / 1e9)
  rope = config_lib.Rope(1e4)  # the second layer sees 4 of the 10 tokens
  kinds = config_lib.LayerKind(None, rope), config_lib.LayerKind(4, rope)
  model = dataclasses.replace(tiny.CONFIG, layers=kinds)
  caches *= (10 + 4) / (10 + 10)
  windowed = dataclasses.replace(costs, model=model).pass_s(1, 10)
  assert windowed == pytest.approx((weights + caches + 2 * 4 * 64) / 1e9)


def test_a_block_costs_what_its_weights_cost_at_any_depth():
  """A hand number: its layers over some places once, and its head once."""
  ideal = dataclasses.replace(DEVICE, launch_s=0.0, bandwidth_share=1.0)
  config = drafter_lib.of_target(tiny.CONFIG, "block", num_layers=3, taps=(0, 1))
  sizes = dataclasses.replace(costs_lib.Drafter.of(config), vocab_size=64)
  costs = costs_lib.Roofline(tiny.CONFIG, ideal, drafter=sizes)
  layer = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48
  context = 2 * 32**2 + 3 * 2 * 32 * 32
  weights = 2 * (3 * layer + 64 * 32 + context)
  caches = 3 * 2 * 2 * 16 * 2 * 10  # layers, k and v, heads, size, bytes, tokens
  drafted = pytest.approx((weights + caches) / 1e9)
  for depth in (3, 8):
    arm = strategy_lib.Strategy(depth, 1, depth + 1)
    verified = costs.pass_s(depth + 1, 10, per_row=depth + 1)
    assert costs.step_s(1, arm, 10) - verified == drafted
  # Of a window no more is read, and the head is not trained.
  assert costs.block_s(1, 256, 8) == costs.block_s(1, 1000, 8) > costs.block_s(1, 255, 8)
  # Of many rows, which arithmetic bounds, the first places are cheaper than all.
  assert costs.block_s(999, 9, 1) < costs.block_s(999, 9, 4) < costs.block_s(999, 9, 8)
  smaller = dataclasses.replace(costs, drafter=dataclasses.replace(sizes, vocab_size=32))
  assert smaller.exchange_s(2) == costs.exchange_s(2)
  assert smaller.micro_batch_s(128) < costs.micro_batch_s(128)


def test_measured_costs_are_read_from_the_benchmark():
  """Steps by tokens seen, those of a strategy, what was not measured, and filling."""
  times = {"off": {"160": 1.0, "640": 2.0}, "3_1_4": {"320": 4.0}}
  costs = costs_lib.Measured({"steps": {"2": {"step_ms": times}}, "fill_token_s": 1e-5})
  assert costs.step_s(2, None, 2 * 320) == pytest.approx(1e-3 * 2**0.5)
  assert costs.step_s(2, None, 0) == pytest.approx(1e-3)
  assert costs.step_s(2, CHAIN, 0) == pytest.approx(4e-3)
  assert costs.fill_s(160) == pytest.approx(1.6e-3)
  with pytest.raises(ValueError, match="5_1_6 were not measured"):
    costs.step_s(2, strategy_lib.Strategy(5, 1, 6), 0)


def test_acceptance_is_drawn_at_its_rate_and_grows_with_it():
  """The draws hold what `length` promises; a higher rate never accepts less."""
  low, high = (acceptance_lib.Rates([rate]) for rate in (0.6, 0.8))
  i, drawn = np.arange(2000), np.zeros(2000, int)
  few, many = (rates.ahead(i, drawn, 1, CHAIN)[:, 0] for rates in (low, high))
  assert np.mean(few + 1) == pytest.approx(low.length(CHAIN), abs=0.1)
  assert np.all(few <= many)
  assert acceptance_lib.conditional([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_bundled_scenarios_can_be_read(path):
  """Their costs, lengths and sizes exist for each number of slices."""
  scenario = scenario_lib.read(path)
  assert len(scenario.draw_lengths()) == scenario.prompts * scenario.responses
  assert scenario.draw_lengths().max() <= scenario.max_tokens
  assert scenario.break_even() >= 1
  for slices in scenario.slices:
    assert scenario.options(slices).max_length > scenario.max_tokens


def test_a_scenario_names_its_drafter_and_what_its_chances_are_to_others():
  """Which bounds how deep its strategies are; trees are scaled, too."""
  block = scenario_lib.read(command.SCENARIOS / "qwen2_5_7b_block.json")
  others = scenario_lib.read(command.SCENARIOS / "qwen2_5_7b.json")
  fewer = dataclasses.replace(block, chances=0.5, trees={"4_2_8": [0.9]})
  assert block.acceptance("tlt") == others.acceptance("tlt")
  assert fewer.acceptance("frozen").rates[0] == block.frozen[0] / 2
  assert fewer.acceptance("frozen").trees == {"4_2_8": (0.45,)}
  arm = strategy_lib.parse("6_1_7")
  assert block.costs.step_s(4, arm, 4) < others.costs.step_s(4, arm, 4)
  assert fewer.speedup(1, "6_1_7") < block.speedup(1, "6_1_7")
  with pytest.raises(ValueError, match="8_1_9 guesses 8 tokens, the drafter's block has 4"):
    dataclasses.replace(block, drafter={"kind": "block", "block": {"size": 4}})
  with pytest.raises(ValueError, match="no such drafter"):
    dataclasses.replace(block, drafter={"kind": "block", "block": {"length": 4}})


def test_chances_are_read_from_rollouts_or_from_a_drafters_training(tmp_path):
  path = tmp_path / "metrics.jsonl"
  trained = {"drafter/agreement_1": 0.8, "drafter/agreement_2": 0.6}
  rolled = {"rollout/acceptance_rate_pos_1": 0.5, "rollout/acceptance_rate_pos_2": 0.1}
  path.write_text("".join(json.dumps({"step": i} | trained) + "\n" for i in (1, 2)))
  assert scenario_lib.read_acceptance(path) == pytest.approx((0.8, 0.6))
  path.write_text(json.dumps({"step": 1} | trained | rolled) + "\n")
  assert scenario_lib.read_acceptance(path) == pytest.approx((0.5, 0.2))
  path.write_text(json.dumps({"step": 1}) + "\n")
  with pytest.raises(ValueError, match="no drafter trained"):
    scenario_lib.read_acceptance(path)
