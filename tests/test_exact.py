"""Where all passes have few rows, rollouts are exact, and a near-tie is a bug."""

import dataclasses
import logging

import numpy as np
import pytest

from benchmarks import few_rows as bench
from benchmarks import shapes
from tests import tiny
from tlt_jax.models import config as config_lib
from tlt_jax.pallas_kernels import triton_call
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.decoding import samples as samples_lib
from tlt_jax.spec_decode.rollout import compare
from tlt_jax.spec_decode.speculation import selector as selector_lib

CONFIG = bench.tiny(shapes.MODELS["qwen3-0.6b"])


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch):
  monkeypatch.setattr(triton_call, "is_available", lambda: True)


def engine(
  slots: int, strategies: str, config: config_lib.ModelConfig = CONFIG, kernels="triton"
) -> rollout.Engine:
  """On a ladder of buckets; draws nothing."""
  options = rollout.Options(
    **dict(max_length=64, max_prompt=8, chunk=16, slots=slots, kernels=kernels),
    buckets=rollout.ladder(slots),
  )
  selector = selector_lib.make(strategies, "predictive", has_drafter=False)
  return rollout.make(config, tiny.mesh(1), options, selector=selector)


@pytest.mark.parametrize(
  "slots, strategies, remedy",
  [
    (128, "", None),
    (129, "", 64),
    (32, "up to 32 live: off or ngram_3", None),
    (64, "up to 64 live: off or ngram_3", 32),
    (128, "up to 32 live: ngram_3", None),
    (256, "up to 32 live: ngram_3", 128),
    (128, "up to 32 live: ngram_3; up to 128 live: ngram_1", 64),
    (8, "up to 2 live: ngram_15; up to 8 live: ngram_15", None),
    (16, "up to 16 live: ngram_15", 8),
    (3, "up to 3 live: ngram_15_1_50", 2),
    (1, "up to 1 live: ngram_15_1_200", "strategies of at most 128 nodes"),
  ],
)
def test_what_has_too_many_rows_is_said_with_what_helps(slots, strategies, remedy, caplog):
  """In one line, once; a rollout that follows it is exact."""
  caplog.set_level(logging.INFO)
  made = engine(slots, strategies)
  assert made.exact == (remedy is None)
  engine(slots, strategies)
  said = [r.getMessage() for r in caplog.records if "bit for bit" in r.getMessage()]
  assert len(said) == (remedy is not None)
  if isinstance(remedy, int):
    assert f"rollout.slots={remedy} " in said[0]
    assert engine(remedy, strategies).exact
  elif remedy:
    assert remedy in said[0]


@pytest.mark.parametrize(
  "changes",
  [
    dict(dtype="float32"),
    dict(width=CONFIG.width + 16),
    dict(head_dim=32),
    dict(layers=(config_lib.LayerKind(8, config_lib.Rope(1e4)),)),
    dict(kernels="ref"),
  ],
)
def test_what_has_no_kernels_for_few_rows_is_not_exact(changes, caplog):
  """And nothing is said, as no number of slots would help."""
  caplog.set_level(logging.INFO)
  kernels = changes.pop("kernels", "triton")
  made = engine(4, "", dataclasses.replace(CONFIG, **changes), kernels)
  assert not made.exact and not caplog.records


def test_samples_know_whether_they_are_exact():
  made = tiny.requests(2, 2)
  assert engine(128, "").backend.samples(made).exact
  assert not engine(200, "").backend.samples(made).exact


@pytest.mark.parametrize("exact", [(False, False), (True, False), (True, True)])
def test_a_near_tie_is_a_bug_between_exact_rollouts(exact, monkeypatch):
  """Only where both are; a difference with a margin is one in any case."""
  requests = tiny.requests(1, 2, max_tokens=4, stop_tokens=[])
  empty = samples_lib.empty(requests)
  empty.length[:] = 4
  a, b = (
    dataclasses.replace(empty, tokens=empty.tokens.copy(), exact=is_exact)
    for is_exact in exact
  )
  b.tokens[0, 1], b.tokens[1, 2] = 5, 6
  margin = np.array([[9, 1e-6, 9, 9], [9, 9, 0.1, 9]])
  drawn = dataclasses.make_dataclass("Draw", ["margin"])(margin)
  monkeypatch.setattr(compare, "redraw", lambda *_: drawn)
  found = compare.compare(tiny.CONFIG, None, requests, a, b)
  ties = 0 if all(exact) else 1
  assert (found.near_ties, found.differing_tokens) == (ties, 2 - ties)
  # Who asks for another tolerance gets it.
  found = compare.compare(tiny.CONFIG, None, requests, a, b, tolerance=0.5)
  assert found.near_ties == 2
