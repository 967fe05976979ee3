"""Prompts that cannot be used: refused with their place, or dropped."""

import json
import logging

import pytest
import tokenizers
import transformers

from experiments import from_config
from tests import commands
from tlt_jax import data
from tlt_jax import prompt_checks
from tlt_jax import tokenization

home = commands.home
TEMPLATE = (
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}a:{% endif %}"
)


def wrapped(model) -> transformers.PreTrainedTokenizerFast:
  inner = tokenizers.Tokenizer(model)
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  inner.decoder = tokenizers.decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, chat_template=TEMPLATE
  )


def vocabulary(first: str) -> dict[str, int]:
  return {c: i for i, c in enumerate([first, *"0123456789+?: \nuas"])}


@pytest.fixture(scope="module")
def tokenizer() -> tokenization.Tokenizer:
  """A token per character; what it does not know becomes padding."""
  model = tokenizers.models.WordLevel(vocabulary("<pad>"), unk_token="<pad>")
  return tokenization.Tokenizer(wrapped(model), ())


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
  with pytest.raises(data.DataError) as e:
    prompt_checks.usable(source, "made", rules(tokenizer, "refuse", max_prompt=limit))
  assert str(e.value).startswith(f"{place}: the prompt has ")
  assert f"rollout.max_prompt is {limit}; raise it, or set unusable" in str(e.value)
  assert not caplog.messages
  kept = prompt_checks.usable(source, "made", rules(tokenizer, max_prompt=limit))
  assert [r["prompt"] for r in kept] == [records[0]["prompt"], records[2]["prompt"]]
  assert caplog.messages == ["made: of 3 prompts 1 dropped (too long)"]
  with pytest.raises(data.DataError, match="made: none of 3 prompts is left"):
    prompt_checks.usable(source, "made", rules(tokenizer, max_prompt=1))


LONG = "1" * 9


def test_a_long_source_is_checked_at_its_start_and_when_it_is_drawn(tokenizer):
  """By the same rules; the next usable record replaces one that is dropped."""
  records = [record(USABLE, i) for i in range(1500)]
  for i in (1200, 1201):
    records[i] = record(LONG, i)
  source = Made(records, 2**13 + 1)
  refusing = prompt_checks.usable(source, "made", rules(tokenizer, "refuse"))
  assert source.asked == set(range(1000))
  with pytest.raises(data.DataError, match="^made, record 1200: .* has 9 tokens"):
    refusing[1200]
  dropping = prompt_checks.usable(source, "made", rules(tokenizer))
  drawn = [dropping[i]["answer"] for i in (1199, 1200, 1201, 1202)]
  assert drawn == [1199, 1202, 1202, 1202]
  assert sum(1 for _ in dropping) == len(source)
  whole = prompt_checks.usable(source, "made", rules(tokenizer), whole=True)
  assert whole == [source[i] for i in range(len(source)) if source[i]["prompt"] != LONG]


@pytest.mark.parametrize(
  "record, problem",
  [
    ({"question": "1", "answer": ""}, "no field 'prompt'; there are question, answer"),
    ({"prompt": "1", "anwser": ""}, "no field 'answer'; .*did you mean 'anwser'"),
    ({"prompt": 7, "answer": ""}, "field 'prompt' is a int, not a string or a list"),
    ({"prompt": [{"role": "user"}], "answer": ""}, "field 'prompt' has a message that"),
    (["1", ""], "is a list, not a dict with the fields 'prompt' and 'answer'"),
  ],
)
def test_a_record_that_is_none_is_named(tokenizer, record, problem):
  """At the start, or when it is drawn."""
  good = {"prompt": USABLE, "answer": ""}
  with pytest.raises(data.DataError, match=f"^made, record 1: {problem}") as e:
    prompt_checks.usable([good, record], "made", rules(tokenizer))
  assert "\n" not in str(e.value)
  long = Made([good] * 1000 + [record], 2**14)
  with pytest.raises(data.DataError, match=f"^made, record 1000: {problem}"):
    prompt_checks.usable(long, "made", rules(tokenizer))[1000]


def test_a_stream_with_dropped_records_resumes_exactly(tokenizer):
  """Of a short source, and of a long one."""
  records = [record([LONG, "1"][i % 3 > 0], i) for i in range(90)]
  for source in (records, Made(records, 2**20)):
    stream = lambda s=source: data.prompt_iterator(
      prompt_checks.usable(s, "x", rules(tokenizer)), 4, seed=1
    )
    first = stream()
    for _ in range(30):
      next(first)
    state, rest = first.get_state(), [next(first) for _ in range(20)]
    resumed = stream()
    resumed.set_state(json.loads(json.dumps(state)))
    assert [next(resumed) for _ in range(20)] == rest
    assert all(r["answer"] % 3 for batch in rest for r in batch)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "bytes", "missing", "unk is text"])
def test_every_kind_of_tokenizer_tells_what_it_does_not_know(kind):
  """With a token for the unknown, without one (it is lost), or by bytes (all is known)."""
  if kind == "unigram":
    pieces = [("<unk>", 0.0), *((c, -1.0) for c in vocabulary("!"))]
    fast = wrapped(tokenizers.models.Unigram(pieces, unk_id=0))
  elif kind == "bpe":
    fast = wrapped(tokenizers.models.BPE(vocab=vocabulary("!"), merges=[]))
  elif kind == "missing":
    fast = wrapped(tokenizers.models.WordLevel(vocabulary("!"), unk_token="<unk>"))
  elif kind == "unk is text":
    fast = wrapped(tokenizers.models.WordLevel(vocabulary("!"), unk_token=" "))
  else:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator(["1 2"], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
  check = lambda asked: prompt_checks.usable(asked, "x", rules(tokenizer))
  tokenizer = tokenization.Tokenizer(fast, ())
  known = [record("1+ 2?")]
  assert check(known) == known
  asked = [*known, record("1é+\N{PILE OF POO}")]
  if kind == "bytes":
    assert check(asked) == asked
    return
  with pytest.raises(data.DataError, match="record 1: .* not know 'é', '\N{PILE OF POO}'"):
    check(asked)


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

  workdirs = (f"--workdir={tmp_path / name}" for name in ("a", "b", "c"))
  drafter = "--config=experiments/configs/drafter.py:smoke"
  started = {
    "train": [*asking(good, bad), next(workdirs)],
    "train_drafter": [drafter, *asking(good, bad, "run"), next(workdirs)],
    "evaluate": [*asking(good, bad), f"--model={policy}"],
    "generate": [f"--model={policy}", f"--prompts={bad}", f"--output={output}"],
    "check_lossless": asking(good, bad),
    "benchmarks.step": [*asking(bad, good), next(workdirs)],
  }
  started = {name: commands.start(home, name, *args) for name, args in started.items()}
  for name, process in started.items():
    told = commands.error(commands.finish(process))
    assert f"{bad}, line 2: the tokenizer does not know 'é'" in told, name
  assert not output.exists()


def test_a_tokenizer_of_a_larger_model_is_an_error(home, tmp_path):
  policy = tmp_path / "policy"
  commands.write_policy(policy)
  raw = json.loads((policy / "config.json").read_text())
  (policy / "config.json").write_text(json.dumps(raw | {"vocab_size": 23}))
  with pytest.raises(data.DataError, match="tokens up to 23, the model in .* has 23;"):
    from_config.load_tokenizer(str(policy))
