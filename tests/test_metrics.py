"""Metrics files across restarts, the terminal output, the figures."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import plot
from experiments import summary
from tlt_jax import metrics
from tlt_jax.spec_decode.decoding import samples


def chunk(start_s=0.0, **changes):
  """Two slices for half a second; the second runs dry and trains."""
  made = samples.ChunkRecord(
    start_s=start_s,
    end_s=start_s + 0.5,
    batch=4,
    strategy="3_1_4",
    live=[4, 1],
    steps=[8, np.int32(2)],
    trained=[0, 3],
  )
  return dataclasses.asdict(dataclasses.replace(made, **changes))


def rollout(lengths, outcome="solved"):
  return {
    "length": np.asarray(lengths),
    "outcome": [outcome] * len(lengths),
    "live_time_s": [0.0, 0.5],
    "live_requests": [len(lengths), 0],
    "chunks": [chunk(), chunk(0.5, strategy="off")],
    "micro_batch_s": 0.1,
    "decisions": [["tokens", 32], ["joins", 1]],
  }


def write_run(workdir, steps, resume_step=0):
  writer = metrics.Writer(workdir, resume_step)
  for step in steps:
    writer.write(step, {"reward/mean": step / 10})
    writer.write_rollout(step, rollout([step + 1, 2]))
  writer.close()


@pytest.mark.parametrize(
  "values, mean, half",
  [
    # s = sqrt(5/3), t(0.975, 3) = 3.182446: 3.182446 * 1.290994 / 2
    ([1, 2, 3, 4], 2.5, 2.054260),
    # s = sqrt(82.5/9), t(0.975, 9) = 2.262157: 2.262157 * 3.027650 / sqrt(10)
    (range(1, 11), 5.5, 2.165852),
    ([0.5, 0.5, 0.5], 0.5, 0.0),
  ],
)
def test_intervals_are_students(values, mean, half):
  """Hand numbers for 4 and for 10 values; equal values leave no width."""
  np.testing.assert_allclose(metrics.interval(list(values)), (mean, half), atol=1e-5)


def test_records_come_back_as_written(tmp_path):
  """Scalars of every kind; one JSON object per line, and TensorBoard events."""
  writer = metrics.Writer(tmp_path)
  returned = writer.write(0, {"a/x": jnp.float32(0.5), "a/y": np.int64(3), "a/z": 2.5})
  record = {"step": 0, "a/x": 0.5, "a/y": 3, "a/z": 2.5}
  assert returned == record
  assert metrics.read(tmp_path / "metrics.jsonl") == [record]  # before closing
  writer.close()
  assert list((tmp_path / "tensorboard").glob("events.out.tfevents*"))


def test_a_resumed_run_has_every_step_once(tmp_path):
  """What a killed run wrote after its checkpoint goes, half a line included."""
  write_run(tmp_path, range(5))
  for name in ("metrics.jsonl", "rollouts.jsonl"):
    with (tmp_path / name).open("a") as file:
      file.write('{"step": 5, "rew')
    assert [r["step"] for r in metrics.read(tmp_path / name)] == [0, 1, 2, 3, 4]
  write_run(tmp_path, range(3, 6), resume_step=3)
  for name in ("metrics.jsonl", "rollouts.jsonl"):
    assert [r["step"] for r in metrics.read(tmp_path / name)] == [0, 1, 2, 3, 4, 5]
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "metrics.jsonl",
    "rollouts.jsonl",
    "tensorboard",
  ]


def test_damage_before_the_last_line_is_an_error(tmp_path):
  """Named with its line; nothing is thrown away silently."""
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\nxx\n{"step": 2}\n')
  with pytest.raises(metrics.MetricError, match="2"):
    metrics.Writer(tmp_path, 3)


@pytest.mark.parametrize("value", [np.nan, jnp.float32(np.inf), None, "0.5", np.ones(2)])
def test_what_is_no_finite_number_is_refused_by_key(tmp_path, value):
  """And nothing of that step is written."""
  writer = metrics.Writer(tmp_path)
  with pytest.raises(metrics.MetricError, match="policy/loss"):
    writer.write(7, {"reward/mean": 1.0, "policy/loss": value})
  writer.close()
  assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_a_rollout_comes_back_as_written(tmp_path):
  """Its chunks have the fields of `samples.ChunkRecord`, in Python numbers."""
  writer = metrics.Writer(tmp_path)
  writer.write_rollout(3, rollout([1, 2]))
  writer.close()
  (record,) = metrics.read(tmp_path / "rollouts.jsonl")
  assert record == {"step": 3, **rollout([1, 2]), "length": [1, 2]}


def test_the_summary_compares_ends_and_shares_out_the_time():
  """Hand numbers."""
  seconds = {"step/seconds_s": 10.0, "rollout/seconds_s": 6.0, "policy/seconds_s": 3.0}
  records = [{"step": i, "reward/mean": 0.1 * i} | seconds for i in range(6)]
  records[0]["eval/accuracy"] = 0.25
  records[4]["eval/accuracy"] = 0.75
  rows = {" ".join(row.split()) for row in summary.text(records, k=2).splitlines()}
  assert {"reward mean 0.050 0.450", "eval accuracy (one) 0.250 0.750"} <= rows
  assert {"rollout 36.0 60%", "other 6.0 10%", "all steps 60.0 100%"} <= rows
  # A last record that is only an evaluation is no step.
  last = {"step": 6, "eval/accuracy": 0.9, "eval/reward_mean": 1.6}
  table = " ".join(summary.text([*records, last], k=2).split())
  assert "reward mean 0.050 0.450" in table and "accuracy (one) 0.250 0.900" in table


def test_the_summary_has_what_compared_rollouts_gained():
  """Twice as fast, then four times: a geometric mean, which replaces the estimate."""
  compared = {"plain/tokens": 600, "plain/differing_tokens": 0, "plain/near_ties": 0}
  own = {"rollout/predicted_gain": 1.5, "rollout/saved_s": 1.0, "rollout/seconds_s": 2.0}
  own |= {"rollout/speculating_s": 1.0, "rollout/mean_acceptance_length": 2.0}
  own |= {"rollout/slices": 2, "rollout/idle_s": 1.0, "rollout/harvested_s": 0.5}
  own |= {"drafter/updates": 3, "step/seconds_s": 4.0}
  records = [dict(own) for _ in range(4)]
  for step, seconds, gain in ((1, 4.0, "2.00"), (3, 8.0, "2.83")):
    records[step] |= compared | {"plain/seconds_s": seconds}
    text = " ".join(summary.text(records).split())
    assert f"{gain} times as fast" in text
  for found in ("1.94 times", "1,200 tokens", "50%", "25%"):
    assert found in text
  assert "less than without it" not in text


def test_a_run_gives_its_figures(tmp_path):
  """Long-tailed and short runs; without rollouts, two."""
  rng = np.random.default_rng(0)
  for steps in (1, 25):
    workdir = tmp_path / str(steps)
    writer = metrics.Writer(workdir)
    for step in range(steps):
      seconds = {"rollout/seconds_s": 1.0, "step/seconds_s": 2.0}
      seconds |= {"plain/seconds_s": 2.0} if step % 5 == 0 else {}
      writer.write(step, {"reward/mean": rng.random(), "eval/accuracy": 0.5} | seconds)
      outcome = metrics.OUTCOMES[step % 3]
      lengths = np.exp(rng.normal(4, 1, 64)).astype(int)
      writer.write_rollout(step, rollout(lengths, outcome))
    writer.close()
    figures = plot.plot_all(workdir)
    names = ["reward.png", "gain.png", "lengths.png", "live_requests.png", "timeline.png"]
    assert [f.name for f in figures] == names
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in figures)
    (workdir / "rollouts.jsonl").unlink()
    assert len(plot.plot_all(workdir)) == 2
