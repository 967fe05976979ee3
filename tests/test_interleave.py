"""Sides of a benchmark take turns."""

from experiments.bench import interleave


def test_every_turn_begins_with_another_side_and_the_warm_up_is_left_out():
  called = []
  sides = {name: lambda turn, name=name: called.append((turn, name)) for name in "abc"}
  measured = list(interleave.turns(sides, repeats=2, warm_up=2))
  assert len(measured) == 2
  assert [name for turn, name in called if turn == 0] == ["a", "b", "c"]
  assert [name for turn, name in called if turn == 1] == ["b", "c", "a"]
  assert sorted(called) == [(turn, name) for turn in range(4) for name in "abc"]


def test_seconds_and_results_are_told_by_side():
  turn = lambda a, b: {"a": interleave.Timed(a, -a), "b": interleave.Timed(b, -b)}
  measured = [turn(1.0, 2.0), turn(3.0, 4.0)]
  found = interleave.seconds(measured)
  assert found["a"].tolist() == [1, 3] and found["b"].tolist() == [2, 4]
  assert interleave.results(measured) == {"a": [-1, -3], "b": [-2, -4]}
