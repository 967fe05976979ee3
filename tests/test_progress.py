"""What takes long says so; what is over soon, and other processes, do not."""

import logging
import time

import pytest

from tests import tiny
from tlt_jax import processes
from tlt_jax import progress
from tlt_jax.spec_decode import rollout


@pytest.fixture
def said(caplog, monkeypatch):
  """The lines so far, where a tenth of a second is long."""
  caplog.set_level(logging.INFO)
  monkeypatch.setattr(progress, "EVERY_S", 0.1)
  return lambda: [r.getMessage() for r in caplog.records if r.module == "progress"]


def test_what_takes_long_says_how_far_it_is(said):
  """Now and then, with what it is a part of; and no longer once it is over."""
  with progress.shown("evaluation"):
    with progress.counted("item", "abc") as each:
      for x in each:
        if x == "b":
          time.sleep(0.35)
  lines = said()
  assert 2 <= len(lines) <= 3 and set(lines) == {"evaluation: item 2 of 3, 0 s"}
  time.sleep(0.2)
  assert said() == lines


def test_nothing_is_said_of_what_is_over_soon_or_elsewhere(said, monkeypatch):
  with progress.shown("short"):
    pass
  monkeypatch.setattr(processes, "is_first", lambda: False)
  with progress.shown("long"):
    time.sleep(0.25)
  assert said() == []


def test_an_error_ends_what_is_shown(said):
  with pytest.raises(ValueError), progress.shown("outer"):
    with progress.counted("item", [1, 2]) as each:
      for _ in each:
        raise ValueError
  with progress.shown("next"):
    time.sleep(0.15)
  assert said() == ["next, 0 s"]


def test_a_rollout_says_what_it_compiles_and_draws(said, monkeypatch):
  """Programs by their number, and responses by how many have ended."""
  monkeypatch.setattr(progress, "EVERY_S", 0.01)
  options = rollout.Options(max_length=40, max_prompt=12, slots=4, chunk=4)
  engine = rollout.make(tiny.CONFIG, tiny.mesh(1), options)
  requests = tiny.requests(2, 4, max_tokens=28)
  engine.compile(tiny.params(), requests.stop_tokens.shape[1])
  compiling = said()
  first = "compiling rollout programs, "
  assert any(line.startswith(first) and " of 3 done (now " in line for line in compiling)

  def watch(samples, ended):
    time.sleep(0.03)

  engine(tiny.params(), requests, watch=watch)
  drawing = said()[len(compiling) :]
  assert all(line.startswith("drawing responses, ") for line in drawing)
  assert any(" 0 of 8 ended" in line for line in drawing)
  assert any(f" {n} of 8 ended" in line for line in drawing for n in range(4, 9))
