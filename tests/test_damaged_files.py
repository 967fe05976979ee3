"""A damaged file that a command reads ends it in one clear line, and changes nothing."""

from collections.abc import Callable
import dataclasses
import json
import pathlib
import pickle
import random
import shutil

import jax
import pytest

from experiments import workdirs
from tests import commands
from tests import tiny
from tlt_jax import data
from tlt_jax import metrics
from tlt_jax import tokenization
from tlt_jax.models import drafter
from tlt_jax.models import drafter_files
from tlt_jax.models import hf

home = commands.home
chat = commands.chat
MODEL = commands.COUNTDOWN
SETTINGS = commands.read_run("countdown.py:smoke")


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of file, and who reads it."""

  folder: str  # of `originals`
  name: str  # of the file in there
  read: Callable[[pathlib.Path], object]  # of the damaged copy of the folder


def reopen(folder):
  metrics.Writer(folder, resume_step=2).close()


def open_workdir(folder):
  """As a command does that goes on from responses in there."""
  workdirs.open(folder, SETTINGS, holds={"metrics.jsonl": ("steps", "seed", "spot")})


def load_prompts(folder):
  data.load_prompts(folder / "some.jsonl")


def load_drafter(folder):
  drafter_files.load(folder, tiny.CONFIG)


KINDS = {
  f"{folder}/{name}": Kind(folder, name, read)
  for folder, name, read in (
    ("policy", "config.json", hf.load),
    ("policy", "model.safetensors", hf.load),
    ("shards", "model.safetensors.index.json", hf.load),
    ("chat", "tokenizer.json", tokenization.Tokenizer.load),
    ("eagle2", "model.safetensors", load_drafter),
    ("prompts", "some.jsonl", load_prompts),
    ("run", "metrics.jsonl", reopen),
    ("run", "rollouts.jsonl", reopen),
    ("run", "config.json", open_workdir),
  )
}
LOGS = ("metrics.jsonl", "rollouts.jsonl")  # which may be missing, or lack their end


@pytest.fixture(scope="session")
def originals(tmp_path_factory, chat) -> pathlib.Path:
  """A folder of each kind, undamaged."""
  folder, params = tmp_path_factory.mktemp("originals"), commands.init(MODEL)
  hf.save(folder / "policy", MODEL, params)
  hf.save(folder / "shards", MODEL, params, max_file_bytes=20_000)
  policy = next(a for a in chat if a.startswith("--config.policy=")).partition("=")[2]
  shutil.copytree(policy, folder / "chat")
  config = tiny.DRAFTERS["eagle2"]
  made = drafter.init_params(config, jax.random.key(0))
  drafter_files.save(folder / "eagle2", config, made)
  (folder / "prompts").mkdir()
  rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(8)]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "prompts" / "some.jsonl").write_text(lines)
  writer = metrics.Writer(folder / "run")
  for step in range(3):
    writer.write(step, {"reward/mean": step / 10})
    writer.write_rollout(step, {"length": [step + 1, 2], "outcome": ["solved"] * 2})
  writer.close()
  workdirs.record(folder / "run", SETTINGS)
  return folder


class Unpickled:
  """Leaves a mark if anything loads its pickle."""

  def __init__(self, mark: pathlib.Path):
    self.mark = mark

  def __reduce__(self):
    return pathlib.Path.touch, (self.mark,)


def replaced(content: bytes) -> Callable[[pathlib.Path], None]:
  return lambda file: file.write_bytes(content)


def truncated(file):
  content = file.read_bytes()
  file.write_bytes(content[: len(content) // 2])


def pickled(file):
  file.write_bytes(pickle.dumps(Unpickled(file.parent / "unpickled")))


def flipped(file):
  """Of the first bytes, which say what the file is."""
  content = bytearray(file.read_bytes())
  content[random.Random(0).randrange(8)] ^= 0x80
  file.write_bytes(content)


ALWAYS = {
  "missing": pathlib.Path.unlink,
  "empty": replaced(b""),
  "truncated": truncated,
  "binary": replaced(random.Random(0).randbytes(3000)),
  "a pickle": pickled,
}
PERHAPS = {"flipped byte": flipped}  # after these a file may say something else


def check(folder: pathlib.Path, kind: Kind, may_succeed: bool) -> None:
  """Reads a damaged folder; an error has to be one that commands show."""
  try:
    kind.read(folder)
  except (ValueError, OSError) as e:
    line = " ".join(str(e).split())
    assert str(folder) in line, line
    assert len(line) < 500 + 2 * len(str(folder)), line
  else:
    assert may_succeed, "the damage was not noticed"
  finally:
    assert not (folder / "unpickled").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_line_that_names_the_file(kind, originals, tmp_path):
  kind = KINDS[kind]
  for damage, apply in (ALWAYS | PERHAPS).items():
    folder = shutil.copytree(originals / kind.folder, tmp_path / damage)
    kind.read(folder)  # whole
    apply(folder / kind.name)
    harmless = kind.name in LOGS and damage in ("missing", "empty", "truncated")
    check(folder, kind, harmless or damage in PERHAPS)


def test_commands_refuse_damage_and_change_nothing(home, originals, tmp_path):
  """A run that would resume drops the later records of both logs, or of none."""
  workdir = shutil.copytree(originals / "run", tmp_path / "run")
  (workdir / "config.json").unlink()
  train = [*commands.tiny_run(home), f"--workdir={workdir}"]
  file = workdir / "rollouts.jsonl"
  file.write_bytes(b"\x89PNG" + file.read_bytes())
  before = {name: (workdir / name).read_bytes() for name in LOGS}
  message = commands.error(commands.run(home, "train", *train))
  assert str(file) in message and len(message) < 500
  assert before == {name: (workdir / name).read_bytes() for name in LOGS}
