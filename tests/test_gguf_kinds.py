"""GGUF files of all kinds: quantizations by formulas, and SentencePiece's tokenizer."""

import itertools
import os
import random

import gguf
import numpy as np
import pytest
import safetensors

from tests import test_gguf as files
from tlt_jax import tokenization
from tlt_jax.integrations import gguf as gguf_lib
from tlt_jax.integrations import gguf_tokenizer
from tlt_jax.models import hf

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPECIAL = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN}
UNKNOWN_ID = 3
PIECES = "a b c e t h n = - . \n".split(" ")
# --- quantizations, as ggml-quants.c defines them: blocks u8[B size] -> f64[B numbers]


def half(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(np.float16).astype(np.float64)


def signed(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(np.int8).astype(int)


def nibbles(x: np.ndarray, run: int) -> np.ndarray:
  """Of every `run` bytes first the low 4 bits, then the high ones."""
  x = x.reshape(len(x), -1, 1, run).astype(int)
  return np.concatenate([x & 15, x >> 4], 2).reshape(len(x), -1)


def crumbs(x: np.ndarray) -> np.ndarray:
  """Of every 32 bytes first the lowest 2 bits, and so on."""
  x = x.reshape(len(x), -1, 1, 32).astype(int)
  return (x >> 2 * np.arange(4)[:, None] & 3).reshape(len(x), -1)


def planes(x: np.ndarray) -> np.ndarray:
  """Of 32 bytes first the lowest bits, and so on."""
  return (x[:, None].astype(int) >> np.arange(8)[:, None] & 1).reshape(len(x), -1)


def high_bits(x: np.ndarray) -> np.ndarray:
  return np.unpackbits(x, axis=1, bitorder="little").astype(int) << 4


def scaled(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Each scale is of equally many numbers that follow each other."""
  return numbers * np.repeat(scales, numbers.shape[1] // scales.shape[1], 1)


def scales_and_minima(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Eight and eight numbers of 6 bits in 12 bytes."""
  first, second, both = np.split(s.astype(int), 3, 1)
  return (
    np.concatenate([first & 63, both & 15 | first >> 6 << 4], 1),
    np.concatenate([second & 63, both >> 4 | second >> 6 << 4], 1),
  )


def q2_k(b: np.ndarray) -> np.ndarray:
  s, numbers = b[:, :16].astype(int), crumbs(b[:, 16:80])
  ones = np.ones_like(numbers)
  d, least = half(b[:, 80:82]), half(b[:, 82:])
  return scaled(numbers, d * (s & 15)) - scaled(ones, least * (s >> 4))


def q3_k(b: np.ndarray) -> np.ndarray:
  s = b[:, 96:108].astype(int)
  low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], 1)
  high = np.concatenate([s[:, 8:] >> 2 * i & 3 for i in range(4)], 1)
  numbers = crumbs(b[:, 32:96]) + 4 * planes(b[:, :32]) - 4
  return scaled(numbers, half(b[:, 108:]) * ((low | high << 4) - 32))


def q4_k(b: np.ndarray) -> np.ndarray:
  return _with_minima(b, nibbles(b[:, 16:], 32))


def q5_k(b: np.ndarray) -> np.ndarray:
  return _with_minima(b, nibbles(b[:, 48:], 32) + 16 * planes(b[:, 16:48]))


def _with_minima(b: np.ndarray, numbers: np.ndarray) -> np.ndarray:
  scales, minima = scales_and_minima(b[:, 4:16])
  d, least = half(b[:, :2]), half(b[:, 2:4])
  return scaled(numbers, d * scales) - scaled(np.ones_like(numbers), least * minima)


def q6_k(b: np.ndarray) -> np.ndarray:
  numbers = (nibbles(b[:, :128], 64) | crumbs(b[:, 128:192]) << 4) - 32
  return scaled(numbers, half(b[:, 208:]) * signed(b[:, 192:208]))


def q4_0(b: np.ndarray) -> np.ndarray:
  return half(b[:, :2]) * (nibbles(b[:, 2:], 16) - 8)


def q4_1(b: np.ndarray) -> np.ndarray:
  return half(b[:, :2]) * nibbles(b[:, 4:], 16) + half(b[:, 2:4])


def q5_0(b: np.ndarray) -> np.ndarray:
  return half(b[:, :2]) * ((nibbles(b[:, 6:], 16) | high_bits(b[:, 2:6])) - 16)


def q5_1(b: np.ndarray) -> np.ndarray:
  numbers = nibbles(b[:, 8:], 16) | high_bits(b[:, 4:8])
  return half(b[:, :2]) * numbers + half(b[:, 2:4])


def q8_0(b: np.ndarray) -> np.ndarray:
  return half(b[:, :2]) * signed(b[:, 2:])


def _binary(b: np.ndarray, fraction: int, bias: int) -> np.ndarray:
  """Sign, exponent, fraction; without infinities."""
  x = np.ascontiguousarray(b).view(np.uint16).astype(int)
  exponent = (x & 0x7FFF) >> fraction
  mantissa = (x & (1 << fraction) - 1) / 2.0**fraction + (exponent > 0)
  return (1 - 2 * (x >> 15)) * mantissa * 2.0 ** (np.maximum(exponent, 1) - bias)


def f16(b: np.ndarray) -> np.ndarray:
  return _binary(b, 10, 15)


def bf16(b: np.ndarray) -> np.ndarray:
  return _binary(b, 7, 127)


KINDS = {  # formula, and where a block has numbers of 16 bits
  "Q4_K": (q4_k, [0, 2]),
  "Q5_K": (q5_k, [0, 2]),
  "Q6_K": (q6_k, [208]),
  "Q2_K": (q2_k, [80, 82]),
  "Q3_K": (q3_k, [108]),
  "Q4_0": (q4_0, [0]),
  "Q4_1": (q4_1, [0, 2]),
  "Q5_0": (q5_0, [0]),
  "Q8_0": (q8_0, [0]),
  "Q5_1": (q5_1, [0, 2]),
  "F16": (f16, [0]),
  "BF16": (bf16, [0]),
}


def number_type(kind: str) -> gguf.GGMLQuantizationType:
  return gguf.GGMLQuantizationType[kind]


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
  """Any bits, but scales that are finite."""
  rng, (_, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[number_type(kind)]
  blocks = rng.integers(0, 256, (count, size), np.uint8)
  for at in KINDS[kind][1]:
    scales = rng.normal(size=(count, 1)).astype(np.float16)
    blocks[:, at : at + 2] = scales.view(np.uint8)
  return blocks


def by_formula(kind: str, blocks: np.ndarray) -> np.ndarray:
  """Exact in float64 and then rounded once, as float32 does, whose products are exact."""
  return KINDS[kind][0](blocks).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_quantizations_are_as_llama_cpp_defines_them(kind):
  blocks = random_blocks(kind, 500)
  found = gguf.dequantize(blocks, number_type(kind))
  np.testing.assert_array_equal(found, by_formula(kind, blocks))


# --- whole files


NAMES = {  # Hugging Face's
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
  "attn_norm.weight": "input_layernorm.weight",
  "attn_q.weight": "self_attn.q_proj.weight",
  "attn_k.weight": "self_attn.k_proj.weight",
  "attn_v.weight": "self_attn.v_proj.weight",
  "attn_q.bias": "self_attn.q_proj.bias",
  "attn_k.bias": "self_attn.k_proj.bias",
  "attn_v.bias": "self_attn.v_proj.bias",
  "attn_q_norm.weight": "self_attn.q_norm.weight",
  "attn_k_norm.weight": "self_attn.k_norm.weight",
  "attn_output.weight": "self_attn.o_proj.weight",
  "ffn_norm.weight": "post_attention_layernorm.weight",
  "ffn_gate.weight": "mlp.gate_proj.weight",
  "ffn_up.weight": "mlp.up_proj.weight",
  "ffn_down.weight": "mlp.down_proj.weight",
}
OF_GEMMA = {
  "post_attention_norm.weight": "post_attention_layernorm.weight",
  "ffn_norm.weight": "pre_feedforward_layernorm.weight",
  "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def hf_name(name: str, architecture: str) -> str:
  names = NAMES | (OF_GEMMA if architecture == "gemma3" else {})
  block, i, rest = name.split(".", 2) if name.startswith("blk.") else ("", "", name)
  return f"model.layers.{i}.{names[rest]}" if block else names[rest]


def as_transformers_has_it(name: str, x: np.ndarray, architecture: str, head_dim: int):
  """A tensor, or rows of whole heads, by Hugging Face's name."""
  if architecture == "gemma3" and "norm" in name:
    x = (x.astype(np.float64) - 1).astype(np.float32)
  if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
    # Neighbours 2 i and 2 i + 1 of a head become i and H / 2 + i.
    x = x.reshape(-1, head_dim // 2, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
  return hf_name(name, architecture), x


@pytest.mark.parametrize(
  "architecture, tied",
  [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True), ("gemma3", True)],
)
def test_weights_are_those_of_the_file(architecture, tied, tmp_path):
  """To the bit, of matrices that are quantized in all ways."""
  weights = files.tensors(architecture, tied=tied, scale=8)  # K-quants need rows of 256
  expected, kinds = {}, itertools.cycle(KINDS)
  for i, (name, x) in enumerate(weights.items()):
    if x.ndim == 2:
      kind = next(kinds)
      count, _ = gguf.GGML_QUANT_SIZES[number_type(kind)]
      blocks = random_blocks(kind, x.size // count, seed=i)
      weights[name] = kind, blocks.reshape(len(x), -1)
      x = by_formula(kind, blocks).reshape(x.shape)
    theirs, x = as_transformers_has_it(name, x, architecture, 8 * files.H)
    expected[theirs] = x
  fields = files.metadata(architecture, scale=8)
  files.write(tmp_path / "m.gguf", architecture, fields=fields, weights=weights)
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  config, params = hf.load(tmp_path / "hf")
  assert config.architecture.lower().startswith(architecture)
  assert config.windowed == (architecture == "gemma3", False)
  names = hf.names(config)
  found = {names[path]: x for path, x in hf.flatten(params).items()}
  assert found.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_array_equal(found[name], x, name)


@pytest.mark.skipif("TLT_GGUF" not in os.environ, reason="TLT_GGUF names no GGUF file")
def test_a_published_file_is_read_by_the_formulas(tmp_path):
  """The first head's rows of all tensors."""
  file = gguf_lib.open_file(os.environ["TLT_GGUF"])
  architecture = file.metadata["general.architecture"]
  config = gguf_lib.to_hf(file.path, tmp_path / "hf")
  opened = safetensors.safe_open(tmp_path / "hf" / hf.SINGLE, framework="numpy")
  for name, stored in file.tensors.items():
    kind, rows = stored.tensor_type.name, slice(config.head_dim)
    x = stored.data[rows]
    if kind != "F32":
      _, size = gguf.GGML_QUANT_SIZES[stored.tensor_type]
      x = by_formula(kind, x.view(np.uint8).reshape(-1, size)).reshape(len(x), -1)
    theirs, x = as_transformers_has_it(name, x, architecture, config.head_dim)
    np.testing.assert_array_equal(opened.get_slice(theirs)[rows], x, name)
  inner = tokenization.Tokenizer.load(tmp_path / "hf").inner
  for seed in range(200):
    text = files.random_text(seed)
    ids = inner.encode(text, add_special_tokens=False).ids
    assert inner.decode(ids, skip_special_tokens=False) == text


# --- SentencePiece


def metadata(known=range(256), **changes) -> dict:
  """A SentencePiece BPE of random pieces, each made of two others, and the known bytes."""
  rng, pieces = random.Random(0), [SPACE, *PIECES]
  while len(pieces) < 300:
    piece = rng.choice(pieces) + rng.choice(pieces)
    if piece not in pieces and len(piece) < 9:
      pieces.append(piece)
  kinds = SPECIAL | {f"<0x{b:02X}>": BYTE for b in known} | {"[think]": USER_DEFINED}
  tokens = [*kinds, *pieces]
  scores = [0.0] * len(kinds) + [-float(i) for i in range(len(pieces))]
  entries = {
    "model": "llama",
    "tokens": tokens,
    "token_type": [kinds.get(token, 1) for token in tokens],
    "scores": scores,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "padding_token_id": 0,
    "unknown_token_id": UNKNOWN_ID,
    "add_space_prefix": False,
  }
  return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items()}


def merged(entries: dict, text: str) -> list[int]:
  """The ids of a text by the definition: the best pair is merged, the first of equals."""
  tokens = entries["tokenizer.ggml.tokens"]
  ids = {token: i for i, token in enumerate(tokens)}
  score = dict(zip(tokens, entries["tokenizer.ggml.scores"], strict=True))
  parts = list(text.replace(" ", SPACE))
  while True:
    pairs = {i: parts[i] + parts[i + 1] for i in range(len(parts) - 1)}
    known = [i for i, pair in pairs.items() if pair in score]
    if not known:
      break
    i = max(known, key=lambda i: (score[pairs[i]], -i))
    parts[i : i + 2] = [pairs[i]]
  found = []
  for part in parts:
    spelled = [ids.get(f"<0x{b:02X}>") for b in part.encode()]
    if part in ids:
      found.append(ids[part])
    elif None not in spelled:
      found += spelled
    elif found[-1:] != [ids["<unk>"]]:  # one for a run
      found.append(ids["<unk>"])
  return found


def texts(count: int) -> list[str]:
  rng = random.Random(1)
  some = [*PIECES, " ", "  ", "é", "中", "😀", "th", "\t"]
  return ["".join(rng.choices(some, k=rng.randrange(1, 40))) for _ in range(count)]


@pytest.mark.parametrize("known", [range(256), []])
def test_sentencepiece_merges_by_score(known):
  """Other characters are their bytes, or unknown where no byte is a token."""
  entries = metadata(known)
  inner = gguf_tokenizer.make(entries).backend_tokenizer
  for text in texts(300):
    ids = inner.encode(text, add_special_tokens=False).ids
    assert ids == merged(entries, text), text
    if known:
      assert inner.decode(ids) == text


def test_bytes_that_are_no_text_are_shown():
  entries = metadata()
  inner = gguf_tokenizer.make(entries).backend_tokenizer
  ids = inner.encode("中a", add_special_tokens=False).ids
  assert inner.decode(ids[:2]) == inner.decode([ids[0], ids[2]]) == 2 * "\ufffd"
  assert inner.decode([*ids[:2], ids[3]]) == 2 * "\ufffd" + "a"


def test_what_would_lose_or_swap_characters_is_refused():
  """The library leaves out what is unknown without a token for it, and puts bytes before
  unknown characters in front of them."""
  for known, unknown in (([], None), (range(255), None), (range(255), UNKNOWN_ID)):
    with pytest.raises(ValueError, match="byte"):
      gguf_tokenizer.make(metadata(known, unknown_token_id=unknown))
  gguf_tokenizer.make(metadata(unknown_token_id=None))


def test_a_folder_keeps_sentencepiece(tmp_path):
  fields = files.metadata("gemma3") | metadata()
  files.write(tmp_path / "m.gguf", "gemma3", fields=fields)
  gguf_lib.to_hf(tmp_path / "m.gguf", tmp_path / "hf")
  found = tokenization.Tokenizer.load(tmp_path / "hf")
  assert found.stop_tokens == (1,)
  for text in texts(50):
    assert found.encode(text).tolist() == [2, *merged(fields, text)]
    assert found.decode(found.encode(text)) == text


@pytest.mark.parametrize("prefixed", [False, True])
def test_tokens_of_begin_and_end(prefixed):
  """A space, a token of begin by default, one of end if the file says so."""
  entries = metadata(add_space_prefix=prefixed, add_eos_token=True)
  inner = gguf_tokenizer.make(entries).backend_tokenizer
  begin, *ids, end = inner.encode("the cat").ids
  assert (begin, end) == (2, 1)
  assert ids == merged(entries, " " * prefixed + "the cat")
  assert inner.decode(ids) == "the cat"


def test_control_tokens_are_no_text_and_user_defined_ones_are():
  tokenizer = gguf_tokenizer.make(metadata())
  inner, tokens = tokenizer.backend_tokenizer, metadata()["tokenizer.ggml.tokens"]
  ids = inner.encode("a[think]b<unk>\u0489<eos>", add_special_tokens=False).ids
  spelled = ["a", "[think]", "b", "<unk>", "<0xD2>", "<0x89>", "<eos>"]
  assert [tokens[i] for i in ids] == spelled
  assert inner.decode(ids) == "a[think]b\u0489"
  assert gguf_tokenizer.end_tokens(metadata()) == [1]
