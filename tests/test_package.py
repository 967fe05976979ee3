"""The package: what a wheel holds, and that its parts say the same."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests import commands
import tlt_jax
from tlt_jax import command_line

ROOT = commands.ROOT
LEFT_OUT = ("figures", "results")  # of experiments/


def read(name: str) -> str:
  return (ROOT / name).read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
  """What setuptools puts into a wheel, without its metadata."""
  pytest.importorskip("setuptools")
  folder = tmp_path_factory.mktemp("built")
  command = [sys.executable, "setup.py", "-q", "build_py", f"--build-lib={folder}"]
  found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert found.returncode == 0, found.stderr
  return folder


def test_a_wheel_has_all_code_and_what_commands_read(built):
  """No tests, no figures, no records; `experiments` only inside of tlt_jax."""
  files = {str(p.relative_to(built)) for p in built.rglob("*") if p.is_file()}
  source = lambda top: [p.relative_to(ROOT / top) for p in (ROOT / top).rglob("*.py")]
  expected = {f"tlt_jax/{path}" for path in source("tlt_jax")}
  kept = [path for path in source("experiments") if path.parts[0] not in LEFT_OUT]
  expected |= {f"tlt_jax/bundled/experiments/{path}" for path in kept}
  assert {name for name in files if name.endswith(".py")} == expected
  inside = "tlt_jax/bundled/experiments/"
  assert f"{inside}policies/countdown/model.safetensors" in files
  assert f"{inside}drafters/countdown/config.json" in files
  assert f"{inside}scenarios/qwen2_5_7b.json" in files
  assert f"{inside}h200.txtpb" in files
  assert all(name.startswith("tlt_jax/") for name in files)
  assert not [name for name in files if re.search(r"LOG|results|\.png|pyc", name)]


def test_every_command_can_be_named_outside_of_the_checkout(built, tmp_path):
  """With the first line of its docstring, and importing none of them."""
  run = lambda *args: subprocess.run(
    [sys.executable, "-m", "tlt_jax.command_line", *args],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(built)},
    capture_output=True,
    text=True,
  )
  told = run().stdout
  for line in (
    r"  train +Trains a policy by reinforcement learning, straight down\.",
    r"  bench\.step +\w.*",
    r"  generate +Answers a prompt or a file of them.*",
  ):
    assert re.search(f"^{line}$", told, re.MULTILINE), told
  assert not re.search(r"^  configs\b", told, re.MULTILINE)
  assert run("trian").stderr == "error: no command 'trian'; `tlt` alone lists them\n"


def test_the_checkout_has_the_same_commands():
  known = command_line.commands()
  assert {"train", "generate", "export", "bench.step"} < known.keys()
  assert command_line.home() == ROOT


def test_the_version_is_one():
  """Of the package, its citation and its changes."""
  version = tlt_jax.__version__
  assert f"\nversion: {version}\n" in read("CITATION.cff")
  assert re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[1] == version
  assert tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["dynamic"] == {
    "version": {"attr": "tlt_jax.__version__"}
  }


def test_dependencies_are_those_of_requirements():
  """Every line, once, in the package or in an extra."""
  pytest.importorskip("setuptools")
  spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
  setup = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(setup)
  found = setup.requirements()
  assert found.keys() == {"", "gguf", "dev"}
  lines = [line for line in read("requirements.txt").splitlines() if re.match(r"\w", line)]
  assert sorted(lines) == sorted(line for part in found.values() for line in part)
  assert "jax>=0.10" in found[""] and "pytest>=8.2" in found["dev"]
