"""A new drafter of a policy with a large vocabulary drafts the tokens that its task has."""

import collections
import collections.abc
import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from experiments import config as config_lib
from experiments import draft_vocab
from experiments import from_config
from experiments import memory_plan
from experiments import opening
from experiments import trees
from experiments import workdirs
from tests import commands
from tests import tiny
from tlt_jax import data
from tlt_jax.models import drafter_files
from tlt_jax.models import hf

home, chat = commands.home, commands.chat
MODEL = dataclasses.replace(
  tiny.CONFIG,
  architecture="Qwen2ForCausalLM",
  vocab_size=100_000,
  width=16,
  num_layers=1,
  qkv_bias=True,
  qk_norm=False,
  tie_embeddings=True,
)
OWN, LAST = 32_768, 99_000  # tokens of a drafter, and the first id of the tokenizer


@pytest.fixture(scope="module")
def large(home, chat) -> config_lib.RunConfig:
  """A chat run of a policy of 100,000 tokens, of which letters and markup are the last."""
  folder = shutil.copytree(home / "chat_policy", home / "large_policy")
  hf.save(folder, MODEL, commands.init(MODEL))
  path = folder / "tokenizer.json"
  raw = json.loads(path.read_text())
  for token in (vocab := raw["model"]["vocab"]):
    vocab[token] += LAST
  for token in raw["added_tokens"]:
    token["id"] += LAST
  think = {"id": LAST + 500, "content": "<think>", "special": False}
  raw["added_tokens"].append(raw["added_tokens"][0] | think)
  vocab[think["content"]] = think["id"]
  path.write_text(json.dumps(raw))
  for name in ("config.json", "generation_config.json"):
    file = folder / name
    if file.exists():
      ids = {"eos_token_id": LAST + 2}
      file.write_text(json.dumps(json.loads(file.read_text()) | ids))
  changes = {
    "policy": str(folder),
    "prompts.path": str(home / "train.jsonl"),
    "prompts.split": "all",
    "held_out.path": str(home / "test.jsonl"),
    "held_out.split": "all",
    "rollout.max_prompt": 192,
    "learner.buckets": ((2, 208),),
    "spot.rows": 4,
  }
  return commands.read_run("qwen2_5_7b.py:smoke", changes)


def vocab_of(run: config_lib.RunConfig, **options) -> tuple[int, ...]:
  records = from_config.RunPrompts(run).train.records
  return from_config.drafter_vocab(run, hf.load_config(run.policy), records, **options)


def id_of(character: str) -> int:
  return LAST + {"\n": 0, "\1": 1, "\2": 2}.get(character, ord(character))


def times(run: config_lib.RunConfig) -> collections.Counter:
  """How often each id is in what the policy is asked, and in gold answers."""
  text = ""
  for line in pathlib.Path(run.prompts["path"]).read_text().splitlines():
    row = json.loads(line)
    text += f"\1system\n{run.chat.system}\2\n\1user\n{row['question']}\2\n"
    text += f"\1assistant{row['answer']}"
  return collections.Counter(map(id_of, text))


@pytest.mark.parametrize("size", [None, 8, 200])
def test_the_most_frequent_tokens_of_prompts_and_answers_are_predicted(large, size, caplog):
  """With all that ends a response; then characters, and the lowest ids."""
  run = dataclasses.replace(large, drafter_vocab_size=size)
  with caplog.at_level("INFO"):
    found = vocab_of(run)
  seen = times(run)
  markup = {id_of("\1"), id_of("\2")}
  characters = {id_of(chr(i)) for i in range(32, 127)} | {id_of("\n")}
  by_rank = [*markup, *sorted(seen.keys() - markup, key=lambda i: (-seen[i], i))]
  by_rank += sorted(characters - seen.keys())
  by_rank += [i for i in range(MODEL.vocab_size) if i not in {*by_rank}]
  assert found == tuple(sorted(by_rank[: size or OWN]))
  covered = sum(n for i, n in seen.items() if i in found) / seen.total()
  assert size == 8 or covered == 1
  assert f"{size or OWN:,} of the policy's 100,000 tokens: {covered:.2%} of" in caplog.text
  assert vocab_of(run) == found
  assert vocab_of(run, saved={"vocab": [3, 5]}) == (3, 5)
  assert vocab_of(run, saved={}) == ()  # of a checkpoint from before


def test_a_smaller_vocabulary_is_whole_unless_a_number_is_given(large):
  assert draft_vocab.size(None, 99_999) == 0
  assert draft_vocab.size(None, 100_000) == OWN
  assert draft_vocab.size(0, 100_000) == 0
  assert draft_vocab.size(7, 24) == 7
  with pytest.raises(ValueError, match="drafter_vocab_size=25: the policy has 24 tokens"):
    draft_vocab.size(25, 24)
  assert vocab_of(dataclasses.replace(large, drafter_vocab_size=0)) == ()
  assert vocab_of(dataclasses.replace(large, drafter="")) == ()


class Made(collections.abc.Sequence):
  """A long source, which makes its records when they are asked for."""

  def __init__(self, first: int):
    self.first = first

  def __len__(self):
    return 10**9

  def __getitem__(self, i):
    return {"prompt": str(self.first + i), "answer": None}


def test_of_sources_that_make_their_records_few_are_counted(large):
  """Of each part of a mixture as many, from one end to the other."""
  tokenizer = from_config.load_tokenizer(large.policy, None)
  source = data.Mixture([Made(0), Made(5 * 10**9)], [1.0, 100.0])
  plain = config_lib.Chat(apply=False)
  found = [tokenizer.decode(x) for x in draft_vocab.tokens_of(tokenizer, source, plain)]
  assert 100 < len(found) < 1000
  numbers = np.array(found, int).reshape(2, -1)
  assert numbers[0, 0] == 0 and numbers[1, 0] == 5 * 10**9
  assert (np.diff(numbers) < 10**8).all() and (numbers[:, -1] % 10**9 > 9 * 10**8).all()


def test_the_plan_and_the_log_say_the_size_before_the_prompts_are_read(large, tmp_path):
  run = trees.change(large, {"prompts.path": "nowhere.jsonl", "held_out.path": ""})
  plan = memory_plan.of_run(run)
  assert plan.where.endswith("; the drafter predicts 32,768 of 100,000 tokens")
  asked = from_config.RunPrompts(large)
  lines = opening.of_run(large, asked, workdirs.open(tmp_path / "run", large, fork=""))
  (line,) = [line for line in lines if line.startswith("drafter: a new eagle2 of")]
  assert "that predicts 32,768 of 100,000 tokens, random at first" in line


def args_of(run: config_lib.RunConfig, workdir, *more: str) -> list[str]:
  """Arguments of `train` that differ from the config of the chat run."""
  return [
    "--config=experiments/configs/qwen2_5_7b.py:smoke",
    f"--config.policy={run.policy}",
    f"--config.prompts.path={run.prompts['path']}",
    f"--config.held_out.path={run.held_out['path']}",
    "--config.rollout.max_prompt=192",
    "--config.learner.buckets=((2,208),)",
    "--config.spot.rows=4",
    "--config.strategies=up to 4 live: 2_1_3",
    "--config.checkpoint.every=1",
    f"--workdir={workdir}",
    *more,
  ]


def test_a_run_goes_on_with_the_vocabulary_that_it_began_with(large, home, tmp_path):
  """Although the answers are others by then; what is exported has it, too."""
  answers = tmp_path / "train.jsonl"
  shutil.copy(large.prompts["path"], answers)
  large = trees.change(large, {"prompts.path": str(answers)})
  workdir, expected = tmp_path / "run", vocab_of(large)
  began = commands.succeed(
    commands.run(home, "train", *args_of(large, workdir, "--config.steps=1"))
  )
  assert (
    "32,768 of the policy's 100,000 tokens: 100.00% of those in prompts" in began.stderr
  )
  model = hf.load_config(large.policy)
  assert drafter_files.load_shape(workdir / "drafter", model).vocab == expected
  answers.write_text(answers.read_text().replace("So", "<think>"))
  assert vocab_of(large) != expected
  commands.succeed(
    commands.run(home, "train", *args_of(large, workdir, "--config.steps=2"))
  )
  assert drafter_files.load_shape(workdir / "drafter", model).vocab == expected
  export = ["--workdir", workdir, "--output", tmp_path / "out"]
  commands.succeed(commands.run(home, "export", *export))
  shape = drafter_files.load_shape(tmp_path / "out" / "drafter", model)
  assert shape.vocab == expected


@pytest.mark.slow  # three runs
def test_a_run_from_before_goes_on_with_all_tokens(large, home, tmp_path):
  """Its config.json has no such entry; a fork of it keeps the drafter as well."""
  whole = ["--config.steps=1", "--config.drafter_vocab_size=0"]
  commands.succeed(commands.run(home, "train", *args_of(large, tmp_path / "run", *whole)))
  file = tmp_path / "run" / "config.json"
  config = json.loads(file.read_text())
  assert config.pop("drafter_vocab_size") == 0
  file.write_text(json.dumps(config))
  for more in ([], [f"--fork={tmp_path / 'fork'}"]):
    more = [*args_of(large, tmp_path / "run"), "--config.steps=2", *more]
    commands.succeed(commands.run(home, "train", *more))
    name = "fork" if "--fork" in more[-1] else "run"
    assert drafter_files.load_shape(tmp_path / name / "drafter", MODEL).vocab == ()
