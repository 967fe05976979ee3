"""The tokenizer of a folder: as tokenizer.json says, with every stop, and the same prompts
on every day."""

import datetime
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers

from tests import tiny
from tlt_jax import chat_template
from tlt_jax import data
from tlt_jax import prompt_checks
from tlt_jax import tokenization
from tlt_jax.models import drafter
from tlt_jax.models import hf
from tlt_jax.models import layers
from tlt_jax.models import target

CORPUS = ["In the year 1987 and in 2024 there were 123 456 boxes. It's 12345.\n"] * 20
TEXTS = (
  "In 2024 there were 123 boxes.",
  " two  spaces\tand\n\na tab ",
  "é è ñ 你好 \U0001f600",
  "the tokens <eos> and <turn>, and a prefix",
  "",
)
# What model folders say of their classes, whatever their tokenizer.json does.
CLASSES = (
  ("Qwen2Tokenizer", "Qwen2ForCausalLM", "qwen2"),
  ("Qwen2TokenizerFast", "Qwen3ForCausalLM", "qwen3"),
  ("PreTrainedTokenizerFast", "Qwen2ForCausalLM", "qwen2"),
  ("LlamaTokenizer", "LlamaForCausalLM", "llama"),
  ("LlamaTokenizerFast", "LlamaForCausalLM", "llama"),
  (None, "LlamaForCausalLM", "llama"),
)


def _bpe(**parts) -> tokenizers.Tokenizer:
  inner = tokenizers.Tokenizer(models.BPE())
  for name, part in parts.items():
    setattr(inner, name, part)
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  inner.train_from_iterator(
    CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
  )
  return inner


def _by_words(regex: str) -> tokenizers.Tokenizer:
  split = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
  level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return _bpe(
    pre_tokenizer=pre_tokenizers.Sequence([split, level]), decoder=decoders.ByteLevel()
  )


def _sentencepiece(prepend: bool) -> tokenizers.Tokenizer:
  """Spaces are U+2581, with a byte for what it does not know; perhaps one in front."""
  special = ["<unk>"] + [f"<0x{i:02X}>" for i in range(256)]
  inner = tokenizers.Tokenizer(
    models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
  )
  inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
  trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
  inner.train_from_iterator(CORPUS, trainer)
  inner.pre_tokenizer = None
  steps = [normalizers.Prepend("\u2581")] * prepend + [normalizers.Replace(" ", "\u2581")]
  inner.normalizer = normalizers.Sequence(steps)
  inner.decoder = decoders.Sequence(
    [
      decoders.Replace("\u2581", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      *[decoders.Strip(" ", 1, 0)] * prepend,
    ]
  )
  return inner


def _unigram() -> tokenizers.Tokenizer:
  inner = tokenizers.Tokenizer(models.Unigram())
  inner.normalizer = normalizers.NFKC()
  inner.pre_tokenizer = pre_tokenizers.Metaspace()
  inner.decoder = decoders.Metaspace()
  inner.train_from_iterator(
    CORPUS,
    trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>"),
  )
  return inner


def _lower() -> tokenizers.Tokenizer:
  return _bpe(
    normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
    decoder=decoders.ByteLevel(),
  )


def _cut_short() -> tokenizers.Tokenizer:
  """As left by a script that trained on short texts, with a template of special tokens."""
  inner = _by_words(r"\p{N}{1,3}|\S+|\s+")
  inner.add_special_tokens(["<s>"])
  inner.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
  )
  return inner


KINDS = {
  "qwen2's words": lambda: _by_words(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+(?!\S)|\s+"),
  "three digits": lambda: _by_words(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"),
  "digits right to left": lambda: _by_words(r"\d{1,3}(?=(?:\d{3})*\b)|\s?\D+"),
  "gpt-2's": lambda: _bpe(
    pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
    decoder=decoders.ByteLevel(),
  ),
  "a space in front": lambda: _bpe(
    pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
    decoder=decoders.ByteLevel(),
  ),
  "spaces as U+2581": lambda: _sentencepiece(prepend=False),
  "U+2581 in front": lambda: _sentencepiece(prepend=True),
  "unigram": _unigram,
  "lower case": _lower,
  "a token in front": _cut_short,
}


def write(folder, inner, **files) -> None:
  inner.save(str(folder / "tokenizer.json"))
  for name, content in files.items():
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name, architecture, kind", CLASSES)
@pytest.mark.parametrize("words", KINDS)
def test_tokens_are_those_of_tokenizer_json(words, name, architecture, kind, tmp_path):
  """Whatever class the other files name; what comes back is that file's text, too.

  Those that it puts in front of a text are in front of a prompt, once.
  """
  inner = KINDS[words]()
  inner.add_special_tokens(["<eos>"])
  inner.add_tokens(["<turn>"])
  named = {"tokenizer_class": name} if name else {}
  write(
    tmp_path,
    inner,
    tokenizer_config={**named, "eos_token": "<eos>", "add_prefix_space": True},
    config={"architectures": [architecture], "model_type": kind},
  )
  found = tokenization.Tokenizer.load(tmp_path)
  for text in TEXTS:
    ids = inner.encode(text).ids
    assert found.encode(text).tolist() == ids
    added = inner.get_added_tokens_decoder()
    shown = [i for i in ids if i not in added or not added[i].special]
    assert found.decode(ids) == inner.decode(shown, skip_special_tokens=False)
  each = [inner.encode(text, add_special_tokens=False).ids for text in TEXTS]
  assert found.lengths(TEXTS) == [len(ids) for ids in each]
  first = inner.decode(inner.encode("").ids[:1], skip_special_tokens=False)
  assert found.encode(first + "In").tolist() == inner.encode("In").ids


def test_tokens_in_front_count_for_the_longest_prompt(tmp_path):
  write(tmp_path, _cut_short())
  rules = prompt_checks.Rules(tokenization.Tokenizer.load(tmp_path))
  records = [{"prompt": CORPUS[0], "answer": "1"}]
  _, longest = prompt_checks.measured(records, "these", rules)
  assert longest == len(rules.tokenizer.encode(CORPUS[0]))


def test_a_limit_in_the_file_cuts_no_prompt(tmp_path):
  inner = KINDS["gpt-2's"]()
  ids = inner.encode(CORPUS[0]).ids
  inner.enable_truncation(4)
  inner.enable_padding(length=100)
  write(tmp_path, inner)
  found = tokenization.Tokenizer.load(tmp_path)
  assert found.encode(CORPUS[0]).tolist() == ids and len(ids) > 4
  assert found.lengths([CORPUS[0], "In"]) == [len(ids), 1]


def test_without_tokenizer_json_the_log_says_what_is_used(tmp_path, caplog):
  """And a run writes one, so that the next program reads the same."""
  inner = KINDS["gpt-2's"]()
  inner.add_special_tokens(["<|endoftext|>"])
  inner.model.save(str(tmp_path))
  config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
  found = tokenization.Tokenizer.load(tmp_path)
  assert "no tokenizer.json" in caplog.text and "vocab.json and merges.txt" in caplog.text
  text = "In 2024 there were 123 boxes."
  assert found.encode(text).tolist() == inner.encode(text).ids
  (tmp_path / "out").mkdir()
  found.save(tmp_path / "out")
  again = tokenization.Tokenizer.load(tmp_path / "out")
  assert again.encode(text).tolist() == inner.encode(text).ids
  assert again.stop_tokens == found.stop_tokens != ()


def test_special_tokens_that_do_not_exist_are_said(tmp_path, caplog):
  """They are text, as tokenizer.json has it."""
  inner = KINDS["gpt-2's"]()
  write(tmp_path, inner, tokenizer_config={"eos_token": "<|im_end|>"})
  found = tokenization.Tokenizer.load(tmp_path)
  assert "'<|im_end|>', which it does not have" in caplog.text
  assert found.encode("<|im_end|>").tolist() == inner.encode("<|im_end|>").ids
  assert found.stop_tokens == ()


# --- what ends a response


@pytest.fixture
def ends(tmp_path):
  """A folder whose tokenizer has the tokens <a> to <e>; returns their ids by letter."""
  inner = KINDS["gpt-2's"]()
  inner.add_special_tokens([f"<{c}>" for c in "abcde"])
  write(tmp_path, inner)
  return tmp_path, {c: inner.token_to_id(f"<{c}>") for c in "abcde"}


PLACES = {  # file, its content by the ids, and the letters that stop
  "generation_config.json": ("generation_config", lambda i: {"eos_token_id": i["a"]}, "a"),
  "several": ("generation_config", lambda i: {"eos_token_id": [i["a"], i["b"]]}, "ab"),
  "config.json": ("config", lambda i: {"eos_token_id": i["c"]}, "c"),
  "several there": ("config", lambda i: {"eos_token_id": [i["c"], i["d"]]}, "cd"),
  "a text model inside": (
    "config",
    lambda i: {"text_config": {"eos_token_id": i["c"]}},
    "c",
  ),
  "tokenizer_config.json": ("tokenizer_config", lambda i: {"eos_token": "<d>"}, "d"),
  "with properties": (
    "tokenizer_config",
    lambda i: {"eos_token": {"content": "<d>", "lstrip": False}},
    "d",
  ),
  "special_tokens_map.json": ("special_tokens_map", lambda i: {"eos_token": "<e>"}, "e"),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_names_an_end_counts(place, ends):
  folder, ids = ends
  file, content, stops = PLACES[place]
  (folder / f"{file}.json").write_text(json.dumps(content(ids)))
  found = tokenization.Tokenizer.load(folder)
  assert found.stop_tokens == tuple(ids[c] for c in stops)
  for c in stops:
    assert f"'<{c}>' ({ids[c]}; {file}.json)" in found.describe_stops()


def test_all_places_are_united_and_what_is_written_keeps_them(ends, tmp_path):
  folder, ids = ends
  contents = {}
  for file, content, _ in PLACES.values():
    contents.setdefault(file, {}).update(content(ids))
  contents["generation_config"]["temperature"] = 0.6
  for file, content in contents.items():
    (folder / f"{file}.json").write_text(json.dumps(content))
  found = tokenization.Tokenizer.load(folder)
  assert found.stop_tokens == tuple(ids.values())
  out = tmp_path / "out"
  out.mkdir()
  (out / "config.json").write_text('{"eos_token_id": null, "hidden_size": 8}')
  found.save(out)
  for name in ("config.json", "generation_config.json"):
    assert json.loads((out / name).read_text())["eos_token_id"] == [*ids.values()]
  assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6
  assert json.loads((out / "config.json").read_text())["hidden_size"] == 8
  assert tokenization.Tokenizer.load(out).stop_tokens == found.stop_tokens


def test_a_tokenizer_without_an_end_says_so(ends):
  folder, _ = ends
  found = tokenization.Tokenizer.load(folder)
  assert found.stop_tokens == ()
  assert "no token ends a response" in found.describe_stops()


@pytest.mark.parametrize("value", ["<a>", -1, [1.5], True, {"a": 1}, [[1]]])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_ends_that_are_no_ids_are_refused(file, value, ends):
  folder, _ = ends
  (folder / f"{file}.json").write_text(json.dumps({"eos_token_id": value}))
  with pytest.raises(data.DataError, match=f"{file}.json: eos_token_id="):
    tokenization.Tokenizer.load(folder)


def test_an_end_that_is_no_token_is_ignored_aloud(ends, caplog):
  folder, _ = ends
  (folder / "config.json").write_text('{"eos_token_id": 128001}')
  assert tokenization.Tokenizer.load(folder).stop_tokens == ()
  assert "128001" in caplog.text


# --- chat templates

ASKED = [{"role": "user", "content": "What is <b>1 + 1</b>?\n Say 'two'."}]
REWORDING = {
  "upper case": "{{ messages[0].content | upper }}",
  "escapes": "{{ messages[0].content | escape }}",
  "JSON": "{{ messages[0].content | tojson }}",
  "words": "{% for w in messages[0].content.split() %}{{ w }} {% endfor %}",
  "replaced": "{{ messages[0].content | replace('Say', 'Write') }}",
  "lines": "{{ messages[0].content.split('\n') | join('\r\n') }}",
  "no tags": "{{ messages[0].content | striptags }}",
  "title": "{{ messages[0].content | title }}",
  "cut": "{{ messages[0].content[:12] }}",
  "reversed": "{{ messages[0].content | reverse }}",
  "indented": "{{ messages[0].content | indent(2, true) }}",
}


def chatting(source, today=None) -> tokenization.Tokenizer:
  inner = KINDS["gpt-2's"]()
  return tokenization.Tokenizer(inner, template=chat_template.Template(source, today))


@pytest.mark.parametrize("source", REWORDING.values(), ids=REWORDING)
def test_templates_may_reword_what_the_user_says(source):
  assert chatting(source).text(ASKED)


@pytest.mark.parametrize(
  "source",
  [
    "{{ messages[0].role }}",
    "Hello",
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
    "{{ messages[0].text }}",
  ],
)
def test_templates_that_leave_it_out_are_refused(source):
  with pytest.raises(data.DataError, match="leaves out"):
    chatting(source).text(ASKED)


def test_templates_see_the_day_that_they_are_given():
  source = "{{ strftime_now('%d %b %Y, %H:%M') }} {{ messages[0].content }}"
  day = datetime.date(2024, 7, 26)
  tokenizer = chatting(source, day)
  assert tokenizer.text(ASKED).startswith("26 Jul 2024, 00:00 What")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_run_keeps_the_day_only_if_the_template_asks(file, tmp_path):
  (tmp_path / file).write_text('{"chat_template": "{{ messages[0].content }}"}')
  assert not tokenization.reads_date(tmp_path)
  (tmp_path / file).write_text('{"chat_template": "{{ strftime_now(1) }}"}')
  assert tokenization.reads_date(tmp_path)


@pytest.mark.parametrize(
  "source, text",
  [
    ("{%- if true %}\n  a\n{%- endif %}{{ messages[0].content }}", "  aHi"),
    ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Hi"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
    ("{{ {'a': '<é>'} | tojson }} {{ messages[0].content }}", '{"a": "<é>"} Hi'),
    ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi"),
    ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}{{ messages[0].content }}",
     "2Hi"),
    ("{% if tools %}t{% endif %}{% if add_generation_prompt %}g{% endif %}"
     "{{ messages[0]['content'] | trim }}", "gHi"),
  ],
)  # fmt: skip
def test_templates_run_as_in_transformers(source, text):
  template = chat_template.Template(source)
  messages = [{"role": "user", "content": "Hi"}]
  assert template.render(messages, {"bos_token": "<s>"}) == text
  from transformers.utils import chat_template_utils

  theirs, _ = chat_template_utils.render_jinja_template(
    [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
  )
  assert theirs == [text]


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nothing %}"])
def test_a_damaged_template_is_an_error(source, tmp_path):
  write(tmp_path, KINDS["gpt-2's"](), tokenizer_config={"chat_template": source})
  with pytest.raises(data.DataError, match="template is damaged"):
    tokenization.Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
  "files",
  [
    {"tokenizer_config": {"chat_template": "A {{ messages[0].content }}"}},
    {"chat_template": {"chat_template": "A {{ messages[0].content }}"}},
    {
      "tokenizer_config": {
        "chat_template": [
          {"name": "tool_use", "template": "B"},
          {"name": "default", "template": "A {{ messages[0].content }}"},
        ]
      }
    },
  ],
)
def test_templates_are_found_where_folders_have_them(files, tmp_path):
  write(tmp_path, KINDS["gpt-2's"](), **files)
  assert tokenization.Tokenizer.load(tmp_path).text("x", chat=True) == "A x"
  (tmp_path / "chat_template.jinja").write_text("C {{ messages[0].content }}")
  assert tokenization.Tokenizer.load(tmp_path).text("x", chat=True) == "C x"


# --- rows of the model that are no token


def policy(folder, tokens=((0, 5), (9, 20)), rows=28):
  """A random model of 28 rows, and a tokenizer that has only some of them."""
  model = tiny.CONFIG.__class__(**{**vars(tiny.CONFIG), "vocab_size": rows})
  ids = [i for start, end in tokens for i in range(start, end)]
  vocabulary = {chr(97 + i): i for i in ids}
  inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=chr(97 + ids[0])))
  hf.save(folder, model, target.init_params(model, jax.random.key(0)))
  write(folder, inner)
  return ids


@pytest.mark.parametrize(
  "tokens, unused",
  [
    (((0, 28),), ()),
    (((0, 20),), ((20, 28),)),
    (((0, 5), (9, 20)), ((5, 9), (20, 28))),
    (((1, 28),), ((0, 1),)),
    (((0, 40),), ()),  # too many: loading the tokenizer says so
  ],
)
def test_rows_beyond_the_tokenizer_are_known(tokens, unused, tmp_path):
  policy(tmp_path, tokens)
  assert hf.load_config(tmp_path).unused_rows == unused


def test_rows_beyond_the_tokenizer_are_never_likely(tmp_path):
  """Neither to the policy nor to its drafters; the others keep their logits."""
  ids = np.array(policy(tmp_path))
  model, params = hf.load(tmp_path)
  features = jax.random.normal(jax.random.key(1), (3, model.width))

  def logits(config):
    return target.Target(config).apply(
      {"params": params}, features, method=target.Target.logits
    )

  masked, all_rows = logits(model), logits(tiny.CONFIG.__class__(
    **{**vars(model), "unused_rows": ()}
  ))  # fmt: skip
  np.testing.assert_array_equal(masked[:, ids], all_rows[:, ids])
  p = jax.nn.softmax(masked)
  unused = np.setdiff1d(np.arange(28), ids)
  assert not np.any(p[:, unused]) and np.all(all_rows[:, unused] > -10)
  entropy = -jnp.sum(p * jax.nn.log_softmax(masked), -1)
  assert np.all(np.isfinite(entropy))
  some = np.array([2, 6, 10, 25])
  part = layers.mask_unused(all_rows[:, some], model, some)
  np.testing.assert_array_equal(part, masked[:, some])
  for kind in ("eagle2", "eagle3"):
    for vocab in ((), tuple(some.tolist())):
      of = drafter.of_target(model, kind, vocab=vocab)
      own = drafter.init_params(of, jax.random.key(2))
      module = drafter.Drafter(of)
      head = module.apply({"params": own}, params, method=drafter.Drafter.output_head)
      found = module.apply({"params": own}, head, features, method=drafter.Drafter.logits)
      likely = np.isin(of.target_ids, ids)
      assert np.all((found > -10) == likely)
