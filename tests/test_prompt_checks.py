"""Prompts that cannot be used: refused with their place, dropped, or cut."""

import itertools
import json
import logging
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
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


def chat(text: str) -> list[dict]:
  return [{"role": "system", "content": "0"}, {"role": "user", "content": text}]


SHAPES = {"plain": (lambda text: text, 8), "chat": (chat, 8 + len("s:0\nu:\na:"))}


class Made:
  """Records that are made when they are asked for."""

  def __init__(self, records, size=None):
    self.records, self.size, self.asked = records, size or len(records), set()

  def __len__(self):
    return self.size

  def __getitem__(self, i):
    self.asked.add(i)
    return self.records[i % len(self.records)]


def source_of(kind: str, prompts: list, folder: pathlib.Path):
  """Records of one of the kinds of sources, and where the second of them stands."""
  records = [{"prompt": p, "answer": "é"} for p in prompts]
  path = folder / f"x.{kind}"
  if kind == "jsonl":
    path.write_text("\n" + "".join(json.dumps(r) + "\n" for r in records))
    return data.load_prompts(path), f"{path}, line 3"
  if kind == "parquet":
    pq.write_table(pa.Table.from_pylist(records), path)
    return data.load_prompts(path), f"{path}, row 1"
  return Made(records), "made, record 1"


USABLE = "1+2?"
BAD = {  # text; what is said; what is left when it is cut
  "too_long": ("0123456789+?", "tokens, rollout.max_prompt is", "456789+?"),
  "unknown_characters": ("é1+xé2?", "the tokenizer does not know 'é', 'x'", "1+2?"),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "made"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BAD)
def test_an_unusable_prompt_is_refused_dropped_or_cut(
  tokenizer, tmp_path, caplog, name, shape, kind
):
  """Whatever is done about the other fault; the answer may hold anything."""
  caplog.set_level(logging.INFO)
  make, limit = SHAPES[shape]
  text, message, left = BAD[name]
  prompts = [make(t) for t in (USABLE, text, USABLE, text)]
  source, place = source_of(kind, prompts, tmp_path)

  def usable(does: str):
    other = {"too_long", "unknown_characters"} - {name}
    unusable = prompt_checks.Unusable(**{name: does, other.pop(): "refuse"})
    rules = prompt_checks.Rules(tokenizer, unusable, max_prompt=limit)
    return prompt_checks.usable(source, "made", rules)

  with pytest.raises(data.DataError) as e:
    usable("refuse")
  assert str(e.value).startswith(f"{place}: ") and message in str(e.value)
  assert f"set unusable_prompts.{name} to drop or cut (the first of 2" in str(e.value)
  assert "\n" not in str(e.value) and not caplog.messages

  assert [r["prompt"] for r in usable("drop")] == [prompts[0], prompts[2]]
  assert [r["prompt"] for r in usable("cut")] == [*map(make, (USABLE, left) * 2)]
  assert [r["answer"] for r in usable("cut")] == ["é"] * 4
  words = name.replace("_", " ")
  assert caplog.messages[0] == f"made: of 4 prompts 2 dropped ({words})"
  assert caplog.messages[1] == f"made: of 4 prompts 2 cut ({words})"


def test_usable_prompts_stay_as_they_are(tokenizer, caplog):
  """The very records, in their order, without a word; so the stream is the same too."""
  caplog.set_level(logging.INFO)
  records = [{"prompt": f"{i}+1?", "answer": ""} for i in range(40)]
  rules = prompt_checks.Rules(tokenizer, max_prompt=8)
  checked = prompt_checks.usable(records, "x", rules)
  assert all(a is b for a, b in zip(checked, records, strict=True))
  long = Made(records, 10**9)
  drawn = prompt_checks.usable(long, "x", rules)
  plain, streamed = (data.prompt_iterator(s, 3, seed=5) for s in (long, drawn))
  for _ in range(50):
    assert next(plain) == next(streamed)
  assert plain.get_state() == streamed.get_state()
  assert not caplog.messages


def test_a_long_source_is_checked_at_its_start_and_when_it_is_drawn(tokenizer):
  """By the same rules; the next usable record stands for one that is dropped."""
  records = [{"prompt": USABLE, "answer": i} for i in range(1500)]
  for i in (1200, 1201):
    records[i] = {"prompt": "é", "answer": i}
  source = Made(records, 2**13 + 1)
  rules = lambda does: prompt_checks.Rules(
    tokenizer, prompt_checks.Unusable(unknown_characters=does), max_prompt=8
  )
  refusing = prompt_checks.usable(source, "made", rules("refuse"))
  assert source.asked == set(range(1000))
  with pytest.raises(data.DataError, match="^made, record 1200: .* not know 'é'"):
    refusing[1200]
  dropping = prompt_checks.usable(source, "made", rules("drop"))
  assert [dropping[i]["answer"] for i in (1199, 1200, 1201, 1202)] == [
    *(1199, 1202, 1202, 1202)
  ]
  assert len(dropping) == len(source)
  records[3] = {"prompt": "é", "answer": 3}
  with pytest.raises(data.DataError, match="^made, record 3: "):
    prompt_checks.usable(source, "made", rules("refuse"))


def test_a_long_source_ends_and_is_a_list_where_it_is_read_whole(tokenizer):
  """Without one record standing for another; outside of it there is nothing."""
  records = [{"prompt": "é1"[i % 3 > 0], "answer": i} for i in range(2**13 + 1)]
  unusable = prompt_checks.Unusable(unknown_characters="drop")
  rules = prompt_checks.Rules(tokenizer, unusable, max_prompt=8)
  source = lambda: Made(list(records))
  drawn = prompt_checks.usable(source(), "made", rules)
  ahead = itertools.islice(drawn, len(records) + 1)  # one that never ends is told too
  assert sum(1 for _ in ahead) == len(records) == len(drawn)
  for i in (-1, len(records)):
    with pytest.raises(IndexError, match=f"made has 8,193 records, none of index {i}"):
      drawn[i]
  whole = prompt_checks.usable(source(), "made", rules, whole=True)
  assert whole == [record for record in records if record["answer"] % 3]
  assert whole == prompt_checks.usable(source(), "made", rules, whole=True)


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
  """Whatever is done about prompts that cannot be used; at the start, or when drawn."""
  drop = prompt_checks.Unusable("drop", "drop")
  rules = prompt_checks.Rules(tokenizer, drop, max_prompt=8)
  good = {"prompt": USABLE, "answer": ""}
  with pytest.raises(data.DataError, match=f"^made, record 1: {problem}") as e:
    prompt_checks.usable([good, record], "made", rules)
  assert "\n" not in str(e.value)
  long = prompt_checks.usable(Made([good] * 1000 + [record], 2**14), "made", rules)
  with pytest.raises(data.DataError, match=f"^made, record 1000: {problem}"):
    long[1000]


def test_a_stream_with_dropped_records_resumes_exactly(tokenizer):
  """Of a short source, and of a long one."""
  records = [{"prompt": "é1"[i % 3 > 0], "answer": i} for i in range(90)]
  unusable = prompt_checks.Unusable(unknown_characters="drop")
  rules = prompt_checks.Rules(tokenizer, unusable, max_prompt=8)
  for source in (records, Made(records, 2**20)):
    stream = lambda s=source: data.prompt_iterator(
      prompt_checks.usable(s, "x", rules), 4, seed=1
    )
    first = stream()
    for _ in range(30):
      next(first)
    state, rest = first.get_state(), [next(first) for _ in range(20)]
    resumed = stream()
    resumed.set_state(json.loads(json.dumps(state)))
    assert [next(resumed) for _ in range(20)] == rest
    assert all(r["answer"] % 3 for batch in rest for r in batch)


def test_nothing_left_is_an_error_or_a_dropped_record(tokenizer):
  """Of one prompt, of a chat whose template alone is too long, and of a source."""
  cut = prompt_checks.Unusable("cut", "cut")
  rules = lambda limit: prompt_checks.Rules(tokenizer, cut, max_prompt=limit)
  record = lambda prompt: {"prompt": prompt, "answer": ""}
  checked = prompt_checks.usable([record("é"), record("1é")], "x", rules(8))
  assert checked == [record("1")]
  with pytest.raises(data.DataError, match="x: none of 1 prompts is left"):
    prompt_checks.usable([record("é")], "x", rules(8))
  with pytest.raises(data.DataError, match="record 0: 9 tokens are left .* is 8; raise"):
    prompt_checks.usable([record(chat("1+2?"))], "x", rules(8))
  with pytest.raises(data.DataError, match="record 0: nothing is left of the prompt"):
    prompt_checks.usable([record("")], "x", prompt_checks.Rules(tokenizer))
  with pytest.raises(data.DataError, match="not know 'é' of the chat template"):
    system = prompt_checks.Rules(tokenizer, cut, chat=True, system="é")
    prompt_checks.usable([record("1")], "x", system)
  with pytest.raises(ValueError, match="too_long\n.*'refuse', 'drop' or 'cut'"):
    prompt_checks.Unusable(too_long="keep")


def test_a_prompt_is_cut_until_it_fits_whatever_the_tokens_of_what_is_left():
  """The rest of a merged token takes more tokens than the whole did."""
  model = tokenizers.models.BPE(
    vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5},
    merges=[("b", "c"), ("a", "bc")],
  )
  inner = tokenizers.Tokenizer(model)
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
  rules = prompt_checks.Rules(
    tokenization.Tokenizer(fast, ()), prompt_checks.Unusable("cut", "cut"), max_prompt=3
  )
  [record] = prompt_checks.usable([{"prompt": "aabcacabc", "answer": ""}], "x", rules)
  assert record["prompt"] == "acabc"
  assert len(rules.tokenizer.encode(record["prompt"])) == 3


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
  rules = prompt_checks.Rules(tokenization.Tokenizer(fast, ()))
  known = [{"prompt": "1+ 2?", "answer": ""}]
  assert prompt_checks.usable(known, "x", rules) == known
  asked = [*known, {"prompt": "1é+\N{PILE OF POO}", "answer": ""}]
  if kind == "bytes":
    assert prompt_checks.usable(asked, "x", rules) == asked
    return
  message = {
    "missing": "record 1: the tokenizer cannot encode this .*UNK",
  }.get(kind, "record 1: the tokenizer does not know 'é', '\N{PILE OF POO}'")
  with pytest.raises(data.DataError, match=message):
    prompt_checks.usable(asked, "x", rules)


# Every command that asks prompts of a config, in one process. None may get as far as
# reading a model.
_COMMANDS = """
import importlib, json, sys, types
from absl import flags
from experiments import config as config_lib
from experiments import trees
from experiments import launch
from tlt_jax.models import convert

def load_hf(*args, **options):
  raise AssertionError("it reads the policy")

convert.load_hf = load_hf
launch.start = lambda *args, **options: None
configs = json.loads(sys.argv[2])
training = trees.load("drafter:smoke", config_lib.DrafterConfig)
for name, given in json.loads(sys.argv[1]).items():
  config = trees.change(trees.load("countdown:smoke", config_lib.RunConfig), configs[name])
  package = "" if name.startswith("benchmarks.") else "experiments."
  module = importlib.import_module(package + name)
  flags.FLAGS.mark_as_parsed()
  for key, holder in list(vars(module).items()):
    if isinstance(holder, flags.FlagHolder):
      value = given.get(holder.name, holder.default)
      setattr(module, key, types.SimpleNamespace(value=value))
  for flag in list(flags.FLAGS):
    delattr(flags.FLAGS, flag)
  try:
    module.main(*([training, config] if name == "train_drafter" else [config]))
  except ValueError as e:
    print(f"{name}: {e}")
"""


def test_commands_refuse_before_they_read_a_model(home, tmp_path):
  """Held-out prompts too, which are asked only later; and leave no file."""
  good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
  for path, prompt in ((good, "1 2>3:"), (bad, "1é2>3:")):
    rows = [{"prompt": p, "answer": ""} for p in ("1 2>3:", prompt)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  policy, workdir = str(home / "policy"), {"workdir": str(tmp_path / "run")}
  given = {  # flags of each command
    "train": workdir,
    "train_drafter": workdir,
    "evaluate": {"model": [policy]},
    "generate": {
      "model": policy,
      "prompts": str(bad),
      "output": str(tmp_path / "responses.jsonl"),
    },
    "check_lossless": {},
    "benchmarks.step": workdir,
  }
  source = lambda path: {"source": "tlt_jax.data.load_prompts", "path": str(path)}
  config = {"policy": policy, "drafter": "eagle2"}
  by_command = {
    name: config | {"prompts": source(good), "held_out": source(bad)} for name in given
  }
  for name in ("benchmarks.step",):  # it asks no others
    by_command[name]["prompts"] = source(bad)
  result = commands.run_text(_COMMANDS, json.dumps(given), json.dumps(by_command))
  assert result.returncode == 0, result.stderr
  refused = f"{bad}, line 2: the tokenizer does not know 'é'"
  said = [line.split("; ")[0] for line in result.stdout.splitlines() if "; " in line]
  assert said == [f"{name}: {refused}" for name in given]
  assert not (tmp_path / "responses.jsonl").exists()


_LONG = """
import sys, types
from experiments import config as config_lib
from experiments import trees
from experiments import evaluate
from experiments import launch
from tlt_jax import prompt_checks

def answer(folder, config, prompts):
  raise ValueError(f"{type(prompts.records).__name__} of {len(prompts.records)}")

prompt_checks._WHOLE = prompt_checks._SOME = 8
evaluate.answer, launch.start = answer, lambda: None
for name, value in (("_MODEL", [sys.argv[1]]), ("_BASELINE", sys.argv[1]), ("_PROMPTS", 9)):
  setattr(evaluate, name, types.SimpleNamespace(value=value))
try:
  evaluate.main(trees.load("countdown:smoke", config_lib.RunConfig))
except ValueError as e:
  print(e)
"""


def test_policies_are_asked_the_same_of_many_prompts(home):
  """More than are checked at once without having been asked for."""
  result = commands.run_text(_LONG, home / "policy")
  assert result.stdout == "list of 9\n", result.stderr


def test_a_tokenizer_of_a_larger_model_is_an_error(home, tmp_path):
  policy = tmp_path / "policy"
  commands.write_policy(policy)
  raw = json.loads((policy / "config.json").read_text())
  (policy / "config.json").write_text(json.dumps(raw | {"vocab_size": 23}))
  with pytest.raises(data.DataError, match="tokens up to 23, the model in .* has 23;"):
    from_config.load_tokenizer(str(policy))
