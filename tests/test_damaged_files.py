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
from matplotlib import figure
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import plot
from experiments import responses
from experiments import workdirs
from tests import commands
from tests import test_metrics
from tests import tiny
from tlt_jax import data
from tlt_jax import metrics
from tlt_jax import tokenization
from tlt_jax.models import drafter
from tlt_jax.models import drafter_files
from tlt_jax.models import hf
from tlt_jax.rl import sample

home = commands.home
chat = commands.chat
MODEL = commands.COUNTDOWN
SETTINGS = {"steps": 4, "seed": 0, "spot": {"train": True}, "checkpoint": {"every": 1}}
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
  tokenizer = tokenization.Tokenizer.load(folder)
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


def open_workdir(folder):
  """As a command does that goes on from responses in there."""
  try:
    workdirs.open(folder, SETTINGS, holds={"metrics.jsonl": tuple(SETTINGS)})
  except workdirs.WorkdirError as e:
    other = f"{folder} was made with other settings: "
    raise ValueError(str(e).replace(other, f"{folder / 'config.json'}: ")) from e


def read_responses(folder):
  return responses.load(folder / "responses.npz", vocab_size=64)


def read_prompts(name):
  return lambda folder: data.load_prompts(folder / name, "prompt", "answer")


# Files that need not be there, nor say anything of what we ask them.
OPTIONAL = frozenset(["missing", "an object without keys", "an object of another meaning"])
SHARES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)  # of a file that is cut off
CUT = frozenset(f"{share:.0%} of it" for share in SHARES)  # as a killed run leaves a log

KINDS = {
  f"{read}: {folder}/{name}": Kind(folder, name, call, frozenset(harmless))
  for read, folder, name, call, harmless in (
    ("load_hf", "policy", "config.json", hf.load, ()),
    ("load_hf", "policy", "model.safetensors", hf.load, ()),
    ("load_hf", "shards", "model.safetensors.index.json", hf.load, ()),
    ("load_hf", "shards", "model-00002-of-00003.safetensors", hf.load, ()),
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
    ("workdir", "workdir", "config.json", open_workdir, ()),
    ("workdir", "fork", "forked_from.json", workdirs._origin, ["missing"]),
    ("responses", "sequences", "responses.npz", read_responses, ()),
  )
}


@pytest.fixture(scope="session")
def originals(tmp_path_factory, chat) -> pathlib.Path:
  """A folder of each kind, undamaged."""
  folder = tmp_path_factory.mktemp("originals")
  params = commands.init(MODEL)
  hf.save(folder / "policy", MODEL, params)
  hf.save(folder / "shards", MODEL, params, max_file_bytes=20_000)
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
  shutil.copytree(folder / "run", folder / "workdir")
  workdirs.record(folder / "workdir", SETTINGS)
  (folder / "fork").mkdir()
  origin = {"workdir": "before", "step": 0}
  (folder / "fork" / "forked_from.json").write_text(json.dumps(origin))
  (folder / "sequences").mkdir()
  sequences = [(np.arange(3 + i), np.arange(2 + i)) for i in range(4)]
  responses.store(folder / "sequences" / "responses.npz", sequences)
  return folder


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
  **{f"flipped byte {seed}": flipped(seed) for seed in range(8)},
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


@pytest.fixture
def unrendered(monkeypatch):
  """Figures are made but not rendered, which takes longer than all else."""
  monkeypatch.setattr(figure.Figure, "savefig", lambda figure, path: None)


@pytest.mark.parametrize("damage", [*ALWAYS, *PERHAPS])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_in_one_line_that_names_the_file(
  kind, damage, originals, tmp_path, unrendered
):
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


# --- what is well-formed but cannot be


def edit_json(file: pathlib.Path, path: str, value: object) -> None:
  """Sets the key at a dotted path; `ABSENT` removes it."""
  raw = json.loads(file.read_text())
  *sections, key = path.split(".")
  section = raw
  for name in sections:
    section = section[name]
  section.pop(key, None)
  if value is not ABSENT:
    section[key] = value
  file.write_text(json.dumps(raw))


ABSENT = object()
INF, NAN = float("inf"), float("nan")
NO_SIZE = (0, -1, 10**9, 2**40, 10**30, 1.5, "x", "2", [2], {}, True, NAN, INF)
NO_NUMBER = (0, -1.0, "x", [1.0], {}, True, NAN, INF, 10**400)
NO_FLAG = (0, 1, "false", [], {})
NO_TEXT = (0, True, [], {}, "", "x" * 10_000)

HF_KEYS = {
  **dict.fromkeys(
    (
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_hidden_layers",
      "num_attention_heads",
      "num_key_value_heads",
      "head_dim",
    ),
    (*NO_SIZE, 3, 7),
  ),
  "max_position_embeddings": (0, -1, 2**40, 1.5, "x", [2], {}, True, NAN, INF),
  "rms_norm_eps": NO_NUMBER,
  "rope_theta": NO_NUMBER,
  "rope_scaling": ("x", [1], 1, True),
  "rope_parameters": ("x", [1], 1),
  "tie_word_embeddings": (*NO_FLAG, True),
  "architectures": ("Qwen3ForCausalLM", {}, 1, [], [[]], [{}], [1], ["x" * 10_000]),
  "dtype": (*NO_TEXT, "float64", "float8_e4m3fn"),
  "hidden_act": (0, [], {}, "x" * 10_000),
  "attention_bias": (1, "false", [], True),
  "layer_types": (1, "full_attention", {}, [[]]),
  "use_sliding_window": (1, "false", [1]),
}
MISSING_SIZES = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
LLAMA3_KEYS = {
  "rope_type": ("x" * 10_000, [], 1),
  "rope_theta": ("x", 0, NAN),
  "factor": ("x", 0, -1.0, [1.0], True, NAN, INF, 10**400, None),
  "low_freq_factor": ("x", 0, NAN, None, 4.0),
  "high_freq_factor": ("x", 0, NAN, None, 1.0),
  "original_max_position_embeddings": (0, -1, 1.5, "x", [2], True, NAN, INF, None),
}


def refused(folder: pathlib.Path, read: Callable, name: str, key: str) -> None:
  """Reading the folder is refused in a line with the names of the file and of the key."""
  line = check(folder, Kind("", name, read), may_succeed=False)
  assert key in line, line


@pytest.mark.parametrize("key", HF_KEYS)
def test_config_json_is_refused_by_key(key, originals, tmp_path):
  """Whatever type or size a value has. Weights that do not fit are told by their names."""
  folder = shutil.copytree(originals / "policy", tmp_path / "policy")
  original = (folder / "config.json").read_bytes()
  for value in (*HF_KEYS[key], *([None, ABSENT] if key in MISSING_SIZES else [])):
    (folder / "config.json").write_bytes(original)
    edit_json(folder / "config.json", key, value)
    shape = type(value) is int and value in (3, 7, 10**9)
    with as_any_user(), little_memory(), pytest.raises(ValueError) as e:
      hf.load(folder)
    line = " ".join(str(e.value).split())
    assert "config.json" in line and len(line) < 500, line
    assert key in line or shape or value is True, (value, line)


@pytest.mark.parametrize("key", LLAMA3_KEYS)
def test_rope_scaling_is_refused_by_key(key, originals, tmp_path):
  folder = shutil.copytree(originals / "policy", tmp_path / "policy")
  for value in LLAMA3_KEYS[key]:
    edit_json(folder / "config.json", "rope_scaling", LLAMA3 | {key: value})
    refused(folder, hf.load, "config.json", key)


DRAFTER_KEYS = {
  **dict.fromkeys(
    (
      "layer.vocab_size",
      "layer.width",
      "layer.mlp_width",
      "layer.num_layers",
      "layer.num_heads",
      "layer.num_kv_heads",
      "layer.head_dim",
    ),
    (*NO_SIZE, None, ABSENT, 3),
  ),
  "layer.max_position": (0, -1, 2**40, 1.5, "x", [2], {}, True, NAN, INF, None),
  "layer.norm_eps": (*NO_NUMBER, None),
  "layer.rope_theta": (*NO_NUMBER, None),
  "layer.rope_scaling": ("x", [1], 1, True),
  "layer.tie_embeddings": (*NO_FLAG, None, True),
  "layer.qkv_bias": (*NO_FLAG, None),
  "layer.dtype": (*NO_TEXT, "float64", None),
  "layer.architecture": (0, True, [], {}, None, ABSENT),
  "layer.x": (1,),
  "layer": ("x", [], 1, None, ABSENT),
  "kind": (*NO_TEXT, None, ABSENT, "eagle9"),
  "taps": (None, ABSENT, 1, "0", {}, ["x"], [-1], [[0]], [True], [0.0], [10**9], []),
  "fc_bias": (*NO_FLAG, None),
  "draft_vocab_size": (*NO_SIZE, 7),
  "vocab": ([1, 2],),
  "x": (1,),
}


@pytest.mark.parametrize("key", DRAFTER_KEYS)
def test_config_json_of_a_drafter_is_refused_by_key(key, originals, tmp_path):
  folder = shutil.copytree(originals / "own_vocab", tmp_path / "drafter")
  original = (folder / "config.json").read_bytes()
  for value in DRAFTER_KEYS[key]:
    (folder / "config.json").write_bytes(original)
    edit_json(folder / "config.json", key, value)
    with as_any_user(), little_memory(), pytest.raises(ValueError) as e:
      drafter_files.load(folder, tiny.CONFIG)
    line = " ".join(str(e.value).split())
    assert str(folder) in line and len(line) < 500, line
    assert "config.json" in line or "this drafter" in line, line
    assert key.removeprefix("layer.") in line or "config.json says" in line, (value, line)


def with_header(change: Callable[[dict], None]) -> Callable[[bytes], bytes]:
  """The same file with another header, of a length that fits it."""

  def damaged(content):
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]

  return damaged


def first(header: dict) -> dict:
  """The entry of its first tensor."""
  return next(value for name, value in header.items() if name != "__metadata__")


def overlap(header):
  a, b = [value for name, value in header.items() if name != "__metadata__"][:2]
  b.update(a)


def rename(header):
  name = next(name for name in header if name != "__metadata__")
  header["x" * 10_000] = header.pop(name)


HEADERS = {
  "length 2**60": lambda content: (2**60).to_bytes(8, "little") + content[8:],
  "length 2**64 - 1": lambda content: b"\xff" * 8 + content[8:],
  "length 0": lambda content: bytes(8) + content[8:],
  "length one more": lambda c: (
    (int.from_bytes(c[:8], "little") + 1).to_bytes(8, "little") + c[8:]
  ),
  "a list": lambda content: (2).to_bytes(8, "little") + b"[]" + content,
  "no tensors": lambda content: (2).to_bytes(8, "little") + b"{}",
  "beyond the end": with_header(lambda h: first(h).update(data_offsets=[0, 2**40])),
  "negative": with_header(lambda h: first(h).update(data_offsets=[-4, 0])),
  "backwards": with_header(lambda h: first(h).update(data_offsets=[64, 0])),
  "overlapping": with_header(overlap),
  "a huge shape": with_header(lambda h: first(h).update(shape=[2**60])),
  "a product of 2**64": with_header(lambda h: first(h).update(shape=[2**32, 2**32])),
  "a negative shape": with_header(lambda h: first(h).update(shape=[-1])),
  "no shape": with_header(lambda h: first(h).pop("shape")),
  "half of the dtype": with_header(lambda h: first(h).update(dtype="F16")),
  "integers": with_header(lambda h: first(h).update(dtype="I32")),
  "a dtype that numpy lacks": with_header(lambda h: first(h).update(dtype="F8_E8M0")),
  "no dtype": with_header(lambda h: first(h).update(dtype="O")),
  "a long name": with_header(rename),
}


@pytest.mark.parametrize("lie", HEADERS)
@pytest.mark.parametrize("folder", ["policy", "eagle2"])
def test_safetensors_headers_that_lie_are_refused(lie, folder, originals, tmp_path):
  """Before anything of their size is allocated."""
  read = {kind.folder: kind.read for kind in KINDS.values()}[folder]
  damaged = shutil.copytree(originals / folder, tmp_path / folder)
  file = damaged / "model.safetensors"
  file.write_bytes(HEADERS[lie](file.read_bytes()))
  refused(damaged, read, "model.safetensors", "")


@pytest.mark.parametrize(
  "value",
  ["x", 1, [], None, {}, {"a": 1}, {"a": []}, {"a": "../x.safetensors"}]
  + [{"a": "x" * 10_000}, {"a": "\0.safetensors"}, {"a": "config.json"}],
)
def test_an_index_that_names_no_files_is_refused(value, originals, tmp_path):
  folder = shutil.copytree(originals / "shards", tmp_path / "shards")
  name = "model.safetensors.index.json"
  edit_json(folder / name, "weight_map", value)
  refused(folder, hf.load, name, "weight_map")


@pytest.mark.parametrize(
  "name, key, values",
  [
    (
      "generation_config.json",
      "eos_token_id",
      (True, {}, "x", 1.5, -1, 2**40, [[1]], ["2"]),
    ),
    ("tokenizer_config.json", "tokenizer_class", (1, [], {})),
    ("tokenizer.json", "model", (1, [], {}, None, {"type": "WordLevel"})),
    ("tokenizer.json", "added_tokens", (1, ["x"])),
  ],
)
def test_tokenizer_files_that_say_something_else_are_refused(
  name, key, values, originals, tmp_path
):
  folder = shutil.copytree(originals / "chat", tmp_path / "chat")
  original = (folder / name).read_bytes()
  for value in values:
    (folder / name).write_bytes(original)
    edit_json(folder / name, key, value)
    refused(folder, read_tokenizer, name, "")


def test_nobody_is_asked_whether_code_of_a_folder_may_run(originals, tmp_path, capsys):
  """A tokenizer that needs it is refused."""
  folder = shutil.copytree(originals / "chat", tmp_path / "chat")
  (folder / "config.json").unlink()  # of a model whose tokenizer transformers has
  edit_json(folder / "tokenizer_config.json", "tokenizer_class", "Theirs")
  auto_map = {"AutoTokenizer": ["theirs.Theirs", None]}
  edit_json(folder / "tokenizer_config.json", "auto_map", auto_map)
  refused(folder, read_tokenizer, "tokenizer_config.json", "custom code")
  assert "[y/N]" not in capsys.readouterr().out


WRONG = ("x", None, 10**30, [NAN])


LOGGED = (*test_metrics.rollout([1]), *(f"chunks.{key}" for key in test_metrics.chunk()))


@pytest.mark.parametrize("key", LOGGED)
def test_rollouts_of_another_meaning_are_refused_or_drawn(
  key, originals, tmp_path, unrendered
):
  """Whatever type or size a value of rollouts.jsonl has."""
  folder = shutil.copytree(originals / "run", tmp_path / "run")
  file = folder / "rollouts.jsonl"
  *others, last = metrics.read(file)
  section, _, name = key.rpartition(".")
  for value in WRONG:
    (last["chunks"][0] if section else last)[name] = value
    file.write_text("".join(json.dumps(record) + "\n" for record in (*others, last)))
    for read in (plot.plot_all, replay):
      check(folder, Kind("", "rollouts.jsonl", read), may_succeed=True)


@pytest.mark.parametrize("key", ["reward/mean", "eval/accuracy"])
def test_metrics_of_another_meaning_are_refused(key, tmp_path):
  for value in ("x", "0.5", None, {}, [], [1], True, NAN, INF, 10**400):
    record = {"step": 0, key: value}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    refused(tmp_path, plot.plot_all, "metrics.jsonl", key)


@pytest.mark.parametrize("step", ["x", None, -1, 1.5, True, [], NAN, ABSENT])
def test_records_without_a_step_are_refused(step, tmp_path):
  for name in ("metrics.jsonl", "rollouts.jsonl"):
    record = {} if step is ABSENT else {"step": step}
    (tmp_path / name).write_text(json.dumps(record) + "\n")
    refused(tmp_path, reopen, name, "step")
    (tmp_path / name).unlink()


# --- whole commands


def contents(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
  files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
  return {file: file.read_bytes() for file in files}


def test_commands_refuse_damage_and_change_nothing(home, originals, tmp_path):
  """Training goes no further than to note its config, and does that but once."""
  policy = shutil.copytree(home / "policy", tmp_path / "policy")
  workdir = shutil.copytree(originals / "run", tmp_path / "run")
  train = [*commands.tiny_run(home, ("policy", policy)), f"--workdir={workdir}"]
  for file, command, args in (
    (policy / "tokenizer.json", "train", train),
    (workdir / "rollouts.jsonl", "train", train),
    (workdir / "metrics.jsonl", "plot", [f"--workdir={workdir}"]),
  ):
    whole = file.read_bytes()
    file.write_bytes(b"\x89PNG" + whole)
    before = contents(workdir)
    message = commands.error(commands.run(home, command, *args))
    assert str(file) in message and len(message) < 500
    after = contents(workdir)
    assert before == {path: after[path] for path in before}
    assert after.keys() - before.keys() <= {workdir / "config.json"}
    file.write_bytes(whole)


def test_neither_log_is_changed_if_one_is_damaged(originals, tmp_path):
  """A run that resumes drops the later records of both, or of none."""
  for name in ("metrics.jsonl", "rollouts.jsonl"):
    folder = shutil.copytree(originals / "run", tmp_path / name)
    (folder / name).write_bytes(b"\x89PNG\n" + (folder / name).read_bytes())
    before = contents(folder)
    refused(folder, reopen, name, "line 1")
    assert contents(folder) == before
