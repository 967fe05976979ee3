"""Rollouts begin before all their programs are compiled, and draw the same tokens."""

import contextlib
import functools
import gc
import os
import sys
import threading
import weakref

import jax
import numpy as np
import pytest

from tests import tiny
from tlt_jax import programs as pool_lib
from tlt_jax.spec_decode import rollout
from tlt_jax.spec_decode.rollout import clock as clock_lib
from tlt_jax.spec_decode.rollout import joining
from tlt_jax.spec_decode.speculation import selector as selector_lib

STOPS = 1
OPTIONS = rollout.Options(**tiny.SIZES, slots=4, chunk=4, buckets=(2,))
STRATEGIES = "up to 2 live: off or 2_1_3; up to 4 live: off or ngram_3"
PLAIN_2, MODEL_2, NGRAM_4 = (
  "plain with 2 slots",
  "2_1_3 with 2 slots",
  "ngram_3 with 4 slots",
)


def make(pool=None):
  selector = selector_lib.make(STRATEGIES, "predictive", has_drafter=True)
  drafter = tiny.frozen("eagle2")
  return rollout.make(tiny.CONFIG, tiny.mesh(1), OPTIONS, drafter, selector, pool)


@functools.cache
def requests():
  limits = np.array([6, 8, 9, 80] * 2)
  return tiny.requests(2, 4, max_tokens=limits, stop_tokens=[])


@functools.cache
def compiled():
  """All programs, and what they draw."""
  engine = make()
  params = tiny.on(tiny.mesh(1))
  engine.compile(params, STOPS)
  return engine, engine(params, requests())


class Held:
  """Keeps programs from being compiled until they are released."""

  def __init__(self, monkeypatch, faults=()):
    made = compiled()[0].pool
    self._events = {}

    def compile_one(key, *_):
      name, *bucket = key
      if bucket and name != "fill":
        arm = {"chunk": "plain"}.get(name, "ngram_3" if "ngram" in name else "2_1_3")
        named = f"{arm} with {bucket[0]} slots"
        self.event(named).wait(60)
        if named in faults:
          raise ValueError("too complex\nfor this compiler")
      return made._programs[key]

    monkeypatch.setattr(pool_lib, "_compile", compile_one)

  def event(self, name: str) -> threading.Event:
    return self._events.setdefault(name, threading.Event())

  def release(self, *names: str) -> None:
    for name in names:
      self.event(name).set()


@contextlib.contextmanager
def held(monkeypatch, faults=()):
  made = Held(monkeypatch, faults)
  try:
    yield made
  finally:
    made.release("plain with 4 slots", PLAIN_2, MODEL_2, NGRAM_4)


def begun(holder):
  engine, params = make(), tiny.on(tiny.mesh(1))
  holder.release("plain with 4 slots")
  engine.begin_compiling(params, STOPS)
  return engine, params


def ran(samples):
  return [(chunk.batch, chunk.strategy) for chunk in samples.chunks]


def assert_same(a, b):
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_allclose(a.logp, b.logp, atol=1e-4)


def released_after(holder, chunks: dict[int, str], engine):
  """Releases a program after so many chunks, and waits until it is there."""
  count = 0

  def watch(samples, ended):
    nonlocal count
    count += 1
    if count in chunks:
      before = engine.programs.count
      holder.release(chunks[count])
      engine.programs.wait(before + 1)

  return watch


def test_programs_join_in_the_midst_of_a_rollout(monkeypatch):
  """Also buckets; a replay, with all programs from the start, decides the same."""
  reference = compiled()[1]
  with held(monkeypatch) as holder:
    engine, params = begun(holder)
    assert engine.programs.count == 1
    after = {2: NGRAM_4, 12: PLAIN_2, 15: MODEL_2}
    drawn = engine(params, requests(), watch=released_after(holder, after, engine))
  assert_same(drawn, reference)
  assert set(ran(drawn)[:2]) == {(4, "off")}
  assert set(ran(drawn)[2:12]) == {(4, "off"), (4, "ngram_3")}
  assert set(ran(drawn)[12:15]) == {(2, "off")}
  assert (2, "2_1_3") in ran(drawn)[15:]

  decide = clock_lib.Decisions(drawn.decisions)
  replayed = make(compiled()[0].pool)(params, requests(), decide=decide)
  assert ran(replayed) == ran(drawn)
  np.testing.assert_array_equal(replayed.tokens, drawn.tokens)


def test_a_replay_waits_for_its_programs(monkeypatch):
  reference = compiled()[1]
  with held(monkeypatch) as holder:
    engine, params = begun(holder)
    others = PLAIN_2, MODEL_2, NGRAM_4
    timer = threading.Timer(0.5, holder.release, others)
    timer.start()
    decide = clock_lib.Decisions(reference.decisions)
    drawn = engine(params, requests(), decide=decide)
  assert ran(drawn) == ran(reference)
  np.testing.assert_array_equal(drawn.tokens, reference.tokens)


def test_no_program_but_the_first_is_needed(monkeypatch):
  with held(monkeypatch) as holder:
    engine, params = begun(holder)
    drawn = engine(params, requests())
    assert not engine.measure(params, STOPS)
  assert_same(drawn, compiled()[1])
  assert set(ran(drawn)) == {(4, "off")}
  engine.programs.wait()
  assert engine.measure(params, STOPS) and not engine.measure(params, STOPS)
  assert len(set(ran(engine(params, requests())))) > 2


@pytest.mark.parametrize("name", [NGRAM_4, PLAIN_2])
def test_what_cannot_be_compiled_is_left_out(name, monkeypatch, caplog):
  with held(monkeypatch, faults=[name]) as holder:
    engine, params = begun(holder)
    holder.release(PLAIN_2, MODEL_2, NGRAM_4)
    engine.programs.wait()
    drawn = [engine(params, requests()) for _ in range(2)][1]
  assert_same(drawn, compiled()[1])
  used = {f"{arm.replace('off', 'plain')} with {batch} slots" for batch, arm in ran(drawn)}
  assert name not in used and "plain with 4 slots" in used
  lines = [r.message for r in caplog.records if "left out" in r.message]
  assert lines == [f"{name} is left out: too complex"]


def test_a_rollout_does_not_begin_without_its_first_program(monkeypatch):
  with held(monkeypatch, faults=["plain with 4 slots"]) as holder:
    with pytest.raises(ValueError, match="too complex"):
      begun(holder)


def test_programs_that_are_not_compiled_yet_hold_no_weights(monkeypatch):
  """An update between rollouts has their memory."""
  with held(monkeypatch) as holder:
    engine = make()
    params = jax.tree.map(jax.numpy.copy, tiny.on(tiny.mesh(1)))
    held_by = weakref.ref(params["embedding"])
    holder.release("plain with 4 slots")
    engine.begin_compiling(params, STOPS)
    assert engine.programs.count == 1
    del params
    gc.collect()
    assert held_by() is None


@pytest.mark.parametrize("processes", [1, 2])
def test_what_follows_a_rollout_is_compiled_before_late_chunks(monkeypatch, processes):
  """Unless other processes would wait for it; its error is that of its use."""
  monkeypatch.setattr(joining.processes, "count", lambda: processes)
  monkeypatch.setattr(joining.os, "cpu_count", lambda: 1)
  keys, made = [(4, None), (2, None)], []

  def fail():
    made.append("update")
    raise ValueError("too complex")

  def adds(*names):
    return {name: functools.partial(made.append, name) for name in names}

  programs = joining.Programs(keys)
  programs.compile(adds("prefill"), adds(*keys), adds("train"), {"update": fail})
  programs.wait()
  followed = ["update"] if processes == 1 else []
  assert made == ["prefill", keys[0], "train", *followed, keys[1]]
  assert programs.complete and programs.joined(2) == set(keys)


def test_the_end_of_a_rollout_waits_for_no_update():
  released, programs = threading.Event(), joining.Programs([(4, None)])
  programs.compile({}, {(4, None): str}, {"train": str}, {"update": released.wait})
  programs.wait_for_later()
  assert not programs.complete
  released.set()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority")
def test_compiling_gives_way_to_the_rollout(monkeypatch):
  """Where it would take every core."""
  monkeypatch.setattr(joining.os, "cpu_count", lambda: 1)
  released, found, keys = threading.Event(), [], [(4, None), (2, None)]

  def own():
    found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

  programs = joining.Programs(keys)
  programs.compile({}, dict.fromkeys(keys, own), {"train": released.wait}, {})
  released.set()
  programs.wait()
  own()
  assert found[1] > found[0] == found[2]


def test_threads_share_a_program():
  pool, calls = pool_lib.Pool(), []

  def traced(x):
    calls.append(threading.current_thread())
    if len(calls) == 1:
      raise ValueError("once")
    return x + 1

  jitted = jax.jit(traced)
  with pytest.raises(ValueError, match="once"):
    pool.get("one", (), jitted, 1)
  threads = [
    threading.Thread(target=pool.get, args=("one", (), jitted, 1)) for _ in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(calls) == 2 and len(pool) == 1 and pool.run("one", (), jitted, 1) == 2
