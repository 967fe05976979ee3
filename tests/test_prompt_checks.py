"""Prompts that cannot be used: refused with their place, or dropped."""

import json
import logging

import pytest
import tokenizers

from experiments import config as config_lib
from experiments import from_config
from experiments import trees
from tests import commands
from tlt_jax import chat_template
from tlt_jax import data
from tlt_jax import prompt_checks
from tlt_jax import tokenization

home = commands.home
TEMPLATE = (
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}a:{% endif %}"
)


def wrapped(model) -> tokenization.Tokenizer:
  inner = tokenizers.Tokenizer(model)
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  inner.decoder = tokenizers.decoders.Fuse()
  return tokenization.Tokenizer(inner, template=chat_template.Template(TEMPLATE))


def vocabulary(first: str) -> dict[str, int]:
  return {c: i for i, c in enumerate([first, *"0123456789+?: \nuas"])}


@pytest.fixture(scope="module")
def tokenizer() -> tokenization.Tokenizer:
  """A token per character; what it does not know becomes padding."""
  model = tokenizers.models.WordLevel(vocabulary("<pad>"), unk_token="<pad>")
  return wrapped(model)


class Made:
  """Records that are made when they are asked for."""

  def __init__(self, records, size=None):
    self.records, self.size, self.asked = records, size or len(records), set()

  def __len__(self):
    return self.size

  def __getitem__(self, i):
    self.asked.add(i)
    return self.records[i % len(self.records)]


USABLE = "1+2?"


def record(prompt, answer="") -> dict:
  return {"prompt": prompt, "answer": answer}


def rules(tokenizer, too_long="drop", **options) -> prompt_checks.Rules:
  unusable = prompt_checks.Unusable(too_long)
  return prompt_checks.Rules(tokenizer, unusable, **{"max_prompt": 8} | options)


@pytest.mark.parametrize("kind", ["file", "made", "chat"])
def test_a_prompt_that_is_too_long_is_refused_or_dropped(tokenizer, tmp_path, caplog, kind):
  """With its line; the answer may hold anything."""
  caplog.set_level(logging.INFO)
  wrap = (lambda text: [{"role": "user", "content": text}]) if kind == "chat" else str
  records = [record(wrap(t), "é") for t in (USABLE, "0123456789+?" * 2, USABLE)]
  limit = 8 + len("u:\na:") if kind == "chat" else 8
  source, place = Made(records), "made, record 1"
  if kind == "file":
    path = tmp_path / "x.jsonl"
    path.write_text("\n" + "".join(json.dumps(r) + "\n" for r in records))
    source, place = data.load_prompts(path), f"{path}, line 3"
  with pytest.raises(data.DataError, match=place):
    prompt_checks.usable(source, "made", rules(tokenizer, "refuse", max_prompt=limit))
  kept = prompt_checks.usable(source, "made", rules(tokenizer, max_prompt=limit))
  assert [r["prompt"] for r in kept] == [records[0]["prompt"], records[2]["prompt"]]
  assert "1 dropped" in caplog.text
  with pytest.raises(data.DataError, match="none"):
    prompt_checks.usable(source, "made", rules(tokenizer, max_prompt=1))


LONG = "1" * 9


def test_a_stream_with_dropped_records_resumes_exactly(tokenizer):
  """Of a short source, and of a long one."""
  records = [record([LONG, "1"][i % 3 > 0], i) for i in range(90)]
  for source in (records, Made(records, 2**20)):

    def stream(s=source):
      return data.prompt_iterator(prompt_checks.usable(s, "x", rules(tokenizer)), 4, seed=1)

    first = stream()
    for _ in range(30):
      next(first)
    state, rest = first.get_state(), [next(first) for _ in range(20)]
    resumed = stream()
    resumed.set_state(json.loads(json.dumps(state)))
    assert [next(resumed) for _ in range(20)] == rest
    assert all(r["answer"] % 3 for batch in rest for r in batch)


def refuse_none(records, name=""):
  """In place of a reward that needs an answer."""
  return ["no answer" if r["answer"] is None else "" for r in records]


def judged(tokenizer, bad_answer) -> prompt_checks.Rules:
  unusable = prompt_checks.Unusable(too_long="drop", bad_answer=bad_answer)
  return prompt_checks.Rules(tokenizer, unusable, 8, try_answers=refuse_none)


def test_a_bad_answer_is_refused_or_dropped(tokenizer, caplog):
  """With its place, which a long prompt before it does not move."""
  records = [record(p, a) for p, a in ((LONG, "1"), ("1", "1"), ("2", None), ("3", "3"))]
  with pytest.raises(data.DataError, match="made, record 2: .*no answer.*bad_answer") as e:
    prompt_checks.usable(Made(records), "made", judged(tokenizer, "refuse"))
  assert e.value.argument == "answer_field"
  kept = prompt_checks.usable(Made(records), "made", judged(tokenizer, "drop"))
  assert [r["prompt"] for r in kept] == ["1", "3"]
  assert "1 dropped (bad answers)" in caplog.text and "record 2" in caplog.text
  with pytest.raises(data.DataError, match="all 1 gold answers"):
    prompt_checks.usable(records[2:3], "made", judged(tokenizer, "drop"))


def test_a_bad_answer_that_is_drawn_later_ends_no_run(tokenizer, caplog):
  """It is replaced by the next one, always the same."""
  records = [record("1", i if i % 1500 < 1000 else None) for i in range(3000)]
  source = prompt_checks.usable(Made(records, 2**20), "made", judged(tokenizer, "refuse"))
  assert source[10]["answer"] == 10
  assert source[1999]["answer"] == source[1999]["answer"] == 1999
  assert source[1500 - 1]["answer"] == 1500
  assert "made, record 1499 is left out" in caplog.text


def asked(bad_answer="refuse", **sources) -> from_config.RunPrompts:
  """The prompts of a run with the reward of GSM8K, in one process."""
  values = trees.read("countdown:smoke")
  load = {"source": "tlt_jax.data.load_prompts"}
  sources = {
    name: options if "source" in options else load | options
    for name, options in sources.items()
  }
  own = {
    "reward": "tlt_jax.tasks.gsm8k.score",
    "verifier": {"processes": 1},
    "unusable_prompts": {"bad_answer": bad_answer},
  }
  return from_config.RunPrompts(
    trees.validate(config_lib.RunConfig, values | own | sources)
  )


def write(path, count, answer="{}"):
  rows = [{"question": f"{i} 1>2:", "answer": answer.format(i)} for i in range(count)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def test_a_share_of_the_prompts_is_held_out_without_a_file(tmp_path, caplog):
  """Both sections of the config then say so; a file of its own is taken whole."""
  caplog.set_level(logging.INFO)
  train, test = write(tmp_path / "train.jsonl", 40), write(tmp_path / "test.jsonl", 3)
  prompts = asked(prompts={"path": train}, held_out={"path": "", "share": 0.1})
  texts = [{r["prompt"] for r in x.records} for x in (prompts.train, prompts.held_out)]
  assert [*map(len, texts)] == [36, 4] and not texts[0] & texts[1]
  assert "gold answers: 36 of 36 score as solved" in caplog.text
  both = asked(prompts={"path": train}, held_out={"path": test})
  assert [len(x.records) for x in (both.train, both.held_out)] == [40, 3]


def test_null_and_nan_of_a_file_are_refused_or_dropped(tmp_path):
  """As pandas writes them; the stream of prompts has the others."""
  answers = [float(i) if i % 10 else [None, float("nan")][i // 10 % 2] for i in range(40)]
  rows = [{"question": f"{i} 1>2:", "answer": x} for i, x in enumerate(answers)]
  path = tmp_path / "x.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  sources = {"prompts": {"path": str(path)}, "held_out": {"path": str(path)}}
  with pytest.raises(data.DataError, match="x.jsonl, line 1: .* 4 of 40 .*bad_answer"):
    _ = asked(**sources).train
  kept = asked("drop", **sources).train.records
  assert [r["answer"] for r in kept] == [x for i, x in enumerate(answers) if i % 10]


MIXED = {"source": "tlt_jax.data.mixture"}
SETS = {"source": "tlt_jax.data.named_sets"}


@pytest.mark.parametrize(
  "sources, key, message",
  [
    ({"held_out": {"path": "no.jsonl"}}, "held_out.path", "no such file"),
    ({"prompts": {"path": "no.jsonl"}}, "prompts.path", "no such file"),
    ({"prompts": {"path": "a.csv"}}, "prompts.path", "'.csv'"),
    ({"prompts": {"path": "one.jsonl"}}, "held_out.share", "none to train on"),
    ({"prompts": {"path": "bad.jsonl"}}, "prompts.answer_field", "bad.jsonl, line 1"),
    ({"held_out": {"path": "bad.jsonl"}}, "held_out.answer_field", "correct the reward"),
    ({"prompts": {"path": "ok.jsonl", "answer_field": "x"}}, "prompts.answer_field", "'x'"),
    ({"prompts": {"path": "ok.jsonl", "prompt_field": "q"}}, "prompts.prompt_field", "'q'"),
    ({"prompts": {"path": "ok.jsonl", "keep": "my.f"}}, "prompts.keep", "no module"),
    ({"prompts": MIXED | {"sources": "a b"}}, "prompts.sources", "is not of the form"),
    (
      {"prompts": MIXED | {"sources": "tlt_jax.data.load_prompts(path='no.jsonl')"}},
      "prompts.source",
      "no.jsonl: no such file",
    ),
    (
      {"prompts": MIXED | {"sources": "tlt_jax.data.load_prompts(path='ok.jsonl')"}},
      "held_out.path",
      "names no file",
    ),
    ({"held_out": SETS | {"sets": "a="}}, "held_out.sets", "is not of the form"),
    ({"prompts": {"path": "long.jsonl"}}, "prompts.path", "rollout.max_prompt"),
  ],
)
def test_an_error_of_a_source_names_its_key(tmp_path, monkeypatch, sources, key, message):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / "ok.jsonl", 40)
  write(tmp_path / "one.jsonl", 1)
  write(tmp_path / "bad.jsonl", 40, "none")
  text = (tmp_path / "ok.jsonl").read_text().replace(" 1>", " 1" * 200 + ">")
  (tmp_path / "long.jsonl").write_text(text)
  prompts = asked(**{"prompts": {"path": "ok.jsonl"}, "held_out": {"path": ""}} | sources)
  with pytest.raises(data.DataError, match=message) as e:
    _ = prompts.train, prompts.held_out
  assert str(e.value).startswith(f"{key}: "), e.value


def test_commands_refuse_prompts(home, tmp_path):
  """Held-out prompts too, which are asked only later; and leave no file."""
  good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
  for path, prompt in ((good, "1 2>3:"), (bad, "1é2>3:")):
    rows = [{"prompt": p, "answer": ""} for p in ("1 2>3:", prompt)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  policy, output = home / "policy", tmp_path / "responses.jsonl"

  def asking(train, held_out, flag="config"):
    source = "tlt_jax.data.load_prompts"
    prompts = {"prompts.source": source, "held_out.source": source}
    paths = {"prompts.path": train, "held_out.path": held_out, "drafter": "eagle2"}
    return commands.tiny_run(home, *(prompts | paths).items(), flag=flag)

  workdirs = (f"--workdir={tmp_path / name}" for name in ("a", "b"))
  drafter = "--config=experiments/configs/drafter.py:smoke"
  started = {
    "train": [*asking(good, bad), next(workdirs)],
    "train_drafter": [drafter, *asking(good, bad, "run"), next(workdirs)],
    "generate": [f"--model={policy}", f"--prompts={bad}", f"--output={output}"],
  }
  started = {name: commands.start(home, name, *args) for name, args in started.items()}
  for name, process in started.items():
    told = commands.error(commands.finish(process))
    assert f"{bad}, line 2: the tokenizer does not know 'é'" in told, name
  assert not output.exists()
