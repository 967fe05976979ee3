"""The package: what a wheel holds, and that its parts say the same."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest

from tests import commands
import tlt_jax
from tlt_jax import metrics

ROOT = commands.ROOT
LEFT_OUT = ("figures", "results")  # of experiments/


def read(name: str) -> str:
  return (ROOT / name).read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
  """What setuptools puts into a wheel, without its metadata."""
  return build(ROOT, tmp_path_factory.mktemp("built"))


def build(root: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Builds a folder of sources; gives where the result is."""
  run_setup(root, "build_py", f"--build-lib={folder}")
  return folder


def run_setup(root: pathlib.Path, *args: str) -> None:
  """Runs setup.py."""
  pytest.importorskip("setuptools")
  command = [sys.executable, "setup.py", "-q", *args]
  found = subprocess.run(command, cwd=root, capture_output=True, text=True)
  assert found.returncode == 0, found.stderr


def files_of(folder: pathlib.Path) -> set[str]:
  return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow  # files are seldom left out
def test_a_wheel_can_be_built_of_the_packed_sources(built, tmp_path):
  """As pip does where it has no wheel: with the same files."""
  meta, packed = f"--egg-base={tmp_path}", f"--dist-dir={tmp_path}"
  run_setup(ROOT, "egg_info", meta, "sdist", packed)
  with tarfile.open(*tmp_path.glob("*.tar.gz")) as tar:
    tar.extractall(tmp_path / "sources", filter="data")
  (sources,) = (tmp_path / "sources").iterdir()
  assert files_of(build(sources, tmp_path / "again")) == files_of(built)


def test_a_wheel_has_all_code_and_what_commands_read(built):
  """No tests, no figures, no records; `experiments` only inside of tlt_jax."""
  files = files_of(built)

  def source(top):
    return [p.relative_to(ROOT / top) for p in (ROOT / top).rglob("*.py")]

  expected = {f"tlt_jax/{path}" for path in source("tlt_jax")}
  kept = [path for path in source("experiments") if path.parts[0] not in LEFT_OUT]
  expected |= {f"tlt_jax/bundled/experiments/{path}" for path in kept}
  assert {name for name in files if name.endswith(".py")} == expected
  inside = "tlt_jax/bundled/experiments/"
  for name in ("countdown", "countdown_9m"):
    assert f"{inside}policies/{name}/model.safetensors" in files
    assert f"{inside}drafters/{name}/config.json" in files
  assert f"{inside}scenarios/qwen2_5_7b.json" in files
  assert all(name.startswith("tlt_jax/") for name in files - {"tlt_jax.pth"})
  assert not [name for name in files if re.search(r"/log/|results|\.png|pyc", name)]


def test_every_command_can_be_named_outside_of_the_checkout(built, tmp_path):
  """With the first line of its docstring, and importing none of them."""

  def run(*args):
    return subprocess.run(
    [sys.executable, "-m", "tlt_jax.command_line", *args],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(built)},
    capture_output=True,
    text=True,
  )

  told = run().stdout
  for line in (
    r"  train +Trains a policy by reinforcement learning, straight down\.",
    r"  generate +Generates responses to prompts.*",
  ):
    assert re.search(f"^{line}$", told, re.MULTILINE), told
  assert not re.search(r"^  (configs|figures|benchmarks|dev)\b", told, re.MULTILINE)
  assert run("trian").stderr == "error: no command 'trian'; `tlt` alone lists them\n"


def test_python_itself_finds_the_commands_of_a_wheel(built, tmp_path):
  """In any folder, and after a package of the same name there."""
  shown = "import site; site.addsitedir({!r}); import experiments as e; print(*e.__path__)"
  command = [sys.executable, "-S", "-c", shown.format(str(built))]
  env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}

  def found():
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    return pathlib.Path(result.stdout.strip())

  assert found() == built / "tlt_jax" / "bundled" / "experiments"
  (tmp_path / "experiments").mkdir()
  (tmp_path / "experiments" / "__init__.py").touch()
  assert found() == tmp_path / "experiments"


@pytest.mark.slow  # a run
def test_a_fork_trains_with_the_installed_package(built, tmp_path):
  """In a folder of its own, with nothing of the checkout."""
  fork = shutil.copytree(ROOT / "examples" / "my_fork", tmp_path / "my_fork")
  command = [sys.executable, "-m", "tlt_jax.command_line", "train"]
  result = subprocess.run(
    [*command, "--config=my_config.py:smoke", "--workdir=runs/mine"],
    cwd=fork,
    env=os.environ | {"PYTHONPATH": str(built)},
    capture_output=True,
    text=True,
  )
  commands.succeed(result)
  config = json.loads((fork / "runs" / "mine" / "config.json").read_text())
  assert config["policy"].startswith(str(built / "tlt_jax" / "bundled"))
  steps = metrics.read(fork / "runs" / "mine" / "metrics.jsonl")
  assert "reward/brief.score" in steps[0]  # of the fork
  assert (fork / "runs" / "mine" / "policy" / "model.safetensors").is_file()


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
