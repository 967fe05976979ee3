"""Evaluation: pass@k, intervals, named sets, files, and runs compared."""

import itertools
import json
import math
import types

import numpy as np
import pytest

from experiments import evaluations
from tests import commands
from tlt_jax import metrics
from tlt_jax.rl import evaluation
from tlt_jax.spec_decode.decoding import samples as samples_lib

compare = commands.module("compare")


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
  """Counted out over all subsets, and the formula of Chen et al. with binomials."""
  rng = np.random.default_rng(0)
  solved = rng.random((12, 6)) < rng.random((12, 1))
  for k in range(1, 7):
    chosen = list(itertools.combinations(range(6), k))
    counted = [np.mean([row[list(c)].any() for c in chosen]) for row in solved]
    np.testing.assert_allclose(evaluation.pass_at_k(solved, k), counted, atol=1e-12)
    formula = [1 - math.comb(6 - c, k) / math.comb(6, k) for c in solved.sum(1)]
    np.testing.assert_allclose(evaluation.pass_at_k(solved, k), formula, atol=1e-12)
  assert evaluation.ks(6) == [1, 2, 4, 6] and evaluation.ks(1) == [1]


def scored(solved, sets=None):
  """Responses that are as solved as said, [P n]."""
  P, n = np.shape(solved)
  solved = np.asarray(solved, bool).reshape(-1)
  names = [{"set": name} if name else {} for name in (sets or [""] * P)]
  records = [{"prompt": f"p{i}", "answer": i} | names[i] for i in range(P)]
  return types.SimpleNamespace(
    solved=solved,
    reward=2.0 * solved,
    parts={"a.b": np.arange(P * n)},
    text=[f"é{i}\ud800" for i in range(P * n)],
    records=[record for record in records for _ in range(n)],
    samples=types.SimpleNamespace(
      length=np.arange(P * n),
      finish_reason=np.where(solved, samples_lib.STOP, samples_lib.LENGTH),
    ),
    rollout_s=1.0,
    reward_s=0.5,
  )


def test_figures_of_an_evaluation_have_intervals_over_problems():
  """Hand numbers, of all problems and of each set."""
  found = evaluation.metrics(
    scored([[1, 1], [1, 0], [0, 0], [0, 0]], ["easy", "easy", "hard", "hard"]), n=2
  )
  assert found["eval/accuracy"] == 0.375 and found["eval/reward_mean"] == 0.75
  assert found["eval/pass_at_2"] == 0.5 and found["eval/seconds_s"] == 1.5
  half = metrics.interval([1, 0.5, 0, 0])[1]
  assert found["eval/accuracy_half_width"] == pytest.approx(half)
  assert found["eval/easy/accuracy"] == 0.75 and found["eval/easy/pass_at_2"] == 1.0
  assert found["eval/hard/accuracy"] == 0.0 == found["eval/hard/accuracy_half_width"]
  alone = evaluation.metrics(scored([[1]]), n=1)
  assert alone["eval/accuracy"] == 1.0 and "eval/accuracy_half_width" not in alone
  assert not any("pass_at" in key for key in alone)


def test_evaluations_are_read_back_as_written(tmp_path):
  found = scored([[1, 0], [0, 0]], ["a", "a"])
  evaluations.write(found, 2, 7, tmp_path, 1)
  first, second = evaluations.read(tmp_path)[7]
  assert first == {"prompt": "p0", "set": "a", "solved": [True, False], "reward": [2, 0]}
  assert second["solved"] == [False, False]
  assert len((tmp_path / "samples" / "eval_000007.jsonl").read_text().splitlines()) == 1


def test_runs_are_paired_by_problem():
  """Whatever the order; what only one was asked does not count."""
  first = evaluation.problems(scored([[1, 0], [0, 0], [1, 1]]), 2)
  other = evaluation.problems(scored([[1, 1], [1, 1], [1, 1], [0, 0]]), 2)[::-1]
  found = compare.paired(first, other)
  gains = [0.5, 1.0, 0.0]
  assert found["problems"] == 3 and found["gain"] == pytest.approx(np.mean(gains))
  assert found["gain_half_width"] == pytest.approx(metrics.interval(gains)[1])
  assert compare.paired(first, []) == {"problems": 0}


def write_run(workdir, reward):
  writer = metrics.Writer(workdir)
  for step in range(4):
    written = {"reward/mean": reward + step, "step/seconds_s": 1.0 + step}
    writer.write(step, written | {"rollout/seconds_s": 2.0, "rollout/tokens_per_s": 50.0})
  writer.close()
  for step, solved in ((0, [[0], [0], [1]]), (4, [[1], [1], [round(reward)]])):
    evaluations.write(scored(solved), 1, step, workdir, 0)


def test_workdirs_are_compared(tmp_path, monkeypatch, capsys):
  """In a table and a figure; the same numbers in the last line."""
  write_run(tmp_path / "a", 0.0)
  write_run(tmp_path / "b", 1.0)
  figure = tmp_path / "curves.png"
  monkeypatch.setattr(compare, "_FIGURE", types.SimpleNamespace(value=str(figure)))
  monkeypatch.setattr(compare, "_STEPS", types.SimpleNamespace(value=2))
  names = [str(tmp_path / name) for name in "ab"]
  compare.main(*names)
  *_, last = capsys.readouterr().out.splitlines()
  a, b = (json.loads(last)[name] for name in names)
  assert (a["steps"], a["reward"], a["step_s"]) == (4, 2.5, 3.5)
  assert a["accuracy"] == pytest.approx(2 / 3) and b["accuracy"] == 1.0
  assert b["paired"]["gain"] == pytest.approx(1 / 3) and "paired" not in a
  assert figure.stat().st_size > 10_000


def test_what_steps_took_is_summed(tmp_path):
  """Before the first step: nothing; a run without times has steps only."""
  write_run(tmp_path, 1.0)
  records, _ = compare.read(tmp_path)
  step, minutes, tokens = compare.costs(records).values()
  assert step == {n: n for n in range(5)}
  assert tokens == pytest.approx({0: 0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
  assert minutes == pytest.approx({0: 0, 1: 1 / 60, 2: 3 / 60, 3: 6 / 60, 4: 10 / 60})
  resumed = [{"step": 7, "reward/mean": 1.0}, {"step": 8, "reward/mean": 2.0}]
  assert [*compare.costs(resumed).values()] == [{7: 7, 8: 8, 9: 9}, {}, {}]
  assert compare.rewards(records, 3) == [
    (3, 2.0, pytest.approx(metrics.interval([1, 2, 3])[1]))
  ]
  assert compare.rewards(records, 1) == [(n + 1, 1.0 + n, 0.0) for n in range(4)]
