"""Offline training of a drafter: what is wrong with its settings costs no responses."""

import json
import types

import numpy as np
import pytest

from experiments import feature_files
from tests import commands

home = commands.home

# In one process: each of some changes of the config, up to the policy's answers.
SCRIPT = """
import copy, json, os, pathlib, sys, types
from experiments import launch
from experiments import config as config_lib
from experiments import trees
from experiments import train_drafter
from experiments import workdirs

def ask(*args):
  raise ValueError("the policy answers")

policy, workdir, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
train_drafter.ask = ask
train_drafter._WORKDIR = types.SimpleNamespace(value=workdir)
run = trees.load("countdown:smoke", config_lib.RunConfig)
run = trees.change(run, {"policy": policy})
config = trees.load("drafter:smoke", config_lib.DrafterConfig)
for changes in cases:
  try:
    train_drafter.main(trees.change(config, changes), run)
  except (ValueError, OSError) as e:
    workdirs.unlock(pathlib.Path(workdir))  # as when this process ends
    print(json.dumps([str(e), os.path.exists(workdir)]))
  launch.start = lambda: None  # once
"""

CASES = [
  ({"drafter.kind": "eagle9"}, "eagle9"),
  ({"drafter.vocab_size": 3, "evaluation.strategies": ["3_4_8"]}, "3_4_8"),
  ({"init": "nowhere"}, "nowhere"),
  ({"loss.distance": "totl"}, "loss.distance"),
  ({"learner.buckets": []}, "buckets"),
  ({"learner.buckets": [[2, 64]]}, "learner.buckets"),
  ({"evaluation.strategies": ["200_1_201"]}, "no room"),
]


def test_settings_that_are_wrong_are_told_before_the_policy_answers(home, tmp_path):
  """And leave no file; with none wrong it does answer."""
  cases = [changes for changes, _ in CASES] + [
    {},
    {"drafter.vocab_size": 16},
  ]
  args = [home / "policy", tmp_path / "run", json.dumps(cases)]
  result = commands.run_text(SCRIPT, *args)
  assert result.returncode == 0, result.stderr
  told = [json.loads(line) for line in result.stdout.splitlines()]
  assert len(told) == len(cases)
  for (text, has_begun), (_, part) in zip(told, CASES, strict=False):
    assert part in text and "\n" not in text
    assert not has_begun
  assert told[len(CASES) :] == [["the policy answers", True]] * 2


SIZES = np.random.default_rng(0).integers(2, 9, (35, 2))
SEQUENCES = [(np.arange(p), np.arange(r)) for p, r in SIZES]


class Learner:
  """Makes features that tell their sequence; counts the sequences it was asked for."""

  layout = types.SimpleNamespace(size=3)

  def __init__(self):
    self.asked = 0

  def features(self, target_params, prompts, responses):
    self.asked += len(prompts)
    sizes = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
    return [np.full((p + r, 3), target_params * p, np.float32) for p, r in sizes]


def test_features_are_computed_once_and_those_of_a_lost_file_again(tmp_path):
  learner, folder = Learner(), tmp_path / "features"
  found = feature_files.compute(folder, learner, 1, SEQUENCES)
  assert learner.asked == len(SEQUENCES)
  for i, (p, r) in enumerate(SIZES):
    np.testing.assert_array_equal(found[i], np.full((p + r, 3), p))
  files = sorted(folder.iterdir())
  assert len(files) == 3
  feature_files.compute(folder, learner, 2, SEQUENCES)
  assert learner.asked == len(SEQUENCES)
  files[1].unlink()
  found = feature_files.compute(folder, learner, 2, SEQUENCES)
  assert learner.asked == len(SEQUENCES) + 16
  assert [found[i][0, 0] / SIZES[i][0] for i in (0, 20, 34)] == [1, 2, 1]


def test_files_of_features_that_are_damaged_are_named(tmp_path):
  found = feature_files.compute(tmp_path / "features", Learner(), 1, SEQUENCES)
  first, second, third = sorted(found.folder.iterdir())
  first.write_bytes(first.read_bytes()[:20])
  third.write_bytes(second.read_bytes())
  for i, path in ((0, first), (34, third)):
    with pytest.raises(ValueError, match=f"{path} .*delete it"):
      found[i]
