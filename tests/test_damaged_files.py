"""No damage to a file that a command reads does more than end it in one clear line."""

from collections.abc import Callable, Iterator
import contextlib
import ctypes
import dataclasses
import io
import json
import os
import pathlib
import pickle
import random
import resource
import shutil
import zipfile

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import plot
from experiments import responses
from tests import commands
from tests import test_metrics
from tests import tiny
from tlt_jax import data
from tlt_jax import metrics
from tlt_jax.models import convert
from tlt_jax.models import drafter
from tlt_jax.models import drafter_files
from tlt_jax.rl import sample

home = commands.home
MODEL = commands.COUNTDOWN
ROOM = 4 << 30  # bytes that a reader may ask for on top of what is there


# --- the files, and what reads them


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of file: who reads it, and which damages it may have unnoticed."""

  folder: str  # of `originals`
  name: str  # of the file in there
  read: Callable[[pathlib.Path], object]  # of the damaged copy of the folder
  harmless: frozenset[str] = frozenset()


def read_tokenizer(folder):
  """As a command does that then encodes a chat and decodes the answer."""
  tokenizer = data.Tokenizer.load(folder)
  ids = tokenizer.encode([{"role": "user", "content": "1+1?"}], system="Count.")
  assert all(isinstance(i, int) and 0 <= i < 2**31 for i in tokenizer.stop_tokens)
  return tokenizer.decode(ids)


def reopen(folder):
  metrics.Writer(folder, resume_step=2).close()


def replay(folder):
  """The decisions of each step, taken again."""
  for strict in (False, True):
    decisions = sample.replay(folder / "rollouts.jsonl", strict)
    for step in range(3):
      again = decisions(step)
      for name in ("tokens", "joins"):
        again(name, lambda: 1)


def read_responses(folder):
  return responses.load(folder / "responses.npz", vocab_size=64)


def read_prompts(name):
  return lambda folder: data.load_prompts(folder / name, "prompt", "answer")


# Files that need not be there, nor say anything of what we ask them.
OPTIONAL = frozenset(["missing", "an object without keys", "an object of another meaning"])
SHARES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)  # of a file that is cut off
CUT = frozenset(f"{share:.0%} of it" for share in SHARES)  # as a killed run leaves a log

KINDS = {
  f"{read}: {name}": Kind(folder, name, call, frozenset(harmless))
  for read, folder, name, call, harmless in (
    ("load_hf", "policy", "config.json", convert.load_hf, ()),
    ("load_hf", "policy", "model.safetensors", convert.load_hf, ()),
    ("load_hf", "shards", "model.safetensors.index.json", convert.load_hf, ()),
    ("load_hf", "shards", "model-00002-of-00003.safetensors", convert.load_hf, ()),
    ("Tokenizer", "chat", "tokenizer.json", read_tokenizer, ()),
    ("Tokenizer", "chat", "tokenizer_config.json", read_tokenizer, OPTIONAL),
    ("Tokenizer", "chat", "special_tokens_map.json", read_tokenizer, OPTIONAL),
    ("Tokenizer", "chat", "added_tokens.json", read_tokenizer, OPTIONAL),
    ("Tokenizer", "chat", "generation_config.json", read_tokenizer, OPTIONAL),
    ("Tokenizer", "chat", "chat_template.jinja", read_tokenizer, ["90% of it"]),
    *(
      ("drafter", folder, name, lambda f: drafter_files.load(f, tiny.CONFIG), ())
      for folder in ("eagle2", "own_vocab")
      for name in ("config.json", "model.safetensors")
    ),
    ("load_prompts", "prompts", "some.jsonl", read_prompts("some.jsonl"), ()),
    ("load_prompts", "prompts", "some.parquet", read_prompts("some.parquet"), ()),
    ("plot", "run", "metrics.jsonl", plot.plot_all, CUT),
    ("plot", "run", "rollouts.jsonl", plot.plot_all, CUT | {"missing", "empty"}),
    ("Writer", "run", "metrics.jsonl", reopen, CUT | {"missing", "empty"}),
    ("Writer", "run", "rollouts.jsonl", reopen, CUT | {"missing", "empty"}),
    ("replay", "run", "rollouts.jsonl", replay, ()),
    ("responses", "sequences", "responses.npz", read_responses, ()),
  )
}


@pytest.fixture(scope="session")
def originals(tmp_path_factory, chat) -> pathlib.Path:
  """A folder of each kind, undamaged."""
  folder = tmp_path_factory.mktemp("originals")
  params = commands.init(MODEL)
  convert.save_hf(folder / "policy", MODEL, params)
  convert.save_hf(folder / "shards", MODEL, params, max_file_bytes=20_000)
  policy = next(a for a in chat if a.startswith("--config.policy=")).partition("=")[2]
  shutil.copytree(policy, folder / "chat")
  for name, content in (
    ("special_tokens_map.json", {"eos_token": "<|im_end|>"}),
    ("added_tokens.json", {"<|im_start|>": 1}),
    ("generation_config.json", {"eos_token_id": [2, 5]}),
  ):
    (folder / "chat" / name).write_text(json.dumps(content))
  vocab = dataclasses.replace(tiny.DRAFTERS["eagle3"], vocab=tuple(range(0, 64, 2)))
  for name, config in (("eagle2", tiny.DRAFTERS["eagle2"]), ("own_vocab", vocab)):
    drafter_files.save(
      folder / name, config, drafter.init_params(config, jax.random.key(0))
    )
  (folder / "prompts").mkdir()
  rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i), "n": i} for i in range(8)]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "prompts" / "some.jsonl").write_text(lines)
  pq.write_table(pa.Table.from_pylist(rows), folder / "prompts" / "some.parquet")
  test_metrics.write_run(folder / "run", range(3))
  (folder / "sequences").mkdir()
  sequences = [(np.arange(3 + i), np.arange(2 + i)) for i in range(4)]
  responses.store(folder / "sequences" / "responses.npz", sequences)
  return folder


chat = commands.chat


# --- damages


class Unpickled:
  """What leaves a mark if anything loads its pickle."""

  def __init__(self, mark: pathlib.Path):
    self.mark = mark

  def __reduce__(self):
    return pathlib.Path.touch, (self.mark,)


def replaced(content: bytes) -> Callable[[pathlib.Path], None]:
  return lambda file: file.write_bytes(content)


def cut(share: float) -> Callable[[pathlib.Path], None]:
  """Keeps so much of a file, but at most all but the last byte."""

  def damage(file):
    content = file.read_bytes()
    file.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])

  return damage


def flipped(seed: int) -> Callable[[pathlib.Path], None]:
  """Changes a byte somewhere; of large files, among the first 2,000 or the last 500."""

  def damage(file):
    rng = random.Random(seed)
    content = bytearray(file.read_bytes())
    size = len(content)
    places = range(size) if size < 2500 else [*range(2000), *range(size - 500, size)]
    content[rng.choice(places)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)

  return damage


def folder_instead(file):
  file.unlink()
  file.mkdir()


def zipped(file):
  content = io.BytesIO()
  with zipfile.ZipFile(content, "w") as archive:
    archive.writestr(file.name, file.read_bytes())
  file.write_bytes(content.getvalue())


def pickled(file):
  file.write_bytes(pickle.dumps(Unpickled(file.parent / "unpickled")))


def in_utf16(file):
  file.write_bytes(file.read_bytes().decode("latin1").encode("utf-16"))


ALWAYS = {
  "missing": pathlib.Path.unlink,
  "a folder": folder_instead,
  "no permission": lambda file: file.chmod(0),
  "empty": replaced(b""),
  "binary": replaced(random.Random(0).randbytes(3000)),
  "NUL": replaced(bytes(1000)),
  "a PNG": replaced(b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(300)),
  "a zip": zipped,
  "a pickle": pickled,
  "UTF-16": in_utf16,
  "a git-lfs pointer": replaced(b"version https://git-lfs.github.com/spec/v1\n"),
  "a list": replaced(b"[]"),
  "a string": replaced(b'"text"'),
  "a number": replaced(b"1"),
  "null": replaced(b"null"),
  "nested": replaced(b"[" * 200_000),
  "a long number": replaced(b"1" * 10_000),
  "an object without keys": replaced(b"{}"),
  "an object of another meaning": replaced(b'{"x": 1, "step": []}\n'),
  **{f"{share:.0%} of it": cut(share) for share in SHARES},
}
# After these a file may be as good as before, or say something else that can be said.
PERHAPS = {
  "all but a byte": cut(1.0),
  **{f"flipped byte {seed}": flipped(seed) for seed in range(30)},
}


# --- the test


@contextlib.contextmanager
def as_any_user() -> Iterator[None]:
  """Files without permission cannot be read within, by root neither."""
  if os.geteuid():
    yield
    return
  libc = ctypes.CDLL(None)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
  held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the high bits
  if libc.capget(header, held):
    pytest.skip("root's capabilities are not known here")
  dropped = (ctypes.c_uint32 * 6)(*held)
  dropped[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
  libc.capset(header, dropped)
  try:
    yield
  finally:
    libc.capset(header, held)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
  """Asking for gigabytes fails within, instead of being granted or killing the machine."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
  limits = resource.getrlimit(resource.RLIMIT_AS)
  room = pages * resource.getpagesize() + ROOM
  resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)


def check(folder: pathlib.Path, kind: Kind, may_succeed: bool) -> str | None:
  """Reads a damaged folder; the error, which has to be one that commands show."""
  try:
    with as_any_user(), little_memory():
      kind.read(folder)
  except (ValueError, OSError) as e:
    line = " ".join(str(e).split())
    assert kind.name in line, line
    assert len(line) < 500 + len(str(folder)), line
    return line
  finally:
    assert not (folder / "unpickled").exists()
  assert may_succeed, "the damage was not noticed"
  return None


@pytest.mark.parametrize("damage", [*ALWAYS, *PERHAPS])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_in_one_line_that_names_the_file(kind, damage, originals, tmp_path):
  kind = KINDS[kind]
  folder = shutil.copytree(originals / kind.folder, tmp_path / "damaged")
  (ALWAYS | PERHAPS)[damage](folder / kind.name)
  check(folder, kind, damage in PERHAPS or damage in kind.harmless)


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_files_are_read(kind, originals, tmp_path):
  """Or else the tests above would show nothing."""
  kind = KINDS[kind]
  folder = shutil.copytree(originals / kind.folder, tmp_path / "whole")
  with as_any_user(), little_memory():
    kind.read(folder)
