"""Metrics files across restarts, the terminal output, the figures."""

import dataclasses
import io
import types

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


def test_an_uninterrupted_file_is_left_alone(tmp_path):
  """Resuming at its end rewrites nothing."""
  write_run(tmp_path, range(2))
  before = (tmp_path / "metrics.jsonl").stat()
  write_run(tmp_path, [], resume_step=2)
  after = (tmp_path / "metrics.jsonl").stat()
  assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_damage_before_the_last_line_is_an_error(tmp_path):
  """Named with its line; nothing is thrown away silently."""
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\nxx\n{"step": 2}\n')
  with pytest.raises(metrics.MetricError, match="line 2"):
    metrics.Writer(tmp_path, 3)
  with pytest.raises(metrics.MetricError, match="no such file"):
    metrics.read(tmp_path / "other.jsonl")


@pytest.mark.parametrize("value", [np.nan, jnp.float32(np.inf), None, "0.5", np.ones(2)])
def test_what_is_no_finite_number_is_refused_by_key(tmp_path, value):
  """And nothing of that step is written."""
  writer = metrics.Writer(tmp_path)
  with pytest.raises(metrics.MetricError, match="step 7: metric 'policy/loss'"):
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


RECORD = {
  "step": 11,
  "reward/mean": 0.61,
  "reward/solved": 0.5,
  "rollout/length_mean": 143.2,
  "rollout/length_max": 1024,
  "rollout/seconds_s": 3.1,
  "policy/seconds_s": 2.0,
}


def test_progress_is_a_plain_line_off_the_terminal_and_a_bar_on_it():
  """Metrics that a step does not have are left out."""
  stream = io.StringIO()
  metrics.Progress(60, stream=stream).update(12, RECORD)
  assert stream.getvalue() == (
    "step 12/60  reward 0.61  solved 50%  length 143/1024  rollout 3.1 s  update 2.0 s\n"
  )
  terminal = io.StringIO()
  terminal.isatty = types.MethodType(lambda self: True, terminal)
  progress = metrics.Progress(60, done=11, stream=terminal)
  progress.update(12, RECORD)
  progress.close()
  assert "12/60" in terminal.getvalue() and "reward 0.61" in terminal.getvalue()


def test_the_summary_compares_ends_and_shares_out_the_time():
  """Hand numbers; plain text, since a test has no terminal."""
  records = [
    {
      "step": i,
      "reward/mean": 0.1 * i,
      "step/seconds_s": 10.0,
      "rollout/seconds_s": 6.0,
      "policy/seconds_s": 3.0,
    }
    for i in range(6)
  ]
  records[0]["eval/accuracy"] = 0.25
  records[4]["eval/accuracy"] = 0.75
  records[4]["eval/reward_mean"] = 1.5
  table = summary.text(records, k=2)
  rows = {" ".join(line.split()) for line in table.splitlines()}
  assert "reward mean 0.050 0.450" in rows
  assert "eval accuracy (one) 0.250 0.750" in rows
  assert "eval reward (one) 1.500 1.500" in rows
  assert "rollout 36.0 60%" in rows
  assert "other 6.0 10%" in rows
  assert "all steps 60.0 100%" in rows
  assert "\x1b" not in table
  assert "reward mean" in summary.text(records[:1])
  # A last record that is only an evaluation is no step.
  last = {"step": 6, "eval/accuracy": 0.9, "eval/reward_mean": 1.6}
  table = " ".join(summary.text([*records, last], k=2).split())
  assert "reward mean 0.050 0.450" in table and "accuracy (one) 0.250 0.900" in table
  assert "reward mean 0.000 0.100" in " ".join(summary.text([*records[:2], last]).split())
  assert "Speculation" not in table and "Spot training" not in table
  for record in records:
    record |= {"rollout/idle_s": 2.0, "rollout/harvested_s": 1.5, "drafter/updates": 7}
  records[3] |= {"rollout/predicted_gain": 1.3, "rollout/saved_s": 9.0}
  told = " ".join(summary.text(records).split())
  assert "rollouts took 36.0 s, 9.0 s less than without it (1.25 times as fast)" in told
  assert "idle for 12.0 s, and trained the drafter on what takes about 9.0 s alone" in told
  assert "42 updates in all" in told


def test_the_summary_tells_what_compared_rollouts_gained():
  """Twice as fast, then four times: a geometric mean, which replaces the estimate."""
  compared = {"plain/tokens": 600, "plain/differing_tokens": 0, "plain/near_ties": 0}
  records = [
    {
      "rollout/predicted_gain": 1.5,
      "rollout/saved_s": 1.0,
      "rollout/seconds_s": 2.0,
      "rollout/speculating_s": 1.0,
      "rollout/mean_acceptance_length": 2.0,
      "rollout/slices": 2,
      "rollout/idle_s": 1.0,
      "rollout/harvested_s": 0.5,
      "drafter/updates": 3,
      "step/seconds_s": 4.0,
    }
    for _ in range(4)
  ]
  records[1] |= compared | {"plain/seconds_s": 4.0}
  told = " ".join(summary.text(records).split())
  assert "in 1 of 4 steps the rollout was repeated plainly. Of 600 tokens" in told
  assert "repeated plainly: 2.00 times as fast in all. Its steps" in told
  records[3] |= compared | {"plain/seconds_s": 8.0}
  told = " ".join(summary.text(records).split())
  assert "2.83 times as fast (95%: 0.03 to 231.22) in all. Its steps" in told
  assert "all training included: 1.94 times" in told
  assert "Of 1,200 tokens compared 0 were different." in told
  assert "less than without it" not in told
  assert "Speculation ran for 50% of the rollouts' time" in told
  assert "drew 2.00 tokens" in told
  assert "slices were idle for 4.0 s (25% of their time)" in told
  records[0] |= compared | {"plain/seconds_s": 2.0, "plain/near_ties": 1}
  assert "and 1 at a tie in rounding." in " ".join(summary.text(records).split())


def test_the_summary_tells_what_training_the_drafter_gained():
  """In all, and in the last ten steps; time of training after rollouts is no rollout's."""
  counts = ("tokens", "differing_tokens", "near_ties")
  sides = {f"{side}/{k}": 0 for side in ("plain", "frozen") for k in counts}
  records = []
  for step in range(20):
    own_s = 4.0 if step < 10 else 2.0
    records.append({"rollout/seconds_s": own_s + 0.5, "step/seconds_s": own_s + 1.5})
    records[-1] |= {"drafter/training_s": 0.5, "drafter/updates": 9}
    records[-1] |= {"rollout/mean_acceptance_length": 1.0 + step / 10}
    if step % 5 == 4:
      records[-1] |= sides | {"plain/seconds_s": 8.0, "frozen/seconds_s": 4.0}
      records[-1] |= {"frozen/mean_acceptance_length": 1.25}
  told = " ".join(summary.text(records).split())
  assert "repeated plainly and with the first drafter, frozen." in told
  assert "repeated plainly: 2.83 times as fast (95%: " in told
  assert "4.00 times as fast (95%: 4.00 to 4.00) in the last 10 steps." in told
  assert "first drafter, frozen: 1.41 times as fast" in told
  assert "2.00 times as fast (95%: 2.00 to 2.00) in the last 10 steps" in told
  assert "drew 1.40 and 2.90 tokens in the first and the last of these rollouts" in told
  assert "with the frozen drafter 1.25 and 1.25." in told
  assert "Training after rollouts took 10.0 s." in told


def test_the_share_of_solved_responses_is_drawn_where_it_is_not_the_reward():
  """A reward of 0 and 1 would give the same curve twice."""

  def labels(solved):
    steps = [{"step": i, "reward/mean": 0.5, "reward/solved": solved} for i in range(3)]
    return [line.get_label() for line in plot.plot_reward(steps).axes[0].lines]

  assert labels(0.5) == ["reward mean of a step"]
  assert labels(0.25) == ["reward mean of a step", "solved responses of a step"]


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
