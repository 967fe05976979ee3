"""Judging whole batches: a verifier that fails costs its response, and no other."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tlt_jax.rl import judge
from tlt_jax.rl import reward

VERIFIERS = """
import os, signal, sys, time

def good(prompt, response, answer, length):
  print("printed")
  return len(response) / length, response == answer

def bad(prompt, response, answer, length):
  if response == "spin":
    while True:
      pass
  if response == "C code":
    str(7 ** 10**9)
  if response == "wait":
    time.sleep(1000)
  if response == "raise":
    raise KeyError("k")
  if response == "leave":
    sys.exit(0)
  if response == "end":
    os._exit(3)
  if response == "end as if well":
    os._exit(0)
  if response == "memory":
    bytearray(2**33)
  if response == "nan":
    return float("nan")
  if response == "signal":
    os.kill(0, signal.SIGTERM)
    os.kill(0, signal.SIGINT)
  return good(prompt, response, answer, length)

def named(prompt, response, answer):
  return float(prompt[0]["content"] == response and answer["is"] == "ä\\ud800")

def wait(prompt, response, answer):
  if not os.fork():
    time.sleep(1000)
  open(answer, "w").write(f"{os.getpid()} ")
  time.sleep(1000)
"""
FAILURES = {
  "spin": "took more than verifier.cpu_s=0.1",
  "C code": "took more than verifier.cpu_s=0.1",
  "wait": "took more than verifier.wall_s=2",
  "raise": "KeyError: 'k'",
  "leave": "SystemExit: 0",
  "end": "ended its process (status 3)",
  "end as if well": "ended its process (status 1)",
  "memory": "MemoryError",
  "nan": "returned nan, neither a finite number",
}


@pytest.fixture(autouse=True)
def verifiers(tmp_path, monkeypatch):
  """A module that only this test can import."""
  (tmp_path / "own_verifiers.py").write_text(VERIFIERS)
  monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def made():
  """Makes judges whose processes end with the test."""
  judges = []

  def make(text, **options):
    judges.append(judge.Judge(text, options=judge.Options(**options)))
    return judges[-1]

  yield make
  for each in judges:
    each.close()


def test_a_verifier_that_fails_costs_its_response_and_no_other(made, caplog):
  """It hangs, waits, raises, exits, ends its process, takes all memory or returns NaN."""
  texts = [f"{i}" for i in range(80)]
  where = dict(zip(range(3, 80, 8), FAILURES, strict=False))
  for i, text in where.items():
    texts[i] = text
  texts[50] = "signal"  # of those to all processes of a job, which end no verifier
  samples = texts, texts, texts
  length = [i % 3 + 1 for i in range(80)]
  others = [i for i in range(80) if i not in where]
  one = made("own_verifiers.good", processes=0)(*samples, length=length)
  text = "own_verifiers.bad + 2 * own_verifiers.good"
  judges = [
    made(text, processes=n, cpu_s=0.1, wall_s=2.0, memory_mb=1024, failed_reward=-1.0)
    for n in (1, 2)
  ]
  found, again = (each(*samples, length=length) for each in judges)
  np.testing.assert_array_equal(found.reward[others], 3 * one.reward[others])
  np.testing.assert_array_equal(found.solved[others], one.solved[others])
  assert one.solved[others].all() and not any(one.failure)
  assert np.flatnonzero(found.failure != "").tolist() == list(where)
  for i, text in where.items():
    assert found.reward[i] == -1 and not found.solved[i]
    assert FAILURES[text] in found.failure[i] and f"response '{text}'" in found.failure[i]
  assert f"{len(FAILURES)} of 80 responses" in caplog.text
  for a, b in zip(found[:3], again[:3], strict=True):
    np.testing.assert_array_equal(a, b)
  judges[0].check(found)


def test_failures_on_too_many_responses_end_the_run(made):
  """In one line that says what went wrong first."""
  judges = made("own_verifiers.bad", processes=0)
  texts = ["1", "raise", "2", "3"]

  def score():
    return judges(texts, texts, texts, length=[1, 5, 1, 1])

  texts[3] = "nan"
  judges.check(score())  # a half may fail
  texts[2] = "raise"
  with pytest.raises(reward.RewardError, match="3 of 4"):
    judges.check(score())


def test_messages_and_answers_reach_a_process_whole(made):
  """Chats and any text; what JSON changes is refused."""
  judges = made("own_verifiers.named", processes=1)
  prompt, answer = [{"role": "user", "content": "x\n"}], {"is": "ä\ud800"}
  assert judges([prompt] * 2, ["x\n", "y"], [answer] * 2).reward.tolist() == [1, 0]
  for lost in ({1j}, {"is": ("ä",)}, {"is": "ä", 1: 2}):
    with pytest.raises(reward.RewardError, match="JSON"):
      judges([prompt], ["x"], [lost])


# A script without a guard of its main part, which the processes do not run again.
SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
from tlt_jax.rl import judge
judge.Judge("own_verifiers.wait")("p", "r", [sys.argv[3]])
"""


def test_processes_end_with_a_run_that_is_killed(tmp_path):
  """With what they have started, while they wait."""
  note = tmp_path / "note"
  root = pathlib.Path(__file__).parents[1]
  run = subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path, root, note])

  def wait_until(found):
    end = time.monotonic() + 60
    while not found():
      assert time.monotonic() < end
      time.sleep(0.05)

  wait_until(lambda: note.exists() and note.read_text().endswith(" "))
  verifier = psutil.Process(int(note.read_text()))
  started = [verifier, *verifier.children()]
  assert len(started) == 2
  os.kill(run.pid, signal.SIGKILL)
  run.wait()
  wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in started))
