"""The comparison of algorithms: how long each trains, and what is written."""

import csv
import json

import pytest

from tests import commands

algorithms = commands.module("bench.algorithms")
home = commands.home


@pytest.mark.parametrize("by_step", [[50] * 9, [40, 35, 45, 40, 60], [200]])
def test_a_run_ends_after_the_first_step_that_has_drawn_enough(
  tmp_path, monkeypatch, by_step
):
  """Where steps are about as long as each other, and whatever was done of it before."""
  asked = []

  def train(folder, settings):
    asked.append(settings["steps"])
    (folder / "checkpoints" / str(asked[-1])).mkdir(parents=True)
    (folder / "policy").mkdir(exist_ok=True)
    lines = [
      json.dumps({"step": i, "length": [n - 1, 1]}) + "\n"
      for i, n in enumerate(by_step[: asked[-1]])
    ]
    (folder / "rollouts.jsonl").write_text("".join(lines))

  monkeypatch.setattr(algorithms, "train", train)
  enough = next(i for i in range(1, 10) if sum(by_step[:i]) >= 150)
  algorithms.train_until(tmp_path, {}, 150, most=200)
  assert asked == sorted(set(asked)) and asked[-1] == enough
  algorithms.train_until(tmp_path, {}, 150, most=200)
  assert asked[-1] == enough and len(asked) == len(set(asked))


def test_the_table_and_the_figure_are_written(tmp_path, capsys):
  rows = [
    dict(zip(algorithms.COLUMNS, row, strict=True))
    for row in (
      ("grpo", 20, 2_000_000, 0.7, 0.05, 0.01, True),
      ("ppo", 21, 2_000_001, 0.64, -0.01, 0.02, None),
    )
  ]
  algorithms.write(tmp_path, rows)
  algorithms.show(rows)
  assert (tmp_path / "algorithms.png").stat().st_size > 1000
  with (tmp_path / "algorithms.csv").open() as f:
    assert [row["algorithm"] for row in csv.DictReader(f)] == ["grpo", "ppo"]
  assert "+5.0 +- 1.0" in capsys.readouterr().out


@pytest.mark.slow
def test_algorithms_are_compared(home, tmp_path):
  """A second call adds another to them, and a third finds everything done."""
  config = commands.tiny_run(home, *commands.DRAFTING.items())
  more = ["--tokens=300", "--prompts=2", "--compared_steps=1", f"--workdir={tmp_path}"]
  call = lambda names: commands.found(
    home, "bench.algorithms", *config, *more, f"--names={names}"
  )
  first = call("grpo")
  both = call("grpo,ppo")
  assert both[:1] == first and [row["algorithm"] for row in both] == ["grpo", "ppo"]
  assert all(row["same"] and row["tokens"] >= 300 for row in both)
  assert call("grpo,ppo") == both
