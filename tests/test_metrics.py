"""Metrics files across restarts, the terminal output, the figures."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import plot
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
    writer.write_rollout(steps, rollout([1]) | {"chunks": []})  # it drew nothing
    writer.close()
    figures = plot.plot_all(workdir)
    names = ["reward.png", "gain.png", "lengths.png", "live_requests.png", "timeline.png"]
    assert [f.name for f in figures] == names
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in figures)
    (workdir / "rollouts.jsonl").unlink()
    assert len(plot.plot_all(workdir)) == 2


def test_figures_count_steps_from_one_as_the_log_does():
  """A record's `step` counts the steps before it, and so do evaluations."""
  keys = ("reward/mean", "eval/accuracy", "rollout/seconds_s", "step/seconds_s")
  records = [{"step": i} | dict.fromkeys(keys, 0.5) for i in range(3)]
  records.append({"step": 3, "eval/accuracy": 0.75})
  curves = {line.get_label(): line for line in plot.plot_reward(records).axes[0].lines}
  assert [*curves["reward mean of a step"].get_xdata()] == [1, 2, 3]
  assert [*curves["accuracy on held-out problems"].get_xdata()] == [0, 1, 2, 3]
  repeated = [r | {"plain/seconds_s": 1.0} for r in records[:3]]
  assert [*plot.plot_gain(repeated).axes[0].lines[0].get_xdata()] == [1, 2, 3]
  rollouts = [{"step": i, **rollout([3, 4])} for i in range(10)]
  titles = [ax.get_title() for ax in plot.plot_lengths(rollouts).axes]
  assert titles == [f"Response lengths, steps {x}" for x in ("1 to 2", "9 to 10")]
  live = plot.plot_live_requests(rollouts).axes[0].get_legend_handles_labels()[1]
  assert [label.partition(":")[0] for label in live] == ["step 1", "step 5", "step 10"]


@pytest.mark.parametrize(
  "key, where",
  [("policy/loss", "step 8: "), ("eval/accuracy", "the evaluation after step 7: ")],
)
def test_an_error_names_the_step_of_the_log(tmp_path, key, where):
  with pytest.raises(metrics.MetricError, match=f"^{where}"):
    metrics.Writer(tmp_path).write(7, {key: np.nan})
