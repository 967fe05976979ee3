"""Prompt files, the prompt stream, the tokenizer."""

import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from tlt_jax import data
from tlt_jax import tokenization

MESSAGES = [{"role": "user", "content": "1+1?"}]


def without_places(records):
  return [{"prompt": r["prompt"], "answer": r["answer"]} for r in records]


def write_jsonl(path, records):
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return path


def test_jsonl_and_parquet_give_the_same_records(tmp_path):
  """Strings and messages alike, under the file's own field names."""
  rows = [{"q": "a\u2028b", "a": "1"}, {"q": "c", "a": "2"}]
  expected = [{"prompt": "a\u2028b", "answer": "1"}, {"prompt": "c", "answer": "2"}]
  path = tmp_path / "x.jsonl"
  path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
  table = tmp_path / "x.parquet"
  pq.write_table(pa.Table.from_pylist(rows), table)
  for file, places in ((path, ("line 1", "line 3")), (table, ("row 0", "row 1"))):
    found = data.load_prompts(file, "q", "a")
    assert without_places(found) == expected
    assert [r["place"] for r in found] == [f"{file}, {place}" for place in places]

  chat = [{"prompt": MESSAGES, "answer": "2"}]
  assert without_places(data.load_prompts(write_jsonl(path, chat))) == chat
  pq.write_table(pa.Table.from_pylist(chat), table)
  assert without_places(data.load_prompts(table)) == chat
  assert data.load_prompts(path, answer_field=None)[0]["answer"] == ""


@pytest.mark.parametrize(
  "content, message",
  [
    ("", "no records"),
    ('{"prompt": "a", "answer": 1}\n{"prompt', "line 2"),
    ('{"promt": "a", "answer": 1}', "did you mean 'promt'"),
    ('{"prompt": [{"role": "user"}], "answer": 1}', "line 1"),
  ],
)
def test_broken_prompt_files_are_named_with_the_place(tmp_path, content, message):
  """One clear line each."""
  path = tmp_path / "x.jsonl"
  path.write_text(content)
  with pytest.raises(data.DataError, match=message) as e:
    data.load_prompts(path)
  assert "\n" not in str(e.value)


ASKED = [{"role": "system", "content": "Box it."}, {"role": "user", "content": "1+1?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "So 2."}]
VERL = {
  "data_source": "openai/gsm8k",
  "prompt": ASKED,
  "ability": "math",
  "reward_model": {"style": "rule", "ground_truth": "2"},
  "extra_info": {"index": 0, "split": "train", "question": "1+1?", "answer": "#### 3"},
}
PADDED = [message | {"name": None} for message in ASKED]
LAYOUTS = {
  "verl": (VERL, ASKED, "2"),
  "verl, in text": (
    VERL | {k: json.dumps(VERL[k]) for k in ("prompt", "reward_model", "extra_info")},
    *(ASKED, "2"),
  ),
  "DAPO, as processed": (
    VERL | {"prompt": "1+1?", "source_prompt": ASKED, "solution": "2"},
    *("1+1?", "2"),
  ),
  "Archer": ({"prompt": ASKED, "ground_truth": "2", "index": 5}, ASKED, "2"),
  "TRL": ({"prompt": ASKED, "problem": "1+1?", "solution": "$2$"}, ASKED, "$2$"),
  "TRL, plain": ({"prompt": "1+1?", "ground_truth": 2}, "1+1?", 2),
  "TRL, prompt and completion": ({"prompt": "1+1?", "completion": " 2"}, "1+1?", " 2"),
  "TRL, turns": ({"prompt": ASKED, "completion": ANSWERED[-1:]}, ASKED, "So 2."),
  "TRL, messages": ({"messages": ANSWERED}, ASKED, "So 2."),
  "Tulu 3": ({"messages": ASKED, "ground_truth": "2", "dataset": "gsm8k"}, ASKED, "2"),
  "OpenR1": (
    {"problem": "1+1?", "solution": "So 2.", "answer": "2", "messages": ANSWERED},
    *("1+1?", "2"),
  ),
  "MATH": (
    {"problem": "1+1?", "level": "1", "solution": "\\boxed{2}"},
    "1+1?",
    "\\boxed{2}",
  ),
  "AIME": ({"ID": "1", "Problem": "1+1?", "Solution": "So 2.", "Answer": 2}, "1+1?", 2),
  "GSM8K": ({"question": "1+1?", "answer": "1+1\n#### 2"}, "1+1?", "1+1\n#### 2"),
  "OpenRLHF": ({"input": "1+1?", "label": "2"}, "1+1?", "2"),
  "NeMo RL": ({"problem": "1+1?", "expected_answer": "2"}, "1+1?", "2"),
  "one twice": ({"prompt": "1+1?", "answer": "2", "label": "2"}, "1+1?", "2"),
  "padded structs": ({"prompt": PADDED, "answer": "2"}, PADDED, "2"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_other_libraries_need_no_names(tmp_path, name):
  """In both formats; what TRL and verl take for the answer is taken here."""
  record, prompt, answer = LAYOUTS[name]
  path = write_jsonl(tmp_path / "x.jsonl", [record] * 2)
  table = tmp_path / "x.parquet"
  pq.write_table(pa.Table.from_pylist([record] * 2), table)
  for file in (path, table):
    found = without_places(data.load_prompts(file))
    assert found == [{"prompt": prompt, "answer": answer}] * 2


@pytest.mark.parametrize(
  "record, argument, message",
  [
    ({"prompt": "a", "answer": "1", "label": "2"}, "answer_field", "'label' differ"),
    ({"question": "a", "input": "", "answer": "1"}, "prompt_field", "'input' differ"),
    ({"instruction": "a", "input": "b", "output": "1"}, "prompt_field", "differ"),
    ({"prompt": "a"}, "answer_field", "no field 'answer'.*None"),
    ({"prompt": ASKED}, "answer_field", "there are prompt"),
    ({"messages": ASKED}, "answer_field", "there are messages"),
    ({"prompt": "a", "reward_model": {"style": "x"}}, "answer_field", "reward_model.style"),
    ({"text": "a", "answer": "1"}, "prompt_field", "no field 'prompt'; there are text"),
    ({"conversations": [{"from": "human"}], "answer": 1}, "prompt_field", "conversations"),
    ({"messages": ANSWERED[-1:], "answer": "1"}, "prompt_field", "empty list"),
    ({"prompt": [{"role": "user", "content": [1]}], "answer": 1}, "prompt_field", "messag"),
  ],
)
def test_an_unknown_or_ambiguous_layout_says_what_to_name(
  tmp_path, record, argument, message
):
  path = write_jsonl(tmp_path / "x.jsonl", [record])
  with pytest.raises(data.DataError, match=message) as e:
    data.load_prompts(path)
  assert e.value.argument == argument and f"{path}, line 1" in str(e.value)


@pytest.mark.parametrize(
  "name, value",
  [
    ("reward_model.ground_truth", "2"),
    ("extra_info.index", 0),
    ("prompt.0.content", "Box it."),
    ("prompt.-1.role", "user"),
    ("a.b", 1),
    ("a.b.c", 2),
    ("json.tests.1", [3]),
  ],
)
def test_nested_fields_have_dotted_names(tmp_path, name, value):
  """A field whose own name has dots too; indices; JSON in texts."""
  record = VERL | {"a.b": 1, "a": {"b.c": 2}, "json": '{"tests": [0, [3]]}'}
  path = write_jsonl(tmp_path / "x.jsonl", [record])
  assert data.load_prompts(path, answer_field=name)[0]["answer"] == value
  with pytest.raises(data.DataError, match="no field 'reward_model.truth'.*ground_truth"):
    data.load_prompts(path, answer_field="reward_model.truth")


@pytest.mark.parametrize(
  "value, expected",
  [
    (decimal.Decimal("72.50"), "72.50"),
    (decimal.Decimal("12345678901234567890"), "12345678901234567890"),
    (2**63 - 1, 2**63 - 1),
    (np.float32(0.5), 0.5),
    (np.int8(7), 7),
    (datetime.date(2024, 2, 29), "2024-02-29"),
    (datetime.datetime(2024, 2, 29, 12), "2024-02-29T12:00:00"),
    (b"72", "72"),
    ([decimal.Decimal("1.5"), None], ["1.5", None]),
    ({"tests": [["1", "2"]], "n": 1}, {"tests": [["1", "2"]], "n": 1}),
    (True, True),
    (None, None),
  ],
)
def test_parquet_types_become_those_of_json(tmp_path, value, expected):
  path = tmp_path / "x.parquet"
  pq.write_table(pa.table({"prompt": ["a"], "answer": pa.array([value])}), path)
  found = data.load_prompts(path)[0]["answer"]
  assert found == expected and type(found) is type(expected)
  json.dumps(found)


def test_a_share_of_a_file_is_held_out_by_content(tmp_path):
  """In whatever order: no question is in both, if the system message differs too."""
  rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(200)]
  rows += [{"prompt": f" {i}  + 1?\n", "answer": str(i + 1)} for i in range(200)]
  rows += [
    {"prompt": [ASKED[0], {"role": "user", "content": f"{i} + 1?"}], "answer": "0"}
    for i in range(200)
  ]

  def parts(rows, **options):
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    return [
      data.load_prompts(path, split=split, **options) for split in ("train", "held_out")
    ]

  def numbers(records):
    texts = (
      r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][-1]["content"]
      for r in records
    )
    return {int(text.split()[0]) for text in texts}

  train, held_out = parts(rows)
  assert len(held_out) == 3 * 10 and len(train) == 3 * 190
  assert numbers(held_out).isdisjoint(numbers(train))
  again = parts(rows[::-1])
  assert numbers(again[1]) == numbers(held_out)
  assert numbers(parts(rows, share=0.1)[1]) > numbers(held_out)
  assert [len(x) for x in parts(rows, size=5)] == [5, 5]
  assert [len(x) for x in parts(rows[:2])] == [1, 1]
  with pytest.raises(data.DataError, match="none to train on") as e:
    parts(rows[:1])
  assert e.value.argument == "share"


def source(size):
  return [{"prompt": str(i), "answer": ""} for i in range(size)]


def take(iterator, count):
  return [[r["prompt"] for r in next(iterator)] for _ in range(count)]


def test_every_epoch_holds_each_prompt_once_in_its_own_order():
  """Also where batches straddle epochs, or one batch holds several."""
  for batch in (1, 3, 5, 12):
    flat = sum(take(data.prompt_iterator(source(5), batch, seed=1), 60 // batch + 1), [])
    epochs = [flat[i : i + 5] for i in range(0, 60, 5)]
    assert all(sorted(e) == ["0", "1", "2", "3", "4"] for e in epochs)
    assert len({tuple(e) for e in epochs}) > 1


def test_the_prompt_stream_is_deterministic_and_resumes_exactly():
  """The state survives JSON and says what comes next, whatever was read ahead."""
  iterator = data.prompt_iterator(source(50), 4, seed=7)
  start = take(iterator, 5)
  state = json.loads(json.dumps(iterator.get_state()))
  rest = take(iterator, 20)
  assert take(data.prompt_iterator(source(50), 4, seed=7), 5) == start
  assert take(data.prompt_iterator(source(50), 4, seed=8), 5) != start
  resumed = data.prompt_iterator(source(50), 4, seed=7)
  resumed.set_state(state)
  assert take(resumed, 20) == rest
  iterator.set_state(state)
  assert take(iterator, 20) == rest


def lettered(letter, size):
  return [{"prompt": f"{letter}{i}", "answer": ""} for i in range(size)]


def test_a_mixture_draws_by_weight_and_resumes_exactly():
  """Whatever the sizes: in each epoch of a source every record comes once."""

  def make(seed):
    mixed = data.Mixture([lettered("a", 30), lettered("b", 5)], [3, 1])
    return data.prompt_iterator(mixed, 8, seed)

  iterator = make(3)
  start = take(iterator, 4)
  state = json.loads(json.dumps(iterator.get_state()))
  rest = take(iterator, 6)
  resumed = make(3)
  resumed.set_state(state)
  assert take(resumed, 6) == rest
  drawn = sum(start + rest, [])
  of_a, of_b = ([p for p in drawn if p[0] == letter] for letter in "ab")
  assert len(of_a) == 60 and len(of_b) == 20
  assert all(len(set(of_a[i : i + 30])) == 30 for i in (0, 30))
  assert all(len(set(of_b[i : i + 5])) == 5 for i in range(0, 20, 5))
  assert of_a[:30] != of_a[30:]
  assert take(make(4), 4) != start


def test_sources_are_mixed_and_sets_named_in_a_config(tmp_path):
  """As texts; `size` is the most of each."""
  a = write_jsonl(tmp_path / "a.jsonl", lettered("a", 4))
  b = write_jsonl(tmp_path / "b.jsonl", lettered("b", 2))
  load = "tlt_jax.data.load_prompts(path={!r})".format
  mixed = data.mixture(f"0.7 * {load(str(a))} + 0.3 * {load(str(b))}")
  assert [*map(len, mixed.parts)] == [4, 2] and mixed.weights == [0.7, 0.3]
  sets = data.named_sets(f"first={load(str(a))}, second={load(str(b))}", size=3)
  assert [r["set"] for r in sets] == ["first"] * 3 + ["second"] * 2
  for wrong in ("a b", "tlt_jax.data.load_promts(path='a')"):
    with pytest.raises(data.DataError):
      data.mixture(wrong)


def test_records_are_filtered_by_a_function_or_by_length(tmp_path, monkeypatch):
  """The function sees all fields; one that fails names the record."""
  (tmp_path / "mine_filter.py").write_text("def hard(r):\n  return r['level'] > 3\n")
  monkeypatch.syspath_prepend(tmp_path)
  rows = [{"prompt": "x" * n, "answer": "", "level": n} for n in range(1, 7)]
  path = write_jsonl(tmp_path / "x.jsonl", rows)

  def lengths(**filters):
    return [len(r["prompt"]) for r in data.load_prompts(path, **filters)]

  assert lengths(keep="mine_filter.hard") == [4, 5, 6]
  assert lengths(longest=4) == [1, 2, 3, 4]
  assert lengths(keep="mine_filter.hard", longest=5, size=1) == [4]
  with pytest.raises(data.DataError, match="did you mean 'hard'"):
    data.load_prompts(path, keep="mine_filter.hrd")


CHARACTERS = "0123456789+=?!: \nus"
TEMPLATE = (
  "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
  "{% endif %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}<say>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A character-level tokenizer that stops at the newline, with a chat template."""
  folder = tmp_path_factory.mktemp("tokenizer")
  vocabulary = {c: i for i, c in enumerate(["<pad>", "<say>", *CHARACTERS])}
  model = tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  tokenizer.decoder = tokenizers.decoders.Fuse()
  tokenizer.add_special_tokens(["<say>"])
  tokenizer.save(str(folder / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "\n",
    "pad_token": "<pad>",
    "chat_template": TEMPLATE,
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  (folder / "generation_config.json").write_text('{"eos_token_id": [1, 18]}')
  return folder


def test_text_round_trips_without_markup_but_with_a_stop_character(folder):
  """Padding and chat markup go; the newline that ends a response stays."""
  tokenizer = tokenization.Tokenizer.load(folder)
  ids = tokenizer.encode("1+1=2!\n")
  assert ids.dtype == np.int32 and ids.shape == (7,)
  assert tokenizer.decode([1, *ids, 0, 0]) == "1+1=2!\n"
  assert tokenizer.decode([]) == ""
  assert tokenizer.vocab_size == 21
  assert tokenizer.stop_tokens == (1, 18)


def test_a_chat_goes_through_the_template(folder):
  """Its markup becomes single tokens, and the assistant's turn is open."""
  tokenizer = tokenization.Tokenizer.load(folder)
  asked = tokenizer.encode(MESSAGES)
  assert asked[-1] == 1
  assert tokenizer.decode(asked) == "u:1+1?\n"
  for chat in (True, None):
    np.testing.assert_array_equal(tokenizer.encode("1+1?", chat=chat), asked)
  with_system = tokenizer.encode(MESSAGES, system="2+2")
  assert tokenizer.decode(with_system) == "s:2+2\nu:1+1?\n"
  own = [{"role": "system", "content": "3"}, *MESSAGES]
  assert tokenizer.decode(tokenizer.encode(own, system="2")) == "s:3\nu:1+1?\n"


def test_what_no_template_takes_is_an_error(folder, tmp_path):
  with pytest.raises(data.DataError, match="no tools"):
    tokenization.Tokenizer.load(folder).encode([{"role": "tool", "content": "1"}])
  with pytest.raises(data.DataError, match="tokenizer.json"):
    tokenization.Tokenizer.load(tmp_path)
  (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
  config = {"tokenizer_class": "PreTrainedTokenizerFast"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  plain = tokenization.Tokenizer.load(tmp_path)
  assert plain.stop_tokens == ()
  with pytest.raises(data.DataError, match="no chat template"):
    plain.encode(MESSAGES)
  assert plain.text("1+1?", chat=None) == "1+1?"


def test_a_source_is_called_by_its_dotted_name(tmp_path):
  """With its options; `size` asks for the first so many records, were there enough."""
  rows = [{"q": f"{i}?", "a": str(i)} for i in range(3)]
  path = write_jsonl(tmp_path / "x.jsonl", rows)
  spec = dict(
    source="tlt_jax.data.load_prompts", path=path, prompt_field="q", answer_field="a"
  )
  first = {"prompt": "0?", "answer": "0", "place": f"{path}, line 1"}
  assert data.source(**spec)[0] == first and len(data.source(**spec)) == 3
  assert data.source(**spec, size=1) == [first]
  assert data.source(**spec, size=10) == data.source(**spec)
  with pytest.raises(data.DataError, match="pth"):
    data.source(source="tlt_jax.data.load_prompts", pth=path)


def test_items_are_made_ahead_in_the_same_order():
  """Nothing before the first is asked for; what fails is raised."""
  made = []
  items = data.prefetch(made.append(i) or i for i in range(4))
  assert made == []
  assert next(items) == 0
  assert list(items) == [1, 2, 3] == made[1:]
  failing = data.prefetch(1 // i for i in (1, 0))
  with pytest.raises(ZeroDivisionError):
    list(failing)


