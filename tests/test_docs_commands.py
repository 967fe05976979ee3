"""Every command of the documents: read by its command, and run in small.

A document's blocks are run from top to bottom in a new folder, as by a reader; `--all`. The
rest, such as flags in tables, is only read: a flag that was renamed, a key or a value that
is none, a file or module that is gone is an error.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import textwrap

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import commands
from tests import forked
from tests import tiny
from tlt_jax.models import drafter as drafter_lib
from tlt_jax.models import eagle_files
from tlt_jax.models import hf

home, chat = commands.home, commands.chat
ROOT = commands.ROOT
DOCUMENTS = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
DOCUMENTS += ["CONTRIBUTING.md", "examples/my_fork/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+")
SHELL = {"make", "tlt", "srun", "gcloud"}

# Flags of other programs, and commands of earlier commits, which the text says.
FOREIGN = ("--signal=TERM", "--requeue", "--speculative-token-map", "--logdir")
EARLIER = ("experiments.bench.",)
# For the names in capitals that stand for a value.
VALUES = {
  "--config.algorithm.name=NAME": "--config.algorithm.name=grpo",
  "--config.batch.most_prompts=N": "--config.batch.most_prompts=2",
  "--run=CONFIG.py": "--run=countdown",
  "--coordinator=HOST:PORT": "--coordinator=host:1",
  "=$(JOB_COMPLETION_INDEX)": "=0",
  "--figure=NAME": "--figure=lengths",
}
# For flags that the text names alone.
ALONE = {
  "--config.rollout.kernels": "--config.rollout.kernels=ref",
  "--config.algorithm.name=": "--config.algorithm.name=grpo",
  "--run": "--run=tail",
}
NUMBERS = re.compile(r"=[NSKI]$")
# What a flag alone may belong to, with what these require.
OWNERS = [
  ["experiments.train"],
  ["experiments.train", "--config=qwen2_5_7b"],
  ["experiments.train_drafter"],
  ["experiments.generate", "--model=A"],
  ["experiments.evaluate", "--model=A"],
  ["experiments.export", "--workdir=A", "--output=B"],
  ["experiments.import_gguf", "--output=A"],
  ["experiments.check_resume"],
  ["benchmarks.run"],
  ["benchmarks.accelerator"],
  ["experiments.simulate"],
  ["experiments.figures.collect", "--figure=A"],
]


def read(document: str) -> str:
  return (ROOT / document).read_text()


def blocks(document: str) -> list[str]:
  """The indented blocks, and those in fences without a language."""
  text = read(document)
  plain = FENCE.sub(lambda m: "" if m[1] else textwrap.indent(m[2], "    "), text)
  return [textwrap.dedent(block) for block in INDENTED.findall(f"\n{plain}\n\n")]


def lines(block: str) -> list[str]:
  """Those of a shell: joined where a backslash or an open quote continues them."""
  found, begun = [], ""
  for line in block.splitlines():
    begun = f"{begun} {line.strip()}".strip()
    if begun.endswith("\\"):
      begun = begun[:-1]
      continue
    try:
      shlex.split(begun, comments=True)
    except ValueError:
      continue
    found, begun = [*found, begun], ""
  return found


def of_shell(document: str) -> list[list[str]]:
  """The command lines of a document's blocks, as words."""
  found = []
  for block in blocks(document):
    if listed := re.search(r"command: \[(.*?)\]", block, re.DOTALL):
      found.append(re.split(r",\s*", listed[1]))
      continue
    if block.strip().startswith("--"):  # flags, on several lines
      found.append(shlex.split(block))
      continue
    for line in lines(block):
      words = shlex.split(line, comments=True)
      known = words and (words[0] in SHELL or ".venv/bin/" in line)
      if known or (words and all(word.startswith("--") for word in words)):
        found.append(words)
  return found


def as_module(words: list[str]) -> list[str]:
  """Module and arguments of `python -m MODULE ...`, `tlt ...` or a module's name; [] of
  what is none."""
  for word in words:
    if " .venv/bin/python -m " in word:  # what a shell elsewhere runs
      words = shlex.split(word)
  words = [word.replace("$TLT/", "") for word in words]
  if words[0] == "tlt":
    words = [f"experiments.{name}" for name in words[1:2]] + words[2:]
  if "-m" in words:
    words = words[words.index("-m") + 1 :]
  is_one = words and re.match(r"(experiments|benchmarks|dev)\.[a-z]", words[0])
  return words if is_one else []


def filled(words: list[str]) -> list[str]:
  """With values for names that stand for one, and without the signs of alternatives."""
  found = []
  for word in words:
    word = word.lstrip("([")
    word = word if "(" in word else word.rstrip(")]")
    for name, value in VALUES.items():
      word = word.replace(name, value)
    if word not in ("...", "or"):
      found.append(ALONE.get(word) or NUMBERS.sub("=2", word))
  return found


def alternatives(words: list[str]) -> list[list[str]]:
  """The commands that may be meant."""
  if not words[0].startswith("--"):
    return [as_module(words)]
  given = [word if "=" in word else f"{word}=1" for word in words]
  found = [[*owner, *args] for owner in OWNERS for args in (words, given)]
  launched = ["--", "experiments.train"]
  return [*found, *(["experiments.launch", *x, *launched] for x in (words, given))]


def written(document: str) -> list[list[str]]:
  """All command lines and flags, those in the text too."""
  spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", read(document)))
  inline = [
    shlex.split(span) for span in spans if re.match(r"(--|tlt |\S*python -m )\w", span)
  ]
  inline += [span.split() for span in spans if as_module([span.split()[0]])]
  found = []
  for words in (*of_shell(document), *inline):
    if words[0].startswith("--") or as_module(words):
      if not any(word.startswith((*FOREIGN, *EARLIER)) for word in words):
        found.append(filled(words))
  return found


def checkout(folder: pathlib.Path) -> pathlib.Path:
  """A folder with what the checkout has, and nothing that runs have left."""
  for path in ROOT.iterdir():
    if path.name != "runs" and not path.name.startswith("."):
      (folder / path.name).symlink_to(path)
  shutil.copytree(ROOT / "examples/my_fork/my_package", folder / "my_package")
  shutil.copy(ROOT / "examples/my_fork/my_config.py", folder)
  for code in (m[2] for m in FENCE.finditer(read("docs/start.md"))):
    (folder / code.split()[1]).write_text(code)  # "# FILE.py"
  for name in ("my_package/my_module.py", "my_module.py"):
    (folder / name).write_text(commands.VERIFIER + "\nscore = digits\n")
  return folder


def start(folder: pathlib.Path, *args: str) -> subprocess.CompletedProcess:
  """Runs Python there to its end."""
  return commands.finish(forked.start(args, str(folder), os.environ))


def test_every_command_and_flag_can_be_read(tmp_path):
  there = [(d, words) for d in DOCUMENTS for words in written(d)]
  assert len(there) > 100 and len({d for d, _ in there}) > 8
  file = tmp_path / "commands.json"
  file.write_text(json.dumps([alternatives(words) for _, words in there]))
  (tmp_path / "checkout").mkdir()
  result = start(checkout(tmp_path / "checkout"), "-m", "tests.parsed", str(file))
  problems = json.loads(commands.succeed(result).stdout.splitlines()[-1])
  wrong = [(d, *w, p) for (d, w), p in zip(there, problems, strict=True) if p]
  assert not wrong, "\n".join(" ".join(x) for x in wrong)


def test_what_is_gone_is_found(tmp_path):
  """A renamed flag, key, value, file or module, in a command and alone."""
  wrong = [
    ["experiments.train", "--config.stepz=3"],
    ["experiments.train", "--workdirr=a"],
    ["experiments.train", "--config=experiments/configs/gone.py"],
    ["experiments.train", "--config.algorithm.name=gone"],
    ["experiments.plot", "runs/a"],
    ["experiments.gone"],
    ["experiments.launch", "--gone=1", "--", "experiments.train"],
    ["--config.gone=1"],
    ["--gone"],
  ]
  right = [["experiments.compare", "a", "b"], ["--fork=NEW"], ["--restarts=2"]]
  file = tmp_path / "commands.json"
  file.write_text(json.dumps([alternatives(words) for words in (*wrong, *right)]))
  result = start(ROOT, "-m", "tests.parsed", str(file))
  problems = json.loads(commands.succeed(result).stdout.splitlines()[-1])
  assert all(problems[: len(wrong)]) and not any(problems[len(wrong) :]), problems


@functools.cache
def made(target: str, *variables: str) -> str:
  """What `make` would do."""
  command = ["make", "-n", target, *variables]
  found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert found.returncode == 0, found.stderr
  return found.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_target_of_make_exists(document):
  spans = [shlex.split(s) for s in re.findall(r"`(make \w[^`\n]*)`", read(document))]
  for words in (*of_shell(document), *spans):
    if words[0] == "make" and words[1:]:
      assert made(*words[1:])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_of_python_name_what_exists(document):
  """Those of the fork are run by `test_extensions`, the README's below."""
  fenced = [m[2] for m in FENCE.finditer(read(document)) if m[1] == "python"]
  imports = [b for b in blocks(document) if re.match(r"(from|import) ", b)]
  for code in (*fenced, *imports):
    tree, ours = ast.parse(code), {}
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom) and node.module.startswith("tlt_jax"):
        module = importlib.import_module(node.module)
        for name in node.names:
          if not hasattr(module, name.name):
            whole = f"{node.module}.{name.name}"
            assert importlib.util.find_spec(whole), whole
            with contextlib.suppress(ImportError):  # tunix's needs tunix
              importlib.import_module(whole)
          if hasattr(module, name.name):
            ours[name.asname or name.name] = getattr(module, name.name)
    for node in ast.walk(tree):
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id in ours:
          assert hasattr(ours[node.value.id], node.attr), ast.unparse(node)


# A run in small: what the config leaves open follows from it.
SMALL = {
  "steps": 2,
  "batch.prompts": 2,
  "batch.responses": 2,
  "held_out.size": 3,
  "sampling.max_tokens": 16,
  "rollout.max_prompt": None,
  "rollout.slots": 4,
  "rollout.buckets": (),
  "rollout.chunk": 8,
  "spot.rows": 4,
  "tensor_parallel": 1,
  "learner.buckets": None,
  "checkpoint.every": 1,
}
SMALL_DRAFTER = {
  "steps": 2,
  "sequences": 2,
  "responses.prompts": 2,
  "responses.samples": 1,
  "drafter.vocab_size": 64,
  "learner.buckets": None,
  "evaluation.prompts": 2,
}
IN_SMALL = {  # of a command that runs: what comes before its own arguments, and behind
  "train": ([f"--config.{key}={x}" for key, x in SMALL.items()], []),
  "train_drafter": (
    [f"--run.{key}={x}" for key, x in SMALL.items()]
    + [f"--config.{key}={x}" for key, x in SMALL_DRAFTER.items()],
    [],
  ),
  "generate": ([], ["--max_tokens=8"]),
  "evaluate": ([], ["--prompts=3", "--samples=1", "--config.sampling.max_tokens=8"]),
  "export": ([], []),
  "plot": ([], []),
  "compare": ([], []),
}
# What a reader has to have, or takes long, and what is there instead.
STAND_INS = {
  r"/models/[\w.-]*EAGLE[\w.-]*": "eagle",
  r"/models/[\w.-]+": "model",
  r"\$TLT/": "",
  r"(?<=steps=)40": "4",
}
RUN = ["README.md", "docs/start.md", "docs/train.md", "docs/extending.md"]


def in_small(words: list[str]) -> list[str]:
  """What is run instead; [] where it takes hardware, a network, or too long."""
  if words[:2] == ["make", "quickstart"]:
    line = next(x for x in lines(made(*words[1:])) if "experiments.train" in x)
    words = shlex.split(line)
  for there, stand_in in STAND_INS.items():
    words = [re.sub(there, stand_in, word) for word in words]
  name, *args = as_module(words) or [""]
  before, behind = IN_SMALL.get(name.removeprefix("experiments."), ([], None))
  if behind is None:
    return []
  if re.search(r"=(\S*/)?(countdown|my_config)\b", " ".join(args)) and "train" in name:
    before = [*before, "--config.policy=tiny"]
  return [name, *before, *args, *behind]


def prepare(folder: pathlib.Path, home: pathlib.Path) -> None:
  """What a reader has: a model, a drafter of it, files of prompts."""
  policy = shutil.copytree(home / "chat_policy", folder / "model")
  shutil.copytree(policy, folder / "runs/smollm2")  # of import_gguf
  shutil.copytree(home / "policy", folder / "tiny")
  drafter = drafter_lib.of_target(hf.load_config(policy))
  eagle_files.save(
    folder / "eagle", drafter, drafter_lib.init_params(drafter, jax.random.key(1))
  )
  for name in ("train", "test"):
    shutil.copy(home / f"{name}.jsonl", folder)
  rows = [{"prompt": f"{i}+1?", "solution": f"{i + 1}"} for i in range(4)]
  for name in ("FILE", "trl"):
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  pq.write_table(pa.Table.from_pylist(rows), folder / "problems.parquet")
  asked = [
    {
      "prompt": [{"role": "user", "content": row["prompt"]}],
      "reward_model": {"style": "rule", "ground_truth": row["solution"]},
    }
    for row in rows
  ]
  for name in ("train", "test"):
    pq.write_table(pa.Table.from_pylist(asked), folder / f"verl_{name}.parquet")


@pytest.mark.parametrize("document", [tiny.slow(document) for document in RUN])
def test_a_reader_gets_from_the_first_command_to_the_last(document, home, chat, tmp_path):
  folder = checkout(tmp_path)
  prepare(folder, home)
  for words in of_shell(document):
    if command := in_small(words):
      result = start(folder, "-m", *command)
      assert result.returncode == 0, (shlex.join(command), result.stderr)


@pytest.mark.slow
def test_the_snippet_of_the_readme_works_after_its_quickstart(home, tmp_path):
  folder = checkout(tmp_path)
  shutil.copytree(home / "policy", folder / "tiny")
  command = in_small(["make", "quickstart"])
  commands.succeed(start(folder, "-m", *command))
  (snippet,) = [b for b in blocks("README.md") if b.startswith("from tlt_jax")]
  result = start(folder, "-c", re.sub(r"max_tokens=\d+", "max_tokens=24", snippet))
  text, *_, last = commands.succeed(result).stdout.splitlines()
  assert text and 1 <= float(last.split()[-1]) <= 4
