"""A fork outside the checkout, made and run as docs/extending.md says, to the letter."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import textwrap

import pytest

from tests import commands
from tests import forked
from tests import tiny
from tlt_jax import metrics

TEXT = (commands.ROOT / "docs" / "extending.md").read_text()
FORK = commands.ROOT / "examples" / "my_fork"
COMMANDS = [
  textwrap.dedent(block)
  for block in re.findall(r"(?:^    .*\n)+", TEXT, re.MULTILINE)
  if "experiments.train" in block
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  """A folder with a copy of the example, and nothing else."""
  folder = tmp_path_factory.mktemp("outside")
  shutil.copytree(FORK, folder / "my_fork", ignore=shutil.ignore_patterns("__pycache__"))
  return folder


def bash(folder: pathlib.Path, script: str) -> subprocess.CompletedProcess:
  """Runs a script of the document, in which `TLT` is known."""
  known = {k: x for k, x in os.environ.items() if k != "PYTHONPATH"}
  return subprocess.run(
    ["bash", "-e", "-c", script],
    cwd=folder,
    env=known | {"TLT": str(commands.ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )


@pytest.mark.parametrize("name", ["mine", tiny.slow("rloo")])
def test_its_commands_run(folder, name):
  """With a config of one's own, and with names on the command line; a small policy."""
  first, second = COMMANDS
  script = first if name == "mine" else f"cd my_fork; export PYTHONPATH=$TLT\n{second}"
  smaller = "--config.policy=$TLT/experiments/policies/countdown"
  smaller += " --config.sampling.max_tokens=12"
  commands.succeed(bash(folder, f"{script.rstrip()} {smaller}"))
  run = folder / "my_fork" / "runs" / name
  *steps, last = metrics.read(run / "metrics.jsonl")
  assert [r["step"] for r in steps] == [0, 1, 2]
  assert (run / "policy" / "model.safetensors").is_file()
  rollouts = metrics.read(run / "rollouts.jsonl")
  assert "solved" in [o for r in rollouts for o in r["outcome"]]
  assert ("reward/brief.score" in steps[0]) == (name == "mine")  # of the config
  assert 0 <= last["eval/accuracy"] <= 1 and "eval/reward_mean" in last
  solved = sum(o == "solved" for o in rollouts[0]["outcome"])
  assert steps[0]["reward/solved"] == pytest.approx(solved / len(rollouts[0]["outcome"]))


def test_its_mistakes_end_in_one_line(folder):
  """Of the fork's own arguments, by their names."""
  _, _, command = COMMANDS[0].strip().split("\n", 2)
  _, *args = shlex.split(command.replace("\\\n", " "))
  env = os.environ | {"PYTHONPATH": str(commands.ROOT)}
  for more, message in (
    ("--config.algorithm.scale=-1", "algorithm.scale=-1: takes a number above 0"),
    ("--config.reward=my_package.parity.scor", "did you mean 'score'"),
  ):
    wrong = [*args, more, "--workdir=runs/wrong"]
    result = commands.finish(forked.start(wrong, str(folder / "my_fork"), env))
    assert message in commands.error(result)
    assert not (folder / "my_fork" / "runs" / "wrong").exists()
