"""K-quants and SentencePiece's tokenizer, as in GGUF files of Gemma."""

import random

import gguf
import numpy as np
import pytest

from tlt_jax.integrations import gguf_tokenizer

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPECIAL = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN}
PIECES = "a b c e t h n = - . \n".split(" ")


def q4_k(block: np.ndarray) -> np.ndarray:
  """256 numbers of u8[144]: eight groups of 4 bits, each with a scale and a minimum."""
  (d, least), s = block[:4].view(np.float16).astype(np.float32), block[4:16].astype(int)
  out = []
  for j in range(8):
    if j < 4:
      scale, offset = s[j] & 63, s[j + 4] & 63
    else:
      scale = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4)
      offset = (s[j + 4] >> 4) | (s[j] >> 6 << 4)
    pair = block[16 + 32 * (j // 2) :][:32]
    out.append(d * scale * (pair >> 4 if j % 2 else pair & 15) - least * offset)
  return np.concatenate(out)


def q6_k(block: np.ndarray) -> np.ndarray:
  """256 numbers of u8[210]: 6 bits each, sixteen signed scales."""
  low, high = block[:128].astype(int), block[128:192].astype(int)
  scales, d = block[192:208].view(np.int8), block[208:].view(np.float16).astype(np.float32)
  out = np.zeros(256, np.float32)
  for i in range(256):
    half, quarter, at = i // 128, i % 128 // 32, i % 32
    nibble = low[64 * half + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
    bits = high[32 * half + at] >> 2 * quarter & 3
    out[i] = d[0] * scales[i // 16] * ((nibble | bits << 4) - 32)
  return out


@pytest.mark.parametrize(
  "kind, formula, scales", [("Q4_K", q4_k, [0, 2]), ("Q6_K", q6_k, [208])]
)
def test_k_quants_are_as_llama_cpp_defines_them(kind, formula, scales):
  kind = gguf.GGMLQuantizationType[kind]
  _, size = gguf.GGML_QUANT_SIZES[kind]
  blocks = np.random.default_rng(0).integers(0, 256, (3, size), np.uint8)
  for at in scales:  # no NaN
    blocks[:, at : at + 2] = np.array([[0.5], [-0.01], [3]], np.float16).view(np.uint8)
  found = gguf.quants.dequantize(blocks, kind)
  np.testing.assert_allclose(found, list(map(formula, blocks)), rtol=1e-6)


def metadata(**changes) -> dict:
  """A SentencePiece BPE of random pieces; each is made of two others."""
  rng, pieces = random.Random(0), [SPACE, *PIECES]
  while len(pieces) < 300:
    piece = rng.choice(pieces) + rng.choice(pieces)
    if piece not in pieces and len(piece) < 9:
      pieces.append(piece)
  kinds = SPECIAL | {f"<0x{b:02X}>": BYTE for b in range(256)} | {"[think]": USER_DEFINED}
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
    "unknown_token_id": 3,
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
  bytes_of = {p: [ids[f"<0x{b:02X}>"] for b in p.encode()] for p in parts if p not in ids}
  return [i for p in parts for i in bytes_of.get(p, [ids.get(p)])]


def texts(count: int) -> list[str]:
  rng = random.Random(1)
  some = [*PIECES, " ", "  ", "é", "中", "😀", "th", "\t"]
  return ["".join(rng.choices(some, k=rng.randrange(1, 40))) for _ in range(count)]


def test_sentencepiece_merges_by_score():
  """Other characters are bytes; a text is what its ids are decoded to."""
  entries = metadata()
  inner = gguf_tokenizer.make(entries).backend_tokenizer
  for text in texts(300):
    ids = inner.encode(text, add_special_tokens=False).ids
    assert ids == merged(entries, text), text
    assert inner.decode(ids) == text


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
  ids = inner.encode("a[think]b<eos>", add_special_tokens=False).ids
  assert [tokens[i] for i in ids] == ["a", "[think]", "b", "<eos>"]
  assert inner.decode(ids) == "a[think]b"
  assert gguf_tokenizer.end_tokens(metadata()) == [1]
