"""Responses on a terminal: each is shown once, in order, whatever ends first."""

import io
import types

from experiments import streaming

WHOLE = ["cold", "été", "12"]


def decode(ids) -> str:
  """Of UTF-8 bytes."""
  return bytes(ids).decode(errors="replace")


def shown(prompts, chunks) -> list[str]:
  """What is on the terminal after each chunk: bytes per response so far, and who ended."""
  out = io.StringIO()
  stream = streaming.Stream(decode, prompts, out)
  texts = []
  for lengths, ended in chunks:
    tokens = [w.encode()[:n] for w, n in zip(WHOLE, lengths, strict=False)]
    stream(types.SimpleNamespace(length=lengths, response=tokens.__getitem__), ended)
    texts.append(out.getvalue())
  return texts


def test_one_response_grows():
  assert shown([""], [([1], []), ([3], []), ([4], [0])]) == ["c", "col", "cold\n"]


def test_others_wait_for_their_turn():
  chunks = [([1, 2, 0], []), ([2, 5, 1], [1]), ([4, 5, 1], [0]), ([4, 5, 2], [2])]
  first, second, third, last = shown(["a", "b", "c"], chunks)
  assert first == "--- a\nc" and second == "--- a\nco"
  assert third == "--- a\ncold\n--- b\nété\n--- c\n1"
  assert last == third + "2\n"


def test_half_a_character_is_not_shown():
  texts = shown(["a", "b"], [([4, 1], [0]), ([4, 2], []), ([4, 4], []), ([4, 5], [1])])
  assert [text.split("--- b\n")[1] for text in texts] == ["", "é", "ét", "été\n"]


def test_a_terminal_neither_obeys_a_response_nor_stops_at_it():
  """Escape sequences lose what makes them such; ASCII shows what it has not as escapes."""
  text = "a\x1b[2J\x9b1m\r\tb\n\u2713"
  terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
  stream = streaming.Stream(decode, ["\x1b]0;x\x07", "b"], terminal)
  tokens = [list(text.encode()), []]
  lengths = list(map(len, tokens))
  stream(types.SimpleNamespace(length=lengths, response=tokens.__getitem__), [0])
  assert terminal.buffer.getvalue() == b"--- ]0;x\na[2J1m\tb\n\\u2713\n"
